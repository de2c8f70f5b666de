"""Fused casts as torch.library operators: Triton kernels on a GPU, the plain torch of `eager` elsewhere.

A linear layer needs each matrix `x` [M, N] as two operands: `x` itself, with K = N ("rows"), and `x^T`, with K = M
("cols"), both row-major. Each operator reads `x` once and writes the results that were requested; the others are empty
tensors. An `x` that is not contiguous is copied first.

Shapes: `row_*` belong to `x` [M, N] and `col_*` to `x^T` [N, M]; a scale or amax has the `Granularity.scale_shape` of
its operand. All are contiguous except 1x128 scales, which are column-major, as the GEMM requires [EPI-5].

Exactness: the kernels and `eager` give the same bits, those of the verbs `amax`, `scale_from_amax` and `quantize`; a
NaN scale equals any NaN. To a compiler each operator is opaque, and its kernel is launched as it is (`inductor`). So an
amax is that of the values as they are stored, and divisions are not replaced (NUMERICS 6), eager and compiled alike.

Raises: OperandError for a wrong dtype, rank, shape or device; SpecError for an unknown format, or a floor or margin
out of range; UnsupportedError if a gradient would be recorded.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.scaling import Granularity, ScaleRule, check_rule
from f8emu.torch.chip import HIGH_PRECISION_DTYPES, require_values
from f8emu.torch.fused import eager
from f8emu.torch.fused.fused_cast import (
    CODES,
    FusedCast,
    Output,
    check_device,
    check_one_float,
    codes_of,
    matrix,
    named_format,
    named_rule,
)
from f8emu.torch.fused.launch import amax_tiles
from f8emu.torch.library import Operator, operator, seen_as_max
from f8emu.torch.scale import scale_from_amax

# 1. Amaxes.


def _seen(name: str, reduction: Operator) -> Operator:
    """`reduction` as the operator `name`, which dispatch modes see as `aten.max`: their policies know that."""

    def seen(x: Tensor) -> Tensor:
        return seen_as_max(x, lambda: reduction(x))

    seen.__name__ = name
    return operator(opaque=False, plain=reduction.function)(seen)


def _amax_outputs(x: Tensor) -> tuple[Output, ...]:
    require_values("tensor_amax", x)
    return (Output((1, 1), is_zeroed=True),)


@FusedCast(
    outputs=_amax_outputs,
    launch=lambda on, out, x: on.run(on.plans.tensor_amax(on.count(x)), x, *out),
    is_reduction=True,
)
def reduce_tensor(x: Tensor) -> Tensor:
    """The opaque operator behind `tensor_amax`."""
    return eager.tensor_amax(x)


tensor_amax = _seen("tensor_amax", reduce_tensor)  # largest magnitude of `x` of any shape, [1, 1]


@FusedCast(
    outputs=lambda x: (Output((matrix("row_amax", x)[0], 1)),),
    launch=lambda on, out, x: on.run(on.plans.row_amax(*on.shape(x)), x, *out),
    is_reduction=True,
)
def row_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row of `x` [M, N], [M, 1]."""
    return eager.row_amax(x)


@FusedCast(
    outputs=lambda x: (Output((sum(matrix("row_col_amax", x)),), is_zeroed=True),),
    launch=lambda on, out, x: on.run(on.plans.row_col_amax(*on.shape(x), on.has_pairs(x), False), x, *out),
    is_reduction=True,
)
def reduce_rows_and_cols(x: Tensor) -> Tensor:
    """The opaque operator behind `row_col_amaxes`."""
    return torch.cat(eager.row_col_amax(x)).flatten()


row_col_amaxes = _seen("row_col_amaxes", reduce_rows_and_cols)  # of the rows of `x`, then of its columns: [M + N]


