"""Triton kernels of the statistics: of a matrix's values, and of a cast of it, each from one reading.

A program reads one tile and writes its numbers as float64, side by side with those of the other programs, and
`total_kernel` adds them up, always in the same order. Counts are exact, sums are of float64 terms.

Exactness: codes are those of `fused.cast_kernels`, whose clamp, conversion and scale rule these are. The noise of a
cast is a float64 difference of its float32 product, which no compiler can turn into a fused multiply-add.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# (Triton is optional, and its branches are decided at compile time.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from f8emu.spec.formats import Format, format_by_name
from f8emu.spec.scaling import BLOCK, Granularity, ScaleRule
from f8emu.torch.chip import HIGH_PRECISION_DTYPES
from f8emu.torch.fused.cast_kernels import DTYPES, clamp
from f8emu.torch.fused.launch import LaunchPlan, planned
from f8emu.torch.fused.plans import blocks, codes_constants, rule_constants
from f8emu.torch.fused.scale_kernels import inv_scale_of, magnitudes, one_nan, reciprocal
from f8emu.torch.inspection.statistics import CAST, COUNTED, SUMMED, tie_of

# Not tuned. Chosen so that ptxas spills no registers and at least 16 warps fit on a multiprocessor. On an H200 all of
# them take 21 ms of a step of 4 Llama-3 8B blocks with 8,192 tokens.
VALUES_TILE = (64, 128)
CAST_TILE = (32, 128)
"""A part of a block of 128 by 128."""
TOTAL_BLOCK = 4096
WARPS = 8
_INFINITY = tl.constexpr(0x7F800000)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _count(is_so):
    return tl.sum(tl.sum(is_so.to(tl.int32), 1), 0).to(tl.float64)


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit(do_not_specialize=["M", "tiles_n"])
def values_kernel(
    x,
    partials,
    M,
    N,
    row_stride,
    col_stride,
    tiles_n,
    SUMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """`partials` [4 or 7, programs] of `x` [M, N]: amax, as the integer of its bits; how many NaN, infinities, zeros.

    With `SUMS` also the sums of the values, of their magnitudes, and of their squares.
    """
    tile, programs = tl.program_id(0), tl.num_programs(0)
    rows = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    found = tl.load(x + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0)
    values = found.to(tl.float32)
    bits = magnitudes(values)
    own = partials + tile
    tl.store(own, one_nan(tl.max(tl.max(bits, 1), 0)).to(tl.float64))
    tl.store(own + programs, _count(bits > _INFINITY))
    tl.store(own + 2 * programs, _count(bits == _INFINITY))
    tl.store(own + 3 * programs, _count((bits == 0) & inside))
    if SUMS:
        exact = values.to(tl.float64)
        tl.store(own + 4 * programs, _sum(exact))
        tl.store(own + 5 * programs, _sum(tl.abs(exact)))
        tl.store(own + 6 * programs, _sum(exact * exact))


@triton.jit(do_not_specialize=["M", "source_rows", "source_cols", "tiles_n"])
def cast_kernel(
    x,
    source,
    partials,
    M,
    N,
    row_stride,
    col_stride,
    source_rows,
    source_cols,
    tiles_n,
    QUOTIENT: tl.constexpr,
    FLOOR: tl.constexpr,
    AT_FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    TIE: tl.constexpr,
    IS_AMAX: tl.constexpr,
    ALONG: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """`partials` [4, programs] of the cast of `x` [M, N].

    How many values that are not zero become zero, how many are above `TIE` in the format's range; the sums of squares
    of the values and of what the cast changes them by.

    `source` has the inv_scales, or with `IS_AMAX` the amaxes; `POWER_OF_TWO` is for amaxes only. `ALONG` says which
    values share one: 0 all of a tile, 1 those of a row of it, 2 those of a column. A step of `source_rows` and
    `source_cols` leads to the next row or column that has one of its own, and to the next block of 128 where a tile has
    only one.
    """
    tile, programs = tl.program_id(0), tl.num_programs(0)
    first_row, first_col = (tile // tiles_n).to(tl.int64) * BM, (tile % tiles_n).to(tl.int64) * BN
    rows, cols = first_row + tl.arange(0, BM), first_col + tl.arange(0, BN)
    # 1. The scales.
    if ALONG == 0:
        given = tl.load(source + (first_row // _BLOCK) * source_rows + (first_col // _BLOCK) * source_cols)
    elif ALONG == 1:
        at = rows * source_rows + (first_col // _BLOCK) * source_cols
        given = tl.load(source + at, mask=rows < M, other=1.0)
    else:
        at = cols * source_cols + (first_row // _BLOCK) * source_rows
        given = tl.load(source + at, mask=cols < N, other=1.0)
    inv = given.to(tl.float32)
    if IS_AMAX:
        inv = inv_scale_of(one_nan(magnitudes(inv)), QUOTIENT, FLOOR, AT_FLOOR, POWER_OF_TWO)
    scale = reciprocal(inv, POWER_OF_TWO)
    if ALONG == 1:
        inv, scale = inv[:, None], scale[:, None]
    elif ALONG == 2:
        inv, scale = inv[None, :], scale[None, :]
    # 2. The codes, and what they mean.
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    found = tl.load(x + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0)
    values = found.to(tl.float32)
    scaled = values * inv
    decoded = clamp(scaled, LIMIT).to(DTYPE).to(tl.float32)
    exact = values.to(tl.float64)
    noise = tl.where(inside, (decoded * scale).to(tl.float64) - exact, 0.0)
    # 3. The numbers.
    own = partials + tile
    tl.store(own, _count((decoded == 0.0) & (magnitudes(values) != 0)))
    tl.store(own + programs, _count(tl.abs(scaled) > TIE))
    tl.store(own + 2 * programs, _sum(exact * exact))
    tl.store(own + 3 * programs, _sum(noise * noise))


@triton.jit(do_not_specialize=["count", "blocks"])
def total_kernel(partials, totals, count, blocks, AMAX: tl.constexpr, BLOCK: tl.constexpr):
    """`totals` [rows] of `partials` [rows, count], a program each: sums; with `AMAX` the first is a maximum of bits."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    largest, total = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for _ in range(0, blocks):
        found = tl.load(partials + row.to(tl.int64) * count + at, mask=at < count, other=0.0)
        largest = tl.maximum(largest, found)
        total += found
        at += BLOCK
    whole = tl.sum(total, 0)
    if AMAX:
        bits = tl.max(largest, 0).to(tl.int32)
        whole = tl.where(row == 0, bits.to(tl.float32, bitcast=True).to(tl.float64), whole)
    tl.store(totals + row, whole)


