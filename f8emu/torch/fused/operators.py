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

The kernels run on a CUDA device of compute capability 8.9 or newer with Triton. Without Triton `eager` runs there too,
and one warning says so.
"""

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from f8emu.torch.aten_equivalents import seen_as_max
from f8emu.torch.device import has_float8_hardware
from f8emu.torch.dtypes import require_values
from f8emu.torch.fused import eager
from f8emu.torch.fused.arguments import (
    amax_tiles,
    block_granularity,
    empty_blocks,
    empty_codes,
    empty_pair,
    empty_rows,
    named_format,
    named_rule,
    new_floats,
    new_zeros,
    tile_amaxes,
)
from f8emu.torch.launch_sequence import repeatable
from f8emu.torch.library import Implementation, Operator, fake, operator
from f8emu.torch.scale import require_margin


@cache
def launches() -> ModuleType | None:
    """The module that launches the kernels; None, with one warning, if Triton is not installed."""
    try:
        from f8emu.torch.fused import launch
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        warnings.warn(
            "f8emu.torch: Triton is not installed, so casts to float8 run as plain torch operations: the same bits, "
            "several times slower; install it with: pip install triton",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return launch


def fake_with_hooks(operator: Operator) -> Callable[[Implementation], Implementation]:
    """`fake`, which also installs the hooks of `inductor` before a compiler that traces this call needs them."""

    def register(function: Implementation) -> Implementation:
        @wraps(function)
        def prepared(*args: Any) -> Any:
            if "torch._functorch.partitioners" in sys.modules:
                from f8emu.torch.fused import inductor

                inductor.install()
            return function(*args)

        fake(operator)(prepared)
        return function

    return register


def kernels_for(x: Tensor) -> ModuleType | None:
    """The module that launches kernels on `x`; None where `eager` runs."""
    return launches() if x.numel() > 0 and has_float8_hardware(x.device) else None


@operator()
def reduce_tensor(x: Tensor) -> Tensor:
    """The opaque operator behind `tensor_amax`."""
    require_values("tensor_amax", x)
    if (launch := kernels_for(x)) is None:
        return eager.tensor_amax(x)
    amax = new_zeros(x, 1, 1)
    launch.tensor_amax(x.numel())(x.contiguous(), amax)
    return amax


@fake_with_hooks(reduce_tensor)
def _(x: Tensor) -> Tensor:
    require_values("tensor_amax", x)
    return new_floats(x, 1, 1)


@operator(opaque=False, plain=reduce_tensor.function)
def tensor_amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` of any shape, [1, 1]."""
    return seen_as_max(x, lambda: reduce_tensor(x))


@operator()
def row_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row of `x` [M, N], [M, 1]."""
    require_values("row_amax", x, ndim=2)
    if (launch := kernels_for(x)) is None:
        return eager.row_amax(x)
    amax = new_floats(x, x.shape[0], 1)
    launch.row_amax(*x.shape)(x.contiguous(), amax)
    return amax


@fake_with_hooks(row_amax)
def _(x: Tensor) -> Tensor:
    require_values("row_amax", x, ndim=2)
    return new_floats(x, x.shape[0], 1)


def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows of `x` [M, N], [M, 1], and of its columns, [N, 1], in one pass."""
    amaxes, m = row_col_amaxes(x), x.shape[0]
    return amaxes[:m].unsqueeze(1), amaxes[m:].unsqueeze(1)


@operator()
def reduce_rows_and_cols(x: Tensor) -> Tensor:
    """The opaque operator behind `row_col_amaxes`."""
    require_values("row_col_amax", x, ndim=2)
    if (launch := kernels_for(x)) is None:
        return torch.cat(eager.row_col_amax(x)).flatten()
    amaxes = new_zeros(x, x.shape[0] + x.shape[1])
    launch.row_col_amax(*x.shape, launch.has_pairs(x.dtype, x.shape[1], x.device), False)(x.contiguous(), amaxes)
    return amaxes


@fake_with_hooks(reduce_rows_and_cols)
def _(x: Tensor) -> Tensor:
    require_values("row_col_amax", x, ndim=2)
    return new_floats(x, x.shape[0] + x.shape[1])


