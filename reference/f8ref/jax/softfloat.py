"""Float32 arithmetic on bit patterns, in uint32: multiply, fused multiply-add, add.

XLA may flush subnormals, contract `a * b + c` and reassociate factors (NUMERICS 6). None of that reaches integers, so
every float32 operation whose operands or result are not known to be harmless goes through here. Everything is
elementwise and broadcasts.

A finite number is unpacked to `(-1)^sign * sig * 2^(exp - 23)` with `sig` in [2^23, 2^24), subnormals normalised; a
result is rounded once, in `_round_pack`. Wider magnitudes are pairs of uint32 limbs (high, low).
"""

import jax
import jax.numpy as jnp
from jax import lax

NAN = 0x7FFFFFFF
"""The one float32 NaN that f8ref emits [SPEC-1]."""
INFINITY = 0x7F800000
ONE = 0x3F800000
NEGATIVE_ZERO = 0x80000000

_HIDDEN = 0x00800000
_NEVER = -(1 << 12)
"""Exponent of a zero: below that of every product and addend, so that it is shifted out."""


def bits(x: jax.Array) -> jax.Array:
    """The uint32 bit pattern of a float32 array."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(code: jax.Array) -> jax.Array:
    """The float32 array with these uint32 bit patterns."""
    return lax.bitcast_convert_type(code, jnp.float32)


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b` rounded to nearest even, from and to uint32 bit patterns.

    Exactness: IEEE 754 binary32, subnormal operands and results included; every NaN result is 0x7fffffff.
    """
    # 1. The product of the significands, rounded once.
    sign = _sign(a ^ b)
    exp_a, sig_a = _unpack(a)
    exp_b, sig_b = _unpack(b)
    high, low = _product_24(sig_a, sig_b)
    # The product is in [2^46, 2^48): put its leading bit at bit 31. What falls off is kept as a sticky last bit.
    carry = high >= _HIDDEN
    top = jnp.where(carry, high << 8 | low >> 16, high << 9 | low >> 15) | _flag((low & 0xFFFF) != 0)
    result = _round_pack(exp_a + exp_b + carry.astype(jnp.int32), top)

    # 2. Infinities, zeros and NaN, which the unpacked numbers do not hold; infinity times 0 is NaN.
    mag_a, mag_b = _magnitude(a), _magnitude(b)
    result = jnp.where((mag_a == INFINITY) | (mag_b == INFINITY), jnp.uint32(INFINITY), result)
    is_zero = (mag_a == 0) | (mag_b == 0)
    is_nan = (mag_a > INFINITY) | (mag_b > INFINITY) | (is_zero & (result == INFINITY))
    return jnp.where(is_nan, jnp.uint32(NAN), sign | jnp.where(is_zero, jnp.uint32(0), result))


def fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """`a * b + c` rounded once to nearest even, from and to uint32 bit patterns.

    Exactness: IEEE 754 fusedMultiplyAdd of binary32; every NaN result is 0x7fffffff.
    """
    sign_p = _sign(a ^ b)
    sign_c = _sign(c)
    mag_a, mag_b, mag_c = _magnitude(a), _magnitude(b), _magnitude(c)

    # 1. Product, in [2^61, 2^63), and addend, in [2^61, 2^62), as 64-bit magnitudes of weight 2^(exp - 61).
    exp_a, sig_a = _unpack(a)
    exp_b, sig_b = _unpack(b)
    exp_c, sig_c = _unpack(c)
    p_24, q_24 = _product_24(sig_a, sig_b)
    p_high, p_low = p_24 << 7 | q_24 >> 17, q_24 << 15
    zero_p = (mag_a == 0) | (mag_b == 0)
    p_high, p_low = _cleared(zero_p, p_high), _cleared(zero_p, p_low)
    c_high, c_low = _cleared(mag_c == 0, sig_c << 6), jnp.zeros_like(sig_c)
    exp_p = jnp.where(zero_p, _NEVER, exp_a + exp_b)
    exp_c = jnp.where(mag_c == 0, _NEVER, exp_c)

    # 2. Shift the one with the smaller exponent right, keeping a sticky bit: bits are lost only beyond a distance of
    #    15, where the sum cannot lose more than one leading bit, so the sticky bit stays below the rounding bit.
    distance = exp_p - exp_c
    p_high, p_low = _shift_right_sticky(p_high, p_low, jnp.maximum(-distance, 0))
    c_high, c_low = _shift_right_sticky(c_high, c_low, jnp.maximum(distance, 0))

    # 3. Add or subtract magnitudes, the larger first.
    is_less = (p_high < c_high) | ((p_high == c_high) & (p_low < c_low))
    x_high, x_low = jnp.where(is_less, c_high, p_high), jnp.where(is_less, c_low, p_low)
    y_high, y_low = jnp.where(is_less, p_high, c_high), jnp.where(is_less, p_low, c_low)
    same = sign_p == sign_c
    sum_low, difference_low = x_low + y_low, x_low - y_low
    high = jnp.where(same, x_high + y_high + _flag(sum_low < x_low), x_high - y_high - _flag(x_low < y_low))
    low = jnp.where(same, sum_low, difference_low)
    sign = jnp.where(is_less, sign_c, sign_p)

    # 4. Normalise to bit 63 and round. An exact zero is +0 unless both terms are -0.
    high_is_zero = high == 0
    exp = jnp.maximum(exp_p, exp_c) + 2 - jnp.where(high_is_zero, 32, 0)
    high, low = jnp.where(high_is_zero, low, high), _cleared(high_is_zero, low)
    shift = leading_zeros(high)
    top = high << shift | (low >> 1) >> (31 - shift)
    result = _round_pack(exp - shift.astype(jnp.int32), top | _flag((low << shift) != 0))
    sum_is_zero = high == 0
    result = jnp.where(sum_is_zero, jnp.where(same, sign_p, jnp.uint32(0)), sign | result)

    # 5. Not finite.
    inf_p = (mag_a == INFINITY) | (mag_b == INFINITY)
    inf_c = mag_c == INFINITY
    result = jnp.where(inf_c, sign_c | INFINITY, jnp.where(inf_p, sign_p | INFINITY, result))
    is_nan = (mag_a > INFINITY) | (mag_b > INFINITY) | (mag_c > INFINITY)
    is_nan = is_nan | (inf_p & zero_p) | (inf_p & inf_c & ~same)
    return jnp.where(is_nan, jnp.uint32(NAN), result)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a + b` rounded to nearest even, from and to uint32 bit patterns: `a * 1 + b` with one rounding."""
    return fused_multiply_add(a, jnp.uint32(ONE), b)


def pack_toward_zero(exp: jax.Array, sig: jax.Array) -> jax.Array:
    """Magnitude bits of `sig * 2^(exp - 31)` cut toward zero; `sig` is 0 or has bit 31 set.

    A magnitude of 2^128 or more gives infinity, one below 2^-126 is cut to a multiple of 2^-149.
    """
    cut = jnp.clip(-126 - exp, 0, 31).astype(jnp.uint32)
    return _cleared(sig == 0, _pack(exp, (sig >> 8) >> cut))


def _round_pack(exp: jax.Array, top: jax.Array) -> jax.Array:
    """Magnitude bits of `top * 2^(exp - 31)`, rounded to nearest even; `top` has bit 31 set, bit 0 is sticky."""
    shift = jnp.clip(-126 - exp, 0, 31).astype(jnp.uint32)  # beyond 31 nothing but the sticky bit is left anyway
    top = top >> shift | _flag(((top << 1) << (31 - shift)) != 0)
    rest = top & 0xFF
    sig = top >> 8
    return _pack(exp, sig + _flag((rest > 0x80) | ((rest == 0x80) & ((sig & 1) != 0))))


def _pack(exp: jax.Array, sig: jax.Array) -> jax.Array:
    """Magnitude bits of `sig * 2^(max(exp, -126) - 23)`, `sig` <= 2^24: its hidden bit adds 1 to the exponent field."""
    # The hidden bit of a normal number adds the one that is missing here; a carry beyond 254 is infinity.
    field = jnp.clip(exp + 126, 0, 254).astype(jnp.uint32)
    return jnp.minimum((field << 23) + sig, jnp.uint32(INFINITY))


def _sign(code: jax.Array) -> jax.Array:
    return (code >> 31) << 31


def _magnitude(code: jax.Array) -> jax.Array:
    return code & 0x7FFFFFFF


def _unpack(code: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(exponent, significand in [2^23, 2^24)) of a finite non-zero code; anything else gives harmless numbers."""
    field = (code >> 23) & 0xFF
    fraction = code & 0x007FFFFF
    shift = jnp.where(field == 0, leading_zeros(fraction) - 8, jnp.uint32(0))
    sig = jnp.where(field == 0, fraction << shift, fraction | _HIDDEN)
    return jnp.maximum(field, 1).astype(jnp.int32) - shift.astype(jnp.int32) - 127, sig


def _product_24(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The product of two 24-bit numbers as two limbs of 24 bits, from four products of 12 bits."""
    # Each partial product has 24 bits, and the sum of the two middle ones 25: all fit uint32.
    a_high, a_low, b_high, b_low = a >> 12, a & 0xFFF, b >> 12, b & 0xFFF
    middle = a_high * b_low + a_low * b_high
    low = a_low * b_low + ((middle & 0xFFF) << 12)
    return a_high * b_high + (middle >> 12) + (low >> 24), low & 0xFFFFFF


def _shift_right_sticky(high: jax.Array, low: jax.Array, distance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A magnitude below 2^63 shifted right by `distance` >= 0; the last bit becomes one if a one was shifted out."""
    distance = jnp.minimum(distance, 63).astype(jnp.uint32)
    is_far = distance >= 32
    lost = _cleared(~is_far, low)
    high, low = _cleared(is_far, high), jnp.where(is_far, high, low)
    shift = distance & 31
    lost = lost | (low << 1) << (31 - shift)
    return high >> shift, low >> shift | (high << 1) << (31 - shift) | _flag(lost != 0)


def leading_zeros(x: jax.Array) -> jax.Array:
    """Leading zeros of a uint32, 31 for 0: a shift by it is always in range."""
    return jnp.minimum(lax.clz(x), jnp.uint32(31))


def _flag(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.uint32)


def _cleared(condition: jax.Array, x: jax.Array) -> jax.Array:
    """0 where `condition`, else `x`."""
    return jnp.where(condition, jnp.uint32(0), x)
