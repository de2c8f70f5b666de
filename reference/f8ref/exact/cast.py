"""Codes and the numbers they mean: decode, the one rounding, the casts made of the two; scales, as float32 codes."""

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from f8emu.spec.errors import SpecError
from f8emu.spec.formats import E8M0FNU, FLOAT32, Format, Overflow, Specials
from f8emu.spec.scaling import (
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    E8M0Rule,
    ScaleRule,
    Scales,
    check_rule,
)
from f8ref.exact.number import NAN, ZERO, Number, NumberKind, exponent_of, finite, infinity, multiply, power_of_two


@lru_cache(maxsize=1 << 17)  # holds all codes of 16 bits, which are cast to every format
def decode(code: int, format: Format) -> Number:
    """The number that a code means, exactly.

    `(-1)^sign * significand * 2^(exponent - fraction_bits)`. A code with exponent field 0 has no hidden bit and
    keeps the exponent of field 1 (E8M0FNU has no such codes).
    """
    assert 0 <= code < 1 << format.bits, f"{code:#x} is not a code of {format}"
    negative = bool(code & format.sign_mask)
    magnitude_code = code & format.magnitude_mask
    field = magnitude_code >> format.fraction_bits
    fraction = magnitude_code & format.fraction_mask

    # 1 Infinities and NaN.
    match format.specials:
        case Specials.NAN_ALL_ONES:
            if magnitude_code == format.magnitude_mask:
                return NAN
        case Specials.NAN_NEGATIVE_ZERO:
            if code == format.sign_mask:
                return NAN
        case Specials.IEEE:
            if field == (1 << format.exponent_bits) - 1:
                return infinity(negative) if fraction == 0 else NAN

    # 2 The hidden bit and the exponent.
    if field == 0 and format.has_subnormals:
        significand, exponent = fraction, 1 - format.bias
    else:
        significand, exponent = (1 << format.fraction_bits) | fraction, field - format.bias
    return Number(NumberKind.FINITE, negative, significand * power_of_two(exponent - format.fraction_bits))


def encode(number: Number, format: Format, overflow: Overflow = Overflow.NONFINITE) -> int:
    """The code of `format` nearest to a number, ties to even: every rounding to nearest of f8ref.exact is here.

    The sign is kept, by zeros and by what rounds to zero too, unless the format has no -0. NaN gives the one NaN code
    of the format. A magnitude that rounds beyond the largest finite value, and an infinity, are treated as `overflow`
    says; where that gives a NaN it is the one NaN code.
    """
    if not (format.signed and format.has_subnormals):
        raise SpecError(f"encode: a format with a sign and a zero expected; got {format}, which holds scales")
    if number.is_nan:
        return format.nan_code
    sign = format.sign_mask if number.negative else 0
    if number.is_infinite:
        return _overflow_code(sign, format, overflow)
    if number.is_zero:
        return sign if format.has_negative_zero else 0

    # 1 The format's values near the number are the multiples of `2^last_place`; below the smallest normal the spacing
    #   stays what it is there (gradual underflow).
    exponent = max(exponent_of(number.magnitude), format.min_exponent)
    last_place = exponent - format.fraction_bits

    # 2 The nearest multiple, of two equally near the even one. In integers: Fractions would be reduced every time.
    n, d = number.magnitude.as_integer_ratio()
    if last_place < 0:
        n <<= -last_place
    else:
        d <<= last_place
    count, rest = divmod(n, d)
    count += 2 * rest > d or (2 * rest == d and count % 2 == 1)

    # 3 The codes of positive values are consecutive. At the smallest exponent the code is `count` itself: subnormals
    #   up to 2^fraction_bits - 1, then the hidden bit turns up as exponent field 1. Each further exponent begins
    #   2^fraction_bits codes later, so a count rounded up to 2^(fraction_bits + 1) is the next exponent's first code.
    code = count + ((exponent - format.min_exponent) << format.fraction_bits)

    # 4 What is left of a small magnitude may be nothing.
    if code == 0:
        return sign if format.has_negative_zero else 0

    # 5 Overflow is judged after rounding: 464 rounds to 448 in E4M3FN, 61440 beyond 57344 in E5M2.
    return sign | code if code <= format.max_code else _overflow_code(sign, format, overflow)