@operator(opaque=False, plain=reduce_rows_and_cols.function)
def row_col_amaxes(x: Tensor) -> Tensor:
    """Largest magnitudes of the rows of `x` [M, N], followed by those of its columns: [M + N]."""
    return seen_as_max(x, lambda: reduce_rows_and_cols(x))


@operator()
def reduce_tiles(x: Tensor) -> Tensor:
    """The opaque operator behind `row_col_amax_of_tiles`."""
    require_values("row_col_amax_of_tiles", x, ndim=2)
    if (launch := kernels_for(x)) is None:
        return eager.amaxes_of_tiles(x)
    amaxes = new_floats(x, sum(tile_amaxes(*x.shape)))
    launch.row_col_amax(*x.shape, launch.has_pairs(x.dtype, x.shape[1], x.device), True)(x.contiguous(), amaxes)
    return amaxes


@fake_with_hooks(reduce_tiles)
def _(x: Tensor) -> Tensor:
    require_values("row_col_amax_of_tiles", x, ndim=2)
    return new_floats(x, sum(tile_amaxes(*x.shape)))


@operator(opaque=False, plain=reduce_tiles.function)
def amaxes_of_tiles(x: Tensor) -> Tensor:
    """Largest magnitudes of the rows of every tile of `x`, [tiles, M], then of its columns, [tiles, N]: one vector."""
    return seen_as_max(x, lambda: reduce_tiles(x))


def row_col_amax_of_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows of `x` [M, N], [tiles, M, 1], and of its columns, [tiles, N, 1], tile by tile.

    `row_col_amax` writes less, but into zeros, which another kernel has to write first.
    """
    amaxes, (m, n), (tiles_m, tiles_n) = amaxes_of_tiles(x), x.shape, amax_tiles(*x.shape)
    end, _ = tile_amaxes(m, n)
    return amaxes[:end].view(tiles_n, m, 1), amaxes[end:].view(tiles_m, n, 1)


@operator()
def scales(amax: Tensor, fmt: str, power_of_two: bool, amax_floor: float, margin: int) -> tuple[Tensor, Tensor]:
    """(inv_scale, scale) for each amax, as `scale_from_amax`; any shape and high-precision dtype."""
    require_values("scales", amax, name="amax")
    require_margin("scales", margin)
    format, rule = named_rule("scales", fmt, power_of_two, amax_floor)
    if (launch := kernels_for(amax)) is None:
        return eager.scales(amax.float(), format, rule, margin)
    inv_scale, scale = new_floats(amax, *amax.shape), new_floats(amax, *amax.shape)
    launch.scales(fmt, power_of_two, amax_floor, margin, amax.numel())(amax.contiguous(), inv_scale, scale)
    return inv_scale, scale


@fake_with_hooks(scales)
def _(amax: Tensor, fmt: str, power_of_two: bool, amax_floor: float, margin: int) -> tuple[Tensor, Tensor]:
    require_values("scales", amax, name="amax")
    require_margin("scales", margin)
    named_rule("scales", fmt, power_of_two, amax_floor)
    return new_floats(amax, *amax.shape), new_floats(amax, *amax.shape)


def amax_count(shape: Sequence[int]) -> int:
    """How many amaxes of a whole tensor there are; 0 for a vector of one a row; -t for t such vectors."""
    if len(shape) == 3 and math.prod(shape) > 1:
        return -shape[0]
    return 0 if len(shape) == 2 and shape[0] > 1 else math.prod(shape)


@operator()
@repeatable
def cast_pair(
    x: Tensor, fmt: str, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of `x` [M, N] and of `x^T` [N, M], each by its own amaxes; None leaves an operand out.

    An operand has one amax, one a row, amaxes [1, any number] of which the largest is that of all, or amaxes
    [any number, rows, 1] of which the largest is that of a row, for powers of two; in any high-precision dtype.

    Returns:
        (row_codes, row_scale, col_codes, col_scale).
    """
    settings = (fmt, power_of_two, amax_floor)
    format, rule = named_rule("cast_pair", *settings)
    out = empty_pair(x, format, row_amax, col_amax, power_of_two)
    if (launch := kernels_for(x)) is None:
        return (
            *(out[:2] if row_amax is None else eager.cast_rows_by(x, format, row_amax, rule)),
            *(out[2:] if col_amax is None else eager.cast_rows_by(x.t(), format, col_amax, rule)),
        )
    sources = [None if amax is None else amax.contiguous() for amax in (row_amax, col_amax)]
    counts = [None if source is None else amax_count(source.shape) for source in sources]
    plan = launch.cast_pair(*x.shape, *settings, *counts)
    if not power_of_two:  # a kernel before this one divides for the scales of vectors
        for i, count in enumerate(counts):
            if count == 0:
                amax, inv_scale = sources[i], new_floats(x, *out[2 * i + 1].shape)
                assert amax is not None, "a vector is there"
                launch.scales(*settings, 0, amax.numel())(amax, inv_scale, out[2 * i + 1])
                sources[i] = inv_scale
    row_source, col_source = (x if source is None else source for source in sources)
    plan(x.contiguous(), row_source, *out[:2], col_source, *out[2:])
    return out


