"""Casts of matrices that are computed from others while they are read, as `hidden` is from `gate` and `up`.

On a GPU a Pallas kernel computes them tile by tile, and none of them is ever written; elsewhere plain JAX computes them
and then casts. Amaxes take one pass and codes another, which computes again.

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
from f8emu.jax.fused.computed_kernels import Pair
from f8emu.jax.fused.gated import rounded_in_kernel, rounded_to
from f8emu.jax.fused.kernels import MOST_ELEMENTS
from f8emu.spec.formats import Format

Function = Callable[..., tuple[jax.Array, ...]]
"""From `gated.Rounded` and float32 tiles of the operands to tiles of the matrices; zeros where all operands are."""


def tensor_amaxes(function: Function, *xs: jax.Array) -> list[jax.Array]:
    """Largest magnitude of every matrix, [1, 1]; the operands are [M, N], bfloat16."""
    return _chosen(kernels.tensor_amaxes, plain_amaxes, function, xs)


def cast_pairs(
    function: Function,
    format: Format,
    inv_scales: Sequence[jax.Array],
    sides: Sequence[tuple[bool, bool]],
    *xs: jax.Array,
    amaxes: bool = False,
) -> list[Pair]:
    """Codes of every matrix [M, N] and of its transpose, as far as `sides` wants them, under its inv_scale [1, 1].

    With `amaxes` also the amax of every matrix, [1, 1].
    """
    settings: dict[str, Any] = {"sides": sides, "format": format, "amaxes": amaxes}
    of_kernel, of_plain = (functools.partial(f, **settings) for f in (kernels.cast_pairs, plain_pairs))
    return _chosen(of_kernel, of_plain, function, xs, list(inv_scales), format=format)


def plain_amaxes(function: Function, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """`tensor_amaxes` in plain JAX."""
    return [*map(plain.tensor_amax, values_of(function, xs))]


def plain_pairs(
    function: Function,
    xs: Sequence[jax.Array],
    inv_scales: Sequence[jax.Array],
    *,
    sides: Sequence[tuple[bool, bool]],
    format: Format,
    amaxes: bool,
) -> list[Pair]:
    """`cast_pairs` in plain JAX."""
    found: list[Pair] = []
    for x, inv_scale, (rows, cols) in zip(values_of(function, xs), inv_scales, sides, strict=True):
        codes = plain.cast_pair(x, inv_scale if rows else None, inv_scale if cols else None, format=format)
        found.append((*codes, plain.tensor_amax(x) if amaxes else None))
    return found


def values_of(function: Function, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The matrices in bfloat16, in plain JAX."""
    found = function(rounded_to(jnp.bfloat16), *(x.astype(jnp.float32) for x in xs))
    return [x.astype(jnp.bfloat16) for x in found]


def _chosen(
    in_kernel: Callable[..., Any],
    in_plain: Callable[..., Any],
    function: Function,
    xs: Sequence[jax.Array],
    *args: Any,
    format: Format | None = None,
) -> Any:
    """What the kernel gives where it runs and takes the operands and the format, else plain JAX."""
    of_plain = functools.partial(in_plain, function)
    if not 0 < xs[0].size <= MOST_ELEMENTS or not (format is None or format in CHIP.operand_formats):
        return of_plain(list(xs), *args)
    of_kernel = functools.partial(in_kernel, functools.partial(function, rounded_in_kernel))
    return kernel_or_plain(of_kernel, of_plain, list(xs), *args)
