"""The two operands that a linear layer makes of one matrix.

A matrix `x` [M, N] is an operand of two GEMMs: of one as it is, with K = N ("rows"), and of another transposed, with
K = M ("cols"). Their scales come from a `ScaleSource`: amaxes, found in a previous pass over `x`, or, under delayed
scaling, the scales of earlier passes. The operators of `fused` then cast both operands in one pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from f8emu.spec.cast_plan import CastPlan, CastPlans, Kinds
from f8emu.spec.formats import format_by_name
from f8emu.spec.recipe import CastFrom, Recipe
from f8emu.spec.scaling import MX_BLOCK, E8M0Rule, Granularity, ScaleRule, Scales
from f8emu.torch import cpu_casts
from f8emu.torch.fused import eager
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.delayed import cast_pair_delayed
from f8emu.torch.fused.fused_cast import CODES
from f8emu.torch.fused.launch import amax_tiles
from f8emu.torch.library import fake, has_dispatch_mode, is_known, operator

# The code below uses enum identity only: Dynamo 2.11 cannot trace Enum methods.
_ELEMENTS_OF_A_PROGRAM = 8192  # the elements that one program of a cast handles, about
_LONGEST_READ = 8192  # amaxes, by one program: they are in its registers
_MOST_READ_AGAIN = 4 << 20  # amaxes, by all programs of a cast: from the L2 cache, in about 2 us
_MOST_TILES = 16  # along either side: a program of a cast then reads fewer amaxes than elements
_SHORT_ROWS = 4096
"""Elements: `python -m benchmarks.casts` has our kernel for the amaxes of rows before the compiler's up to here."""
_BLOCKWISE = (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128)


class Operand(NamedTuple):
    """One operand of a GEMM."""

    codes: Tensor  # [rows, K], row-major; in high precision bfloat16 of any layout
    scale: Tensor | None  # of `Granularity.scale_shape` and `scale_format`; None in high precision


Both = tuple[Operand | None, Operand | None]  # of rows and columns; None: not requested


class ScaleSource(NamedTuple):
    """The source of the scales of both operands of a matrix.

    None for operands that are high-precision, not requested, or blockwise (amax found in the cast).
    """

    rows: Tensor | None = None  # the amax of `x`, or of each of its rows, in the shapes that `cast_pair` takes
    cols: Tensor | None = None  # the amax of `x`, or of each of its columns
    used: Scales | None = None  # in place of amaxes: the scales, each [1, 1], of another cast of the same matrix


class Delayed(NamedTuple):
    """The state of delayed scaling that the casts of one tensor read and write between two updates."""

    inv_scale: Tensor  # [1, 1], of earlier passes; `fused.delayed.UNSET` before the first: a cast uses its own amax
    amax: Tensor  # [1, 1], the maximum over all casts since the last update; each cast updates it in place
    margin: int  # the margin of `DelayedScaling`
    first: int = 0  # of the groups of inv_scale [G, 1], the one of the first amax


# The states of input, weight and grad_output; None for a tensor with dynamic scales.
DelayedStates = tuple[Delayed | None, Delayed | None, Delayed | None]


@operator()
def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype."""
    # A custom operator: a compiler drops an ordinary rounding between two operations that it fuses.
    return x.to(dtype, copy=True)


@fake(rounded)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@operator()
def cast_microscaled(x: Tensor, format: str, rule: str) -> tuple[Tensor, Tensor]:
    """Codes [M, K], row-major, and E8M0 scales [M, ceil(K / 32)] of `x` [M, K]; on a GPU by torch's own operations."""
    settings = format_by_name(format), Granularity.BLOCKWISE_1X32, ScaleRule(e8m0=E8M0Rule(rule))
    codes, scale, _ = eager.cast_by_own(x, *settings)
    return codes, scale


