"""What a conversion does with each linear layer of a model and why, and the weights that belong to no linear layer."""

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from f8emu.spec.recipe import Recipe
from f8emu.torch.conversion.layers import surrounds_forward
from f8emu.torch.conversion.torchao import ModuleFilter
from f8emu.torch.dtypes import CHIP, HIGH_PRECISION_DTYPES
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.torch_internals import ConvNd, is_dtensor, named_modules, own_parameters


class Outcome(Enum):
    """What a conversion does with a layer."""

    CONVERTED = "converted"
    FILTER = "filter"
    """Left alone: the filter excludes it."""
    SIZE = "size"
    """in_features or out_features is not a multiple of 16 and `pad` is off: the conversion raises an error."""
    ADAPTER = "adapter"
    """Left alone: a low-rank layer (LoRA) whose rank is not a multiple of 16, and `pad` is off."""
    TYPE = "type"
    """Left alone: a subclass of nn.Linear, a replaced `forward`, or a weight not in float32, bfloat16 or float16."""
    SHARDED = "sharded"
    """Its weight is a DTensor, or flattened by FSDP: the conversion raises an error."""
    ALREADY = "already"
    """Left alone: it is a Float8Linear already."""


_COVERED = (Outcome.CONVERTED, Outcome.ALREADY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionEntry:
    """One linear layer of the model."""

    fqn: str
    shape: tuple[int, int]
    """(out_features, in_features)."""
    outcome: Outcome
    reason: str = ""
    """Why it is not converted, if the outcome alone does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWeight:
    """A parameter of two or more dimensions outside of linear layers, which a conversion does not consider."""

    fqn: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion does to every linear layer, in the order of `named_modules`."""

    recipe: Recipe
    entries: tuple[ConversionEntry, ...]
    others: tuple[OtherWeight, ...] = ()
    notes: tuple[str, ...] = ()
    """Modules that bypass their converted layers."""
    parameters: int = 0
    """The number of parameters of the model, each counted once."""
    covered: int = 0
    """How many of these parameters are weights of layers that are converted, or were before."""

    @property
    def share(self) -> float:
        """The share of the parameters that float8 GEMMs multiply."""
        return self.covered / max(self.parameters, 1)

    def names(self, outcome: Outcome) -> tuple[str, ...]:
        """The names of the layers with this outcome."""
        return tuple(entry.fqn for entry in self.entries if entry.outcome is outcome)

    @property
    def summary(self) -> str:
        """One line: the recipe, and how many layers have each outcome."""
        counts = ((outcome, len(self.names(outcome))) for outcome in Outcome)
        found = ", ".join(f"{count} {outcome.value}" for outcome, count in counts if count)
        return f"recipe {self.recipe.label}: {found or 'no linear layer'}"

    def __str__(self) -> str:
        lines = [f"{self.summary}; float8 GEMMs multiply {self.share:.1%} of {self.parameters} parameters"]
        lines += _rows([(e.fqn, e.shape, ": ".join(filter(None, (e.outcome.value, e.reason)))) for e in self.entries])
        if self.others:
            lines += ["not looked at:", *_rows([(other.fqn, other.shape, other.reason) for other in self.others])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _rows(rows: list[tuple[str, tuple[int, ...], str]]) -> list[str]:
    width = max((len(fqn) for fqn, _, _ in rows), default=0)
    return [f"  {fqn:<{width}}  {list(shape)!s:<14}  {text}" for fqn, shape, text in rows]


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """(name, layer), a shared layer under each of its names."""
    for fqn, layer in named_modules(module, remove_duplicate=False):
        if isinstance(layer, nn.Linear):
            yield fqn, layer


def report_of(
    module: nn.Module,
    recipe: Recipe,
    module_filter_fn: ModuleFilter | None,
    pad: bool,
    subclasses: Collection[type[nn.Linear]],
) -> ConversionReport:
    """What a conversion with these settings does."""
    sharded = sharded_layers(module)

    def outcome_of(fqn: str, layer: nn.Linear) -> tuple[Outcome, str]:
        # The order is that of the remedies: what no setting changes comes first, sizes come last.
        is_sharded = id(layer) in sharded
        if isinstance(layer, Float8Linear):
            return Outcome.ALREADY, ""
        if not is_sharded and (own := _own_computation(layer, subclasses)):
            return Outcome.TYPE, own
        if module_filter_fn is not None and not module_filter_fn(layer, fqn):
            return Outcome.FILTER, ""
        if is_sharded:
            return Outcome.SHARDED, "convert the model first, then shard it"
        if pad or not (layer.in_features % CHIP.size_multiple or layer.out_features % CHIP.size_multiple):
            return Outcome.CONVERTED, ""
        if any(part.lower().startswith("lora_") for part in fqn.split(".")):
            return Outcome.ADAPTER, f"its rank is not a multiple of {CHIP.size_multiple}"
        return Outcome.SIZE, f"not multiples of {CHIP.size_multiple}"

    found: dict[int, tuple[Outcome, str]] = {}
    entries: list[ConversionEntry] = []
    linear: dict[int, Tensor] = {}
    covered: dict[int, Tensor] = {}
    for fqn, layer in linear_layers(module):
        if id(layer) not in found:  # a shared layer has one outcome, which its first name decides
            found[id(layer)] = outcome_of(fqn, layer)
        outcome, reason = found[id(layer)]
        shape = (layer.out_features, layer.in_features)
        entries.append(ConversionEntry(fqn=fqn, shape=shape, outcome=outcome, reason=reason))
        linear |= {id(p): p for p in layer.parameters(recurse=False)}
        if outcome in _COVERED:
            covered[id(layer.weight)] = layer.weight
    return ConversionReport(
        recipe=recipe,
        entries=tuple(entries),
        others=tuple(_other_weights(module, linear)),
        notes=tuple(_notes(module, {e.fqn for e in entries if e.outcome in _COVERED})),
        parameters=sum(p.numel() for p in module.parameters() if not is_lazy(p)),
        covered=sum(weight.numel() for weight in covered.values()),
    )


def _own_computation(layer: nn.Linear, subclasses: Collection[type[nn.Linear]]) -> str:
    """Why the layer does not compute what nn.Linear does; empty where it does."""
    # From the weight to the class to the forward: each may replace what nn.Linear computes.
    kind, weight = type(layer), own_parameters(layer).get("weight")
    if weight is None or is_lazy(weight):
        return "its weight is not a parameter yet, or is computed in every call"
    if kind is NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention reads its weight and does not call it"
    if kind is not nn.Linear and kind not in subclasses:
        return (
            f"{kind.__name__} may compute something else; if it only surrounds super().forward(), name it in subclasses"
        )
    if kind is not nn.Linear and not surrounds_forward(kind):
        return f"the forward of {kind.__name__} does not call super().forward()"
    if "forward" in layer.__dict__:
        return "its forward was replaced"
    if weight.dtype is torch.float64:
        return "its weight is torch.float64; convert the model first, with model.float() or model.bfloat16()"
    return "" if weight.dtype in HIGH_PRECISION_DTYPES else f"its weight is {weight.dtype}"


def sharded_layers(module: nn.Module) -> set[int]:
    """The ids of modules whose weight is a DTensor, or managed by fully_shard or FSDP (gathered after some calls)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it, nothing is sharded
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    managed = {id(part) for owner in module.modules() if isinstance(owner, kinds) for part in owner.modules()}
    return managed | {id(layer) for _, layer in linear_layers(module) if _is_part(layer)}


def _is_part(layer: nn.Linear) -> bool:
    weight = own_parameters(layer).get("weight")
    if weight is None or is_lazy(weight):
        return False
    # FSDP1 keeps a part of a flattened weight. Quantized weights have shapes of their own, and another dtype.
    return is_dtensor(weight) or (weight.ndim == 1 and weight.dtype in HIGH_PRECISION_DTYPES)


def _other_weights(module: nn.Module, linear: dict[int, Tensor]) -> Iterator[OtherWeight]:
    seen = set(linear)
    for prefix, owner in named_modules(module):
        for name, parameter in owner.named_parameters(recurse=False):
            if is_lazy(parameter) or parameter.ndim < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            fqn = f"{prefix}.{name}" if prefix else name
            yield OtherWeight(fqn=fqn, shape=tuple(parameter.shape), reason=_reason(owner, parameter))


def _reason(owner: nn.Module, parameter: Tensor) -> str:
    kind = type(owner).__name__
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "an embedding: no GEMM"
    if isinstance(owner, ConvNd):
        return "a convolution"
    if kind == "Conv1D":
        return "transformers' Conv1D is not an nn.Linear; replace it by one with the transposed weight"
    if parameter.ndim > 2 and parameter.shape[0] > 1:  # a class token or an embedding of positions is one matrix
        return f"{kind} multiplies a stack of matrices (experts), for which there is no float8 layer"
    return f"{kind} computes with it directly"


def _notes(module: nn.Module, covered: set[str]) -> Iterator[str]:
    fast = [
        fqn
        for fqn, layer in named_modules(module, remove_duplicate=False)
        if isinstance(layer, nn.TransformerEncoderLayer)
        and covered & {f"{fqn}.{name}" if fqn else name for name in ("linear1", "linear2")}
    ]
    if fast:
        yield (
            f"nn.TransformerEncoderLayer ({', '.join(fqn or 'the module' for fqn in fast)}) reads the weights of its "
            "layers in evaluation without gradients, and computes in high precision; "
            "torch.backends.mha.set_fastpath_enabled(False) turns that off"
        )
