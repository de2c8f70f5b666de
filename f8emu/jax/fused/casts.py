"""The casts that a linear layer needs, each from one reading of its matrix: Pallas kernels on a GPU, else `plain`.

A linear layer needs each matrix `x` [M, N] as two operands: `x` itself, with K = N ("rows"), and `x^T`, with K = M
("cols"), both row-major. A scale or an amax has the `Granularity.scale_shape` of its operand. Arguments are checked by
who calls.

Exactness: the kernels and `plain` give the same bits, those of the verbs `amax`, `scale_from_amax` and `quantize`.
`choice` says where kernels run. Empty and very large matrices, and formats that the chip does not multiply, take plain
JAX everywhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from f8emu.jax.dtypes import CHIP
from f8emu.jax.fused import block_kernels, kernels, plain
from f8emu.jax.fused.choice import kernel_or_plain
from f8emu.jax.fused.plain import Cast
from f8emu.jax.fused.plain import row_amax as row_amax
from f8emu.jax.fused.plain import tensor_amax as tensor_amax  # one reduction, which XLA fuses with what computes x
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule

Codes = tuple[jax.Array | None, jax.Array | None]
"""Codes of `x` [M, N] and of `x^T` [N, M]; None for an operand that is left out."""


@jax.jit
def row_col_amax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest magnitudes of the rows of `x` [M, N], [M, 1], and of its columns, [N, 1]."""
    return _chosen(kernels.row_col_amax, plain.row_col_amax, x)


def cast_pair(x: jax.Array, format: Format, row_inv_scale: jax.Array | None, col_inv_scale: jax.Array | None) -> Codes:
    """Codes of `x` and of `x^T`, each under its inv_scale; None leaves an operand out.

    An inv_scale is [1, 1], or one a row of its operand: [M, 1] for `x`, [N, 1] for `x^T`. One array given for both is
    applied once.
    """
    if row_inv_scale is None and col_inv_scale is None:
        return None, None
    is_one = row_inv_scale is col_inv_scale
    return _cast_pair(x, row_inv_scale, None if is_one else col_inv_scale, format=format, is_one=is_one)


@functools.partial(jax.jit, static_argnames=("format", "is_one"))
def _cast_pair(
    x: jax.Array, row_inv_scale: jax.Array | None, col_inv_scale: jax.Array | None, *, format: Format, is_one: bool
) -> Codes:
    def under(cast: Callable[..., Codes]) -> Callable[..., Codes]:
        return lambda x, rows, cols: cast(x, rows, rows if is_one else cols, format=format)

    return _chosen(under(kernels.cast_pair), under(plain.cast_pair), x, row_inv_scale, col_inv_scale, format=format)


@functools.partial(jax.jit, static_argnames=("format", "rows", "cols"))
def cast_pair_amax(
    x: jax.Array, format: Format, inv_scale: jax.Array, rows: bool = True, cols: bool = True
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` if `rows`, of `x^T` if `cols`, under one inv_scale [1, 1], and the amax of `x`."""
    given, otherwise = (
        functools.partial(cast, format=format, rows=rows, cols=cols)
        for cast in (kernels.cast_pair_amax, plain.cast_pair_amax)
    )
    return _chosen(given if rows or cols else otherwise, otherwise, x, inv_scale, format=format)


@functools.partial(jax.jit, static_argnames=("format", "rule"))
def cast_rows(x: jax.Array, format: Format, rule: ScaleRule = ScaleRule()) -> Cast:
    """Codes [M, N] and scales [M, 1] of the rows of `x` [M, N], each scaled by its own amax."""
    given, otherwise = (
        functools.partial(cast, format=format, rule=rule) for cast in (kernels.cast_rows, plain.cast_rows)
    )
    return _chosen(given, otherwise, x, format=format, takes=x.shape[1] <= kernels.LONGEST_ROW)


@functools.partial(jax.jit, static_argnames=("format", "rule", "row_granularity", "col_granularity"))
def cast_blocks(
    x: jax.Array,
    format: Format,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
) -> tuple[Cast | None, Cast | None]:
    """Codes and scales of `x` [M, N] and of `x^T` [N, M], each by blocks of its own; None leaves an operand out."""
    settings: dict[str, Any] = {"row_granularity": row_granularity, "col_granularity": col_granularity}
    given, otherwise = (
        functools.partial(cast, format=format, rule=rule, **settings)
        for cast in (block_kernels.cast_blocks, plain.cast_blocks)
    )
    return _chosen(given, otherwise, x, format=format)


def _chosen(
    kernel: Callable[..., Any],
    otherwise: Callable[..., Any],
    x: jax.Array,
    *args: Any,
    format: Format | None = None,
    takes: bool = True,
) -> Any:
    """The kernel where it runs and takes the matrix and the format."""
    if takes and 0 < x.size <= kernels.MOST_ELEMENTS and (format is None or format in CHIP.operand_formats):
        return kernel_or_plain(kernel, otherwise, x, *args)
    return otherwise(x, *args)
