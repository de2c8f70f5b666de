"""Which layers are too small for float8 to be worth its casts, as it was measured."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from torch import nn

from f8emu.spec.recipe import BLOCKWISE, DELAYED, ROWWISE, ROWWISE_WITH_GW_HP, TENSORWISE, Recipe
from f8emu.torch.conversion.torchao import RecipeLike, resolve_recipe
from f8emu.torch.gemm.checks import SIZE_MULTIPLE

ModuleFilter = Callable[[nn.Module, str], bool]
"""(layer, its name) -> whether to convert it."""


class SmallestLayer(NamedTuple):
    """Layers at least this large in both fields are not slower in float8 than in bfloat16."""

    features: int
    """The smaller of in_features and out_features."""
    parameters: int
    """in_features * out_features."""


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
) -> ModuleFilter:
    """A `module_filter_fn` that excludes layers which are slower in float8 under this recipe than in bfloat16.

    It also excludes layers whose sizes are not multiples of 16, so that they raise no error. The thresholds were
    measured on one H200 with 8,192 tokens, one layer at a time; with fewer tokens they would be higher. Small layers
    are bound by the host, unless they run in a CUDA graph (`torch.compile(mode="reduce-overhead")`) or between layers
    so large that the host runs ahead: use `in_cuda_graph` for both. For a recipe that was not measured, no layer is
    excluded as too small.

    Args:
        config: the recipe, or its name.
        filter_fqns: excludes every layer whose name contains one of these, as torchao's argument does.
        in_cuda_graph: count GPU time only, not host time.
        pad: as for the conversion: keep layers whose sizes are not multiples of 16.

    Raises:
        SpecError: an unknown recipe.
    """
    table = SMALLEST_LAYERS_IN_CUDA_GRAPHS if in_cuda_graph else SMALLEST_LAYERS
    smallest = table.get(resolve_recipe("filter_small_layers", config))
    if isinstance(filter_fqns, str):  # its letters would be names
        filter_fqns = (filter_fqns,)

    def is_large(module: nn.Module, fqn: str) -> bool:
        if any(name in fqn for name in filter_fqns):
            return False
        if not isinstance(module, nn.Linear):
            return True
        sizes = (module.in_features, module.out_features)
        if not pad and any(size % SIZE_MULTIPLE for size in sizes):
            return False
        return smallest is None or (min(sizes) >= smallest.features and sizes[0] * sizes[1] >= smallest.parameters)

    return is_large
