"""The casts that a linear layer needs, each from one reading of its matrix: Pallas kernels on a GPU, else plain JAX.

A linear layer needs each matrix `x` [M, N] as two operands: `x` itself, with K = N ("rows"), and `x^T`, with K = M
("cols"), both row-major. A scale or an amax has the `Granularity.scale_shape` of its operand. The caller checks
arguments.

Exactness: kernels and plain JAX give the same bits, those of the verbs `amax`, `scale_from_amax` and `quantize`.
`compiling.kernel_or_plain` says where kernels run. Empty and very large matrices, and formats that the chip does not
multiply, take plain JAX everywhere. It casts a matrix as it is stored, also for its transpose: it transposes the codes,
a byte an element.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from f8emu.jax import kernels
from f8emu.jax.bits import CHIP
from f8emu.jax.cast import quantize_blocks
from f8emu.jax.compiling import kernel_or_plain
from f8emu.jax.kernels import ScaledCodes
from f8emu.jax.scale import Block, group_amax, scales_of
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule, Scales

Codes = tuple[jax.Array | None, jax.Array | None]
"""Codes of `x` [M, N] and of `x^T` [N, M]; None for an operand that is left out."""
_ALL: Block = (None, None)
_ROW: Block = (1, None)
_COL: Block = (None, 1)


def tensor_amax(x: jax.Array) -> jax.Array:
    """The amax of `x` [M, N], [1, 1]: one reduction, which XLA fuses with what computes x."""
    return group_amax(x, _ALL)


def row_amax(x: jax.Array) -> jax.Array:
    """The amaxes of the rows, [M, 1]."""
    return group_amax(x, _ROW)


@jax.jit
def row_col_amax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The amaxes of the rows of `x` [M, N], [M, 1], and of its columns, [N, 1]."""
    return _chosen(kernels.row_col_amax, lambda x: (group_amax(x, _ROW), group_amax(x, _COL).T), x)


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
def _cast_pair(x: jax.Array, rows: jax.Array | None, cols: jax.Array | None, *, format: Format, is_one: bool) -> Codes:
    # Both see by identity that the inv_scales are one.
    def kernel(x: jax.Array, rows: Any, cols: Any) -> Codes:
        return kernels.cast_pair(x, rows, rows if is_one else cols, format=format)

    def plain(x: jax.Array, rows: Any, cols: Any) -> Codes:
        return _plain_pair(x, rows, rows if is_one else cols, format)

    return _chosen(kernel, plain, x, rows, cols, format=format)


def _plain_pair(
    x: jax.Array, row_inv_scale: jax.Array | None, col_inv_scale: jax.Array | None, format: Format
) -> Codes:
    rows = cols = None
    if row_inv_scale is not None:
        rows = quantize_blocks(x, row_inv_scale, format, _ROW if row_inv_scale.size > 1 else _ALL)
    if col_inv_scale is not None:
        if rows is not None and row_inv_scale is col_inv_scale and col_inv_scale.size == 1:
            cols = rows.T
        else:
            kind = _COL if col_inv_scale.size > 1 else _ALL
            cols = quantize_blocks(x, col_inv_scale.T, format, kind).T
    return rows, cols


@functools.partial(jax.jit, static_argnames=("format", "rows", "cols"))
def cast_pair_amax(
    x: jax.Array, format: Format, inv_scale: jax.Array, rows: bool = True, cols: bool = True
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` if `rows`, of `x^T` if `cols`, one of them at least, under one inv_scale [1, 1]; the amax of `x`."""

    def plain(x: jax.Array, inv_scale: jax.Array) -> Any:
        codes = _plain_pair(x, inv_scale if rows else None, inv_scale if cols else None, format)
        return *codes, tensor_amax(x)

    kernel = functools.partial(kernels.cast_pair_amax, format=format, rows=rows, cols=cols)
    return _chosen(kernel, plain, x, inv_scale, format=format)


@functools.partial(jax.jit, static_argnames=("format", "rule"))
def cast_rows(x: jax.Array, format: Format, rule: ScaleRule = ScaleRule()) -> ScaledCodes:
    """Codes [M, N] and scales [M, 1] of the rows of `x` [M, N], each scaled by its own amax."""
    settings = {"format": format, "rule": rule}
    kernel = functools.partial(kernels.cast_rows, **settings)
    plain = functools.partial(_plain_cast, block=_ROW, **settings)
    return _chosen(kernel, plain, x, format=format, takes=x.shape[1] <= kernels.LONGEST_ROW)


@functools.partial(jax.jit, static_argnames=("format", "rule", "row_granularity", "col_granularity"))
def cast_blocks(
    x: jax.Array,
    format: Format,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """Codes and scales of `x` [M, N] and of `x^T` [N, M], each by blocks of its own; None leaves an operand out."""

    def plain(x: jax.Array) -> tuple[ScaledCodes | None, ScaledCodes | None]:
        rows = None if row_granularity is None else _plain_cast(x, row_granularity.block, format, rule)
        if col_granularity is None:
            return rows, None
        if rows is not None and row_granularity is col_granularity and col_granularity.is_transposable:
            codes, scales = rows
        else:
            block_n, block_m = col_granularity.block
            codes, scales = _plain_cast(x, (block_m, block_n), format, rule)
        return rows, (codes.T, Scales(scales.inv_scale.T, scales.scale.T))

    kinds = {"row_granularity": row_granularity, "col_granularity": col_granularity}
    kernel = functools.partial(kernels.cast_blocks, format=format, rule=rule, **kinds)
    return _chosen(kernel, plain, x, format=format, takes=rule.e8m0 is None)


def _plain_cast(x: jax.Array, block: Block, format: Format, rule: ScaleRule) -> ScaledCodes:
    scales = scales_of(group_amax(x, block), format, rule)
    return quantize_blocks(x, scales.inv_scale, format, block), scales


def _chosen(
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    x: jax.Array,
    *args: jax.Array | None,
    format: Format | None = None,
    takes: bool = True,
) -> Any:
    """`kernel(x, *args)` where it runs and takes the matrix and the format, else `plain(x, *args)`."""
    is_taken = takes and 0 < x.size <= kernels.MOST_ELEMENTS and (format is None or format in CHIP.operand_formats)
    return kernel_or_plain(kernel, plain, x, *args) if is_taken else plain(x, *args)
