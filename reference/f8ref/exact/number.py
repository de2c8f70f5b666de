"""Exact numbers, their sums and products.

A `Number` is a `Fraction` with a sign that zero keeps, or an infinity, or NaN. Sums and products of numbers are exact
too. Arithmetic of a float format is the exact operation followed by `cast.round_to`:

    float32 product of x and y          float32(multiply(x, y))
    float32 fused multiply-add          float32(add(multiply(x, y), z))       one rounding
    float32 product, then float32 sum   float32(add(float32(multiply(x, y)), z))      two
"""

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache


class NumberKind(Enum):
    """The kinds of numbers."""

    FINITE = "finite"
    INFINITE = "infinite"
    NAN = "nan"


@dataclass(frozen=True, slots=True)
class Number:
    """`(-1)^negative * magnitude`, or an infinity of that sign, or NaN (whose sign and payload do not exist here)."""

    kind: NumberKind
    negative: bool = False
    magnitude: Fraction = Fraction(0)

    @property
    def is_nan(self) -> bool:
        return self.kind is NumberKind.NAN

    @property
    def is_infinite(self) -> bool:
        return self.kind is NumberKind.INFINITE

    @property
    def is_zero(self) -> bool:
        return self.kind is NumberKind.FINITE and not self.magnitude

    @property
    def value(self) -> Fraction:
        """The real number; only for a finite one."""
        assert self.kind is NumberKind.FINITE, self
        return -self.magnitude if self.negative else self.magnitude


NAN = Number(NumberKind.NAN)
"""NaN."""
ZERO = Number(NumberKind.FINITE)
"""+0."""


def infinity(negative: bool = False) -> Number:
    """The infinity with this sign."""
    return Number(NumberKind.INFINITE, negative)


def finite(value: Fraction | int) -> Number:
    """The number with this real value; 0 gives +0."""
    return Number(NumberKind.FINITE, value < 0, abs(Fraction(value)))


@cache  # the exponents of formats are few, and each is used a million times
def power_of_two(exponent: int) -> Fraction:
    """`2^exponent`."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def exponent_of(magnitude: Fraction) -> int:
    """The normalised exponent: the e with `2^e <= magnitude < 2^(e + 1)`, for a positive magnitude."""
    n, d = magnitude.numerator, magnitude.denominator
    assert n > 0, magnitude
    # With n in [2^(i-1), 2^i) and d in [2^(j-1), 2^j), n / d is in (2^(i-j-1), 2^(i-j+1)): one of two binades.
    exponent = n.bit_length() - d.bit_length()
    is_lower = n < d << exponent if exponent >= 0 else n << -exponent < d
    return exponent - 1 if is_lower else exponent


def multiply(x: Number, y: Number) -> Number:
    """The exact product; `inf * 0` is NaN, the sign of a zero is the product of the signs."""
    if x.is_nan or y.is_nan:
        return NAN
    negative = x.negative != y.negative
    if x.is_infinite or y.is_infinite:
        return NAN if x.is_zero or y.is_zero else infinity(negative)
    return Number(NumberKind.FINITE, negative, x.magnitude * y.magnitude)


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
        return Number(NumberKind.FINITE, x.negative and y.negative)
    return finite(total)
