"""Operands and scales as a kernel's declaration has them: padded, turned, and how they are to lie in memory."""

from typing import NamedTuple

import numpy as np

from f8emu.conformance.kernels.kernel import OperandLayout, ScaleLayout
from f8emu.spec import Granularity


class Laid(NamedTuple):
    """An array, and how it is to lie in the kernel's memory."""

    array: np.ndarray
    column_major: bool
    padding: int = 0
    """Elements between its contiguous rows."""
    offset: int = 0
    """Bytes from a boundary to its first element."""


def laid_operand(codes: np.ndarray, shape: tuple[int, int], layout: OperandLayout) -> Laid:
    """Codes [.., R, K], padded with zeros to `shape`."""
    whole = np.zeros((*codes.shape[:-2], *shape), codes.dtype)
    whole[..., : codes.shape[-2], : codes.shape[-1]] = codes
    return Laid(whole.swapaxes(-1, -2) if layout.k_first else whole, layout.column_major)


def laid_scale(
    scale: np.ndarray, granularity: Granularity, shape: tuple[int, int], layout: ScaleLayout
) -> Laid | float:
    """Scales [groups of R, groups of K] of an operand that was padded to `shape`, as the kernel takes them."""
    rows, groups = granularity.scale_shape(*shape)
    scale = np.pad(scale, ((0, rows - scale.shape[0]), (0, groups - scale.shape[1])), constant_values=1)
    if layout.is_inverse:
        with np.errstate(divide="ignore"):
            scale = np.float32(1) / scale
    if layout.as_float:
        return float(scale[0, 0])
    scale = np.pad(scale, ((0, 0), (0, -scale.shape[1] % layout.k_multiple)))
    if layout.ndim < 2:
        return Laid(scale.reshape((-1,) if layout.ndim else ()), False)
    return Laid(scale.T if layout.k_first else scale, layout.column_major)
