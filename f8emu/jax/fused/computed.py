"""Casts of matrices that are computed from others while they are read, as `hidden` is from `gate` and `up`.

On a GPU Pallas kernels compute them tile by tile; elsewhere plain JAX computes them and then casts. Under given scales
they are cast in the same pass, and never written. Where scales need their amaxes, one pass writes them and finds these,
and `casts` casts them.

Exactness: kernels and plain JAX give the same bits, those of `casts` of the bfloat16 matrices. `choice` says where
kernels run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from f8emu.jax.dtypes import CHIP
from f8emu.jax.fused import computed_kernels as kernels
from f8emu.jax.fused import plain
from f8emu.jax.fused.choice import kernel_or_plain
from f8emu.jax.fused.computed_kernels import Pair, Product, WithAmaxes
from f8emu.jax.fused.gated import rounded_in_kernel, rounded_to
from f8emu.jax.fused.kernels import MOST_ELEMENTS
from f8emu.spec.formats import Format

Function = Callable[..., tuple[jax.Array, ...]]
"""From `gated.Rounded` and float32 tiles of the operands to tiles of the matrices; zeros where all operands are."""


def with_amaxes(function: Function, *xs: Product, of_rows: bool, in_place: bool) -> list[WithAmaxes]:
    """Every matrix in bfloat16, with its largest magnitude, [1, 1] twice, or `of_rows` and of columns, [M, 1], [N, 1].

    `in_place` says that the last operands are not needed any more.
    """
    of_kernel = functools.partial(kernels.with_amaxes, of_rows=of_rows, in_place=in_place)
    return _chosen(of_kernel, functools.partial(plain_with_amaxes, of_rows=of_rows), function, xs)


def cast_pairs(
    function: Function,
    format: Format,
    inv_scales: Sequence[jax.Array],
    sides: Sequence[tuple[bool, bool]],
    *xs: Product,
) -> list[Pair]:
    """Codes of every matrix [M, N] and of its transpose, under its inv_scale [1, 1], as `sides` wants, and its amax."""
    settings: dict[str, Any] = {"sides": sides, "format": format}
    of_kernel, of_plain = (functools.partial(f, **settings) for f in (kernels.cast_pairs, plain_pairs))
    return _chosen(of_kernel, of_plain, function, xs, list(inv_scales), format=format)


def plain_pairs(
    function: Function,
    xs: Sequence[Product],
    inv_scales: Sequence[jax.Array],
    *,
    sides: Sequence[tuple[bool, bool]],
    format: Format,
) -> list[Pair]:
    """`cast_pairs` in plain JAX."""
    found: list[Pair] = []
    for x, inv_scale, (rows, cols) in zip(values_of(function, xs), inv_scales, sides, strict=True):
        codes = plain.cast_pair(x, inv_scale if rows else None, inv_scale if cols else None, format=format)
        found.append((*codes, plain.tensor_amax(x)))
    return found


def plain_with_amaxes(function: Function, xs: Sequence[Product], *, of_rows: bool) -> list[WithAmaxes]:
    """`with_amaxes` in plain JAX."""

    def amaxes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if of_rows:
            return plain.row_col_amax(x)
        amax = plain.tensor_amax(x)
        return amax, amax

    return [(x, *amaxes(x)) for x in values_of(function, xs)]


def values_of(function: Function, xs: Sequence[Product]) -> list[jax.Array]:
    """The matrices in bfloat16, in plain JAX."""
    found = function(rounded_to(jnp.bfloat16), *map(_multiplied, xs))
    return [x.astype(jnp.bfloat16) for x in found]


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
