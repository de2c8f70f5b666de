"""One step of the tensor core, and its operands: the arithmetic of NUMERICS 2 and 5 on one tile of the product.

float8 [ACC-1..5] runs in float32 with every operation exact: a product of two codes has at most 8 significant bits and
a raw exponent of -20..23 (E5M2 x E4M3, the widest pair), the accumulator has 14 bits and, being a multiple of
2^(-20 - 13) at any time, no exponent below -33, and the sum of a step is a whole number below 2^24. Nothing finite is
rounded or overflows on the way, and subnormals are cut to zero, so neither flushing, contraction nor
reassociation can change a bit. Infinities and NaN are carried as IEEE 754 does [SPEC-1].

bfloat16 [BF16-1] aligns to 25 bits in the exponent range of float32. Its terms are products of integer significands
times a power of two made from exponent differences; its accumulator is a bit pattern, handled as integers.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import E8M0FNU, FLOAT32, AccumulationModel, Format
from f8ref.jax import softfloat
from f8ref.jax.codec import float32_bits, is_finite, is_nan

_ZERO_FLOAT8 = -57
"""Exponent given to a zero operand: below the accumulator's beside any partner, and twice it still fits int8."""
ZERO_EXPONENT = -1000
"""The same for wider formats, in int16."""

_FRACTION_BITS = 3
"""The fraction bits of an unpacked significand, the most that a float8 format has."""
_EXPONENT_OFFSET = -_ZERO_FLOAT8
_NOT_FINITE, _NAN, _NEGATIVE = 1 << 14, 1 << 13, 1 << 15


class Unpacked(NamedTuple):
    """A block of codes, taken apart."""

    value: jax.Array
    """Float32: the value of a float8 code; the signed integer significand of an `integer_operand`, in which what is not
    finite counts as zero, see `with_specials`."""
    exponent: jax.Array
    """Raw exponent [OP-1], a subnormal's being the smallest; int8 for float8, int16 for an `integer_operand`."""
    sign: jax.Array | None = None
    """Of an `integer_operand`: NaN, +-inf, 0, or the sign of any other value, float32 (`with_specials`)."""


def unpacked_float8(code: jax.Array, format: Format) -> jax.Array:
    """Float8 codes (uint32) of any format in one layout of 16 bits, which a step takes apart quickly.

    Bits 0 to 3 are the significand with its leading bit, in units of 2^-3; 4 to 10 the raw exponent plus 57, which is 0
    for a zero; 13 and 14 say NaN and not finite, both with the significand of a zero; 15 is the sign.
    """
    # Fields of the common layout, from the lowest bit up.
    sig, exponent = _fields(code, format, _ZERO_FLOAT8)
    sig = sig << _FRACTION_BITS - format.fraction_bits
    exponent = (exponent + _EXPONENT_OFFSET).astype(jnp.uint32) << _FRACTION_BITS + 1
    special = jnp.where(is_nan(code, format), _NOT_FINITE | _NAN, _NOT_FINITE).astype(jnp.uint32)
    special = jnp.where(is_finite(code, format), jnp.uint32(0), special)
    sign = jnp.where(code >= format.sign_mask, jnp.uint32(_NEGATIVE), jnp.uint32(0))
    return (sign | special | exponent | sig).astype(jnp.uint16)


def float8_operand(x: jax.Array) -> Unpacked:
    """A block of unpacked float8 codes taken apart."""
    exponent = ((x >> _FRACTION_BITS + 1) & 0x7F).astype(jnp.int32) - _EXPONENT_OFFSET
    last_place = exponent + (FLOAT32.bias - _FRACTION_BITS) << FLOAT32.fraction_bits
    magnitude = (x & 0xF).astype(jnp.float32) * _float32(last_place)
    special = jnp.where(x & _NAN != 0, jnp.float32(jnp.nan), jnp.float32(jnp.inf))
    magnitude = jnp.where(x & _NOT_FINITE != 0, special, magnitude)
    return Unpacked(jnp.where(x >= _NEGATIVE, -magnitude, magnitude), exponent.astype(jnp.int8))


def integer_operand(code: jax.Array, format: Format) -> Unpacked:
    """A block of codes (uint32) of at most 16 bits taken apart, their significands as integers."""
    sig, exponent = _fields(code, format, ZERO_EXPONENT)
    sig = sig.astype(jnp.float32)
    sig = jnp.where(code >= format.sign_mask, -sig, sig)
    return Unpacked(sig, exponent.astype(jnp.int16), _sign_values(code, format))


