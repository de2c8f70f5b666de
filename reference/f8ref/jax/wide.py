"""Signed integers of 64 bits as two limbs of 32, which JAX has on every backend and without its x64 mode.

Two's complement; everything is elementwise and broadcasts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Wide(NamedTuple):
    """`high * 2^32 + low`."""

    high: jax.Array
    """int32"""
    low: jax.Array
    """uint32"""


def widened(x: jax.Array) -> Wide:
    """An int32."""
    return Wide(x >> 31, lax.bitcast_convert_type(x, jnp.uint32))


def plus(x: Wide, y: Wide) -> Wide:
    """The sum, which the caller knows to fit."""
    # A carry shows as a sum below its term.
    low = x.low + y.low
    return Wide(x.high + y.high + (low < x.low).astype(jnp.int32), low)


def shifted_left(x: Wide, n: int) -> Wide:
    """`x * 2^n`, n a number of 1 to 31; the caller knows that it fits."""
    return Wide(x.high << n | _signed(x.low >> (32 - n)), x.low << n)


def floored(x: Wide, n: jax.Array) -> Wide:
    """`x / 2^n` rounded down, n an int32 of 0 or more."""
    n = jnp.minimum(n, 63)
    is_far = n >= 32
    high, low = jnp.where(is_far, x.high >> 31, x.high), jnp.where(is_far, _unsigned(x.high), x.low)
    shift = n & 31
    from_high = (_unsigned(high) << 1) << (31 - shift).astype(jnp.uint32)  # a shift by 32 is not defined
    return Wide(high >> shift, low >> shift.astype(jnp.uint32) | from_high)


def magnitude(x: Wide) -> tuple[jax.Array, jax.Array]:
    """The absolute value as two uint32, high and low."""
    is_negative = x.high < 0
    high, low = _unsigned(x.high), x.low
    # Two's complement: not, plus one; the carry reaches the upper limb where the lower one is 0.
    negated_low = ~low + 1
    negated_high = ~high + (low == 0).astype(jnp.uint32)
    return jnp.where(is_negative, negated_high, high), jnp.where(is_negative, negated_low, low)


def normalised(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(leading zeros, the top 32 bits from the leading one on): the last bit is one if anything was cut off.

    The magnitude is not zero where the result is used.
    """
    is_low = high == 0
    high, low = jnp.where(is_low, low, high), jnp.where(is_low, jnp.uint32(0), low)
    zeros = jnp.minimum(lax.clz(high), jnp.uint32(31))
    top = high << zeros | (low >> 1) >> (31 - zeros)
    rest = (low << zeros) != 0
    return zeros.astype(jnp.int32) + jnp.where(is_low, 32, 0), top | rest.astype(jnp.uint32)


def _unsigned(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)
