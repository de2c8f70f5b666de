"""From an array to its scales: amax, the scale rule and delayed scaling, with the same bits on every backend of XLA.

The verbs refuse to be differentiated: a layer's backward pass treats scales as constants.
"""

from __future__ import annotations  # short signatures in `help`

import functools
import math
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from f8emu.jax import bits
from f8emu.jax.bits import FormatLike, float8_format, format_of, rows_of
from f8emu.jax.compiling import without_gradient
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import E8M0FNU, FLOAT32, Format
from f8emu.spec.names import GranularityName
from f8emu.spec.scaling import (
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    E8M0Rule,
    Granularity,
    ScaleRule,
    Scales,
    check_rule,
    granularity_by_name,
    scale_number,
)

Block = tuple[int | None, int | None]
"""Extents of the elements that share a scale, None for all of them, as `Granularity.block`."""


def amax(x: jax.Array, granularity: Granularity | GranularityName = Granularity.TENSORWISE) -> jax.Array:
    """The largest magnitude of each group that shares a scale; a group with a NaN gives NaN, an empty one 0.

    Shapes:
        x [..., K], float32, bfloat16 or float16 -> float32 `granularity.scale_shape(rows, K)`, where rows is the
        product of the leading dimensions.

    Exactness: exact, on integers: XLA's float maximum loses NaN and flushes subnormals (NUMERICS 6).

    Raises:
        OperandError: wrong dtype or rank.
        SpecError: unknown granularity.
        UnsupportedError: a derivative.
    """
    format_of("amax", "x", x)
    granularity = granularity_by_name("amax", granularity)
    rows, k = rows_of("amax", x)
    return group_amax(without_gradient("amax", jnp.asarray(x)).reshape(rows, k), granularity.block)


