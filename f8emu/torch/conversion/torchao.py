"""What a conversion is told: a recipe, or torchao's configuration of one, and which layers are worth it.

torchao itself is not imported.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import nn

from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.recipe import (
    BLOCKWISE,
    DELAYED,
    HIGH_PRECISION_CAST,
    RECIPES,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    Cast,
    CastFrom,
    Gemm,
    Recipe,
    recipe_by_name,
)
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.chip import CHIP, float8_format
from f8emu.torch.conversion.mixtures import experts_of, speed_of_experts

_GRANULARITIES = {"tensorwise": Granularity.TENSORWISE, "axiswise": Granularity.ROWWISE}
_OPTIONS = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate")  # of torchao's configuration, beyond a recipe


class TorchaoConfig(Protocol):
    """torchao's `Float8LinearConfig`."""

    @property
    def gemm_config_output(self) -> Any: ...


RecipeLike = Recipe | str | Enum | TorchaoConfig
"""A recipe, its name, or torchao's `Float8LinearRecipeName` or `Float8LinearConfig` for it."""


def torchao_options(config: RecipeLike | None) -> set[str]:
    """Which options of a conversion torchao's configuration sets beyond a recipe; none of another recipe."""
    return {name for name in _OPTIONS if type(config).__name__ == "Float8LinearConfig" and getattr(config, name, False)}


def resolve_recipe(call: str, config: RecipeLike, cast_weight_from: CastFrom | str | None = None) -> Recipe:
    """The recipe itself, the one of that name, or the one that torchao's configuration or enum stands for.

    `cast_weight_from` takes the place of the recipe's own, unless it is None.
    """
    # torchao's by the names of their classes: it need not be installed.
    kind = type(config).__name__
    if isinstance(config, Enum) and kind == "Float8LinearRecipeName":
        config = str(config.value)
    if isinstance(config, str):
        config = recipe_by_name(config)
    recipe = _of_torchao(call, config) if kind == "Float8LinearConfig" else config
    if not isinstance(recipe, Recipe):
        raise SpecError(f"{call}: the recipe must be a Recipe or the name of one; got {kind}; see f8emu.RECIPES")
    for _, _, cast in recipe.casts():
        if cast.format is not None and cast.format not in CHIP.operand_formats:
            known = " or ".join(format.name for format in CHIP.operand_formats)
            raise UnsupportedError(
                f"{call}: layers cast to {known}; recipe {recipe.label} to {cast.format}; train with "
                f"f8emu.jax.dot_general, or multiply with scaled_mm(..., chip={recipe.chip!r})"
            )
    return recipe if cast_weight_from is None else replace(recipe, cast_weight_from=_source(call, cast_weight_from))


def _source(call: str, cast_weight_from: CastFrom | str) -> CastFrom:
    try:
        return CastFrom(cast_weight_from)
    except ValueError:
        known = ", ".join(one.value for one in CastFrom)
        raise SpecError(f"{call}: cast_weight_from must be one of {known}; got {cast_weight_from!r}") from None


def _of_torchao(call: str, config: Any) -> Recipe:
    """The recipe with the same casts, scales and accumulation, a named one if there is one."""
    try:
        # torchao fills in casts that were left out.
        recipe = Recipe(
            name="torchao",
            output=_gemm(config, "output", "input", "weight"),
            grad_input=_gemm(config, "grad_input", "grad_output", "weight_for_grad_input"),
            grad_weight=_gemm(config, "grad_weight", "grad_output_for_grad_weight", "input_for_grad_weight"),
            scale_rule=ScaleRule(power_of_two=config.round_scales_to_power_of_2),
        )
    except SpecError as error:
        raise SpecError(
            f"{call}: no recipe matches this Float8LinearConfig: {error}; choose one of {', '.join(RECIPES)}"
        ) from None
    return next((named for named in RECIPES.values() if named == recipe), recipe)


def _gemm(config: Any, gemm: str, a: str, b: str) -> Gemm:
    cast_a, cast_b = (_cast(getattr(config, f"cast_config_{operand}")) for operand in (a, b))
    is_float8 = not (cast_a.is_high_precision and cast_b.is_high_precision)
    is_fast = getattr(config, f"gemm_config_{gemm}").use_fast_accum
    return Gemm(a=cast_a, b=cast_b, use_fast_accum=is_fast and is_float8)


