"""Block scales in cuBLASLt's layout of 128x4 tiles, and back: `f8emu.spec.swizzle` has the arithmetic."""

from __future__ import annotations  # short signatures in `help`

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from f8emu.numpy.cast import array_of
from f8emu.numpy.emulation import Array
from f8emu.spec.errors import OperandError
from f8emu.spec.swizzle import check_padding, check_swizzled, swizzled_groups


def swizzle_scales(
    scale: ArrayLike, *, ends: Iterable[SupportsIndex] | None = None, axis: int = 0, padding: int = 0
) -> Array:
    """Scales in the order in which cuBLASLt reads them, torch's SWIZZLE_32_4_4; `padding` is the byte between them.

    `ends` are the last rows (axis 0) or blocks (axis 1), plus one, of the groups of a grouped GEMM, which begin a tile
    each, as integers or as an array of such; what is beyond the last is left out.

    Shapes:
        scale of bytes, E8M0 or uint8, [..., rows, blocks] -> [..., bytes] of its dtype.

    Raises:
        OperandError: elements of more than a byte, a wrong rank, ends that do not fit, or a padding that is no byte.
    """
    check_padding("swizzle_scales", padding)
    plain = _bytes("swizzle_scales", "scale", scale)
    groups, size = swizzled_groups("swizzle_scales", plain.shape, ends, axis)
    out = np.full((*plain.shape[:-2], size), padding, np.uint8)
    for group in groups:
        out[..., group.places(np.arange)] = plain.view(np.uint8)[..., group.rows, group.blocks]
    return out.view(plain.dtype)


def unswizzle_scales(
    swizzled: ArrayLike, rows: int, blocks: int, *, ends: Iterable[SupportsIndex] | None = None, axis: int = 0
) -> Array:
    """The scales that `swizzle_scales` put in order: its inverse. What is beyond the last group is byte 0.

    Shapes:
        swizzled [..., bytes] or more -> [..., rows, blocks] of its dtype.

    Raises:
        OperandError: elements of more than a byte, fewer than the layout has, or ends that do not fit.
    """
    array = _bytes("unswizzle_scales", "swizzled", swizzled)
    groups, size = swizzled_groups("unswizzle_scales", (*array.shape[:-1], rows, blocks), ends, axis)
    check_swizzled("unswizzle_scales", array.shape, size)
    out = np.zeros((*array.shape[:-1], rows, blocks), np.uint8)
    for group in groups:
        out[..., group.rows, group.blocks] = array.view(np.uint8)[..., group.places(np.arange)]
    return out.view(array.dtype)


def _bytes(call: str, name: str, x: ArrayLike) -> Array:
    array = array_of(call, name, x)
    if array.itemsize != 1:
        raise OperandError(f"{call}: {name} must be bytes, float8_e8m0fnu or uint8; got {array.dtype}; view them so")
    return array
