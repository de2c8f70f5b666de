"""Codes and the numbers they mean: decode, exact sums and products, and the one rounding.

A `Number` is exact: a `Fraction` with a sign that zero keeps, or an infinity, or NaN. Sums and products of numbers are
exact too. Arithmetic of a float format is the exact operation followed by `round_to`:

    float32 product of x and y          float32(multiply(x, y))
    float32 fused multiply-add          float32(add(multiply(x, y), z))       one rounding
    float32 product, then float32 sum   float32(add(float32(multiply(x, y)), z))      two
"""

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import FLOAT32, Format, Overflow, Specials


class Kind(Enum):
    """What a number is."""

    FINITE = "finite"
    INFINITE = "infinite"
    NAN = "nan"


@dataclass(frozen=True, slots=True)
class Number:
    """`(-1)^negative * magnitude`, or an infinity of that sign, or NaN (whose sign and payload do not exist here)."""

    kind: Kind
    negative: bool = False
    magnitude: Fraction = Fraction(0)

    @property
    def is_nan(self) -> bool:
        return self.kind is Kind.NAN

    @property
    def is_infinite(self) -> bool:
        return self.kind is Kind.INFINITE

    @property
    def is_zero(self) -> bool:
        return self.kind is Kind.FINITE and self.magnitude == 0

    @property
    def value(self) -> Fraction:
        """The real number; only of a finite one."""
        assert self.kind is Kind.FINITE, self
        return -self.magnitude if self.negative else self.magnitude


NAN = Number(Kind.NAN)
ZERO = Number(Kind.FINITE)
"""+0."""


def infinity(negative: bool = False) -> Number:
    """The infinity of that sign."""
    return Number(Kind.INFINITE, negative)


def finite(value: Fraction | int) -> Number:
    """The number with that real value; 0 is +0."""
    return Number(Kind.FINITE, value < 0, abs(Fraction(value)))


def power_of_two(exponent: int) -> Fraction:
    """`2^exponent`."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def exponent_of(magnitude: Fraction) -> int:
    """The normalised exponent: the e with `2^e <= magnitude < 2^(e + 1)`, for a positive magnitude."""
    assert magnitude > 0, magnitude
    # With n in [2^(i-1), 2^i) and d in [2^(j-1), 2^j), n / d is in (2^(i-j-1), 2^(i-j+1)): one of two binades.
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if power_of_two(exponent) <= magnitude else exponent - 1


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
        case Specials.IEEE:
            if field == (1 << format.exponent_bits) - 1:
                return infinity(negative) if fraction == 0 else NAN

    # 2 The hidden bit and the exponent.
    if field == 0 and format.has_subnormals:
        significand, exponent = fraction, 1 - format.bias
    else:
        significand, exponent = (1 << format.fraction_bits) | fraction, field - format.bias
    return Number(Kind.FINITE, negative, significand * power_of_two(exponent - format.fraction_bits))


def encode(number: Number, format: Format, overflow: Overflow = Overflow.NONFINITE) -> int:
    """The code of `format` nearest to a number, ties to even: every rounding to nearest of f8ref.exact is here.

    The sign is kept, by zeros and by what rounds to zero too. NaN gives the one NaN code of the format. A magnitude
    that rounds beyond the largest finite value, and an infinity, are treated as `overflow` says; where that gives
    a NaN it is the one NaN code.

    Raises:
        OperandError: the format has neither sign nor zero (E8M0FNU).
    """
    if not (format.signed and format.has_subnormals):
        raise OperandError(f"encode: a format with a sign and a zero expected; got {format}, which holds scales only")
    if number.is_nan:
        return format.nan_code
    sign = format.sign_mask if number.negative else 0
    if number.is_infinite:
        return _overflow_code(sign, format, overflow)
    if number.is_zero:
        return sign

    # 1 The format's values near the number are the multiples of `spacing`; below the smallest normal the spacing
    #   stays what it is there (gradual underflow).
    exponent = max(exponent_of(number.magnitude), format.min_exponent)
    spacing = power_of_two(exponent - format.fraction_bits)

    # 2 The nearest multiple. `round` of a Fraction is to nearest, ties to even.
    count = round(number.magnitude / spacing)

    # 3 The codes of positive values are consecutive. At the smallest exponent the code is `count` itself: subnormals
    #   up to 2^fraction_bits - 1, then the hidden bit turns up as exponent field 1. Each further exponent begins
    #   2^fraction_bits codes later, so a count rounded up to 2^(fraction_bits + 1) is the next exponent's first code.
    code = count + ((exponent - format.min_exponent) << format.fraction_bits)

    # 4 Overflow is judged after rounding: 464 rounds to 448 in E4M3FN, 61440 beyond 57344 in E5M2.
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


def multiply(x: Number, y: Number) -> Number:
    """The exact product; `inf * 0` is NaN, the sign of a zero is the product of the signs."""
    if x.is_nan or y.is_nan:
        return NAN
    negative = x.negative != y.negative
    if x.is_infinite or y.is_infinite:
        return NAN if x.is_zero or y.is_zero else infinity(negative)
    return Number(Kind.FINITE, negative, x.magnitude * y.magnitude)


def add(x: Number, y: Number) -> Number:
    """The exact sum; `inf - inf` is NaN, a sum of zero is +0 unless both are -0 (IEEE 754-2019, 6.3)."""
    if x.is_nan or y.is_nan:
        return NAN
    if x.is_infinite and y.is_infinite:
        return x if x.negative == y.negative else NAN
    if x.is_infinite or y.is_infinite:
        return x if x.is_infinite else y
    total = x.value + y.value
    if total == 0:
        return Number(Kind.FINITE, x.negative and y.negative)
    return finite(total)
