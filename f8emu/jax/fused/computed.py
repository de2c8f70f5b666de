"""Casts of matrices that are computed from others while they are read, as `hidden` is from `gate` and `up`.

On a GPU a Pallas kernel computes them tile by tile, and none of them is ever written; elsewhere plain JAX computes them
and then casts. Amaxes take one pass and codes another, which computes again.

Exactness: kernels and plain JAX give the same bits, those of `casts` of the bfloat16 matrices. `choice` says where
kernels run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from f8emu.jax.dtypes import CHIP
from f8emu.jax.fused import computed_kernels as kernels
from f8emu.jax.fused import plain
from f8emu.jax.fused.choice import kernel_or_plain
from f8emu.jax.fused.computed_kernels import Pair, Product
from f8emu.jax.fused.gated import rounded_in_kernel, rounded_to
from f8emu.jax.fused.kernels import MOST_ELEMENTS
from f8emu.spec.formats import Format

Function = Callable[..., tuple[jax.Array, ...]]
"""From `gated.Rounded` and float32 tiles of the operands to tiles of the matrices; zeros where all operands are."""


class Wanted(NamedTuple):
    """Which codes of a matrix [M, N] are wanted: those that have an inv_scale."""

    rows: jax.Array | None
    """Of the matrix: [1, 1], or one a row, [M, 1]."""
    cols: jax.Array | None
    """Of its transpose: [1, 1], or one a row, [N, 1]."""


def tensor_amaxes(function: Function, *xs: Product) -> list[jax.Array]:
    """Largest magnitude of every matrix, [1, 1]."""
    return _chosen(kernels.tensor_amaxes, functools.partial(_each, plain.tensor_amax), function, xs)


def row_col_amaxes(function: Function, *xs: Product) -> list[tuple[jax.Array, jax.Array]]:
    """Largest magnitudes of the rows, [M, 1], and of the columns, [N, 1], of every matrix."""
    return _chosen(kernels.row_col_amaxes, functools.partial(_each, plain.row_col_amax), function, xs)


def cast_pairs(
    function: Function, format: Format, wanted: Sequence[Wanted], *xs: Product, amaxes: bool = False
) -> list[Pair]:
    """Codes of every matrix and of its transpose under given inv_scales; with `amaxes` also its amax, [1, 1]."""
    is_one = [rows is not None and rows is cols and rows.size == 1 for rows, cols in wanted]

    def in_kernel(function: Function, xs: Sequence[Product], wanted: Sequence[Wanted]) -> list[Pair]:
        given = [(rows, rows if one else cols) for one, (rows, cols) in zip(is_one, wanted, strict=True)]
        return kernels.cast_pairs(function, xs, given, format=format, amaxes=amaxes)

    of_plain = functools.partial(plain_pairs, format=format, amaxes=amaxes)
    return _chosen(in_kernel, of_plain, function, xs, list(wanted), format=format)


def plain_pairs(
    function: Function, xs: Sequence[Product], wanted: Sequence[Wanted], *, format: Format, amaxes: bool
) -> list[Pair]:
    """`cast_pairs` in plain JAX."""
    values = values_of(function, xs)
    codes = (plain.cast_pair(x, *of_x, format=format) for x, of_x in zip(values, wanted, strict=True))
    return [(*of_x, plain.tensor_amax(x) if amaxes else None) for x, of_x in zip(values, codes, strict=True)]


def values_of(function: Function, xs: Sequence[Product]) -> list[jax.Array]:
    """The matrices in bfloat16, in plain JAX."""
    found = function(rounded_to(jnp.bfloat16), *map(_multiplied, xs))
    return [x.astype(jnp.bfloat16) for x in found]


def _each(amax: Callable[[jax.Array], Any], function: Function, xs: Sequence[Product]) -> list[Any]:
    return [*map(amax, values_of(function, xs))]


def _multiplied(x: Product) -> jax.Array:
    values = x.values.astype(jnp.float32)
    for factors in (x.cols, x.rows):
        values = values if factors is None else values * factors
    return values


def _chosen(
    in_kernel: Callable[..., Any],
    in_plain: Callable[..., Any],
    function: Function,
    xs: Sequence[Product],
    *args: Any,
    format: Format | None = None,
) -> Any:
    """What the kernel gives where it runs and takes the operands and the format, else plain JAX."""
    of_plain = functools.partial(in_plain, function)
    if not 0 < xs[0].values.size <= MOST_ELEMENTS or not (format is None or format in CHIP.operand_formats):
        return of_plain(list(xs), *args)
    of_kernel = functools.partial(in_kernel, functools.partial(function, rounded_in_kernel))
    return kernel_or_plain(of_kernel, of_plain, list(xs), *args)
