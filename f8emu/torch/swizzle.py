"""Block scales in cuBLASLt's layout of 128x4 tiles, and back: `f8emu.spec.swizzle` has the arithmetic."""

from collections.abc import Iterable
from functools import partial
from typing import SupportsIndex

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.swizzle import check_padding, check_swizzled, swizzled_groups
from f8emu.torch.chip import require_tensor


def swizzle_scales(
    scale: Tensor, *, ends: Iterable[SupportsIndex] | None = None, axis: int = 0, padding: int = 0
) -> Tensor:
    """Scales in the order in which cuBLASLt reads them, torch's SWIZZLE_32_4_4; `padding` is the byte between them.

    `ends` are the last rows (axis 0) or blocks (axis 1), plus one, of the groups of a grouped GEMM, which begin a tile
    each, as integers or as a tensor of such; what is beyond the last is left out.

    Shapes:
        scale of bytes, E8M0 or uint8, [..., rows, blocks] -> [..., bytes] of its dtype.

    Raises:
        OperandError: elements of more than a byte, a wrong rank, ends that do not fit, or a padding that is no byte.
    """
    check_padding("swizzle_scales", padding)
    plain = _bytes("swizzle_scales", "scale", scale)
    groups, size = swizzled_groups("swizzle_scales", tuple(plain.shape), ends, axis)
    out, arange = plain.new_full((*plain.shape[:-2], size), padding), partial(torch.arange, device=plain.device)
    for group in groups:
        out[..., group.places(arange)] = plain[..., group.rows, group.blocks]
    return out.view(scale.dtype)


def unswizzle_scales(
    swizzled: Tensor, rows: int, blocks: int, *, ends: Iterable[SupportsIndex] | None = None, axis: int = 0
) -> Tensor:
    """The scales that `swizzle_scales` put in order: its inverse. What is beyond the last group is byte 0.

    Shapes:
        swizzled [..., bytes] or more -> [..., rows, blocks] of its dtype.

    Raises:
        OperandError: elements of more than a byte, fewer than the layout has, or ends that do not fit.
    """
    array = _bytes("unswizzle_scales", "swizzled", swizzled)
    groups, size = swizzled_groups("unswizzle_scales", (*array.shape[:-1], rows, blocks), ends, axis)
    check_swizzled("unswizzle_scales", tuple(array.shape), size)
    out, arange = array.new_zeros((*array.shape[:-1], rows, blocks)), partial(torch.arange, device=array.device)
    for group in groups:
        out[..., group.rows, group.blocks] = array[..., group.places(arange)]
    return out.view(swizzled.dtype)


def _bytes(call: str, name: str, x: Tensor) -> Tensor:
    require_tensor(call, name, x)
    if x.element_size() != 1:
        raise OperandError(f"{call}: {name} must be bytes, float8_e8m0fnu or uint8; got {x.dtype}; view them so")
    return x.detach().view(torch.uint8)
