"""Convert a model to float8 training: `nn.Linear` layers become `Float8Linear`, in place, and a report says which.

A layer that cannot be converted is reported here, at conversion, and not in the middle of training.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import BLOCKWISE, DELAYED, ROWWISE, ROWWISE_WITH_GW_HP, TENSORWISE, Recipe
from f8emu.torch.device import require_hopper
from f8emu.torch.dtypes import HIGH_PRECISION_DTYPES
from f8emu.torch.gemm.checks import SIZE_MULTIPLE
from f8emu.torch.gemm.engine import Engine, resolve_engine
from f8emu.torch.training.float8_linear import Float8Linear, resolve_recipe

ModuleFilter = Callable[[nn.Module, str], bool]
"""(layer, its name) -> whether to convert it."""

_log = logging.getLogger("f8emu")


class Outcome(Enum):
    """What a conversion does with a layer."""

    CONVERTED = "converted"
    FILTER = "filter"
    """Left alone: the filter excludes it."""
    SIZE = "size"
    """in_features or out_features is not a multiple of 16 and `pad` is off: the conversion raises an error."""
    TYPE = "type"
    """Left alone: a subclass of nn.Linear, a replaced `forward`, or a weight not in float32, bfloat16 or float16."""
    ALREADY = "already"
    """Left alone: it is a Float8Linear already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionEntry:
    """One linear layer of the model."""

    fqn: str
    shape: tuple[int, int]
    """(out_features, in_features)."""
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion does to every linear layer, in the order of `named_modules`."""

    recipe: Recipe
    entries: tuple[ConversionEntry, ...]

    def names(self, outcome: Outcome) -> tuple[str, ...]:
        """The layers with that outcome."""
        return tuple(entry.fqn for entry in self.entries if entry.outcome is outcome)

    def __str__(self) -> str:
        counts = ((outcome, len(self.names(outcome))) for outcome in Outcome)
        summary = ", ".join(f"{count} {outcome.value}" for outcome, count in counts if count)
        width = max((len(entry.fqn) for entry in self.entries), default=0)
        rows = [f"  {e.fqn:<{width}}  {list(e.shape)!s:<14}  {e.outcome.value}" for e in self.entries]
        return "\n".join([f"recipe {self.recipe.name}: {summary or 'no linear layer'}", *rows])


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Recipe | str = "tensorwise",
    module_filter_fn: ModuleFilter | None = None,
    engine: str = "auto",
    pad: bool = False,
    recompute_casts: bool = False,
) -> nn.Module:
    """Make every `nn.Linear` in `module` a `Float8Linear` with the same parameters.

    Shared modules and parameters stay shared. The report is logged at INFO on the logger "f8emu". A module that reads
    its layers' weights directly, as torch's nn.TransformerEncoderLayer does in evaluation, still computes with them in
    high precision.

    Args:
        module: the model, or a single linear layer, whose converted copy is returned.
        config: the recipe, or its name.
        module_filter_fn: (layer, its name) -> whether to convert it; None converts all.
        engine: as for `scaled_mm`; "hardware" is checked at once if the model is on an accelerator, otherwise at the
            first call, so that a model can be converted before it moves.
        pad: also convert layers whose sizes are not multiples of 16: their GEMMs are zero-padded; results are
            bit-identical, the copies cost time.
        recompute_casts: let compiled code repeat tensorwise and rowwise casts of a layer's input in the backward pass
            if that input is saved anyway or cheap to recompute: less memory, more time (measured, H200: a Hugging Face
            Llama from 17.7 to 15.8 GiB; a feed-forward block 5 to 8 % slower). The codes are those of the input as
            the backward pass computes it; delayed and blockwise casts are not repeated.

    Returns:
        `module`, converted in place; for a single linear layer, the new one.

    Raises:
        SpecError: no such recipe.
        OperandError: sizes that are not multiples of 16, or a model that was converted under another recipe or engine;
            the model is unchanged.
        UnsupportedError: `engine="hardware"` on a device without float8, or a recipe with block scales on a GPU that
            has float8 but is not Hopper.
    """
    report = plan_conversion(module, config=config, module_filter_fn=module_filter_fn, pad=pad)
    recipe = report.recipe
    layers = dict(_linear_layers(module))
    _check_sizes(report)
    _check_converted(report, {fqn: layers[fqn] for fqn in report.names(Outcome.ALREADY)}, engine, recompute_casts)
    chosen = {fqn: layers[fqn] for fqn in report.names(Outcome.CONVERTED)}
    for device in {layer.weight.device for layer in chosen.values()}:
        _check_device(recipe, device, engine)
    new: dict[int, Float8Linear] = {}
    for fqn, layer in chosen.items():
        if id(layer) not in new:
            new[id(layer)] = Float8Linear.from_float(
                layer, recipe=recipe, engine=engine, recompute_casts=recompute_casts
            )
        if not fqn:
            module = new[id(layer)]
            continue
        parent, _, name = fqn.rpartition(".")
        module.get_submodule(parent).register_module(name, new[id(layer)])
    _log.info("convert_to_float8_training: %s", report)
    if not chosen:
        already = len(report.names(Outcome.ALREADY))
        found = f"{already} layers are Float8Linear under this recipe already" if already else "see the report"
        warnings.warn(f"convert_to_float8_training: nothing to convert; {found}; {report}", UserWarning, stacklevel=2)
    return module


def plan_conversion(
    module: nn.Module,
    *,
    config: Recipe | str = "tensorwise",
    module_filter_fn: ModuleFilter | None = None,
    pad: bool = False,
) -> ConversionReport:
    """What `convert_to_float8_training` would do, without doing it.

    Raises:
        SpecError: no such recipe.
    """
    recipe = resolve_recipe("plan_conversion", config)
    outcomes: dict[int, Outcome] = {}
    entries = []
    for fqn, layer in _linear_layers(module):
        if id(layer) not in outcomes:  # a shared layer has one outcome, that of its first name
            outcomes[id(layer)] = _outcome(fqn, layer, module_filter_fn, pad)
        shape = (layer.out_features, layer.in_features)
        entries.append(ConversionEntry(fqn=fqn, shape=shape, outcome=outcomes[id(layer)]))
    return ConversionReport(recipe=recipe, entries=tuple(entries))


def swap_linear_with_float8_linear(
    module: nn.Module,
    *,
    config: Recipe | str = "tensorwise",
    module_filter_fn: ModuleFilter | None = None,
    engine: str = "auto",
    pad: bool = False,
    recompute_casts: bool = False,
) -> nn.Module:
    """The older name of `convert_to_float8_training`, which it calls."""
    return convert_to_float8_training(
        module,
        config=config,
        module_filter_fn=module_filter_fn,
        engine=engine,
        pad=pad,
        recompute_casts=recompute_casts,
    )


class SmallestLayer(NamedTuple):
    """Layers at least this large in both fields are not slower in float8 than in bfloat16."""

    features: int
    """The smaller of in_features and out_features."""
    parameters: int
    """in_features * out_features."""


SMALLEST_LAYERS: dict[Recipe, SmallestLayer] = {
    TENSORWISE: SmallestLayer(2048, 29360128),
    ROWWISE: SmallestLayer(2048, 29360128),
    ROWWISE_WITH_GW_HP: SmallestLayer(2048, 29360128),
    DELAYED: SmallestLayer(4096, 33554432),
    BLOCKWISE: SmallestLayer(2048, 29360128),
}
"""Measured by `benchmarks.sizes`: one H200, 8,192 tokens, eager, forward and backward of one layer back to back."""
SMALLEST_LAYERS_IN_CUDA_GRAPHS: dict[Recipe, SmallestLayer] = {
    TENSORWISE: SmallestLayer(1024, 4194304),
    ROWWISE: SmallestLayer(1024, 8388608),
    ROWWISE_WITH_GW_HP: SmallestLayer(1024, 4194304),
    DELAYED: SmallestLayer(512, 4194304),
    BLOCKWISE: SmallestLayer(1024, 8388608),
}
"""The same in CUDA graphs, where host time does not count."""


def filter_small_layers(config: Recipe | str = "tensorwise", *, in_cuda_graph: bool = False) -> ModuleFilter:
    """A `module_filter_fn` that excludes layers which are slower in float8 under this recipe than in bfloat16.

    The thresholds were measured on one H200 with 8,192 tokens, one layer at a time; with fewer tokens they would be
    higher. Small layers wait for the host, unless they run in a CUDA graph (`torch.compile(mode="reduce-overhead")`) or
    between layers so large that the host runs ahead: use `in_cuda_graph` for both. Under a recipe that was not
    measured, the filter excludes no layer.

    Args:
        config: the recipe, or its name.
        in_cuda_graph: count GPU time only, not host time.
    """
    table = SMALLEST_LAYERS_IN_CUDA_GRAPHS if in_cuda_graph else SMALLEST_LAYERS
    smallest = table.get(resolve_recipe("filter_small_layers", config))

    def is_large(module: nn.Module, fqn: str) -> bool:
        del fqn
        if smallest is None or not isinstance(module, nn.Linear):
            return True
        sizes = (module.in_features, module.out_features)
        return min(sizes) >= smallest.features and sizes[0] * sizes[1] >= smallest.parameters

    return is_large


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for fqn, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Linear):
            yield fqn, layer


def _outcome(fqn: str, layer: nn.Linear, module_filter_fn: ModuleFilter | None, pad: bool) -> Outcome:
    if isinstance(layer, Float8Linear):
        return Outcome.ALREADY
    weight = layer._parameters.get("weight")
    is_plain = type(layer) is nn.Linear and "forward" not in layer.__dict__
    if not is_plain or weight is None or weight.dtype not in HIGH_PRECISION_DTYPES:
        return Outcome.TYPE
    if module_filter_fn is not None and not module_filter_fn(layer, fqn):
        return Outcome.FILTER
    is_odd = layer.in_features % SIZE_MULTIPLE or layer.out_features % SIZE_MULTIPLE
    return Outcome.SIZE if is_odd and not pad else Outcome.CONVERTED


def _check_device(recipe: Recipe, device: torch.device, engine: str) -> None:
    if device.type in ("cpu", "meta"):
        engine = "auto"  # the model may still move
    is_blockwise = any(cast.granularity.is_blockwise for _, _, cast in recipe.casts())
    if resolve_engine("convert_to_float8_training", device, engine) is Engine.HARDWARE and is_blockwise:
        require_hopper(f"convert_to_float8_training: recipe {recipe.name!r} with block scales", device)


def _check_sizes(report: ConversionReport) -> None:
    odd = [f"{e.fqn or 'the module'} {list(e.shape)}" for e in report.entries if e.outcome is Outcome.SIZE]
    if odd:
        raise OperandError(
            f"convert_to_float8_training: in_features and out_features must be multiples of {SIZE_MULTIPLE}; got "
            f"[out, in] of {', '.join(odd)}; leave these layers out with module_filter_fn, or pass pad=True, which "
            "zero-pads their GEMMs"
        )


def _check_converted(
    report: ConversionReport, layers: dict[str, nn.Linear], engine: str, recompute_casts: bool
) -> None:
    for fqn, layer in layers.items():
        assert isinstance(layer, Float8Linear), "only these are converted already"
        if layer.recipe != report.recipe or layer.engine != engine or layer.recompute_casts != recompute_casts:
            raise OperandError(
                f"convert_to_float8_training: {fqn or 'the module'} is a Float8Linear under recipe "
                f"{layer.recipe.name!r}, engine {layer.engine!r} and recompute_casts={layer.recompute_casts} already; "
                f"asked for {report.recipe.name!r}, {engine!r} and {recompute_casts}; convert the model once, from "
                "nn.Linear"
            )