def _cast(config: Any) -> Cast:
    kind = config.scaling_type.value
    if kind == "disabled":
        return HIGH_PRECISION_CAST
    if kind != "dynamic":
        raise SpecError(f'its {kind} scaling is the recipe "delayed" here')
    format = float8_format("Float8LinearConfig", config.target_dtype)
    return Cast(format=format, granularity=_GRANULARITIES[config.scaling_granularity.value])


ModuleFilter = Callable[[nn.Module, str], bool]
"""(layer, its name) -> whether to convert it."""


HEADS = ("lm_head", "*.lm_head")
"""Patterns of the heads' names: in high precision in an export, and in a conversion without a filter."""


class SmallestLayer(NamedTuple):
    """Layers at least this large in both fields are not slower in float8 than in bfloat16."""

    features: int  # the smaller of in_features and out_features
    parameters: int  # in_features * out_features


_TOKENS = 8192  # with which the smallest layers were measured
_NAMED = (TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, DELAYED, BLOCKWISE)
SMALLEST_LAYERS: dict[Recipe, SmallestLayer] = dict.fromkeys(_NAMED, SmallestLayer(2048, 29360128))
"""Measured by `benchmarks.sizes`: one H200, 8,192 tokens, eager, forward and backward of one layer back to back."""
SMALLEST_LAYERS_IN_CUDA_GRAPHS: dict[Recipe, SmallestLayer] = {
    TENSORWISE: SmallestLayer(1024, 4194304),
    ROWWISE: SmallestLayer(1024, 8388608),
    ROWWISE_WITH_GW_HP: SmallestLayer(1024, 4194304),
    DELAYED: SmallestLayer(512, 4194304),
    BLOCKWISE: SmallestLayer(2048, 8388608),
}
"""The same in CUDA graphs, where host time does not count."""


def filter_small_layers(
    config: RecipeLike = "tensorwise",
    *,
    filter_fqns: Collection[str] = (),
    in_cuda_graph: bool = False,
    pad: bool = False,
    tokens_per_expert: float | None = None,
) -> ModuleFilter:
    """A `module_filter_fn` that excludes layers which are slower in float8 under this recipe than in bfloat16.

    The thresholds were measured on one H200 with 8,192 tokens, one layer at a time; with fewer tokens they would be
    higher. For a recipe that was not measured, no layer is excluded as too small.

    Args:
        config: the recipe, or its name.
        filter_fqns: excludes every layer whose name contains one of these, as torchao's argument does.
        in_cuda_graph: count GPU time only, not host time: for layers in a CUDA graph
            (`torch.compile(mode="reduce-overhead")`), or between layers so large that the host runs ahead.
        pad: keep layers whose sizes are not multiples of 16; without, they are excluded, so that they raise no error.
        tokens_per_expert: how many tokens a pass gives each expert. Experts are excluded where `plan_conversion`
            predicts that they are slower. None: 8,192 tokens that have two experts each.

    Raises:
        SpecError: an unknown recipe.
    """
    table = SMALLEST_LAYERS_IN_CUDA_GRAPHS if in_cuda_graph else SMALLEST_LAYERS
    recipe = resolve_recipe("filter_small_layers", config)
    # A string's letters would be names.
    names = [filter_fqns] if isinstance(filter_fqns, str) else filter_fqns
    is_wanted = filter_layers(names, pad or "pad_inner_dim" in torchao_options(config), table.get(recipe))

    def is_fast(module: nn.Module, fqn: str) -> bool:
        experts = experts_of(module)
        if experts is None or experts.layout is None or not is_wanted(module, fqn):
            return is_wanted(module, fqn)
        tokens = 2 * _TOKENS / experts.shape[0] if tokens_per_expert is None else tokens_per_expert
        return speed_of_experts(experts.shape, tokens, recipe) >= 1

    return is_fast


def filter_layers(names: Collection[str], pad: bool, smallest: SmallestLayer | None) -> ModuleFilter:
    """A `module_filter_fn` that excludes these names, sizes that need padding, and layers below `smallest`."""

    def is_wanted(module: nn.Module, fqn: str) -> bool:
        if any(name in fqn for name in names):
            return False
        if not isinstance(module, nn.Linear):
            return True
        sizes = (module.in_features, module.out_features)
        if not pad and any(size % CHIP.size_multiple for size in sizes):
            return False
        return smallest is None or (min(sizes) >= smallest.features and sizes[0] * sizes[1] >= smallest.parameters)

    return is_wanted
