"""How the scales of torch's operators lie, and as what f8emu's GEMMs take them.

`torch._scaled_mm` tells the granularities by shapes and strides, and takes the first pair of `PAIRS` that fits.
`torch.nn.functional.scaled_mm` is told them. The rules are those of torch 2.11 to 2.15 on CUDA. E8M0 scales are always
swizzled there (`f8emu.spec.swizzle`), and of any shape.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from f8emu.spec.scaling import MX_BLOCK, Granularity
from f8emu.spec.swizzle import check_swizzled, swizzled_groups, swizzled_size
from f8emu.torch.chip import name_of
from f8emu.torch.swizzle import unswizzle_scales

PADDED_BLOCKS = 4  # a GPU reads the blocks of a 128x128 operand along K as a multiple
_SQUARE, _VECTOR = Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128
PAIRS = (
    (Granularity.TENSORWISE, Granularity.TENSORWISE),
    (Granularity.ROWWISE, Granularity.ROWWISE),
    (_SQUARE, _VECTOR),
    (_VECTOR, _SQUARE),
    (_VECTOR, _VECTOR),
)
MICROSCALED = (Granularity.BLOCKWISE_1X32, Granularity.BLOCKWISE_1X32)
RECIPES = {
    ScalingType.TensorWise.value: Granularity.TENSORWISE,
    ScalingType.RowWise.value: Granularity.ROWWISE,
    ScalingType.BlockWise1x128.value: _VECTOR,
    ScalingType.BlockWise128x128.value: _SQUARE,
    ScalingType.BlockWise1x32.value: Granularity.BLOCKWISE_1X32,
}
"""`scale_recipe_a` and `scale_recipe_b` of `scaled_mm`; those of float4 are not emulated."""


class Scales(NamedTuple):
    """The scales of both operands as `f8emu.torch.scaled_mm` takes them: b's transposed."""

    a: Tensor
    b: Tensor
    pair: tuple[Granularity, Granularity]


def by_shape(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Scales | None:
    """The scales of `torch._scaled_mm`; None: they fit no pair of granularities."""
    if scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu:
        return by_recipe(a, b, scale_a, scale_b, MICROSCALED)
    for pair in PAIRS:
        if _fits(a, scale_a, pair[0]) and _fits(b.t(), scale_b.t(), pair[1]):
            return Scales(scale_a, scale_b, pair)
    return None


def by_recipe(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipes: tuple[Granularity, Granularity]
) -> Scales | None:
    """The scales of `torch.nn.functional.scaled_mm`; None: their shapes or strides do not fit the recipes."""
    left, right = _of_recipe(a, scale_a, recipes[0]), _of_recipe(b.t(), scale_b, recipes[1])
    return None if left is None or right is None else Scales(left, right.t(), recipes)


def of_groups(call: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """The E8M0 scales of a grouped GEMM as `f8emu.torch.scaled_grouped_mm` takes them; byte 0 beyond the last group."""
    ends, blocks, columns = offs.tolist(), -(-a.shape[1] // MX_BLOCK), b.shape[-1]
    if b.ndim == 3:
        of_b = unswizzle_scales(scale_b, columns, blocks)
        return _of_groups(call, scale_a, a.shape[0], blocks, ends, 0), of_b.mT
    ends = [-(-end // MX_BLOCK) for end in ends]
    of_b = _of_groups(call, scale_b, columns, blocks, ends, 1)
    return _of_groups(call, scale_a, a.shape[0], blocks, ends, 1), of_b.t()


def _of_groups(call: str, scale: Tensor, rows: int, blocks: int, ends: list[int], axis: int) -> Tensor:
    _, size = swizzled_groups(call, (rows, blocks), ends, axis)
    check_swizzled(call, (scale.numel(),), size)
    return unswizzle_scales(scale.flatten(), rows, blocks, ends=ends, axis=axis)


def _lies(scale: Tensor, dim: int, size: int, stride: int) -> bool:
    return scale.shape[dim] == size and (size <= 1 or scale.stride(dim) == stride)


def _fits(x: Tensor, scale: Tensor, granularity: Granularity) -> bool:
    """Whether `scale` is that of an operand [rows, K] for `torch._scaled_mm`."""
    rows, blocks = granularity.scale_shape(*x.shape)
    if scale.dtype is not torch.float32:
        return False
    if granularity is Granularity.TENSORWISE:
        return scale.numel() == 1
    if scale.ndim != 2:
        return False
    if granularity is Granularity.ROWWISE:
        return scale.shape == (rows, 1) and scale.is_contiguous()
    if granularity is _VECTOR:
        return _lies(scale, 0, rows, 1) and _lies(scale, 1, blocks, rows)
    return _lies(scale, 0, rows, blocks) and _lies(scale, 1, blocks, 1)


def _of_recipe(x: Tensor, scale: Tensor, granularity: Granularity) -> Tensor | None:
    """The scales [rows, blocks of K] of an operand [rows, K] for `scaled_mm`; None: they do not lie so."""
    rows, blocks = granularity.scale_shape(*x.shape)
    if name_of(scale.dtype) != granularity.scale_format.name:
        return None
    if granularity.is_microscaled:
        fits = scale.is_contiguous() and scale.numel() == swizzled_size(rows, blocks)
        return unswizzle_scales(scale.flatten(), rows, blocks) if fits else None
    if granularity is Granularity.TENSORWISE:
        return scale.reshape(1, 1) if scale.numel() == 1 else None
    if granularity is Granularity.ROWWISE:
        return scale.reshape(rows, 1) if scale.numel() == rows and scale.is_contiguous() else None
    if scale.ndim != 2:
        return None
    if granularity is _VECTOR:
        return scale if _lies(scale, 0, rows, 1) and _lies(scale, 1, blocks, rows) else None
    padded = -(-blocks // PADDED_BLOCKS) * PADDED_BLOCKS
    is_square = _lies(scale, 0, padded, 1) and _lies(scale, 1, rows, padded)
    return scale[:blocks].t() if is_square else None