def _overflow_code(sign: int, format: Format, overflow: Overflow) -> int:
    match overflow:
        case Overflow.SATURATE:
            return sign | format.max_code
        case Overflow.NONFINITE:
            return format.nan_code if format.infinity_code is None else sign | format.infinity_code


def round_to(number: Number, format: Format) -> Number:
    """The number of `format` nearest to a number, ties to even; infinity (NaN where there is none) beyond its range."""
    return decode(encode(number, format), format)


def float32(number: Number) -> Number:
    """The nearest float32, ties to even."""
    return round_to(number, FLOAT32)


def cast(code: int, from_format: Format, to_format: Format, overflow: Overflow = Overflow.SATURATE) -> int:
    """The code of `to_format` nearest to what a code of `from_format` means."""
    return encode(decode(code, from_format), to_format, overflow)


def quantize(code: int, from_format: Format, inv_scale: int, to_format: Format) -> int:
    """`cast(float32(x * inv_scale))`, saturating: one float32 rounding, then one to the format."""
    return encode(_scaled(code, from_format, inv_scale), to_format, Overflow.SATURATE)


def dequantize(code: int, format: Format, scale: int, scale_format: Format = FLOAT32) -> int:
    """`float32(decode(code) * scale)`, as a float32 code; the scale is a float32 code or an E8M0 byte."""
    return encode(_scaled(code, format, scale, scale_format), FLOAT32)


def _scaled(code: int, format: Format, factor: int, factor_format: Format = FLOAT32) -> Number:
    return float32(multiply(decode(code, format), decode(factor, factor_format)))


_FLOAT64 = Format(name="float64", exponent_bits=11, fraction_bits=52, bias=1023)
"""For the quotient of the scale rule; no operand, code or result of f8emu has it."""


def amax(codes: Iterable[int], format: Format) -> int:
    """The largest magnitude of a group, as a float32 code (exact: float32 holds every value of every format).

    NaN if any is NaN; 0 for an empty group.
    """
    largest = ZERO
    for code in codes:
        number = decode(code, format)
        if number.is_nan:
            return FLOAT32.nan_code
        if number.is_infinite or largest.is_infinite:
            largest = infinity()
        else:
            largest = Number(NumberKind.FINITE, magnitude=max(largest.magnitude, number.magnitude))
    return encode(largest, FLOAT32)


def scale_from_amax(amax: int, format: Format, rule: ScaleRule | None = None, *, margin: int = 0) -> Scales:
    """`inv_scale = float32(float64(max * 2^-margin / max(amax, amax_floor)))` and `scale = float32(1 / inv_scale)`.

    With `power_of_two` the fraction bits of inv_scale are cleared. An amax of 0 gives the quotient by the floor,
    inf gives 0 and inf, NaN gives NaN for both. With `e8m0` the scale is a byte by that rule [MX-1].
    """
    rule = ScaleRule() if rule is None else rule
    check_rule("scale_from_amax", rule, margin)
    largest = decode(amax, FLOAT32)
    if rule.e8m0 is not None:
        return _e8m0_scales(largest, format, rule.e8m0)
    if largest.is_nan:
        return Scales(inv_scale=FLOAT32.nan_code, scale=FLOAT32.nan_code)
    if largest.is_infinite:
        inv_scale = 0
    else:
        divisor = max(largest.magnitude, Fraction(rule.amax_floor))
        quotient = Fraction(format.max) / 2**margin / divisor
        # Rounding twice is the rule. With a float32 divisor it equals rounding once: a quotient of two 24-bit
        # significands is never so near to a midpoint of float32 that 53 bits cannot tell the side.
        inv_scale = encode(round_to(finite(quotient), _FLOAT64), FLOAT32)
    # Clearing the fraction bits cuts to a power of two; infinity and 0 have none.
    if rule.power_of_two:
        inv_scale &= ~FLOAT32.fraction_mask
    return Scales(inv_scale=inv_scale, scale=_reciprocal(inv_scale))


