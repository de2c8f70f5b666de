"""Arithmetic of numbers that are known to a bound: what the chip computed lies within `error` of the exact `value`."""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.spec.formats import Format

Array = NDArray[np.float64]
_EXPONENT = np.float64(np.inf).view(np.int64)


class Near(NamedTuple):
    """Exact values, and how far the chip's may be from them."""

    value: Array
    error: Array

    @property
    def reach(self) -> Array:
        """The largest magnitude that the chip's number may have."""
        return np.abs(self.value) + self.error

    def plus(self, other: "Near") -> "Near":
        """The sum, not rounded."""
        return Near(self.value + other.value, self.error + other.error)

    def times(self, other: "Near") -> "Near":
        """The product, not rounded: `|xy - x'y'| <= |x - x'| |y| + |x'| |y - y'|`."""
        return Near(self.value * other.value, self.error * np.abs(other.value) + self.reach * other.error)

    def rounded(self, format: Format) -> "Near":
        """Rounded to nearest in a format: half a unit of the last place of what is rounded, or of the subnormals.

        Beyond the format's largest number the bound is infinite.
        """
        unit = np.maximum(power_of(self.reach) * 2.0**-format.fraction_bits, format.smallest_subnormal)
        return Near(self.value, np.where(self.reach > format.max, np.inf, self.error + unit / 2))


def exactly(value: Array) -> Near:
    """Numbers that the chip is given."""
    return Near(value, np.zeros_like(value))


def power_of(magnitude: Array) -> Array:
    """`2^e` of numbers from `2^e` up to `2^(e + 1)`, 0 of 0: the exponent's bits alone. Infinite of NaN."""
    return (magnitude.view(np.int64) & _EXPONENT).view(np.float64)


def total(parts: Iterable[Near], format: Format) -> Near:
    """The parts, added in order; each sum but the first, which is no sum, is rounded [CHAIN-2], [CHAIN-3]."""
    return reduce(lambda known, part: known.plus(part).rounded(format), parts)
