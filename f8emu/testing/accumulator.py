"""The tensor core's accumulator of a float8 GEMM in exact numbers, and how far the chip's may be from them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from f8emu.spec.chip import AccumulationModel, Rounding
from f8emu.testing.near import Array, Near, exactly, power_of, total

_EPSILON = float(np.finfo(np.float64).eps)
"""Twice what a rounding of float64 may change, in which exact values and bounds are computed themselves."""


class Operand(NamedTuple):
    """An operand, [rows, K]."""

    values: Array
    powers: Array
    """The power of two of each exponent as the format writes it, a subnormal's too [OP-1]; 0 of a zero."""

    @classmethod
    def of(cls, values: Array, smallest_normal: float) -> "Operand":
        """Decoded values of a format."""
        magnitude = np.abs(values)
        return cls(values, power_of(np.where(magnitude > 0, np.maximum(magnitude, smallest_normal), 0.0)))

    def part(self, k: slice) -> "Operand":
        """Some of K."""
        return Operand(self.values[:, k], self.powers[:, k])

    def in_order(self, order: tuple[int, ...]) -> "Operand":
        """K in the order in which the chip consumes it [CHIP-2], zeros at the end."""
        if not order:
            return self
        padded = (np.pad(x, ((0, 0), (0, -x.shape[1] % len(order)))) for x in self)
        return Operand(*(x.reshape(len(x), -1, len(order))[:, :, list(order)].reshape(len(x), -1) for x in padded))


def chain(a: Operand, b: Operand, model: AccumulationModel) -> Near:
    """One chain of steps from zero over all of K [CHAIN-1], [M, N]: the bound grows with each step.

    With F and R, the fraction bits of [ACC-3] and [ACC-5], and the largest `2^e_max` that the step may have [ACC-2]:

    - each product and the accumulator lose less than a unit, `2^(e_max - F)`, and no more than themselves;
    - the sum loses less than a unit of its own last place, `2^(e_sum - R)`, or half of it where it is rounded.

    [CHIP-6] Products are cut to a unit of the products alone, to which their partial sums are floored too; then their
    total and the accumulator are floored, each to its own multiple of `2^e_max`.
    """
    known = nothing(a, b)
    last_place = 2.0**-model.result_fraction_bits * (0.5 if model.rounding is Rounding.NEAREST_EVEN else 1.0)
    for start in range(0, a.values.shape[1], model.step_k):
        left, right = (x.part(slice(start, start + model.step_k)) for x in (a, b))
        terms, magnitude = left.values.shape[1], np.abs(left.values) @ np.abs(right.values).T
        largest = left.powers.max(axis=1)[:, None] * right.powers.max(axis=1)
        of_all = np.maximum(largest, power_of(known.reach))
        if model.floored is None:
            unit = of_all * 2.0**-model.aligned_fraction_bits
            lost = np.minimum(terms * unit, magnitude) + np.minimum(unit, known.reach)
        else:
            floored = 2.0**-model.floored.fraction_bits + 2.0**-model.floored.accumulator_fraction_bits
            unit = largest * 2.0**-model.aligned_fraction_bits
            lost = (terms + model.floored.interleaved) * unit + floored * of_all
        lost = lost + (terms + 1) * _EPSILON * (magnitude + known.reach)
        known = known.plus(Near(left.values @ right.values.T, lost))
        known = Near(known.value, known.error + last_place * power_of(known.reach))
    return known


def slices(length: int, a: Operand, b: Operand) -> Iterator[tuple[int, Operand, Operand]]:
    """K cut into lengths, each with its begin; a shorter one at the end."""
    for start in range(0, a.values.shape[1], length):
        part = slice(start, start + length)
        yield start, a.part(part), b.part(part)


def promoted(a: Operand, b: Operand, model: AccumulationModel) -> Near:
    """The chains of a slice of K, added in the accumulator's format [CHAIN-2]; one chain where nothing is promoted."""
    length = model.promote_k or max(a.values.shape[1], 1)
    return total((chain(left, right, model) for _, left, right in slices(length, a, b)), model.accumulator)


def nothing(a: Operand, b: Operand) -> Near:
    """The accumulators [M, N] before any K."""
    return exactly(np.zeros((len(a.values), len(b.values))))
