"""The tensor core: one step, the chain of steps, promotion to float32, and split-K.

An accumulator is a float32 number, also where the hardware keeps fewer significant bits of it. The numbers of a
model are data, `f8emu.spec.AccumulationModel`; the rule ids are explained in `reference/NUMERICS.md`.

Shape suffixes: operands are [K, M] and [K, N] here, K first, so that a step reduces over the first dimension.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.spec import FLOAT16, FLOAT32, AccumulationModel, FlooredSum, Format, Rounding
from f8ref.numpy.codec import ABSENT, INFINITY, Array, Unpacked, codes_of, decode_table, unpack


class Operand(NamedTuple):
    """An operand of a GEMM, unpacked, K first."""

    numbers: Unpacked
    """Of shape [K, rows]."""
    fraction_bits: int
    is_paired: bool = False
    """Row i meets row i of the other operand alone, as in `mma`; otherwise every row meets every row."""

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
        return self._replace(numbers=Unpacked(significand[k, rows], exponent[k, rows], nonfinite))


def operand(x: Array, format: Format, model: AccumulationModel) -> Operand:
    """A typed matrix [rows, K] as an operand, in integers wide enough for the sums of the model's step.

    Where the model says so, it is converted [CHIP-1], and K put in an order and padded to whole ones [CHIP-2].
    """
    if model.operand is not None:
        assert model.operand == FLOAT16, model
        x, format = decode_table(format)[codes_of(x, format)].astype(np.float16), model.operand
    if model.order:
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % len(model.order))))
        x = x.reshape(len(x), -1, len(model.order))[:, :, list(model.order)].reshape(len(x), -1)
    # Terms stay below 2^(aligned bits + 2), and step_k of them and the accumulator are added; one bit is the sign.
    bits = model.aligned_fraction_bits + 2 + model.step_k.bit_length() + 1
    if model.floored is not None:
        bits += model.floored.fraction_bits - model.aligned_fraction_bits
    codes = np.ascontiguousarray(codes_of(x, format).T)
    return Operand(unpack(codes, format, np.int32 if bits <= 32 else np.int64), format.fraction_bits)


def tensor_core_step(
    accumulator: NDArray[np.float32], a: Operand, b: Operand, model: AccumulationModel
) -> NDArray[np.float32]:
    """`accumulator + sum over k of a * b`, as the tensor core adds: aligned and cut, on Hopper never rounded.

    Shapes: `a` [step_k, M], `b` [step_k, N]; `accumulator` and the result [M, N]. If paired, `a` and `b`
    [step_k, cases], the others [cases].
    Exactness: bit for bit that of an H200, on the recorded cases.
    """
    start = unpack(codes_of(accumulator, FLOAT32), FLOAT32, a.numbers.significand.dtype.type)

    # [OP-2] The products are exact and not normalised.
    significand_a, significand_b = _meeting(a, b, a.numbers.significand, b.numbers.significand)
    exponent_a, exponent_b = _meeting(a, b, a.numbers.exponent, b.numbers.exponent)
    product, exponent = significand_a * significand_b, exponent_a + exponent_b
    fraction_bits = a.fraction_bits + b.fraction_bits
    # [ACC-2] The exponent of a subnormal accumulator is its format's smallest. float32 holds it normalised if narrower.
    start_exponent = start.exponent
    if model.accumulator != FLOAT32:
        limited = np.maximum(start.exponent, model.accumulator.min_exponent)
        start_exponent = np.where(start.significand == 0, start.exponent, limited)
    start_shift = start.exponent - FLOAT32.fraction_bits

    if model.floored is None:
        # [ACC-2] The largest exponent. Zeros take no part: theirs is below all others.
        e_max = np.maximum(exponent.max(axis=0), start_exponent)
        unit = e_max - model.aligned_fraction_bits
        # [ACC-3] Every term is cut toward zero to a multiple of one unit. [ACC-4] The cut terms are added exactly.
        terms = _aligned(product, exponent, e_max, fraction_bits, model)
        total = terms.sum(axis=0, dtype=terms.dtype) + times_power_of_two(start.significand, start_shift - unit)
    else:
        dot, e_max = _floored_dot(product, exponent, exponent - fraction_bits, model, model.floored)
        total, unit = _floored_total(dot, e_max, start.significand, start_shift, start_exponent, model, model.floored)

    # [ACC-5] The sum is normalised and cut toward zero, [CHIP-4] or rounded.
    result = _normalized(total, unit, model)

    # [SPEC-1] What is not finite is added beside this, and wins.
    if start.nonfinite is None and a.numbers.nonfinite is None and b.numbers.nonfinite is None:
        return result
    nonfinite = _nonfinite_sum(start.nonfinite, a, b)
    return np.where(nonfinite == 0, result, nonfinite)


def _meeting(a: Operand, b: Operand, of_a: Array, of_b: Array) -> tuple[Array, Array]:
    """Something of each operand, [K, rows], so that what meets is multiplied elementwise."""
    return (of_a, of_b) if a.is_paired and b.is_paired else (of_a[:, :, None], of_b[:, None, :])


def _aligned(product: Array, exponent: Array, e_max: Array, fraction_bits: int, model: AccumulationModel) -> Array:
    """`product * 2^(exponent - fraction_bits)` in units of `2^(e_max - aligned_fraction_bits)`, cut toward zero.

    As `times_power_of_two`, most of the time of a step: no exponent is above e_max, so that after a shift to the left
    that is the same for all, every other is to the right.
    """
    up = max(model.aligned_fraction_bits - fraction_bits, 0)
    right = (e_max + (fraction_bits + up - model.aligned_fraction_bits)) - exponent
    magnitude = np.abs(product)
    magnitude <<= up
    magnitude >>= np.minimum(right, product.dtype.itemsize * 8 - 1, out=right)
    magnitude *= np.sign(product)
    return magnitude


def times_power_of_two(x: Array, n: Array) -> Array:
    """`x * 2^n` in integers, cut toward zero on the magnitude; the caller knows that it fits."""
    # A shift by the width of a word or more is undefined; by one less it already gives zero.
    magnitude = np.abs(x) << np.maximum(n, 0) >> np.clip(-n, 0, x.dtype.itemsize * 8 - 1)
    return magnitude * np.sign(x)


def _floored_dot(
    product: Array, exponent: Array, shift: Array, model: AccumulationModel, floored: FlooredSum
) -> tuple[Array, Array]:
    """[CHIP-6] The products' sum, in units of `2^(e - aligned_fraction_bits)`, and e, their largest exponent."""
    sums: list[Array] = []
    largest: list[Array] = []
    for first in range(floored.interleaved):
        group = slice(first, None, floored.interleaved)
        e = exponent[group].max(axis=0, initial=2 * ABSENT)
        terms = times_power_of_two(product[group], shift[group] - (e - model.aligned_fraction_bits))
        sums.append(terms.sum(axis=0, dtype=terms.dtype))
        largest.append(e)
    e_max = largest[0]
    for exponent in largest[1:]:
        e_max = np.maximum(e_max, exponent)
    dot = np.zeros_like(sums[0])
    for part, e in zip(sums, largest, strict=True):
        dot = dot + _floored_shift(part, e - e_max)
    return dot, e_max


