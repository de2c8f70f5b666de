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
    return _chosen("row_col_amax", x)


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
    # The casts see by identity that both inv_scales are one.
    both = (lambda rows, cols: (rows, rows)) if is_one else (lambda rows, cols: (rows, cols))
    return _chosen("cast_pair", x, row_inv_scale, col_inv_scale, arranged=both, format=format)


@functools.partial(jax.jit, static_argnames=("format", "rows", "cols"))
def cast_pair_amax(
    x: jax.Array, format: Format, inv_scale: jax.Array, rows: bool = True, cols: bool = True
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` if `rows`, of `x^T` if `cols`, one of them at least, under one inv_scale [1, 1]; the amax of `x`."""
    return _chosen("cast_pair_amax", x, inv_scale, format=format, rows=rows, cols=cols)


@functools.partial(jax.jit, static_argnames=("format", "rule"))
def cast_rows(x: jax.Array, format: Format, rule: ScaleRule = ScaleRule()) -> Cast:
    """Codes [M, N] and scales [M, 1] of the rows of `x` [M, N], each scaled by its own amax."""
    return _chosen("cast_rows", x, takes=x.shape[1] <= kernels.LONGEST_ROW, format=format, rule=rule)


@functools.partial(jax.jit, static_argnames=("format", "rule", "row_granularity", "col_granularity"))
def cast_blocks(
    x: jax.Array,
    format: Format,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
) -> tuple[Cast | None, Cast | None]:
    """Codes and scales of `x` [M, N] and of `x^T` [N, M], each by blocks of its own; None leaves an operand out."""
    kinds: dict[str, Any] = {"row_granularity": row_granularity, "col_granularity": col_granularity}
    return _chosen("cast_blocks", x, format=format, rule=rule, **kinds)


def _chosen(
    name: str,
    x: jax.Array,
    *args: jax.Array | None,
    takes: bool = True,
    arranged: Callable[..., tuple[Any, ...]] = lambda *args: args,
    **settings: Any,
) -> Any:
    """The kernel `name` where it runs and takes the matrix and the format, else plain JAX; of `arranged(*args)`."""

    def of(room: Any) -> Callable[..., Any]:
        return lambda x, *args: getattr(room, name)(x, *arranged(*args), **settings)

    is_taken = takes and 0 < x.size <= kernels.MOST_ELEMENTS
    if is_taken and settings.get("format") in (None, *CHIP.operand_formats):
        return kernel_or_plain(of(block_kernels if name == "cast_blocks" else kernels), of(plain), x, *args)
    return of(plain)(x, *args)