@operator()
def recomputable_cast_pair(
    x: Tensor, fmt: str, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_pair`, which a compiler may do again in the backward pass instead of keeping its codes."""
    return cast_pair.function(x, fmt, row_amax, col_amax, power_of_two, amax_floor)


@fake_with_hooks(cast_pair)
@fake_with_hooks(recomputable_cast_pair)
def _(
    x: Tensor, fmt: str, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    format, _ = named_rule("cast_pair", fmt, power_of_two, amax_floor)
    return empty_pair(x, format, row_amax, col_amax, power_of_two)


@operator()
def cast_pair_given(x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
    """Codes of `x` [M, N] if `rows`, and of `x^T` [N, M] if `cols`, under one inv_scale, [1, 1]."""
    row, col = empty_codes("cast_pair_given", x, fmt, inv_scale, rows, cols)
    if (launch := kernels_for(x)) is None:
        format = named_format("cast_pair_given", fmt)
        row = eager.cast_by(x, format, inv_scale) if rows else row
        col = eager.cast_by(x.t(), format, inv_scale) if cols else col
        return row, col
    launch.cast_pair_given(*x.shape, fmt, rows, cols)(x.contiguous(), inv_scale, row, col, *[inv_scale] * 3)
    return row, col


@fake_with_hooks(cast_pair_given)
def _(x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
    return empty_codes("cast_pair_given", x, fmt, inv_scale, rows, cols)


@operator()
def cast_rows(x: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rowwise amax, scale and codes of `x` [M, N], read once: (codes [M, N], scale [M, 1], amax [M, 1])."""
    format, rule = named_rule("cast_rows", fmt, power_of_two, amax_floor)
    out = empty_rows(x, format)
    if (launch := kernels_for(x)) is None:
        return eager.cast_rows(x, format, rule)
    launch.cast_rows(*x.shape, fmt, power_of_two, amax_floor)(x.contiguous(), *out)
    return out


@fake_with_hooks(cast_rows)
def _(x: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    format, _ = named_rule("cast_rows", fmt, power_of_two, amax_floor)
    return empty_rows(x, format)


@operator()
def cast_blocks(
    x: Tensor, fmt: str, square: bool, rows: bool, cols: bool, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blockwise amax, scales and codes of `x` [M, N] and `x^T` [N, M] in one pass: 128x128 where `square`, else 1x128.

    Returns:
        (row_codes, row_scale, col_codes, col_scale).
    """
    format, rule = named_rule("cast_blocks", fmt, power_of_two, amax_floor)
    out = empty_blocks(x, format, square, rows, cols)
    if (launch := kernels_for(x)) is None:
        row = eager.cast_blocks(x, format, block_granularity(square), rule) if rows else out[:2]
        col = eager.cast_blocks(x.t(), format, block_granularity(square), rule) if cols else out[2:]
        return *row, *col
    settings = (*x.shape, fmt, power_of_two, amax_floor, rows, cols)
    if square:
        launch.cast_squares(*settings)(x.contiguous(), *out)
    else:
        inv_scales = [new_floats(x, *reversed(scale.shape)) for scale in (out[1], out[3])]
        launch.cast_vectors(*settings)(x.contiguous(), *out[:2], inv_scales[0], *out[2:], inv_scales[1])
    return out


@fake_with_hooks(cast_blocks)
def _(
    x: Tensor, fmt: str, square: bool, rows: bool, cols: bool, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    format, _ = named_rule("cast_blocks", fmt, power_of_two, amax_floor)
    return empty_blocks(x, format, square, rows, cols)
