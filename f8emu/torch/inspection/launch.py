"""The launches of `kernels`, on tensors of any strides. Importing this module needs Triton."""

import torch
from torch import Tensor

from f8emu.spec.formats import Format, format_by_name
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.dtypes import HIGH_PRECISION_DTYPES
from f8emu.torch.fused.kernels.casts import DTYPES
from f8emu.torch.fused.launch import LaunchPlan, planned
from f8emu.torch.fused.plans import blocks, codes_constants, rule_constants
from f8emu.torch.inspection import kernels
from f8emu.torch.inspection.statistics import tie_of

# Not tuned. Chosen so that ptxas spills no registers and at least 16 warps fit on a multiprocessor. On an H200 all of
# them take 21 ms of a step of 4 Llama-3 8B blocks with 8,192 tokens.
VALUES_TILE = (64, 128)
VALUES_WARPS = 8
CAST_TILE = (32, 128)
"""A part of a block of 128 by 128."""
CAST_WARPS = 8
TOTAL_BLOCK = 4096
TOTAL_WARPS = 8
CODES_BLOCK = 16384
CODES_WARPS = 8


def takes(x: Tensor, *formats: Format) -> bool:
    """Whether there are kernels for values of this dtype and these formats."""
    return x.dtype in HIGH_PRECISION_DTYPES and all(format.name in DTYPES for format in formats)


def values(x: Tensor, sums: bool) -> Tensor:
    """Statistics of `x` [rows, columns]: amax, NaN, infinities and zeros; with `sums` also those of `values_kernel`."""
    x = _in_memory(x)
    count = 7 if sums else 4
    plan = _values(*x.shape, *x.stride(), sums)
    partials = x.new_empty((count, plan.programs), dtype=torch.float64)
    plan(x, partials)
    return _totals(partials, True)


def cast(x: Tensor, source: Tensor, is_amax: bool, granularity: Granularity, format: Format, rule: ScaleRule) -> Tensor:
    """The numbers of `cast_kernel` for the cast of `x` [rows, K].

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
    partials = x.new_empty((4, plan.programs), dtype=torch.float64)
    plan(stored, source, partials)
    return _totals(partials, False)


def codes(x: Tensor, format: Format) -> Tensor:
    """How many codes are NaN, zero, and that of the format's largest value: int64 [3]."""
    x = _in_memory(x).contiguous()
    counts = x.new_zeros(3, dtype=torch.int64)
    largest = format.max_code if format.infinity_code is None else format.infinity_code
    _codes(x.numel(), largest, format.max_code)(x, counts)
    return counts


@planned
def _values(m: int, n: int, row_stride: int, col_stride: int, sums: bool) -> LaunchPlan:
    bm, bn = VALUES_TILE
    tiles_n = blocks(n, bn)
    sizes, constants = (m, n, row_stride, col_stride, tiles_n), {"SUMS": sums, "BM": bm, "BN": bn}
    return LaunchPlan(kernels.values_kernel, blocks(m, bm) * tiles_n, sizes, constants, VALUES_WARPS)


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
    return LaunchPlan(kernels.cast_kernel, blocks(m, bm) * tiles_n, sizes, constants, CAST_WARPS)


@planned
def _total(rows: int, count: int, has_amax: bool) -> LaunchPlan:
    constants = {"AMAX": has_amax, "BLOCK": TOTAL_BLOCK}
    return LaunchPlan(kernels.total_kernel, rows, (count, blocks(count, TOTAL_BLOCK)), constants, TOTAL_WARPS)


@planned
def _codes(count: int, largest: int, max_code: int) -> LaunchPlan:
    constants = {"LARGEST": largest, "MAX_CODE": max_code, "BLOCK": CODES_BLOCK}
    return LaunchPlan(kernels.codes_kernel, blocks(count, CODES_BLOCK), (count,), constants, CODES_WARPS)


def _in_memory(x: Tensor) -> Tensor:
    """`x` or its transpose, whichever has neighbours in a row side by side."""
    return x.t() if x.stride(1) != 1 and x.stride(0) < x.stride(1) else x


def _totals(partials: Tensor, has_amax: bool) -> Tensor:
    """The numbers of a matrix, of those of its tiles."""
    totals = partials.new_empty(partials.shape[0])
    _total(*partials.shape, has_amax)(partials, totals)
    return totals