def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows of `x` [M, N], [M, 1], and of its columns, [N, 1], in one pass."""
    amaxes, m = row_col_amaxes(x), x.shape[0]
    return amaxes[:m].unsqueeze(1), amaxes[m:].unsqueeze(1)


def _tile_amaxes(m: int, n: int) -> tuple[int, int]:
    # How many amaxes all tiles of a matrix have together: of their rows, and of their columns.
    tiles_m, tiles_n = amax_tiles(m, n)
    return tiles_n * m, tiles_m * n


@FusedCast(
    outputs=lambda x: (Output((sum(_tile_amaxes(*matrix("row_col_amax_of_tiles", x))),)),),
    launch=lambda on, out, x: on.run(on.plans.row_col_amax(*on.shape(x), on.has_pairs(x), True), x, *out),
    is_reduction=True,
)
def reduce_tiles(x: Tensor) -> Tensor:
    """The opaque operator behind `row_col_amax_of_tiles`."""
    return eager.amaxes_of_tiles(x)


amaxes_of_tiles = _seen("amaxes_of_tiles", reduce_tiles)  # of the rows of every tile, then of its columns: one vector


def row_col_amax_of_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows of `x` [M, N], [tiles, M, 1], and of its columns, [tiles, N, 1], tile by tile.

    `row_col_amax` writes less, but into zeros, which another kernel has to write first.
    """
    amaxes, (m, n), (tiles_m, tiles_n) = amaxes_of_tiles(x), x.shape, amax_tiles(*x.shape)
    end, _ = _tile_amaxes(m, n)
    return amaxes[:end].view(tiles_n, m, 1), amaxes[end:].view(tiles_m, n, 1)


# 2. Scales.


def _scales_outputs(amax: Tensor, *rule: Any) -> tuple[Output, ...]:
    require_values("scales", amax, name="amax")
    check_rule("scales", ScaleRule(), rule[-1])
    named_rule("scales", *rule[:-1])
    return (Output(tuple(amax.shape)),) * 2


@FusedCast(
    outputs=_scales_outputs,
    launch=lambda on, out, amax, *rule: on.run(on.plans.scales(*rule, on.count(amax)), amax, *out),
    is_reduction=True,
)
def scales(amax: Tensor, fmt: str, power_of_two: bool, amax_floor: float, margin: int) -> tuple[Tensor, Tensor]:
    """(inv_scale, scale) for each amax, as `scale_from_amax`; any shape and high-precision dtype."""
    format, rule = named_rule("scales", fmt, power_of_two, amax_floor)
    inv_scale, scale = scale_from_amax(amax.float(), format, rule, margin=margin)
    return inv_scale, scale


# 3. Codes and scales by amaxes of a reading before.


def _pair_outputs(
    x: Tensor, fmt: str, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool, amax_floor: float
) -> tuple[Output, ...]:
    named_rule("cast_pair", fmt, power_of_two, amax_floor)
    m, n = matrix("cast_pair", x)
    rows = _side_of_pair("row_amax", x, fmt, row_amax, (m, n), 0, power_of_two)
    return *rows, *_side_of_pair("col_amax", x, fmt, col_amax, (n, m), 1, power_of_two)


def _side_of_pair(
    name: str, x: Tensor, fmt: str, amax: Tensor | None, shape: tuple[int, int], side: int, power_of_two: bool
) -> tuple[Output, Output]:
    if amax is None:
        return codes_of(fmt, 0, 0, side), Output((0, 0), side=side)
    rows, _ = shape
    is_of_tiles = power_of_two and amax.ndim == 3 and amax.shape[0] > 0 and tuple(amax.shape[1:]) == (rows, 1)
    is_vector = is_of_tiles or tuple(amax.shape) == (rows, 1)
    is_of_all = amax.numel() == 1 or (amax.ndim == 2 and amax.shape[0] == 1 and amax.shape[1] > 0)
    if amax.dtype not in HIGH_PRECISION_DTYPES or not (is_of_all or is_vector):
        raise OperandError(
            f"cast_pair: {name} must be float32, bfloat16 or float16, with one element, of shape [1, any number], "
            f"[{rows}, 1] or, for powers of two, [any number, {rows}, 1]; got {amax.dtype} of shape "
            f"{list(amax.shape)}; take it from tensor_amax() or row_col_amax() of the same x"
        )
    check_device("cast_pair", name, amax, x)
    if is_vector:
        of_scale = rows, 1
    else:
        of_scale = tuple(amax.shape) if amax.numel() == 1 and amax.ndim != 3 else (1, 1)
    return codes_of(fmt, *shape, side), Output(of_scale, side=side)


def _amax_count(shape: Sequence[int]) -> int:
    # How many amaxes of a whole tensor there are; 0 for a vector of one a row; -t for t such vectors.
    if len(shape) == 3 and math.prod(shape) > 1:
        return -shape[0]
    return 0 if len(shape) == 2 and shape[0] > 1 else math.prod(shape)


