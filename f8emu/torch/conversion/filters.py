"""Which layers are worth a recipe: filters by size, as measured, and by name."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from torch import nn

from f8emu.spec.recipe import BLOCKWISE, DELAYED, ROWWISE, ROWWISE_FAST, ROWWISE_WITH_GW_HP, TENSORWISE, Recipe
from f8emu.torch.chip import CHIP
from f8emu.torch.conversion.mixtures import experts_of, speed_of_experts
from f8emu.torch.recipes import RecipeLike, resolve_recipe, torchao_options

ModuleFilter = Callable[[nn.Module, str], bool]
"""(layer, its name) -> whether to convert it."""


HEADS = ("lm_head", "*.lm_head")
"""Patterns of the heads' names: in high precision in an export, and in a conversion without a filter."""


class SmallestLayer(NamedTuple):
    """Layers at least this large in both fields are not slower in float8 than in bfloat16."""

    features: int  # the smaller of in_features and out_features
    parameters: int  # in_features * out_features


_TOKENS = 8192  # with which the smallest layers were measured
_NAMED = (TENSORWISE, ROWWISE, ROWWISE_FAST, ROWWISE_WITH_GW_HP, DELAYED, BLOCKWISE)
SMALLEST_LAYERS: dict[Recipe, SmallestLayer] = dict.fromkeys(_NAMED, SmallestLayer(2048, 29360128))
"""Measured by `benchmarks.sizes`: one H200, 8,192 tokens, eager, forward and backward of one layer back to back."""
SMALLEST_LAYERS_IN_CUDA_GRAPHS: dict[Recipe, SmallestLayer] = {
    TENSORWISE: SmallestLayer(1024, 4194304),
    ROWWISE: SmallestLayer(1024, 8388608),
    ROWWISE_FAST: SmallestLayer(1024, 8388608),  # of rowwise, whose GEMMs are slower
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
        if experts is None or experts.weight_names is None or not is_wanted(module, fqn):
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