@fake(cast_microscaled)
def _(x: Tensor, format: str, rule: str) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    blocks = (m, -(-k // MX_BLOCK))
    return x.new_empty((m, k), dtype=CODES[format]), x.new_empty(blocks, dtype=torch.float8_e8m0fnu)


def weight_to_cast(weight: Tensor, recipe: Recipe) -> Tensor:
    """The values that every cast of a weight reads: the weight's, or those of a bfloat16 copy, as the recipe says.

    The copy takes 2 bytes an element until it is cast; gradients have the dtype of the weight. `no_grad` must be on.
    """
    is_bfloat16 = weight.dtype is torch.bfloat16 and type(weight) in (Tensor, nn.Parameter)  # no wrapper of a master
    if recipe.cast_weight_from is CastFrom.PARAMETER or is_bfloat16:
        return weight
    return rounded(weight, torch.bfloat16)


def find_source(x: Tensor, plan: CastPlan, *, is_stored: bool = False, tiled: bool = False) -> ScaleSource:
    """The amaxes of `x` for both operands, found in one pass.

    `is_stored`: `x` is already in memory (a weight), so its amax need not be fused into the kernel that computes it.
    `tiled`: amaxes of rows and columns may be those of tiles, [tiles, M, 1] and [tiles, N, 1].
    """
    row_kind, col_kind = plan.by_amax
    of_tensor = of_rows = of_cols = None
    if col_kind is Granularity.ROWWISE:
        is_small = tiled and x.numel() > 0 and all(is_known(tiles <= _MOST_TILES) for tiles in amax_tiles(*x.shape))
        of_rows, of_cols = fused.row_col_amax_of_tiles(x) if is_small else fused.row_col_amax(x)
    elif row_kind is Granularity.ROWWISE:
        of_rows = fused.row_amax(x)
    if row_kind is Granularity.TENSORWISE or col_kind is Granularity.TENSORWISE:
        if of_rows is not None:
            of_tensor = fused.tensor_amax(of_rows)
        elif torch.compiler.is_compiling() and x.numel() > 0:
            of_tensor = _amax_in_compiled_code(x, is_stored)
        else:
            of_tensor = _amax_in_eager_code(x)
    return ScaleSource(
        of_tensor if row_kind is Granularity.TENSORWISE else of_rows if row_kind is Granularity.ROWWISE else None,
        of_tensor if col_kind is Granularity.TENSORWISE else of_cols,
    )


def _amax_in_compiled_code(x: Tensor, is_stored: bool) -> Tensor:
    # [1, 1], or amaxes of which it is the largest, [1, M]. A compiler takes the amaxes of rows along in the kernel that
    # computes them, which it does not do with the amax of all; of a stored matrix with short rows our own kernel is
    # faster. Every program of the cast finds the largest, where that reads less than a launch would cost. The cast
    # reads amaxes in the dtype of `x` or in float32, where they are those of the rounded values: rounding is monotonic.
    m, n = x.shape
    of_rows = fused.row_amax(x) if is_stored and n <= _SHORT_ROWS else x.abs().amax(dim=1)
    return of_rows.reshape(1, m) if _is_read_again(m, n) else of_rows.max().reshape(1, 1)


def _amax_in_eager_code(x: Tensor) -> Tensor:
    # [1, 1], or amaxes of which it is the largest, [1, M], which no kernel has to set to zero first.
    m, n = x.shape
    if 0 < n <= _SHORT_ROWS and m > 0 and _is_read_again(m, n) and not has_dispatch_mode():
        return fused.row_amax(x).reshape(1, m)
    return fused.tensor_amax(x)


def _is_read_again(m: int, n: int) -> bool:
    # Every program of a cast of [m, n] may read `m` amaxes.
    return is_known(m <= _LONGEST_READ) and is_known(m * (m * n // _ELEMENTS_OF_A_PROGRAM) <= _MOST_READ_AGAIN)


def cast_both(x: Tensor, plan: CastPlan, source: ScaleSource, *, recompute: bool = False) -> Both:
    """`x` [M, N] and `x^T` [N, M] as operands, those of `plan.by_amax` under the scales of `source`.

    With `recompute`, compiled code may repeat a tensorwise or rowwise cast in the backward pass.

    Exactness: the codes and scales of `f8ref.numpy.linear`.
    """
    operands, format = _in_bfloat16(x, plan), plan.format
    if format is None:
        return operands
    # 1. The scales of another cast of the same matrix.
    if source.used is not None:
        inv_scale, scale = source.used
        wanted = _wanted(plan.by_amax)
        codes = fused.cast_pair_given(x, format.name, inv_scale, *wanted)
        return _with_float8(operands, wanted, codes, (scale, scale))
    settings = (plan.rule.power_of_two, plan.rule.amax_floor)
    # 2. Scales of blocks: one cast for each kind of block, which finds the amaxes itself.
    for kind in _BLOCKWISE:
        if kind is plan.by_blocks[0] or kind is plan.by_blocks[1]:
            wanted = (kind is plan.by_blocks[0], kind is plan.by_blocks[1])
            results = fused.cast_blocks(x, format.name, kind is Granularity.BLOCKWISE_128X128, *wanted, *settings)
            operands = _with_float8(operands, wanted, results[::2], results[1::2])
    # 3. Blocks of 32 along K with E8M0 scales: a reading for each side.
    for i, kind in enumerate(plan.by_blocks):
        if kind is Granularity.BLOCKWISE_1X32 and plan.rule.e8m0 is not None:
            codes, scale = cast_microscaled(x.t() if i else x, format.name, plan.rule.e8m0.value)
            operands = _with_float8(operands, (i == 0, i == 1), (codes, codes), (scale, scale))
    # 4. One scale, or one of each row: a cast by the amaxes of a reading before.
    by_row = None if plan.by_amax[0] is None else source.rows
    by_col = None if plan.by_amax[1] is None else source.cols
    if by_row is not None or by_col is not None:
        cast_pair = fused.recomputable_cast_pair if recompute else fused.cast_pair
        results = cast_pair(x, format.name, by_row, by_col, *settings)
        operands = _with_float8(operands, (by_row is not None, by_col is not None), results[::2], results[1::2])
    return operands


def cast_matrix(x: Tensor, plan: CastPlan, state: Delayed | None = None, *, recompute: bool = False) -> Both:
    """Both operands of `x` under the scales of `state`, or where that is None of `x` itself."""
    if state is not None:
        return cast_delayed(x, plan, state, recompute=recompute)[:2]
    if cpu_casts.takes(x):
        return _cast_on_cpu(x, plan)
    if plan.is_one_pass:
        operand, _ = _cast_rows(x, plan)
        return operand, cast_both(x, plan, ScaleSource())[1]
    return cast_both(x, plan, find_source(x, plan, tiled=plan.rule.power_of_two), recompute=recompute)


def _cast_on_cpu(x: Tensor, plan: CastPlan) -> Both:
    # One reading an operand: amaxes, scales and codes.
    operands, amax = _in_bfloat16(x, plan), None
    for i, kind in enumerate(plan.granularities):
        if kind is not None and plan.format is not None:
            side, is_one = x.t() if i else x, kind is Granularity.TENSORWISE
            codes, scale, amaxes = cpu_casts.cast(side, kind, plan.format, plan.rule, amax if is_one else None)
            operands = _with_float8(operands, (i == 0, i == 1), (codes, codes), (scale, scale))
            amax = amaxes if is_one else None
    return operands


def _cast_rows(x: Tensor, plan: CastPlan) -> tuple[Operand, Tensor]:
    # The operand of rows and its amaxes, from one pass.
    assert plan.format is not None, "rowwise is float8"
    codes, scale, amaxes = fused.cast_rows(x, plan.format.name, plan.rule.power_of_two, plan.rule.amax_floor)
    return Operand(codes, scale), amaxes


def cast_delayed(
    x: Tensor, plan: CastPlan, state: Delayed, *, recompute: bool = False
) -> tuple[Operand | None, Operand | None, ScaleSource]:
    """`cast_both` by the scale of earlier passes; also the source for another cast of `x`.

    The amax of `x` is taken along, for the next update. With `recompute`, compiled code may cast the columns in the
    backward pass: the cast of both tells the state, so it cannot be done again.

    Exactness: the codes, scales and state of `f8ref.numpy.linear`.
    """
    operands = _in_bfloat16(x, plan)
    if plan.format is None:
        return *operands, ScaleSource()
    wanted = _wanted(plan.by_amax)
    is_apart = recompute and all(wanted) and torch.compiler.is_compiling()
    sides = (True, False) if is_apart else wanted
    settings = (state.amax, plan.rule.power_of_two, plan.rule.amax_floor, state.margin)
    rows, cols, inv_scale, scale = cast_pair_delayed(x, plan.format.name, state.inv_scale, *sides, *settings)
    if is_apart:
        _, cols = fused.recomputable_cast_pair_given(x, plan.format.name, inv_scale, False, True)
    return *_with_float8(operands, wanted, (rows, cols), (scale, scale)), ScaleSource(used=Scales(inv_scale, scale))


def cast_rows_first(x: Tensor, plans: CastPlans, state: Delayed | None) -> tuple[Operand, ScaleSource]:
    """The operand of rows, and the source for casting that of columns later, empty if that cast finds its amaxes."""
    if state is not None:
        operand, _, source = cast_delayed(x, plans.rows, state)
    elif cpu_casts.takes(x):
        operand, _ = _cast_on_cpu(x, plans.rows)
        source = ScaleSource()
    elif plans.rows.is_one_pass and plans.both.by_amax[1] is not Granularity.ROWWISE:
        # A tensorwise amax for the columns is the largest of the row amaxes.
        operand, of_rows = _cast_rows(x, plans.rows)
        source = ScaleSource(cols=None if plans.both.by_amax[1] is None else fused.tensor_amax(of_rows))
    else:
        source = find_source(x, plans.both, is_stored=True, tiled=plans.both.rule.power_of_two)
        operand, _ = cast_both(x, plans.rows, source)
        source = ScaleSource(cols=source.cols)
    assert operand is not None, "rows were requested"
    return operand, source


def cast_cols_in_rows(x: Tensor, plan: CastPlan, amax: Tensor) -> Operand:
    """The operand of columns by the amax of `x`, or by those of its columns [N, 1].

    Its codes are still in the layout of `x`; `transpose_codes` makes an operand of them.
    """
    assert plan.format is not None, "codes were requested"
    settings = (plan.rule.power_of_two, plan.rule.amax_floor)
    if plan.by_amax[1] is Granularity.ROWWISE:
        inv_scale, scale = fused.scales(amax, plan.format.name, *settings, 0)
        return Operand(fused.cast_columns(x, plan.format.name, inv_scale), scale)
    codes, scale, _, _ = fused.cast_pair(x, plan.format.name, amax, None, *settings)
    return Operand(codes, scale)


def _in_bfloat16(x: Tensor, plan: CastPlan) -> Both:
    rows, cols = plan.in_bfloat16
    return (
        Operand(x.to(torch.bfloat16), None) if rows else None,
        Operand(x.t().to(torch.bfloat16), None) if cols else None,
    )


def _with_float8(operands: Both, wanted: tuple[bool, bool], codes: Sequence[Tensor], scales: Sequence[Tensor]) -> Both:
    row, col = operands
    row = Operand(codes[0], scales[0]) if wanted[0] else row
    return row, Operand(codes[1], scales[1]) if wanted[1] else col


def _wanted(kinds: Kinds) -> tuple[bool, bool]:
    return kinds[0] is not None, kinds[1] is not None