def microscaled(x: Unpacked, scale: jax.Array) -> Unpacked:
    """[MX-2] An `integer_operand` times E8M0 scales, whose codes broadcast to it: exponents grow, significands stay."""
    exponent = x.exponent + (scale.astype(jnp.int16) - E8M0FNU.bias)
    is_nan = scale == E8M0FNU.nan_code  # [MX-1] of a zero too
    return Unpacked(x.value, exponent, None if x.sign is None else jnp.where(is_nan, jnp.float32(jnp.nan), x.sign))


def _fields(code: jax.Array, format: Format, exponent_of_zero: int) -> tuple[jax.Array, jax.Array]:
    """Integer significands without sign (uint32) and raw exponents (int32); 0 for NaN and infinities."""
    is_term = is_finite(code, format) & ((code & format.magnitude_mask) != 0)
    sig = (code & format.fraction_mask) | _hidden_bit(code, format)
    return (jnp.where(is_term, sig, jnp.uint32(0)), jnp.where(is_term, _raw_exponent(code, format), exponent_of_zero))


def float8_step(model: AccumulationModel, accumulator: jax.Array, a: Unpacked, b: Unpacked) -> jax.Array:
    """The accumulator after one step, [TM, TN] float32: [ACC-2] to [ACC-5].

    Shapes: a [TM, step_k], b [step_k, TN].
    """
    aligned, fraction = model.aligned_fraction_bits, FLOAT32.fraction_bits
    # 1. [ACC-2] The accumulator takes part by its exponent field; 2^-60 stands in where there is nothing but zeros.
    product_exponent = _largest_exponent(a, b).astype(jnp.int32)
    e_max = jnp.maximum(product_exponent, -60) + FLOAT32.bias << fraction
    e_max = jnp.maximum(e_max, _int32_bits(accumulator) & softfloat.INFINITY)
    # 2. [ACC-3] In units of 2^(e_max - 13) a term is below 2^15; the integer next to it toward zero is left.
    unit = e_max - (aligned << fraction)
    to_units, from_units = _float32((2 * FLOAT32.bias << fraction) - unit), _float32(unit)
    # 3. [ACC-4] Added exactly; NaN and infinities as in IEEE 754 [SPEC-1].
    total = _cut(accumulator * to_units)
    for a_k, b_k in _outer_pairs(a.value, b.value):
        total = total + _cut_product(a_k, b_k, to_units)
    # 4. [ACC-5] Clearing fraction bits is the cut toward zero. A sum of zeros is +0.
    dropped = (1 << fraction - model.result_fraction_bits) - 1
    return jnp.where(total == 0, 0, _float32(_int32_bits(total) & ~dropped) * from_units)


def bfloat16_step(model: AccumulationModel, accumulator: jax.Array, a: Unpacked, b: Unpacked) -> jax.Array:
    """The accumulator after one step, [TM, TN] uint32 float32 bit patterns: [BF16-1].

    Shapes: a [TM, step_k], b [step_k, TN].
    """
    aligned, fraction = model.aligned_fraction_bits, FLOAT32.fraction_bits
    # 1. [ACC-2] The accumulator's exponent is that of float32, so -126 for a subnormal accumulator, and less for zero,
    #    beside which products of zero do not matter.
    magnitude = accumulator & 0x7FFFFFFF
    exponent = _raw_exponent(accumulator, FLOAT32)
    sig = (accumulator & FLOAT32.fraction_mask) | _hidden_bit(accumulator, FLOAT32)
    e_zero = 2 * ZERO_EXPONENT if model.zero_exponent is None else model.zero_exponent
    e_acc = jnp.where(magnitude == 0, e_zero, exponent)
    e_max = jnp.maximum(_largest_exponent(a, b).astype(jnp.int32), e_acc)
    # 2. [ACC-3] A product of integer significands weighs 2^(e - 14). Its factor to units of 2^(e_max - 25) is at most
    #    2^11; where the factor would be subnormal, 0 gives the same term.
    field = FLOAT32.bias + aligned - 14 - e_max
    terms = jnp.zeros_like(e_max)
    exponents = _outer_pairs(a.exponent.astype(jnp.int32), b.exponent.astype(jnp.int32))
    for (a_k, b_k), (a_exponent, b_exponent) in zip(_outer_pairs(a.value, b.value), exponents, strict=True):
        factor = _float32(jnp.maximum(field + (a_exponent + b_exponent), 0) << fraction)
        terms = terms + ((a_k * b_k) * factor).astype(jnp.int32)
    distance = jnp.clip(e_max - exponent, 0, 31).astype(jnp.uint32)
    cut = ((sig << (aligned - fraction)) >> distance).astype(jnp.int32)
    kept = jnp.where(accumulator >> 31 != 0, -cut, cut)
    # 3. [ACC-4] 16 terms below 2^27 fit int32, the accumulator's on top only its magnitude in uint32: where both have
    #    one sign, the sum has it too, and otherwise it fits.
    total = terms + kept
    is_negative = jnp.where((terms < 0) == (kept < 0), terms < 0, total < 0)
    units = jnp.where(is_negative, -total, total).astype(jnp.uint32)
    # 4. [ACC-5] Normalise and cut to float32; a sum that is cut to nothing is +0.
    shift = softfloat.leading_zeros(units)
    packed = softfloat.pack_toward_zero(e_max + 31 - aligned - shift.astype(jnp.int32), units << shift)
    result = jnp.where(is_negative & (packed != 0), packed | (jnp.uint32(1) << 31), packed)
    return with_specials(result, accumulator, a, b)