def _launch_pair(
    on: Any, out: Any, x: Any, fmt: str, row_amax: Any, col_amax: Any, power_of_two: bool, amax_floor: float
) -> None:
    # 1. The source of each side's scales.
    rule, counts, tensors = (fmt, power_of_two, amax_floor), [], [x]
    for amax, codes, scale in ((row_amax, *out[:2]), (col_amax, *out[2:])):
        if codes is None:
            tensors += [x, x, x]
            counts.append(None)
            continue
        source, count = on.contiguous(amax), _amax_count(on.shape(amax))
        if count == 0 and not power_of_two:  # a kernel before this one divides for the scales of vectors
            inv_scale = on.floats(x, *on.shape(scale))
            on.run(on.plans.scales(*rule, 0, on.count(scale)), source, inv_scale, scale)
            source = inv_scale
        tensors += [source, codes, scale]
        counts.append(count)
    # 2. Both sides from one reading.
    on.run(on.plans.cast_pair(*on.shape(x), *rule, *counts), *tensors)


@FusedCast(outputs=_pair_outputs, launch=_launch_pair)
def cast_pair(
    x: Tensor, fmt: str, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of `x` [M, N] and of `x^T` [N, M], each by its own amaxes; None leaves an operand out.

    An operand has one amax, one a row, amaxes [1, any number] of which the largest is that of all, or amaxes
    [any number, rows, 1] of which the largest is that of a row, for powers of two; in any high-precision dtype.

    Returns:
        (row_codes, row_scale, col_codes, col_scale).
    """
    format, rule = named_rule("cast_pair", fmt, power_of_two, amax_floor)
    row, col = (
        eager.nothing(side, format) if amax is None else eager.cast_rows_by(side, format, amax, rule)
        for side, amax in ((x, row_amax), (x.t(), col_amax))
    )
    return *row, *col


@FusedCast(outputs=_pair_outputs, launch=_launch_pair, is_recomputable=True)
def recomputable_cast_pair(
    x: Tensor, fmt: str, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_pair`, which a compiler may do again in the backward pass instead of keeping its codes."""
    return cast_pair.function(x, fmt, row_amax, col_amax, power_of_two, amax_floor)


# 4. Codes under scales that are given.


def given_outputs(call: str, x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool) -> tuple[Output, Output]:
    """Row and column codes under one inv_scale."""
    m, n = matrix(call, x)
    check_one_float(call, "inv_scale", inv_scale, x)
    named_format(call, fmt)
    return codes_of(fmt, m, n, 0, is_wanted=rows), codes_of(fmt, n, m, 1, is_wanted=cols)


def _launch_given(on: Any, out: Any, x: Any, fmt: str, inv_scale: Any, *_: bool) -> None:
    wanted = [codes is not None for codes in out]
    codes = [x if codes is None else codes for codes in out]
    on.run(on.plans.cast_pair_given(*on.shape(x), fmt, *wanted, False, False), x, inv_scale, *codes, *[inv_scale] * 3)


@FusedCast(outputs=lambda *args: given_outputs("cast_pair_given", *args), launch=_launch_given)
def cast_pair_given(x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
    """Codes of `x` [M, N] if `rows`, and of `x^T` [N, M] if `cols`, under one inv_scale, [1, 1]."""
    return eager.cast_sides_by(x, named_format("cast_pair_given", fmt), inv_scale, rows, cols)


@FusedCast(outputs=lambda *args: given_outputs("cast_pair_given", *args), launch=_launch_given, is_recomputable=True)
def recomputable_cast_pair_given(
    x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool
) -> tuple[Tensor, Tensor]:
    """`cast_pair_given`, which a compiler may do again in the backward pass instead of keeping its codes."""
    return cast_pair_given.function(x, fmt, inv_scale, rows, cols)


def _columns_outputs(x: Tensor, fmt: str, inv_scale: Tensor) -> tuple[Output, ...]:
    m, n = matrix("cast_columns", x)
    named_format("cast_columns", fmt)
    if inv_scale.dtype is not torch.float32 or tuple(inv_scale.shape) != (n, 1):
        raise OperandError(
            f"cast_columns: inv_scale must be float32 of shape [{n}, 1]; got {inv_scale.dtype} of shape "
            f"{list(inv_scale.shape)}; take it from scale_from_amax() of the column amaxes"
        )
    return (codes_of(fmt, m, n),)


@FusedCast(
    outputs=_columns_outputs,
    launch=lambda on, out, x, fmt, inv_scale: on.run(
        on.plans.cast_columns(*on.shape(x), fmt), x, on.contiguous(inv_scale), *out
    ),
)
def cast_columns(x: Tensor, fmt: str, inv_scale: Tensor) -> Tensor:
    """Codes of `x` [M, N] in its layout, by the inv_scale [N, 1] of each column: `quantize(x^T, inv_scale)^T`.

    The shards of a weight are rows of it, and are gathered as rows. So codes of `x^T` travel in the layout of `x`, and
    are transposed where they arrive.
    """
    codes = eager.cast_by(x.t(), named_format("cast_columns", fmt), inv_scale).t()
    return x.new_empty(x.shape, dtype=codes.dtype).copy_(codes)


def _transposed_outputs(codes: Tensor, after: Tensor) -> tuple[Output, ...]:
    if codes.ndim != 2 or codes.dtype not in (torch.uint8, *CODES.values()):
        raise OperandError(
            f"transpose_codes: codes must be float8 [M, N]; got {codes.dtype} of shape {list(codes.shape)}"
        )
    return (Output((codes.shape[1], codes.shape[0]), codes.dtype),)


@FusedCast(
    outputs=_transposed_outputs,
    launch=lambda on, out, codes, after: on.run(on.plans.transpose_codes(*on.shape(codes)), codes, *out),
)
def transpose_codes(codes: Tensor, after: Tensor) -> Tensor:
    """Codes [M, N], or their bytes, as a new tensor [N, M], row-major.

    `after` is not read. A compiler sees that the transpose needs it, and does not move it into the forward pass, where
    the result would be kept for the backward pass and the codes may not have been gathered yet.
    """
    rows, columns = codes.shape
    out = codes.new_empty(columns, rows)
    return out.copy_(codes.view(torch.uint8).t().view(codes.dtype)) if codes.numel() else out


# 5. Amax, scale and codes in one reading.


def _rows_outputs(x: Tensor, *rule: Any) -> tuple[Output, ...]:
    named_rule("cast_rows", *rule)
    m, n = matrix("cast_rows", x)
    return codes_of(rule[0], m, n), Output((m, 1)), Output((m, 1))


@FusedCast(
    outputs=_rows_outputs, launch=lambda on, out, x, *rule: on.run(on.plans.cast_rows(*on.shape(x), *rule), x, *out)
)
def cast_rows(x: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rowwise amax, scale and codes of `x` [M, N], read once: (codes [M, N], scale [M, 1], amax [M, 1])."""
    format, rule = named_rule("cast_rows", fmt, power_of_two, amax_floor)
    return eager.cast_by_own(x, format, Granularity.ROWWISE, rule)


def _granularity(square: bool) -> Granularity:
    return Granularity.BLOCKWISE_128X128 if square else Granularity.BLOCKWISE_1X128


def _blocks_outputs(x: Tensor, fmt: str, square: bool, rows: bool, cols: bool, *rule: Any) -> tuple[Output, ...]:
    named_rule("cast_blocks", fmt, *rule)
    m, n = matrix("cast_blocks", x)
    outputs: list[Output] = []
    for side, (shape, is_wanted) in enumerate((((m, n), rows), ((n, m), cols))):
        of_scale = _granularity(square).scale_shape(*shape) if is_wanted else (0, 0)
        outputs.append(codes_of(fmt, *shape, side, is_wanted=is_wanted))
        outputs.append(Output(of_scale, side=side, is_transposed=not square))
    return tuple(outputs)


def _launch_blocks(on: Any, out: Any, x: Any, fmt: str, square: bool, rows: bool, cols: bool, *rule: Any) -> None:
    wanted, tensors = [], [x]
    for codes, scale in (out[:2], out[2:]):
        wanted.append(codes is not None)
        if codes is None:
            tensors += [x, x] if square else [x, x, x]
        else:
            tensors += [codes, scale] if square else [codes, scale, on.floats(x, *on.shape(scale))]
    on.run(on.plans.cast_blocks(*on.shape(x), fmt, square, *rule, *wanted), *tensors)


@FusedCast(outputs=_blocks_outputs, launch=_launch_blocks)
def cast_blocks(
    x: Tensor, fmt: str, square: bool, rows: bool, cols: bool, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blockwise amax, scales and codes of `x` [M, N] and `x^T` in one pass: 128x128 where `square`, else 1x128.

    Returns:
        (row_codes, row_scale, col_codes, col_scale).
    """
    format, rule = named_rule("cast_blocks", fmt, power_of_two, amax_floor)
    row, col = (
        eager.cast_by_own(side, format, _granularity(square), rule)[:2] if is_wanted else eager.nothing(side, format)
        for side, is_wanted in ((x, rows), (x.t(), cols))
    )
    return *row, *col
