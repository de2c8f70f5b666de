"""How the scales of torch's operators lie, and as what f8emu's GEMMs take them.

`torch._scaled_mm` tells the granularities by shapes and strides, and takes the first pair of `PAIRS` that fits.
`torch.nn.functional.scaled_mm` is told them. The rules are those of torch 2.11 to 2.15 on CUDA.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from f8emu.spec.scaling import Granularity

PADDED_BLOCKS = 4  # a GPU reads the blocks of a 128x128 operand along K as a multiple
_SQUARE, _VECTOR = Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128
PAIRS = (
    (Granularity.TENSORWISE, Granularity.TENSORWISE),
    (Granularity.ROWWISE, Granularity.ROWWISE),
    (_SQUARE, _VECTOR),
    (_VECTOR, _SQUARE),
    (_VECTOR, _VECTOR),
)
RECIPES = {
    ScalingType.TensorWise.value: Granularity.TENSORWISE,
    ScalingType.RowWise.value: Granularity.ROWWISE,
    ScalingType.BlockWise1x128.value: _VECTOR,
    ScalingType.BlockWise128x128.value: _SQUARE,
}
"""`scale_recipe_a` and `scale_recipe_b` of `scaled_mm`; a Hopper GPU does not multiply those of MXFP8 and float4."""


class Scales(NamedTuple):
    """The scales of both operands as `f8emu.torch.scaled_mm` takes them: b's transposed."""

    a: Tensor
    b: Tensor
    pair: tuple[Granularity, Granularity]


def by_shape(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Scales | None:
    """The scales of `torch._scaled_mm`; None: they fit no pair of granularities."""
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
    if scale.dtype is not torch.float32:
        return None
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
