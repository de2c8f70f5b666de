"""The report of a conversion: its outcome for each linear layer and each module of experts, and all other weights."""

import dis
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from types import new_class
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from f8emu.shown import Shown, screen
from f8emu.spec.chip import Evidence
from f8emu.spec.chips import CHIPS
from f8emu.spec.errors import require_arguments
from f8emu.spec.recipe import Recipe
from f8emu.torch import torch_internals as internals
from f8emu.torch.chip import CHIP, HIGH_PRECISION_DTYPES
from f8emu.torch.conversion.experts import ConvertedExperts, why_not
from f8emu.torch.conversion.filters import HEADS, ModuleFilter
from f8emu.torch.conversion.mixtures import Experts, are_multiplied_apart, experts_of, routers, speed_of_experts
from f8emu.torch.layer.float8_layer import Float8Layer, Scaled, pattern_of, shortened
from f8emu.torch.layer.float8_linear import Float8Linear


class Outcome(Enum):
    """The outcome of a conversion for a layer."""

    CONVERTED = "converted"
    FILTER = "filter"
    """Left alone: the filter excludes it."""
    SIZE = "size"
    """in_features or out_features is not a multiple of 16 and `pad` is off: the conversion raises an error."""
    ADAPTER = "adapter"
    """Left alone: a low-rank layer (LoRA) whose rank is not a multiple of 16, with `pad` too."""
    TYPE = "type"
    """Left alone: a subclass of nn.Linear, a replaced `forward`, a weight not in float32, bfloat16 or float16, or
    experts that the recipe or the sizes exclude."""
    SHARDED = "sharded"
    """Its weight is a DTensor, or flattened by FSDP: the conversion raises an error."""
    ALREADY = "already"
    """Left alone: it was converted before."""
    ROUTER = "router"
    """Left alone: it chooses among experts, or weighs a shared one, in high precision."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionEntry(Shown):
    """One linear layer of the model, or one module of experts."""

    fqn: str
    shape: tuple[int, ...]
    """(out_features, in_features); of experts (number, hidden_dim, dim)."""
    outcome: Outcome
    reason: str = ""
    """Why it is not converted, if the outcome alone does not say."""
    speed: float | None = None
    """Of experts, where the tokens of each are given: the predicted speed in float8, times that of bfloat16."""

    def __str__(self) -> str:
        speed = "" if self.speed is None else f"predicted at {self.speed:.2f} times the speed of bfloat16"
        return ": ".join(filter(None, (self.outcome.value, self.reason, speed)))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OtherWeight(Shown):
    """A parameter of two or more dimensions of no linear layer or experts, which a conversion does not consider."""

    fqn: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionReport(Shown):
    """The outcome of a conversion for every linear layer and all experts, in the order of `named_modules`."""

    _page: ClassVar[str] = "f8emu.report.conversion:conversion_page"
    recipe: Recipe
    entries: tuple[ConversionEntry, ...]
    others: tuple[OtherWeight, ...] = ()
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
        """One line: the recipe, how many layers have each outcome, and a chip of which no GEMM was recorded."""
        counts = ((outcome, len(self.names(outcome))) for outcome in Outcome)
        outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in counts if count)
        chip = CHIPS[self.recipe.chip]
        evidence = "" if chip.evidence is Evidence.RECORDED else f"; chip: {chip.with_evidence}"
        return f"recipe {self.recipe.label}: {outcomes or 'no linear layer'}{evidence}"

    def __str__(self) -> str:
        lines = [self.summary, f"float8 GEMMs multiply {self.share:.1%} of {self.parameters} parameters"]
        lines += _rows((entry.fqn, entry.shape, str(entry)) for entry in self.entries)
        if self.others:
            lines += ["not looked at:", *_rows((other.fqn, other.shape, other.reason) for other in self.others)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return screen([str(self)])

    @property
    def screen(self) -> str:
        """The report in at most 25 lines of 80 columns, folded between words."""
        return screen([str(self)], most=80, rest="more lines: print(plan_conversion(model))")


def _rows(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> list[str]:
    # One row for all layers of a kind.
    kinds: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for fqn, shape, text in rows:
        kinds.setdefault((pattern_of(fqn), shape, text), []).append(fqn)
    names = [shortened(fqns) for fqns in kinds.values()]
    width = max(map(len, names), default=0)
    return [f"  {n:<{width}}  {list(s)!s:<14}  {text}" for n, (_, s, text) in zip(names, kinds, strict=True)]


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """(name, layer), a shared layer under each of its names."""
    for fqn, layer in internals.named_modules(module, remove_duplicate=False):
        if isinstance(layer, nn.Linear):
            yield fqn, layer


def expert_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module, Experts]]:
    """(name, module, its experts), also of those that are converted already."""
    for fqn, part in internals.named_modules(module, remove_duplicate=False):
        if not isinstance(part, nn.Linear) and (experts := experts_of(part)) is not None:
            yield fqn, part, experts


def report_of(
    module: nn.Module,
    recipe: Recipe,
    module_filter_fn: ModuleFilter | None,
    pad: bool,
    subclasses: Collection[type[nn.Linear]],
    tokens_per_expert: float | None = None,
) -> ConversionReport:
    """The report of a conversion with these settings."""
    if module_filter_fn is not None:
        require_arguments("convert_to_float8_training", "module_filter_fn", module_filter_fn, "module, name")
    sharded, of_routers, readers = sharded_layers(module), routers(module), _readers(module)

    def outcome_of(fqn: str, layer: nn.Linear) -> tuple[Outcome, str]:
        # The order is that of the remedies: what no setting changes comes first, sizes come last.
        is_sharded = id(layer) in sharded
        if isinstance(layer, Float8Linear):
            return Outcome.ALREADY, ""
        if id(layer) in of_routers:
            return Outcome.ROUTER, ""
        if not is_sharded and (reason := _own_computation(layer, subclasses)):
            return Outcome.TYPE, reason
        if module_filter_fn is None and any(fnmatchcase(fqn, head) for head in HEADS):
            return Outcome.FILTER, "a head, left out by default"
        if module_filter_fn is not None and not module_filter_fn(layer, fqn):
            return Outcome.FILTER, ""
        if is_sharded:
            return Outcome.SHARDED, "convert the model first, then shard it"
        is_odd = bool(layer.in_features % CHIP.size_multiple or layer.out_features % CHIP.size_multiple)
        if is_odd and any(part.lower().startswith("lora_") for part in fqn.split(".")):
            return Outcome.ADAPTER, f"its rank is not a multiple of {CHIP.size_multiple}"
        if is_odd and not pad:
            return Outcome.SIZE, f"not multiples of {CHIP.size_multiple}"
        return Outcome.CONVERTED, readers.get(id(layer), "")

    def outcome_of_experts(fqn: str, part: nn.Module, experts: Experts) -> tuple[Outcome, str]:
        if isinstance(part, ConvertedExperts):
            return Outcome.ALREADY, ""
        is_sharded = id(part) in sharded or any(internals.is_dtensor(weight) for weight in experts.weights.values())
        if not is_sharded and (reason := why_not(part, experts, recipe)):
            return Outcome.TYPE, reason
        if module_filter_fn is not None and not _is_chosen(module_filter_fn, fqn, part, experts):
            return Outcome.FILTER, ""
        if is_sharded:
            return Outcome.SHARDED, "convert the model first, then shard it"
        if are_multiplied_apart(recipe):
            return Outcome.CONVERTED, "E5M2 gradients are multiplied expert by expert: rowwise is faster on a GPU"
        return Outcome.CONVERTED, "" if experts.weight_names else "its grouped GEMMs, one by one"

    outcomes: dict[int, tuple[Outcome, str]] = {}
    entries: list[ConversionEntry] = []
    covered: dict[int, Tensor] = {}
    for fqn, part in internals.named_modules(module, remove_duplicate=False):
        experts, speed = experts_of(part), None
        if isinstance(part, nn.Linear):  # then it holds no experts
            shape, outcome = (part.out_features, part.in_features), outcomes.get(id(part)) or outcome_of(fqn, part)
        elif experts is not None:
            shape, outcome = experts.shape, outcomes.get(id(part)) or outcome_of_experts(fqn, part, experts)
            is_float8 = outcome[0] in (Outcome.CONVERTED, Outcome.ALREADY)
            if is_float8 and tokens_per_expert is not None and experts.weight_names is not None:
                speed = speed_of_experts(shape, tokens_per_expert, recipe)
        else:
            continue
        kind, reason = outcomes[id(part)] = outcome  # a shared layer has one outcome, which its first name decides
        entries.append(ConversionEntry(fqn=fqn, shape=shape, outcome=kind, reason=reason, speed=speed))
        if kind in (Outcome.CONVERTED, Outcome.ALREADY):
            weights: Any = (part.weight,) if experts is None else experts.weights.values()
            covered |= {id(weight): weight for weight in weights}
    return ConversionReport(
        recipe=recipe,
        entries=tuple(entries),
        others=tuple(_other_weights(module)),
        parameters=sum(p.numel() for p in module.parameters() if not is_lazy(p)),
        covered=sum(weight.numel() for weight in covered.values()),
    )


def _is_chosen(module_filter_fn: ModuleFilter, fqn: str, part: nn.Module, experts: Experts) -> bool:
    """Whether a filter chooses experts; one that reads what only linear layers have is asked for each matrix."""
    try:
        return bool(module_filter_fn(part, fqn))
    except AttributeError:
        sizes = [(weight.shape[2], weight.shape[1]) for weight in experts.weights.values()]
        return all(module_filter_fn(nn.Linear(k, n, bias=False, device="meta"), fqn) for k, n in sizes)


def _own_computation(layer: nn.Linear, subclasses: Collection[type[nn.Linear]]) -> str:
    """Why the layer does not compute what nn.Linear does; empty where it does."""
    # From the weight to the class to the forward: each may replace what nn.Linear computes.
    kind, weight = type(layer), internals.own_parameters(layer).get("weight")
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


_METADATA = ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad")


def _readers(module: nn.Module) -> dict[int, str]:
    """The id of a linear layer -> which module has its weight in its code, in words."""
    readers: dict[int, str] = {}
    for part in module.modules():
        layers = {name: child for name, child in internals.own_modules(part).items() if isinstance(child, nn.Linear)}
        for name in layers.keys() & (_weights_read_by(type(part)) if layers else ()):
            readers[id(layers[name])] = f"{type(part).__name__} reads its weight, and may multiply it in high precision"
    return readers


@cache
def _weights_read_by(kind: type[nn.Module]) -> set[str]:
    """The names of layers for which `forward`, or a method that it calls, has `self.<name>.weight`."""
    read, seen = set[str](), set[str]()
    left = ["forward"]
    while left:
        seen.add(method := left.pop())
        code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
        steps = [] if code is None else list(dis.get_instructions(code))
        names = [str(step.argval) if "LOAD" in step.opname else "" for step in steps]
        left += [name for name in names if name not in seen and inspect.isfunction(getattr(kind, name, None))]
        # Its dtype is no value, nor is isinstance(self.<name>.weight, ...).
        values = [i for i in range(3, len(names) - 1) if names[i] == "weight" and names[i + 1] not in _METADATA]
        read |= {names[i - 1] for i in values if names[i - 3] != "isinstance"}
    return read


def sharded_layers(module: nn.Module) -> set[int]:
    """The ids of modules whose weight is a DTensor, or managed by fully_shard or FSDP (gathered after some calls)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it, nothing is sharded
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    managed = {id(part) for owner in module.modules() if isinstance(owner, kinds) for part in owner.modules()}
    return managed | {id(layer) for _, layer in linear_layers(module) if _is_part(layer)}


