"""The tensor core: one step, the chain of steps, promotion to float32, and split-K.

An accumulator is a float32 number, also where the hardware keeps fewer significant bits of it. The numbers of a
model are data, `f8emu.spec.AccumulationModel`; the rule ids are explained in `reference/NUMERICS.md`.

Shape suffixes: operands are [K, M] and [K, N] here, K first, so that a step reduces over the first dimension.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.spec import FLOAT32, AccumulationModel, Format
from f8ref.numpy.codec import Array, Unpacked, codes_of, unpack


class Operand(NamedTuple):
    """An operand of a GEMM, unpacked, K first."""

    numbers: Unpacked
    """Of shape [K, rows]."""
    fraction_bits: int

    @property
    def k(self) -> int:
        return self.numbers.significand.shape[0]

    @property
    def rows(self) -> int:
        return self.numbers.significand.shape[1]

    def part(self, k: slice = slice(None), rows: slice = slice(None)) -> "Operand":
        """Some of K and some of the rows; no copy."""
        significand, exponent, nonfinite = self.numbers
        nonfinite = None if nonfinite is None else nonfinite[k, rows]
        return Operand(Unpacked(significand[k, rows], exponent[k, rows], nonfinite), self.fraction_bits)


def operand(x: Array, format: Format, model: AccumulationModel) -> Operand:
    """A typed matrix [rows, K] as an operand, in integers wide enough for the sums of the model's step."""
    # Terms stay below 2^(aligned bits + 2), and step_k of them and the accumulator are added; one bit is the sign.
    bits = model.aligned_fraction_bits + 2 + model.step_k.bit_length() + 1
    codes = np.ascontiguousarray(codes_of(x, format).T)
    return Operand(unpack(codes, format, np.int32 if bits <= 32 else np.int64), format.fraction_bits)


def tensor_core_step(
    accumulator: NDArray[np.float32], a: Operand, b: Operand, model: AccumulationModel
) -> NDArray[np.float32]:
    """`accumulator + sum over k of a * b`, as the tensor core adds: aligned and cut, never rounded.

    Shapes: `a` [step_k, M], `b` [step_k, N]; `accumulator` and the result [M, N].
    Exactness: bit for bit that of an H200, on the recorded cases.
    """
    a_KM1, b_K1N = a.numbers.significand[:, :, None], b.numbers.significand[:, None, :]
    start = unpack(codes_of(accumulator, FLOAT32), FLOAT32, a_KM1.dtype.type)

    # [OP-2] The products are exact and not normalised.
    product = a_KM1 * b_K1N
    exponent = a.numbers.exponent[:, :, None] + b.numbers.exponent[:, None, :]

    # [ACC-2] The largest exponent. Zeros take no part: theirs is below all others.
    e_max = np.maximum(exponent.max(axis=0), start.exponent)

    # [ACC-3] Every term is cut toward zero to a multiple of one unit.
    unit = e_max - model.aligned_fraction_bits
    terms = times_power_of_two(product, exponent - (a.fraction_bits + b.fraction_bits) - unit)
    start_term = times_power_of_two(start.significand, start.exponent - FLOAT32.fraction_bits - unit)

    # [ACC-4] The cut terms are added exactly.
    total = terms.sum(axis=0, dtype=terms.dtype) + start_term

    # [ACC-5] The sum is normalised and cut toward zero.
    result = _normalized(total, unit, model.result_fraction_bits)

    # [SPEC-1] What is not finite is added beside this, and wins.
    if start.nonfinite is None and a.numbers.nonfinite is None and b.numbers.nonfinite is None:
        return result
    nonfinite = _nonfinite_sum(start.nonfinite, a, b)
    return np.where(nonfinite == 0, result, nonfinite)