def _e8m0_scales(amax: Number, format: Format, rule: E8M0Rule) -> Scales:
    """The byte of `2^e` by the words of `E8M0Rule`, and `2^-e` as a float32 code."""
    if amax.is_nan:
        return Scales(inv_scale=FLOAT32.nan_code, scale=E8M0FNU.nan_code)
    largest = power_of_two(128) if amax.is_infinite else amax.magnitude
    if amax.is_infinite and rule is E8M0Rule.RCEIL:
        exponent = 127
    elif amax.is_zero or amax.negative:
        exponent = -127
    else:
        match rule:
            case E8M0Rule.FLOOR:
                exponent = exponent_of(largest) - format.max_exponent
            case E8M0Rule.CEIL:
                exponent = _ceiled(largest) - format.max_exponent
            case E8M0Rule.EVEN:
                last_place = power_of_two(exponent_of(largest) - format.fraction_bits)
                rounded = (largest / last_place + Fraction(1, 2)) // 1 * last_place
                exponent = exponent_of(rounded) - format.max_exponent
            case E8M0Rule.RCEIL:
                exponent = _ceiled(largest / Fraction(format.max))
    exponent = max(-127, min(127, exponent))
    return Scales(inv_scale=encode(finite(power_of_two(-exponent)), FLOAT32), scale=exponent + E8M0FNU.bias)


def _ceiled(magnitude: Fraction) -> int:
    """`ceil(log2(magnitude))`."""
    exponent = exponent_of(magnitude)
    return exponent if magnitude == power_of_two(exponent) else exponent + 1


def initial_delayed_state(delayed: DelayedScaling) -> DelayedState:
    """The state before the first step: a history of zeros, inv_scale 1, not initialized."""
    return DelayedState(
        amax_history=(0,) * delayed.history_length, inv_scale=encode(finite(1), FLOAT32), initialized=False
    )


def update_delayed_state(
    state: DelayedState, amax: int, format: Format, rule: ScaleRule, delayed: DelayedScaling
) -> DelayedState:
    """The state after one step whose amax was `amax`; the rule is `DelayedScaling`'s.

    An amax that is 0, infinite or NaN enters the history as 0 and leaves the scale as it is.
    """
    check_rule("update_delayed_state", rule, delayed.margin, is_delayed=True)
    # 1. The history moves by one, whatever the amax is. 2. An unusable amax leaves the scale.
    number = decode(amax, FLOAT32)
    usable = not (number.is_nan or number.is_infinite or number.is_zero)
    history = ((amax if usable else 0), *state.amax_history)[: delayed.history_length]
    if not usable:
        return state._replace(amax_history=history)
    # 3. The scale follows from the history.
    match delayed.reduction:
        case AmaxHistoryReduction.MAX:
            reference = max(history)  # the codes of non-negative floats have the order of their values
        case AmaxHistoryReduction.MOST_RECENT:
            reference = history[0]
    scales = scale_from_amax(reference, format, rule, margin=delayed.margin)
    return DelayedState(amax_history=history, inv_scale=scales.inv_scale, initialized=True)


def _reciprocal(code: int) -> int:
    """`float32(1 / x)`, correctly rounded, of a float32 x >= 0; 1 / 0 is inf and 1 / inf is 0."""
    number = decode(code, FLOAT32)
    if number.is_infinite:
        return encode(ZERO, FLOAT32)
    if number.is_zero:
        return encode(infinity(), FLOAT32)
    return encode(finite(1 / number.magnitude), FLOAT32)