def _is_part(layer: nn.Linear) -> bool:
    weight = internals.own_parameters(layer).get("weight")
    if weight is None or is_lazy(weight):
        return False
    # FSDP1 keeps a part of a flattened weight. Quantized weights have shapes of their own, and another dtype.
    return internals.is_dtensor(weight) or (weight.ndim == 1 and weight.dtype in HIGH_PRECISION_DTYPES)


def _other_weights(module: nn.Module) -> Iterator[OtherWeight]:
    seen = {id(parameter) for _, layer in linear_layers(module) for parameter in layer.parameters(recurse=False)}
    seen |= {id(weight) for _, _, experts in expert_modules(module) for weight in experts.weights.values()}
    for prefix, owner in internals.named_modules(module):
        for name, parameter in owner.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.ndim >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                fqn = f"{prefix}.{name}" if prefix else name
                yield OtherWeight(fqn=fqn, shape=tuple(parameter.shape), reason=_reason(owner, parameter))


def _reason(owner: nn.Module, parameter: Tensor) -> str:
    kind = type(owner).__name__
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "an embedding: no GEMM"
    if isinstance(owner, internals.ConvNd):
        return "a convolution"
    if "router" in kind.lower():
        return f"{kind} chooses among experts, in high precision"
    if kind == "Conv1D":
        return "transformers' Conv1D is not an nn.Linear; replace it by one with the transposed weight"
    if parameter.ndim > 2 and parameter.shape[0] > 1:  # a class token or an embedding of positions is one matrix
        return (
            f"{kind} multiplies a stack of matrices (experts) in its own way; f8emu.torch.grouped_linear is in float8"
        )
    return f"{kind} computes with it directly"