def scale_from_amax(amax: jax.Array, format: FormatLike, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """`inv_scale = float32(max * 2^-margin / max(amax, amax_floor))` and `scale = float32(1 / inv_scale)`.

    With `rule.power_of_two`, inv_scale loses its fraction bits before scale is taken. amax 0 counts as the floor,
    amax inf gives 0 and inf, amax NaN gives NaN and NaN. With `rule.e8m0` the scale is an E8M0 byte by that rule, and
    `inv_scale = 2^(127 - byte)`.

    Shapes:
        amax float32, any shape -> two float32 arrays of that shape, scale float8_e8m0fnu with `rule.e8m0`.

    Exactness: both quotients are correctly rounded, on integers and without a loop (see `divide`).

    Raises:
        OperandError: wrong dtype.
        SpecError: unknown format, a margin out of range, or one with E8M0 scales.
        UnsupportedError: a derivative.
    """
    target = float8_format("scale_from_amax", format)
    format_of("scale_from_amax", "amax", amax, (FLOAT32.name,))
    check_rule("scale_from_amax", rule, margin)
    return scales_of(without_gradient("scale_from_amax", jnp.asarray(amax)), target, rule, margin)


@functools.partial(jax.jit, static_argnames=("target", "rule", "margin"))
def scales_of(amax: jax.Array, target: Format, rule: ScaleRule, margin: int = 0) -> Scales:
    """`scale_from_amax` for casts inside of a layer, whose gradient is the layer's."""
    codes = bits.bits_of(amax)
    # A negative number is below the floor; a negative NaN is a NaN.
    is_below = (bits.sign_of(codes) != 0) & ~bits.is_nan(codes)
    magnitude = jnp.where(is_below, jnp.uint32(0), codes & bits.MAGNITUDE)
    if rule.e8m0 is not None:
        return _e8m0_scales(magnitude, target, rule.e8m0)
    inv = inv_scale_bits(magnitude, target, rule, margin)
    inv_scale = bits.float32_of(inv)
    return Scales(inv_scale, bits.float32_of(inverse_power(inv)) if rule.power_of_two else reciprocal(inv_scale))


def _e8m0_scales(magnitude: jax.Array, format: Format, rule: E8M0Rule) -> Scales:
    # From bits of amaxes without a sign.
    raised = (magnitude + jnp.uint32(rule.carry(format))) >> FLOAT32.fraction_bits
    byte = jnp.maximum(raised.astype(jnp.int32) - format.max_exponent, 0)
    byte = jnp.where(magnitude == bits.INFINITY, rule.infinity_byte(format), byte).astype(jnp.uint32)
    byte = jnp.where(magnitude > bits.INFINITY, jnp.uint32(E8M0FNU.nan_code), byte)
    inverse = jnp.where(byte == E8M0FNU.max_code, jnp.uint32(bits.HIDDEN >> 1), (E8M0FNU.max_code - byte) << 23)
    inverse = jnp.where(byte == E8M0FNU.nan_code, jnp.uint32(bits.NAN), inverse)
    return Scales(bits.float32_of(inverse), bits.typed(byte.astype(jnp.uint8), E8M0FNU))


@jax.jit
def reciprocal(inv_scale: jax.Array) -> jax.Array:
    """`float32(1 / inv_scale)`, correctly rounded: the scale that belongs to it."""
    return bits.float32_of(divide(jnp.uint32(0x3F800000), bits.bits_of(inv_scale)))


def inverse_power(inv: jax.Array) -> jax.Array:
    """`divide(1, inv)` of a power of two that is no subnormal, of 0, infinity or NaN; no division is needed."""
    field = inv >> 23
    # 2^127 has a subnormal inverse, 2^-127; those of 0 and infinity are each other.
    scale = jnp.where(field == 254, jnp.uint32(bits.HIDDEN >> 1), (jnp.uint32(254) - field) << 23)
    scale = jnp.where(field == 0, jnp.uint32(bits.INFINITY), jnp.where(field == 255, jnp.uint32(0), scale))
    return jnp.where(inv > bits.INFINITY, jnp.uint32(bits.NAN), scale)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` rounded to nearest, ties to even, from and to uint32 bit patterns.

    Shapes: any that broadcast.
    Exactness: IEEE 754 binary32, subnormal operands and results included; every NaN result is 0x7fffffff.
    """
    exp_a, sig_a = bits.unpacked(a)
    exp_b, sig_b = bits.unpacked(b)
    quotient = rounded_quotient(exp_a - exp_b, *jnp.broadcast_arrays(sig_a, sig_b))
    mag_a, mag_b = a & bits.MAGNITUDE, b & bits.MAGNITUDE
    quotient = jnp.where((mag_a == 0) | (mag_b == bits.INFINITY), jnp.uint32(0), quotient)
    quotient = jnp.where((mag_a == bits.INFINITY) | (mag_b == 0), jnp.uint32(bits.INFINITY), quotient)
    nan = bits.is_nan(a) | bits.is_nan(b)
    nan = nan | ((mag_a == mag_b) & ((mag_a == 0) | (mag_a == bits.INFINITY)))
    return jnp.where(nan, jnp.uint32(bits.NAN), quotient | bits.sign_of(a ^ b))


def inv_scale_bits(magnitude: jax.Array, format: Format, rule: ScaleRule, margin: int = 0) -> jax.Array:
    """Float32 bit patterns of inv_scales, from amaxes' without a sign; in kernels too, with few registers."""
    numerator = format.max * 2.0**-margin
    fraction, exp = math.frexp(numerator)
    sig, exp = int(fraction * 2**24), exp - 1
    # The floor is a float64 and no float32: compare with the first float32 that is not below it. It is normal.
    floor = _first_float32_from(rule.amax_floor)
    floored = jnp.clip(magnitude, floor, bits.INFINITY - 1)
    exp = exp - ((floored >> 23).astype(jnp.int32) - FLOAT32.bias)
    sig_b = (floored & bits.FRACTION) | bits.HIDDEN
    at_floor = _float32_bits(numerator / rule.amax_floor)
    if rule.power_of_two:
        # The exponent needs no division. A quotient below 1 of two significands is at most 1 - 2^-24, a float32: it
        # does not round to 1.
        exp = exp - (sig < sig_b).astype(jnp.int32)
        inv = jnp.maximum(exp + FLOAT32.bias, 0).astype(jnp.uint32) << 23
        at_floor &= bits.INFINITY
    else:
        is_normal = numerator >= 2.0**2  # then it is divided by less than 2^128, with a quotient above 2^-126
        inv = rounded_quotient(exp, jnp.full_like(sig_b, sig), sig_b, is_normal=is_normal)
    inv = jnp.where(magnitude < floor, at_floor, inv)
    inv = jnp.where(magnitude == bits.INFINITY, 0, inv)
    return jnp.where(magnitude > bits.INFINITY, bits.NAN, inv)


def rounded_quotient(exp: jax.Array, sig_a: jax.Array, sig_b: jax.Array, *, is_normal: bool = False) -> jax.Array:
    """Magnitude bits of `sig_a / sig_b * 2^exp` rounded to nearest even; both are uint32 in [2^23, 2^24).

    XLA's float32 division may be a few units off, or a product with a reciprocal (NUMERICS 6), so that it only
    estimates here. The remainder is exact on integers, and corrects the estimate: by up to 128 units, which is 2^-18.
    No loop is needed. With `is_normal` no result is subnormal.
    """
    # 1. An estimate of a quotient of 25 bits, in [2^24, 2^25): twice the dividend where that is the smaller one.
    is_less = sig_a < sig_b
    shift = jnp.where(is_less, jnp.uint32(25), jnp.uint32(24))
    a, b = sig_a.astype(jnp.int32).astype(jnp.float32), sig_b.astype(jnp.int32).astype(jnp.float32)
    quotient = estimated(a, b, jnp.where(is_less, jnp.float32(2**25), jnp.float32(2**24)))
    # 2. Its remainder modulo 2^32. The true one is below 128 * 2^24 in magnitude, so that this is it.
    divisor = sig_b.astype(jnp.int32)
    rest = lax.bitcast_convert_type((sig_a << shift) - quotient.astype(jnp.uint32) * sig_b, jnp.int32)
    # 3. What the remainder lacks, in divisors, rounded down (256 makes it positive); this may be off by one.
    step = (rest.astype(jnp.float32) / b + 256).astype(jnp.int32) - 256
    quotient, rest = quotient + step, rest - step * divisor
    step = (rest >= divisor).astype(jnp.int32) - (rest < 0).astype(jnp.int32)
    quotient, rest = quotient + step, rest - step * divisor
    # 4. Rounding, with a sticky bit for the remainder.
    significand = (quotient << 1 | (rest != 0).astype(jnp.int32)).astype(jnp.uint32)
    return bits.rounded(exp - is_less.astype(jnp.int32), significand, 26, is_normal=is_normal)


def estimated(a: jax.Array, b: jax.Array, unit: jax.Array) -> jax.Array:
    """About `a / b * unit`, as int32."""
    return (a / b * unit).astype(jnp.int32)


def checked_scales(
    call: str, x: Any, x_name: str, scale: Any, name: str, granularity: Granularity | GranularityName
) -> tuple[Granularity, jax.Array, jax.Array]:
    """The granularity, the array `x` [..., K] as a matrix and its scales as an array of the granularity's shape."""
    granularity = granularity_by_name(call, granularity)
    rows, k = rows_of(call, x, name=x_name)
    if isinstance(scale, int | float):
        scale = np.full((1, 1), scale_number(call, name, scale), np.float32)
    format_of(call, name, scale, (FLOAT32.name,))
    expected = granularity.scale_shape(rows, k)
    is_one = granularity is Granularity.TENSORWISE and math.prod(scale.shape) == 1
    if tuple(scale.shape) != expected and not is_one:
        raise OperandError(
            f"{call}: {name} must have shape {list(expected)} for {granularity.value} scales of an array of shape "
            f"{list(x.shape)}; got {list(scale.shape)}; take amax and scales at the same granularity"
        )
    matrix, factors = without_gradient(call, (jnp.asarray(x), jnp.asarray(scale)))
    return granularity, matrix.reshape(rows, k), factors.reshape(expected)


@functools.partial(jax.jit, static_argnames="block")
def group_amax(x: jax.Array, block: Block) -> jax.Array:
    """The amax of each block of `x` [M, N], float32 [ceil(M / block[0]), ceil(N / block[1])]."""
    extents = tuple(block or max(extent, 1) for block, extent in zip(block, x.shape, strict=True))
    groups = tuple(-(-extent // block) if block else 1 for block, extent in zip(block, x.shape, strict=True))
    padding = tuple((0, g * b - extent) for g, b, extent in zip(groups, extents, x.shape, strict=True))
    if padding != ((0, 0), (0, 0)):
        x = jnp.pad(x, padding)  # zeros do not change an amax
    if block == (None, None):
        largest = jnp.max(bits.magnitudes(x), keepdims=True, initial=0)
        return bits.amax_of(largest, x.dtype)
    # Over the rows first: this is one maximum of whole vectors on a CPU, and little is left for the second.
    largest = jnp.max(bits.magnitudes(x).reshape(groups[0], extents[0], x.shape[1]), axis=1, initial=0)
    largest = jnp.max(largest.reshape(groups[0], groups[1], extents[1]), axis=2, initial=0)
    return bits.amax_of(largest, x.dtype)


def spread(scale: jax.Array, block: Block, shape: tuple[int, ...]) -> jax.Array:
    """The scale of every element of an array of `shape`, broadcastable to it, from one scale a block."""
    for axis, (size, extent) in enumerate(zip(block, shape, strict=True)):
        if size is not None and size > 1:
            scale = lax.slice_in_dim(jnp.repeat(scale, size, axis=axis), 0, extent, axis=axis)
    return scale


def _float32_bits(value: float) -> int:
    """Bit pattern of a float64 rounded to float32; infinity beyond its range."""
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return bits.INFINITY


def _first_float32_from(value: float) -> int:
    """Bit pattern of the smallest float32 that is not below a positive float64."""
    code = _float32_bits(value)
    (rounded,) = struct.unpack("<f", code.to_bytes(4, "little"))
    return code if rounded >= value else code + 1


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state of a tensor before its first step: an empty history, inv_scale 1, not initialized."""
    history = jnp.zeros(delayed.history_length, jnp.float32)
    return DelayedState(history, jnp.ones((), jnp.float32), jnp.zeros((), jnp.bool_))


def update_delayed_state(
    state: DelayedState, amax: jax.Array, format: FormatLike, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The new state after a step whose casts had the maximum `amax`, by the rule of `DelayedScaling`.

    Shapes:
        amax float32 with one element.

    Exactness: as for `scale_from_amax`; comparisons and maxima are on integers (NUMERICS 6).

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: unknown format.
    """
    call = "update_delayed_state"
    check_rule(call, rule, delayed.margin, is_delayed=True)
    target = float8_format(call, format)
    format_of(call, "amax", amax, (FLOAT32.name,))
    if amax.size != 1:
        raise OperandError(
            f"{call}: amax must be one element; got shape {list(amax.shape)}; take amax(x), or the maximum of those of "
            "all casts since the last update"
        )
    if tuple(state.amax_history.shape) != (delayed.history_length,):
        raise OperandError(
            f"{call}: the state's amax_history must have shape [{delayed.history_length}]; got "
            f"{list(state.amax_history.shape)}; the state is of another recipe, start with initial_delayed_state"
        )
    return _update(jax.tree.map(jnp.asarray, state), jnp.asarray(amax), target, rule, delayed)


@functools.partial(jax.jit, static_argnames=("target", "rule", "delayed"))
def _update(
    state: DelayedState, amax: jax.Array, target: Format, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    newest, older, kept = map(bits.bits_of, (amax.reshape(1), state.amax_history[:-1], state.inv_scale))
    is_usable = (newest[0] > 0) & (newest[0] < bits.INFINITY)
    newest = jnp.where(is_usable, newest, jnp.uint32(0))
    history = jnp.concatenate([newest, older])
    is_most_recent = delayed.reduction is AmaxHistoryReduction.MOST_RECENT
    reference = bits.float32_of(newest[0] if is_most_recent else jnp.max(history))
    inv_scale = bits.bits_of(scales_of(reference, target, rule, margin=delayed.margin).inv_scale)
    inv_scale = bits.float32_of(jnp.where(is_usable, inv_scale, kept))
    return DelayedState(bits.float32_of(history), inv_scale, state.initialized | is_usable)
