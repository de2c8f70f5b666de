"""The two operands that a linear layer makes of one matrix.

A matrix `x` [M, N] is an operand of two GEMMs: of one as it is, summed over N ("rows"), and of another transposed,
summed over M ("cols"). The operators of `fused` make both from one reading of `x`; scales that depend on its
amax are found in another before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from f8emu.spec.recipe import Cast
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.spec.trace import Scales
from f8emu.torch import fused

# The code below compares granularities and asks them nothing: torch 2.11 traces no methods of an enum.
_BLOCKWISE = (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128)
_GIVEN = (Granularity.TENSORWISE, Granularity.ROWWISE)
"""Granularities whose scales are known before the cast."""


class Operand(NamedTuple):
    """One operand of a GEMM."""

    codes: Tensor
    """[rows, summed dimension], row-major; in high precision bfloat16, of any layout."""
    scale: Tensor | None
    """Float32 of `Granularity.scale_shape`; None in high precision."""


class Known(NamedTuple):
    """The scales of both operands of a matrix; None for what is in high precision, blockwise, or not asked for."""

    rows: Scales | None = None
    cols: Scales | None = None


def find_scales(
    x: Tensor, rows: Cast | None, cols: Cast | None, rule: ScaleRule, *, margin: int = 0, is_produced: bool = False
) -> Known:
    """The scales of both operands from the amaxes of `x`, found in one pass.

    Where `x` was just computed (`is_produced`), a compiler finds its amax in the kernel that computes it, which costs
    nothing; otherwise our kernel is the faster. `fused.scales`, which takes it, is opaque, so the compiler rounds it to
    the dtype of `x`, and it is the amax of the rounded values: rounding is monotonic.
    """
    row_kind, col_kind = _granularity(rows), _granularity(cols)
    of_tensor = of_rows = of_cols = None
    if col_kind is Granularity.ROWWISE:
        of_rows, of_cols = fused.row_col_amax(x)
    elif row_kind is Granularity.ROWWISE:
        of_rows = fused.row_amax(x)
    if row_kind is Granularity.TENSORWISE or col_kind is Granularity.TENSORWISE:
        if of_rows is not None:
            of_tensor = fused.tensor_amax(of_rows)
        elif is_produced and torch.compiler.is_compiling() and x.numel() > 0:
            of_tensor = x.abs().max().reshape(1, 1)
        else:
            of_tensor = fused.tensor_amax(x)
    is_shared = row_kind is col_kind is Granularity.TENSORWISE
    of_row_operand = of_tensor if row_kind is Granularity.TENSORWISE else of_rows
    of_col_operand = of_tensor if col_kind is Granularity.TENSORWISE else of_cols
    row_scales = _scales(of_row_operand, rows, rule, margin)
    return Known(row_scales, row_scales if is_shared else _scales(of_col_operand, cols, rule, margin))


def cast_both(
    x: Tensor, rows: Cast | None, cols: Cast | None, known: Known, rule: ScaleRule, amax: Tensor | None = None
) -> tuple[Operand | None, Operand | None]:
    """`x` [M, N] under the cast `rows` and `x^T` [N, M] under `cols`; None leaves an operand out.

    Blockwise scales are found on the way; all others are `known`. `amax`, [1, 1], is raised to that of `x` where given.

    Exactness: the codes and scales of `f8ref.numpy.linear`.
    """
    row_operand = Operand(x.to(torch.bfloat16), None) if _is_high_precision(rows) else None
    col_operand = Operand(x.t().to(torch.bfloat16), None) if _is_high_precision(cols) else None
    row_kind, col_kind = _granularity(rows), _granularity(cols)
    name = _format_name(rows) or _format_name(cols)
    if name is None:
        return row_operand, col_operand
    for kind in _BLOCKWISE:
        if kind is row_kind or kind is col_kind:
            wanted = (kind is row_kind, kind is col_kind)
            is_square = kind is Granularity.BLOCKWISE_128X128
            found = fused.cast_blocks(x, name, is_square, *wanted, rule.power_of_two, rule.amax_floor)
            row_operand = Operand(found[0], found[1]) if wanted[0] else row_operand
            col_operand = Operand(found[2], found[3]) if wanted[1] else col_operand
    by_row = known.rows if row_kind in _GIVEN else None
    by_col = known.cols if col_kind in _GIVEN else None
    if by_row is None and by_col is None:
        return row_operand, col_operand
    inv_scales = (None if by_row is None else by_row.inv_scale, None if by_col is None else by_col.inv_scale)
    if amax is None:
        row_codes, col_codes, _ = fused.cast_pair(x, name, *inv_scales, False)
    else:
        row_codes, col_codes = fused.cast_pair_delayed(x, name, *inv_scales, amax)
    row_operand = row_operand if by_row is None else Operand(row_codes, by_row.scale)
    col_operand = col_operand if by_col is None else Operand(col_codes, by_col.scale)
    return row_operand, col_operand


def cast_rows_first(x: Tensor, rows: Cast, cols: Cast | None, rule: ScaleRule) -> tuple[Operand, Known]:
    """The operand `rows`, and the scales with which `cols` is cast later.

    A rowwise operand beside a tensorwise one is found, scaled and cast in a single reading: the tensor's amax is the
    largest of its rows'.
    """
    col_kind = _granularity(cols)
    if _granularity(rows) is not Granularity.ROWWISE or col_kind is Granularity.ROWWISE:
        known = find_scales(x, rows, cols, rule)
        operand, _ = cast_both(x, rows, None, known, rule)
        assert operand is not None, "rows were asked for"
        return operand, known
    name = _format_name(rows)
    assert name is not None, "rowwise is float8"
    codes, scale, of_rows = fused.cast_rows(x, name, rule.power_of_two, rule.amax_floor)
    of_tensor = fused.tensor_amax(of_rows) if col_kind is Granularity.TENSORWISE else None
    return Operand(codes, scale), Known(cols=_scales(of_tensor, cols, rule, 0))


def _scales(amax: Tensor | None, cast: Cast | None, rule: ScaleRule, margin: int) -> Scales | None:
    name = _format_name(cast)
    if amax is None or name is None or _granularity(cast) not in _GIVEN:
        return None
    inv_scale, scale = fused.scales(amax, name, rule.power_of_two, rule.amax_floor, margin)
    return Scales(inv_scale, scale)


def _is_high_precision(cast: Cast | None) -> bool:
    return cast is not None and cast.format is None


def _granularity(cast: Cast | None) -> Granularity | None:
    """None for what has no scale."""
    return None if cast is None or cast.format is None else cast.granularity


def _format_name(cast: Cast | None) -> str | None:
    return None if cast is None or cast.format is None else cast.format.name