# The class of a converted layer, from that of the layer and back.


@cache
def float8_subclass(of: type[nn.Linear]) -> type[Float8Linear]:
    """A subclass of both `of` and `Float8Linear`; for nn.Linear, Float8Linear itself."""
    if of is nn.Linear:
        return Float8Linear

    def reduce(self: Float8Linear, _: object) -> tuple[Any, ...]:
        return _new_layer, (of,), self.__getstate__()  # this class cannot be imported

    attributes: dict[str, Any] = {
        "__doc__": f"{of.__name__}, whose `super().forward()` computes under a recipe.",
        "__module__": of.__module__,
        "__reduce_ex__": reduce,
    }
    # Its method resolution order is (itself, of, ..., Float8Linear, nn.Linear), so that `super().forward()` of `of` is
    # the forward of `Float8Linear`.
    return new_class(
        f"Float8{of.__name__}", (of, Float8Linear), exec_body=lambda namespace: namespace.update(attributes)
    )


def _new_layer(of: type[nn.Linear]) -> Float8Linear:
    cls = float8_subclass(of)
    return cls.__new__(cls)


def linear_class(of: type[Float8Linear]) -> type[nn.Linear] | None:
    """The class that `float8_subclass` made `of` from; None if it did not."""
    if of is Float8Linear:
        return nn.Linear
    base = of.__bases__[0]
    is_made = of.__bases__ == (base, Float8Linear) and issubclass(base, nn.Linear) and float8_subclass(base) is of
    return base if is_made else None


def float_layer(layer: Float8Linear, of: type[nn.Linear]) -> nn.Linear:
    """An `of` with the parameters, hooks and mode of `layer`, which is not changed."""
    # Without __init__, which may take other arguments and would allocate parameters.
    new = of.__new__(of)
    new.__dict__.update(internals.copied_attributes(layer))
    of_float8 = (*Scaled.__annotations__, *Float8Layer.__annotations__, *Float8Linear.__annotations__)
    for name in of_float8:
        new.__dict__.pop(name, None)
        internals.own_modules(new).pop(name, None)
    return new


def surrounds_forward(of: type[nn.Linear]) -> bool:
    """Whether every `forward` between `of` and nn.Linear refers to `super().forward`."""
    between = of.__mro__[: of.__mro__.index(nn.Linear)]
    codes = [getattr(inspect.unwrap(x.__dict__["forward"]), "__code__", None) for x in between if "forward" in vars(x)]
    return all(code is not None and {"super", "forward"} <= set(code.co_names) for code in codes)
