"""The extents that GEMMs are emulated with: M and K rounded up, so that few programs are compiled.

JAX compiles a program for every shape, which takes 0.5 to 1 s; only small eager calls of many shapes share one (see
`tiles` and `sharing` in `f8ref.jax`). A batch changes M of `output` and `grad_input` and K of `grad_weight`, so
operands are zero-padded to the extents below, and the added rows of the result are cut off.

- M: 1, 2, 4, 8, 16, then multiples of 16, and above 128 eight extents an octave (144, 160, ..., 256, 288, ...).
- K: multiples of 32 up to a block (of 128; of 64 in bfloat16), then whole blocks, as the emulation computes anyway;
  above eight blocks, eight extents an octave.

So at most 15 rows, and above 128 rows or eight blocks at most 1/8, are computed only to be cut off.

No bit changes. Rows do not depend on each other. A zero product takes no part in the accumulation [ACC-1], [ACC-2]; a
step of zeros leaves an accumulator as it is, since that has no more bits than [ACC-3] keeps; a promoted partial or a
slice of zeros adds +0 to a total that is never -0 [CHAIN-2], [CHAIN-3]. K is padded at the end, and under split-K at
the end of each slice, so that no promotion and no slice begins elsewhere. Under block scales a total may be -0 [EPI-5],
which +0 would change. So the added scales are -0 for `a` and +0 for `b`: with a partial of +0, what each form of
[EPI-5] adds is then -0, which changes no total.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_PER_OCTAVE_BITS = 3
"""Eight extents an octave."""
_ROWS = 16
_STEP = 32
"""The longest step of a chain [ACC-1]."""
BLOCK_K = 128
"""K that shares a block scale."""


class Extents(NamedTuple):
    """M and K of a GEMM as they are computed, K in equal slices."""

    m: int
    slices: int
    """What to pass as `split_k`: the number of slices that are not empty."""
    slice_k: int
    """K of each slice except the last, which may be shorter; all of K if it is not split."""
    padded_slice_k: int

    @property
    def k(self) -> int:
        return self.slices * self.padded_slice_k


def rounded_extents(m: int, k: int, *, split_k: int, block_k: int, slice_blocks: int = 1) -> Extents:
    """The extents that a product over K, in blocks of `block_k`, is computed with.

    It is in `split_k` slices, each a multiple of `slice_blocks` blocks [CHAIN-3].
    """
    rows = 1 << (m - 1).bit_length() if 0 < m < _ROWS else _rounded(m, _ROWS)
    multiple = block_k * slice_blocks
    slice_k = math.ceil(math.ceil(k / split_k) / multiple) * multiple
    if split_k == 1 or slice_k >= k:
        return Extents(rows, 1, k, _rounded(k, _STEP if k <= block_k else block_k))
    return Extents(rows, math.ceil(k / slice_k), slice_k, _rounded(slice_k, multiple))


def padded_operand(x: Tensor, extents: Extents, rows: int | None = None) -> Tensor:
    """An operand [rows, K] with zeros below, up to `rows` (None: M), and at the end of every slice of K.

    The result has the layout of `x` whatever the number of rows: JAX compiles again for another layout.
    """
    rows = extents.m if rows is None else rows
    if x.shape == (rows, extents.k):
        return x
    if x.is_contiguous() or not x.t().is_contiguous():
        padded = x.new_zeros((rows, extents.slices, extents.padded_slice_k))
    else:
        padded = x.new_zeros((extents.slices, extents.padded_slice_k, rows)).permute(2, 0, 1)
    for i, part in enumerate(x.detach().split(extents.slice_k, dim=1)):
        padded[: part.shape[0], i, : part.shape[1]] = part
    return padded.flatten(1)


def padded_scales(scale: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    """Scales with entries `fill` added below and to the right, up to `shape`."""
    return pad(scale.detach(), (0, shape[1] - scale.shape[1], 0, shape[0] - scale.shape[0]), value=fill)


def padded_block_scales(scale: Tensor, extents: Extents, rows: int, fill: float) -> Tensor:
    """Block scales [rows, blocks of K] with entries `fill` below, up to `rows`, and at the end of every slice of K."""
    blocks = math.ceil(extents.padded_slice_k / BLOCK_K)
    parts = scale.split(math.ceil(extents.slice_k / BLOCK_K), dim=1)
    return torch.cat([padded_scales(part, (rows, blocks), fill) for part in parts], dim=1)


def first_rows(product: Tensor, m: int) -> Tensor:
    """The product without the added rows, copied so that it does not keep their memory."""
    return product if product.shape[0] == m else product[:m].clone()


def _rounded(extent: int, unit: int) -> int:
    """`extent` rounded up to a multiple of `unit`, and above eight units to one of eight extents an octave."""
    units = math.ceil(extent / unit)
    coarse = unit << max(0, (units - 1).bit_length() - _PER_OCTAVE_BITS - 1)
    return math.ceil(extent / coarse) * coarse
