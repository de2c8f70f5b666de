"""A step of any profile, in integers: what `accumulate` has no faster way for, NUMERICS 9.

Products are int32 and their sums 64 bits wide. The accumulator is a float32 bit pattern, which holds float16 too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import FLOAT32, AccumulationModel, FlooredSum, Format, Rounding
from f8ref.jax import softfloat
from f8ref.jax.accumulate import ZERO_EXPONENT, Unpacked, with_specials
from f8ref.jax.codec import codes, float32_bits, round_to_code, typed

_INT32_TERMS = 16
"""Terms below 2^27 whose sum int32 holds."""


class Wide(NamedTuple):
    """`high * 2^32 + low`, int32 and uint32: a signed integer of 64 bits, two's complement, without JAX's x64 mode."""

    high: jax.Array
    low: jax.Array


def taken(
    model: AccumulationModel, a: jax.Array, b: jax.Array, formats: tuple[Format, Format]
) -> tuple[jax.Array, jax.Array, tuple[Format, Format]]:
    """The operands as the steps take them: converted [CHIP-1], K in the model's order, padded to whole ones [CHIP-2].

    Shapes: a [..., K], b [..., K, N] typed -> the same, K rounded up.
    """
    # 1. [CHIP-1] The conversion, which is exact. 2. [CHIP-2] The order of K.
    if model.operand is not None:
        a, b = (_converted(x, format, model.operand) for x, format in zip((a, b), formats, strict=True))
        formats = (model.operand, model.operand)
    if model.order:
        a, b = _ordered(a, model.order), jnp.swapaxes(_ordered(jnp.swapaxes(b, -1, -2), model.order), -1, -2)
    return a, b, formats


@functools.partial(jax.jit, static_argnames=("format", "into"))
def _converted(x: jax.Array, format: Format, into: Format) -> jax.Array:
    # On bit patterns: XLA may flush subnormals.
    return typed(round_to_code(float32_bits(codes(x, format), format), into), into)


@functools.partial(jax.jit, static_argnames="order")
def _ordered(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % len(order))])
    groups = x.reshape(*x.shape[:-1], -1, len(order))
    return groups[..., jnp.array(order)].reshape(x.shape)


def general_step(
    model: AccumulationModel, fraction_bits: int, accumulator: jax.Array, a: Unpacked, b: Unpacked
) -> jax.Array:
    """The accumulator after one step, [TM, TN] uint32 float32 bit patterns.

    Shapes: a [TM, step_k], b [step_k, TN], integer significands; `fraction_bits` are those of a product.
    """
    # 1. The accumulator's significand and exponent.
    magnitude = accumulator & 0x7FFFFFFF
    field = (magnitude >> FLOAT32.fraction_bits).astype(jnp.int32)
    exponents = jnp.maximum(field, 1) - FLOAT32.bias
    sig = (accumulator & FLOAT32.fraction_mask | (field > 0).astype(jnp.uint32) << FLOAT32.fraction_bits).astype(
        jnp.int32
    )
    # [ACC-2] float32 holds a subnormal of float16 normalised; its exponent is float16's smallest.
    limited = jnp.maximum(exponents, model.accumulator.min_exponent)
    # [MX-3], [CHIP-6] A product of zero needs no exponent: that of an accumulator, zero or not, is never below e_zero.
    e_zero = 2 * ZERO_EXPONENT if model.zero_exponent is None else model.zero_exponent
    e_acc = jnp.where(magnitude == 0, e_zero, limited)
    is_negative = accumulator >> 31 != 0

    # 2. [ACC-2..4] Every term cut to one unit and added exactly; or [CHIP-6] floored in two steps.
    if model.floored is None:
        e_max = jnp.maximum(_largest(a, b, range(model.step_k)), e_acc)
        unit = e_max - model.aligned_fraction_bits
        total = _cut_sum(fraction_bits, a, b, range(model.step_k), unit)
        start = _cut(sig, exponents - FLOAT32.fraction_bits - unit)
        total = _plus(total, _widened(jnp.where(is_negative, -start, start)))
    else:
        signed = jnp.where(is_negative, -sig, sig)
        total, unit = _floored_total(model, model.floored, fraction_bits, a, b, signed, exponents, e_acc)
    # 3. [ACC-5], [CHIP-4] Cut or rounded.
    return with_specials(_rounded(model, total, unit), accumulator, a, b)


def rounded_sum(model: AccumulationModel, total: jax.Array, partial: jax.Array) -> jax.Array:
    """[CHAIN-2] `total + partial`, rounded to nearest even to the accumulator's format, as float32 bit patterns.

    float32 has 24 bits, twice the 11 of float16 and two more, so rounding twice is rounding once.
    """
    total_sum = softfloat.add(total, partial)
    if model.accumulator == FLOAT32:
        return total_sum
    return float32_bits(round_to_code(total_sum, model.accumulator), model.accumulator)


def _floored_total(
    model: AccumulationModel,
    floored: FlooredSum,
    fraction_bits: int,
    a: Unpacked,
    b: Unpacked,
    sig: jax.Array,
    exponents: jax.Array,
    e_acc: jax.Array,
) -> tuple[Wide, jax.Array]:
    """[CHIP-6] The sum of the products and the accumulator, each floored to its own unit, and the smaller unit."""
    # 1. Interleaved sums, each cut to its own largest exponent, floored to the largest of all and added.
    groups = [range(first, model.step_k, floored.interleaved) for first in range(floored.interleaved)]
    largest = [_largest(a, b, group) for group in groups]
    e_dot = functools.reduce(jnp.maximum, largest)
    dot = jnp.zeros_like(e_dot)
    for group, exponent in zip(groups, largest, strict=True):
        part = _int32_sum(fraction_bits, a, b, group, exponent - model.aligned_fraction_bits)
        dot = dot + (part >> jnp.minimum(e_dot - exponent, 31))  # an arithmetic shift rounds down

    # 2. That sum floored beside the accumulator, and the accumulator to its own unit, unless it is beyond reach.
    e_max = jnp.maximum(e_dot, e_acc)
    finer = floored.fraction_bits - model.aligned_fraction_bits
    total = _floored(_shifted_left(_widened(dot), finer), e_max - e_dot)
    scaled = sig << (floored.accumulator_fraction_bits - FLOAT32.fraction_bits)
    kept = scaled >> jnp.clip(e_max - exponents, 0, 31)
    if floored.accumulator_reach is not None:
        kept = jnp.where(e_max - e_acc > floored.accumulator_reach, 0, kept)
    start = _shifted_left(_widened(kept), floored.fraction_bits - floored.accumulator_fraction_bits)
    return _plus(total, start), e_max - floored.fraction_bits


def _largest(a: Unpacked, b: Unpacked, group: range) -> jax.Array:
    sums = (a.exponent[:, k, None] + b.exponent[k, None, :] for k in group)
    return functools.reduce(jnp.maximum, sums).astype(jnp.int32)


def _cut_sum(fraction_bits: int, a: Unpacked, b: Unpacked, group: range, unit: jax.Array) -> Wide:
    # Int32 holds the sum of so many terms; the sums of these are 64 bits wide.
    parts = (group[i : i + _INT32_TERMS] for i in range(0, len(group), _INT32_TERMS))
    return functools.reduce(_plus, (_widened(_int32_sum(fraction_bits, a, b, part, unit)) for part in parts))


def _int32_sum(fraction_bits: int, a: Unpacked, b: Unpacked, group: range, unit: jax.Array) -> jax.Array:
    """[ACC-3], [ACC-4] The products of a group in units of `2^unit`, each cut toward zero."""
    total = jnp.zeros_like(unit)
    for k in group:
        # At most 22 bits: exact in float32.
        product = (a.value[:, k, None] * b.value[k, None, :]).astype(jnp.int32)
        pair = a.exponent[:, k, None].astype(jnp.int32) + b.exponent[k, None, :].astype(jnp.int32)
        cut = _cut(jnp.abs(product), pair - fraction_bits - unit)
        total = total + jnp.where(product < 0, -cut, cut)
    return total


def _cut(magnitude: jax.Array, n: jax.Array) -> jax.Array:
    """`magnitude * 2^n` cut to an integer; it fits, or is zero."""
    return magnitude << jnp.clip(n, 0, 31) >> jnp.clip(-n, 0, 31)


def _rounded(model: AccumulationModel, total: Wide, unit: jax.Array) -> jax.Array:
    """[ACC-5], [CHIP-4] Float32 bit patterns of `total * 2^unit`, cut or rounded; a zero result is +0."""
    high, low = _magnitude(total)
    zeros, top = _normalised(high, low)
    exponent = unit + 63 - zeros
    # 1. Places below the smallest normal, their last bit sticky; then those of every number.
    below = jnp.clip(model.accumulator.min_exponent - exponent, 0, 31).astype(jnp.uint32)
    top = top >> below | (((top << 1) << (31 - below)) != 0).astype(jnp.uint32)
    places = 31 - model.result_fraction_bits
    kept, rest = top >> places, top & ((1 << places) - 1)
    if model.rounding is Rounding.NEAREST_EVEN:
        half = 1 << (places - 1)
        kept = kept + ((rest > half) | ((rest == half) & ((kept & 1) != 0))).astype(jnp.uint32)
    # 2. As float32, which holds it exactly; from the format's largest binade on it is infinite.
    last_place = jnp.maximum(exponent, model.accumulator.min_exponent) - model.result_fraction_bits
    shift = softfloat.leading_zeros(kept)
    leading = last_place + 31 - shift.astype(jnp.int32)
    packed = softfloat.pack_toward_zero(leading, kept << shift)
    packed = jnp.where((leading > model.accumulator.max_exponent) & (kept != 0), jnp.uint32(softfloat.INFINITY), packed)
    packed = jnp.where((high | low) == 0, jnp.uint32(0), packed)
    is_negative = (total.high < 0) & (packed != 0)
    return jnp.where(is_negative, packed | jnp.uint32(1) << 31, packed)


def _widened(x: jax.Array) -> Wide:
    return Wide(x >> 31, lax.bitcast_convert_type(x, jnp.uint32))


def _plus(x: Wide, y: Wide) -> Wide:
    # A carry shows as a sum below its term.
    low = x.low + y.low
    return Wide(x.high + y.high + (low < x.low).astype(jnp.int32), low)


def _shifted_left(x: Wide, n: int) -> Wide:
    """`x * 2^n`, n of 1 to 31; the caller knows that it fits."""
    return Wide(x.high << n | _signed(x.low >> (32 - n)), x.low << n)


def _floored(x: Wide, n: jax.Array) -> Wide:
    """`x / 2^n` rounded down, n an int32 of 0 or more."""
    n = jnp.minimum(n, 63)
    is_far = n >= 32
    high, low = jnp.where(is_far, x.high >> 31, x.high), jnp.where(is_far, _unsigned(x.high), x.low)
    shift = n & 31
    from_high = (_unsigned(high) << 1) << (31 - shift).astype(jnp.uint32)  # a shift by 32 is not defined
    return Wide(high >> shift, low >> shift.astype(jnp.uint32) | from_high)


def _magnitude(x: Wide) -> tuple[jax.Array, jax.Array]:
    """The absolute value as two uint32, high and low."""
    is_negative = x.high < 0
    high, low = _unsigned(x.high), x.low
    # Two's complement: not, plus one; the carry reaches the upper limb where the lower one is 0.
    negated_low = ~low + 1
    negated_high = ~high + (low == 0).astype(jnp.uint32)
    return jnp.where(is_negative, negated_high, high), jnp.where(is_negative, negated_low, low)


def _normalised(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
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