def _floored_total(
    dot: Array,
    e_dot: Array,
    start: Array,
    start_shift: Array,
    start_exponent: Array,
    model: AccumulationModel,
    floored: FlooredSum,
) -> tuple[Array, Array]:
    """[CHIP-6] The products' sum and the accumulator, each floored to its own unit, and the smaller of the units."""
    e_max = np.maximum(e_dot, start_exponent)
    unit = e_max - floored.fraction_bits
    total = _floored_shift(dot, e_dot - model.aligned_fraction_bits - unit)
    kept = _floored_shift(start, start_shift - (e_max - floored.accumulator_fraction_bits))
    if floored.accumulator_reach is not None:
        kept = np.where(start_exponent < e_max - floored.accumulator_reach, 0, kept)
    return total + (kept << (floored.fraction_bits - floored.accumulator_fraction_bits)), unit


def _floored_shift(x: Array, n: Array) -> Array:
    """`x * 2^n` in integers, rounded down; the caller knows that it fits, but where x is 0."""
    up = np.where(x == 0, 0, np.maximum(n, 0))
    return x << up >> np.clip(-n, 0, x.dtype.itemsize * 8 - 1)


def chain(
    a: Operand, b: Operand, model: AccumulationModel, start: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Steps from `start`, or zero, over all of K, each on the accumulator of the one before [ACC-1], [CHAIN-1].

    Shapes: `a` [K, M], `b` [K, N]; `start` and the result [M, N].
    """
    accumulator = start
    if accumulator is None:
        accumulator = np.zeros(a.rows if a.is_paired else (a.rows, b.rows), np.float32)
    for k in range(0, a.k, model.step_k):
        # A tail shorter than a step needs no padding: zeros take no part in [ACC-2] and add nothing.
        step = slice(k, k + model.step_k)
        accumulator = tensor_core_step(accumulator, a.part(k=step), b.part(k=step), model)
    return accumulator


def partials(a: Operand, b: Operand, model: AccumulationModel) -> Iterator[NDArray[np.float32]]:
    """The chains, in order of K, that a total takes up: one every `promote_k` [CHAIN-2], or a single one.

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
                slice_total = _sum(slice_total, partial, model.accumulator)
            total = total + slice_total
    return total


def multiply_add(a: Operand, b: Operand, c: NDArray[np.float32], model: AccumulationModel) -> NDArray[np.float32]:
    """`dot(a, b) + c` of each case, c being the first accumulator, or the first total of a model that promotes.

    Shapes: paired `a`, `b` [K, cases]; c and the result [cases].
    """
    if model.promote_k is None:
        return chain(a, b, model, c)
    for partial in partials(a, b, model):
        c = _sum(c, partial, model.accumulator)  # [CHIP-3]
    return c


def _normalized(total: Array, unit: Array, model: AccumulationModel) -> NDArray[np.float32]:
    """`total * 2^unit` cut or rounded to `1 + result_fraction_bits` significant bits, in its format's range [ACC-5].

    Below the smallest normal the weight of the last place stays, as in the format; beyond the largest is infinity.
    """
    format = model.accumulator
    bit_length = np.frexp(np.abs(total).astype(np.float64))[1]  # exact: |total| < 2^53
    exponent = np.maximum(unit + bit_length - 1, format.min_exponent)
    last_place = exponent - model.result_fraction_bits
    if model.rounding is Rounding.NEAREST_EVEN:
        kept = _nearest(total, last_place - unit)
    else:
        kept = times_power_of_two(total, unit - last_place)
    with np.errstate(over="ignore"):
        result = np.ldexp(kept.astype(np.float32), last_place)  # exact: at most 24 bits; 0 gives +0
    return np.where(np.abs(result) > format.max, np.copysign(INFINITY, result), result)


def _nearest(x: Array, n: Array) -> Array:
    """`x / 2^n` in integers, to nearest even; exact where n is negative."""
    magnitude = np.abs(x) << np.maximum(-n, 0)
    n = np.clip(n, 0, x.dtype.itemsize * 8 - 2)
    kept = magnitude >> n
    rest = magnitude - (kept << n)
    half = np.where(n > 0, np.ones_like(kept) << np.maximum(n - 1, 0), 0)
    up = (n > 0) & ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    rounded: Array = kept + up
    return np.where(x < 0, -rounded, rounded)


def _sum(total: NDArray[np.float32], partial: NDArray[np.float32], format: Format) -> NDArray[np.float32]:
    """`total + partial` of two numbers of a format, rounded to it to nearest even, as float32 [CHAIN-2], [CHIP-3].

    Exactness: float32 has 24 bits, twice the 11 of float16 and two more, so rounding twice is rounding once.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = total + partial
        return found if format == FLOAT32 else np.asarray(found, np.float16).astype(np.float32)


def _nonfinite_sum(start: NDArray[np.float32] | None, a: Operand, b: Operand) -> NDArray[np.float32]:
    """The IEEE sum of the infinite and NaN terms of a step, 0 where there are none [SPEC-1]."""
    signs_a, signs_b = (
        np.sign(x.numbers.significand) if x.numbers.nonfinite is None else x.numbers.nonfinite for x in (a, b)
    )
    with np.errstate(invalid="ignore"):
        # With signs in place of the finite numbers no product overflows, and infinity times 0 is still NaN.
        signs_a, signs_b = _meeting(a, b, signs_a, signs_b)
        products = signs_a.astype(np.float32) * signs_b.astype(np.float32)
        terms = products if start is None else np.concatenate([products, start[None]])
        return np.where(np.isfinite(terms), 0, terms).sum(axis=0, dtype=np.float32)