def with_specials(total: jax.Array, accumulator: jax.Array, a: Unpacked, b: Unpacked) -> jax.Array:
    """[SPEC-1] The sum of a step with NaN and infinities, where a term or the accumulator before it was one.

    IEEE arithmetic says the rule by itself, in any order, once every finite value is replaced by its sign.

    Shapes: a [TM, step_k], b [step_k, TN]; total and accumulator float32 bit patterns [TM, TN], as the result.
    """
    assert a.sign is not None and b.sign is not None, "an integer_operand has signs"
    special = lax.dot(a.sign, b.sign, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
    is_special = (accumulator & 0x7FFFFFFF) >= softfloat.INFINITY
    special = special + jnp.where(is_special, softfloat.from_bits(accumulator), 0)
    bits = jnp.where(jnp.isnan(special), jnp.uint32(softfloat.NAN), softfloat.bits(special))
    return jnp.where(jnp.isfinite(special), total, bits)


def _sign_values(code: jax.Array, format: Format) -> jax.Array:
    """Float32: NaN, +-inf, 0, or the sign of any other value."""
    # The exponent bits alone tell NaN and infinities; any other value but zero becomes its sign.
    bits = float32_bits(code, format)
    magnitude = bits & softfloat.INFINITY
    sign = jnp.where(bits << 1 == 0, jnp.uint32(0), jnp.uint32(softfloat.ONE) | (bits >> 31) << 31)
    return softfloat.from_bits(jnp.where(magnitude == softfloat.INFINITY, bits, sign))


def _largest_exponent(a: Unpacked, b: Unpacked) -> jax.Array:
    """[ACC-2] The largest exponent among the products, [TM, TN], in the operands' own narrow integers."""
    sums = (a_k + b_k for a_k, b_k in _outer_pairs(a.exponent, b.exponent))
    return functools.reduce(jnp.maximum, sums)


def _outer_pairs(a: jax.Array, b: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """For each k the column of a and the row of b, whose broadcast product is a term of `a @ b`.

    Shapes: a [TM, K], b [K, TN] -> K pairs of [TM, 1] and [1, TN].
    """
    widths = (1,) * a.shape[1]
    return list(zip(lax.split(a, widths, 1), lax.split(b, widths, 0), strict=True))


def _raw_exponent(code: jax.Array, format: Format) -> jax.Array:
    field = (code & format.magnitude_mask) >> format.fraction_bits
    return jnp.maximum(field, 1).astype(jnp.int32) - format.bias


def _hidden_bit(code: jax.Array, format: Format) -> jax.Array:
    """[OP-1] The leading bit that a normal code has and a subnormal one has not."""
    is_normal = (code & format.magnitude_mask) > format.fraction_mask
    return is_normal.astype(jnp.uint32) << format.fraction_bits


@functools.partial(jax.jit, inline=True)
def _cut_product(a: jax.Array, b: jax.Array, to_units: jax.Array) -> jax.Array:
    """[ACC-3] `a * b` in units."""
    return _cut((a * b) * to_units)


def _cut(x: jax.Array) -> jax.Array:
    """The integer next to x toward zero, with its sign; NaN and infinities stay."""
    magnitude = _int32_bits(lax.floor(lax.abs(x)))
    return _float32(magnitude | (_int32_bits(x) & -0x80000000))


def _int32_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float32(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