def times_power_of_two(x: Array, n: Array) -> Array:
    """`x * 2^n` in integers, cut toward zero on the magnitude; the caller knows that it fits."""
    # A shift by the width of a word or more is undefined; by one less it already gives zero.
    magnitude = np.abs(x) << np.maximum(n, 0) >> np.clip(-n, 0, x.dtype.itemsize * 8 - 1)
    return np.where(x < 0, -magnitude, magnitude)


def chain(a: Operand, b: Operand, model: AccumulationModel) -> NDArray[np.float32]:
    """Steps from zero over all of K, each on the accumulator of the one before [ACC-1], [CHAIN-1].

    Shapes: `a` [K, M], `b` [K, N]; the result [M, N].
    """
    accumulator = np.zeros((a.rows, b.rows), np.float32)
    for k in range(0, a.k, model.step_k):
        # A tail shorter than a step needs no padding: zeros take no part in [ACC-2] and add nothing.
        step = slice(k, k + model.step_k)
        accumulator = tensor_core_step(accumulator, a.part(k=step), b.part(k=step), model)
    return accumulator


def partials(a: Operand, b: Operand, model: AccumulationModel) -> Iterator[NDArray[np.float32]]:
    """The chains, in order of K, that a float32 total takes up: one every `promote_k` [CHAIN-2], or a single one.

    Shapes: `a` [K, M], `b` [K, N]; each is [M, N].
    """
    length = model.promote_k or max(a.k, 1)
    for k in range(0, a.k, length):
        part = slice(k, k + length)
        yield chain(a.part(k=part), b.part(k=part), model)


def accumulate(a: Operand, b: Operand, model: AccumulationModel, split_k: int = 1) -> NDArray[np.float32]:
    """The accumulator of a whole GEMM, before any scale.

    Shapes: `a` [K, M], `b` [K, N]; the result [M, N].
    Exactness: bit for bit that of an H200, on the recorded cases; `split_k` is a choice of its library, so it is given.
    """
    # [CHAIN-3] Slices of one length, a multiple; the last is shorter, and where K is used up there are fewer.
    multiple = model.split_k_multiple
    length = max(-(-a.k // (split_k * multiple)) * multiple, multiple)
    total = np.zeros((a.rows, b.rows), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(0, a.k, length):
            part = slice(k, k + length)
            slice_total = np.zeros_like(total)
            for partial in partials(a.part(k=part), b.part(k=part), model):
                slice_total = slice_total + partial
            total = total + slice_total
    return total


def _normalized(total: Array, unit: Array, fraction_bits: int) -> NDArray[np.float32]:
    """`total * 2^unit` cut toward zero to `1 + fraction_bits` significant bits, in float32's range [ACC-5].

    Below the smallest normal the weight of the last place stays, as in float32; beyond the largest number is infinity.
    """
    bit_length = np.frexp(np.abs(total).astype(np.float64))[1]  # exact: |total| < 2^53
    exponent = np.maximum(unit + bit_length - 1, FLOAT32.min_exponent)
    last_place = exponent - fraction_bits
    kept = times_power_of_two(total, unit - last_place)
    with np.errstate(over="ignore"):
        return np.ldexp(kept.astype(np.float32), last_place)  # exact: at most 24 bits; 0 gives +0


def _nonfinite_sum(start: NDArray[np.float32] | None, a: Operand, b: Operand) -> NDArray[np.float32]:
    """The IEEE sum of the infinite and NaN terms of a step, 0 where there are none [SPEC-1]."""
    signs_a, signs_b = (
        np.sign(x.numbers.significand) if x.numbers.nonfinite is None else x.numbers.nonfinite for x in (a, b)
    )
    with np.errstate(invalid="ignore"):
        # With signs in place of the finite numbers no product overflows, and infinity times 0 is still NaN.
        products = signs_a[:, :, None].astype(np.float32) * signs_b[:, None, :].astype(np.float32)
        terms = products if start is None else np.concatenate([products, start[None]])
        return np.where(np.isfinite(terms), 0, terms).sum(axis=0, dtype=np.float32)