# The launches, on tensors of any strides


def takes(x: Tensor, *formats: Format) -> bool:
    """Whether there are kernels for values of this dtype and these formats."""
    return x.dtype in HIGH_PRECISION_DTYPES and all(format.name in DTYPES for format in formats)


def values(x: Tensor, sums: bool) -> Tensor:
    """The numbers COUNTED of `x` [rows, columns]; with `sums` also those of SUMMED."""
    x = _in_memory(x)
    return _totals(_values(*x.shape, *x.stride(), sums), len(COUNTED + SUMMED * sums), True, x)


def cast(x: Tensor, source: Tensor, is_amax: bool, granularity: Granularity, format: Format, rule: ScaleRule) -> Tensor:
    """The numbers CAST for the cast of `x` [rows, K].

    Shapes:
        source: `granularity.scale_shape`, amaxes or inv_scales; one number in any shape and float dtype.
    """
    block_rows, block_cols = granularity.block
    source_rows = 0 if block_rows is None else source.stride(0)
    source_cols = 0 if block_cols is None else source.stride(1)
    along = 1 if block_rows == 1 else 0
    stored = _in_memory(x)
    if stored is not x:
        source_rows, source_cols, along = source_cols, source_rows, 2 * along
    layout = (*stored.shape, *stored.stride(), source_rows, source_cols)
    plan = _cast(*layout, format.name, is_amax and rule.power_of_two, rule.amax_floor, is_amax, along)
    return _totals(plan, len(CAST), False, stored, source)


@planned
def _values(m: int, n: int, row_stride: int, col_stride: int, sums: bool) -> LaunchPlan:
    bm, bn = VALUES_TILE
    tiles_n = blocks(n, bn)
    sizes, constants = (m, n, row_stride, col_stride, tiles_n), {"SUMS": sums, "BM": bm, "BN": bn}
    return LaunchPlan(values_kernel, blocks(m, bm) * tiles_n, sizes, constants, WARPS)


@planned
def _cast(
    m: int,
    n: int,
    row_stride: int,
    col_stride: int,
    source_rows: int,
    source_cols: int,
    fmt: str,
    power_of_two: bool,
    amax_floor: float,
    is_amax: bool,
    along: int,
) -> LaunchPlan:
    bm, bn = CAST_TILE
    tiles_n = blocks(n, bn)
    sizes = (m, n, row_stride, col_stride, source_rows, source_cols, tiles_n)
    constants = {
        **rule_constants(fmt, power_of_two, amax_floor),
        **codes_constants(fmt),
        "TIE": tie_of(format_by_name(fmt)),
        "IS_AMAX": is_amax,
        "ALONG": along,
        "BM": bm,
        "BN": bn,
    }
    return LaunchPlan(cast_kernel, blocks(m, bm) * tiles_n, sizes, constants, WARPS)


@planned
def _total(rows: int, count: int, has_amax: bool) -> LaunchPlan:
    constants = {"AMAX": has_amax, "BLOCK": TOTAL_BLOCK}
    return LaunchPlan(total_kernel, rows, (count, blocks(count, TOTAL_BLOCK)), constants, WARPS)


def _in_memory(x: Tensor) -> Tensor:
    # `x` or its transpose, whichever has neighbours in a row side by side.
    return x.t() if x.stride(1) != 1 and x.stride(0) < x.stride(1) else x


def _totals(plan: LaunchPlan, count: int, has_amax: bool, *tensors: Tensor) -> Tensor:
    partials = tensors[0].new_empty((count, plan.programs), dtype=torch.float64)
    plan(*tensors, partials)
    totals = partials.new_empty(count)
    _total(count, plan.programs, has_amax)(partials, totals)
    return totals
