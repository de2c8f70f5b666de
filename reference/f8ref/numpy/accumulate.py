"""The tensor core: one step, the chain of steps, promotion to float32, and split-K.

All numbers are float64, and every operation is exact but those that a rule names: products of two operands have at
most 22 significant bits, the sums of a step are whole numbers of units and below 2^53 (`operand` asserts it), and the
factors between numbers and units are powers of two, from 2^-280 to 2^830. Operands and products are float32 where all
this is as exact in it (`are_exact_in_float32`). An accumulator is a float32 number, also where the hardware keeps
fewer significant bits of it. The numbers of a model are data,
`f8emu.spec.AccumulationModel`; the rule ids are explained in `reference/NUMERICS.md`.

Shape suffixes: operands are [K, M] and [K, N] here, K first, so that a step reduces over the first dimension.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.spec import E8M0FNU, FLOAT16, FLOAT32, MX_BLOCK, AccumulationModel, FlooredSum, Format, Rounding
from f8ref.numpy.codec import ABSENT, INFINITY, Array, codes_of, decode_table, exponent_table

TILE = 2048
"""Outputs computed at a time: the terms of their step, 32 times as many, stay in cache."""
Float64 = NDArray[np.float64]
Exponents = NDArray[np.integer[Any]]


class Decoded(NamedTuple):
    """An operand of a GEMM, decoded, K first.

    Chains that do not depend on each other may stand side by side: [K of one, chains, rows] (`side_by_side`).
    """

    values: Float64 | NDArray[np.float32]
    """The values, [K, rows]; infinities and NaN as they are."""
    exponents: Exponents
    """The exponents as the format writes them [OP-1]: subnormals are not normalised; `ABSENT` takes no part."""
    is_paired: bool = False
    """Row i meets row i of the other operand alone, as in `mma`; otherwise every row meets every row."""

    @property
    def k(self) -> int:
        return self.values.shape[0]

    @property
    def rows(self) -> int:
        return self.values.shape[-1]

    def part(self, k: slice = slice(None), rows: slice = slice(None)) -> "Decoded":
        """Some of K and some of the rows; no copy."""
        return Decoded(self.values[k, ..., rows], self.exponents[k, ..., rows], self.is_paired)

    def chains(self, k: slice, length: int) -> "Decoded":
        """Some of K, whole times `length`, as chains of that length side by side; no copy."""
        values, exponents = self.values[k], self.exponents[k]
        shape = (len(values) // length, length, *values.shape[1:])
        values, exponents = (x.reshape(shape).swapaxes(0, 1) for x in (values, exponents))
        return Decoded(values, exponents, self.is_paired)


def operand(x: Array, format: Format, model: AccumulationModel) -> Decoded:
    """A typed matrix [rows, K] as an operand.

    Where the model says so, it is converted [CHIP-1], and K put in an order and padded to whole ones [CHIP-2].
    """
    # A term is below 2^(fraction bits + 2) units, and step_k of them and the accumulator are added.
    fraction_bits = max(model.aligned_fraction_bits, model.floored.fraction_bits if model.floored else 0)
    assert fraction_bits + 2 + model.step_k.bit_length() <= 53, model
    # 1. [CHIP-1] Converted, which is exact. 2. [CHIP-2] In the model's order of K, zeros at the end.
    if model.operand is not None:
        assert model.operand == FLOAT16, model
        x, format = decode_table(format)[codes_of(x, format)].astype(np.float16), model.operand
    if model.order:
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % len(model.order))))
        x = x.reshape(len(x), -1, len(model.order))[:, :, list(model.order)].reshape(len(x), -1)
    # 3. [OP-1] Values and raw exponents by tables, K first.
    codes = np.ascontiguousarray(codes_of(x, format).T)
    values = decode_table(format)[codes]
    return Decoded(
        values if are_exact_in_float32(format, model) else values.astype(np.float64), exponent_table(format)[codes]
    )


def microscaled(x: Decoded, scale: Array) -> Decoded:
    """[MX-2] An operand times its E8M0 scales, exactly: they are added to the exponents.

    Shapes: `x` [K, rows]; `scale` [rows, ceil(K / 32)], E8M0. [MX-1] Byte 255 is NaN.
    Exactness: values lie from 2^-143 to 2^143, products and sums from 2^-311 to 2^310: all in float64.
    """
    bytes_KM = codes_of(scale, E8M0FNU).T.repeat(MX_BLOCK, axis=0)[: x.k]
    values = x.values.astype(np.float64) * decode_table(E8M0FNU)[bytes_KM]
    exponents = x.exponents + (bytes_KM.astype(np.int64) - E8M0FNU.bias)
    return x._replace(values=values, exponents=np.where(x.exponents == ABSENT, 2 * ABSENT, exponents))


def are_exact_in_float32(format: Format, model: AccumulationModel) -> bool:
    """Whether products of this format and another such, and the sum of a step of them in units, are exact in float32.

    Five bits of exponent: products have at most 22 significant bits and lie from 2^-48 to 2^32, and so do factors that
    make units of them. The sum is a whole number below 2^24.
    """
    is_small = format.exponent_bits <= FLOAT16.exponent_bits
    sum_bits = model.aligned_fraction_bits + 2 + model.step_k.bit_length()
    return is_small and model.floored is None and sum_bits <= FLOAT32.fraction_bits + 1


def tensor_core_step(accumulator: Float64, a: Decoded, b: Decoded, model: AccumulationModel) -> Float64:
    """`accumulator + sum over k of a * b`, as the tensor core adds: aligned and cut, on Hopper never rounded.

    Shapes: `a` [step_k, M], `b` [step_k, N]; `accumulator` and the result [M, N]. If paired, `a` and `b`
    [step_k, cases], the others [cases].
    Exactness: the bits of an H200, on the recorded cases.
    """
    product, exponent = products(a, b)
    start_exponent = exponents_of(accumulator, model.accumulator)
    # [BF16-1], [MX-3] That of zero. Any other accumulator has a larger one, so zero products do not matter.
    if model.zero_exponent is not None:
        start_exponent = np.maximum(start_exponent, model.zero_exponent)

    if model.floored is None:
        # [ACC-2] The largest exponent.
        e_max = np.maximum(exponent.max(axis=0), start_exponent)
        to_units = power_of_two(model.aligned_fraction_bits - e_max)
        # [ACC-3] Every term is cut toward zero to a multiple of one unit.
        product *= to_units if product.dtype == np.float64 else _in_float32(to_units)
        total = added(cut(product), cut(accumulator * to_units)) / to_units
    else:
        dot, e_max = _floored_dot(product, exponent, model, model.floored)
        total = _floored_total(dot, e_max, accumulator, start_exponent, model.floored)

    # [ACC-5] The sum is normalised and cut toward zero, [CHIP-4] or rounded.
    # [SPEC-1] What is not finite was added as IEEE 754 adds it, and is still there.
    return _normalized(total, model)


def products(a: Decoded, b: Decoded) -> tuple[Any, Exponents]:
    """[OP-2] Exact, with the sum of the exponents: not normalised. Those of a zero take no part in [ACC-2]."""
    values_a, values_b = _meeting(a, b, a.values, b.values)
    exponents_a, exponents_b = _meeting(a, b, a.exponents, b.exponents)
    return values_a * values_b, exponents_a + exponents_b


def added(terms: Any, start: Float64) -> Float64:
    """[ACC-4] The cut terms and the accumulator, in units, exactly."""
    return terms.sum(axis=0) + start


def _in_float32(to_units: Float64) -> NDArray[np.float32]:
    """Factors of float32 products; beyond 2^127 they meet nothing but zeros."""
    return np.minimum(to_units, 2.0**FLOAT32.max_exponent).astype(np.float32)


def cut(x: Any) -> Any:
    """The integers next to x toward zero; x is overwritten."""
    return np.trunc(x, out=x)


def power_of_two(n: Exponents) -> Float64:
    """`2^n`, of which a product and a quotient are exact."""
    return np.ldexp(1.0, n)


def _meeting(a: Decoded, b: Decoded, of_a: Array, of_b: Array) -> tuple[Array, Array]:
    """Something of each operand, [K, rows], so that what meets is multiplied elementwise."""
    return (of_a, of_b) if a.is_paired and b.is_paired else (of_a[..., :, None], of_b[..., None, :])


def exponents_of(accumulator: Float64, format: Format) -> Exponents:
    """[ACC-2] The exponent of each number: a subnormal has its format's smallest, zero `ABSENT`, NaN and inf any."""
    return np.where(accumulator == 0, ABSENT, _limited_exponents(accumulator, format))


def _limited_exponents(x: Float64, format: Format) -> Exponents:
    """The exponents of the numbers, but not below the format's smallest."""
    return np.maximum(np.frexp(x)[1] - 1, format.min_exponent)


def _floored_dot(
    product: Float64, exponent: Exponents, model: AccumulationModel, floored: FlooredSum
) -> tuple[Float64, Exponents]:
    """[CHIP-6] The products' sum, a multiple of `2^(e - aligned_fraction_bits)`, and e, their largest exponent."""
    # 1. Interleaved sums, each cut to its own largest exponent.
    sums: list[Float64] = []
    largest: list[Exponents] = []
    for first in range(floored.interleaved):
        group = slice(first, None, floored.interleaved)
        e = exponent[group].max(axis=0, initial=2 * ABSENT)
        to_units = power_of_two(model.aligned_fraction_bits - e)
        sums.append(cut(product[group] * to_units).sum(axis=0) / to_units)
        largest.append(e)
    # 2. Each sum is floored to the unit of the largest exponent of all, and added.
    e_max = largest[0]
    for e in largest[1:]:
        e_max = np.maximum(e_max, e)
    to_units = power_of_two(model.aligned_fraction_bits - e_max)
    dot = np.zeros_like(sums[0])
    for part in sums:
        dot = dot + np.floor(part * to_units)
    return dot / to_units, e_max


def _floored_total(
    dot: Float64, e_dot: Exponents, start: Float64, start_exponent: Exponents, floored: FlooredSum
) -> Float64:
    """[CHIP-6] The products' sum and the accumulator, each floored to its own unit."""
    # 1. An accumulator beyond reach is dropped, unless it is not finite. 2. Both parts are floored, then added.
    e_max = np.maximum(e_dot, start_exponent)
    if floored.accumulator_reach is not None:
        start = np.where((start_exponent < e_max - floored.accumulator_reach) & np.isfinite(start), 0, start)
    to_units, start_to_units = (
        power_of_two(bits - e_max) for bits in (floored.fraction_bits, floored.accumulator_fraction_bits)
    )
    return np.floor(dot * to_units) / to_units + np.floor(start * start_to_units) / start_to_units


def chain(
    a: Decoded, b: Decoded, model: AccumulationModel, start: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Steps from `start`, or zero, over all of K, each on the accumulator of the one before [ACC-1], [CHAIN-1].

    Shapes: `a` [K, M], `b` [K, N]; `start` and the result [M, N]. Side by side `a` [K, chains, M], ...
    """
    accumulator = np.zeros(_outputs_shape(a, b)) if start is None else start.astype(np.float64)
    for k in range(0, a.k, model.step_k):
        # A tail shorter than a step needs no padding: zeros take no part in [ACC-2] and add nothing.
        step = slice(k, k + model.step_k)
        accumulator = tensor_core_step(accumulator, a.part(k=step), b.part(k=step), model)
    return accumulator.astype(np.float32)  # exact: at most 24 significant bits, in range


def _outputs_shape(a: Decoded, b: Decoded) -> tuple[int, ...]:
    return a.values.shape[1:] if a.is_paired else (*a.values.shape[1:], b.rows)


def side_by_side(a: Decoded, b: Decoded, length: int) -> Iterator[tuple[Decoded, Decoded]]:
    """Chains of `length` along K, in order, as many side by side as fill a tile; a shorter one at the end by itself."""
    width = max(TILE // max(prod(_outputs_shape(a, b)), 1), 1) * length
    whole = a.k - a.k % length
    for k in range(0, whole, width):
        part = slice(k, min(k + width, whole))
        yield a.chains(part, length), b.chains(part, length)
    if whole < a.k:
        part = slice(whole, a.k)
        yield a.chains(part, a.k - whole), b.chains(part, a.k - whole)


def partials(a: Decoded, b: Decoded, model: AccumulationModel) -> Iterator[NDArray[np.float32]]:
    """The chains, in order of K, that a total takes up: one every `promote_k` [CHAIN-2], or a single one.

    Shapes: `a` [K, M], `b` [K, N]; each is [M, N].
    """
    for chains in side_by_side(a, b, model.promote_k or max(a.k, 1)):
        yield from chain(*chains, model)


def accumulate(a: Decoded, b: Decoded, model: AccumulationModel, split_k: int = 1) -> NDArray[np.float32]:
    """The accumulator of a whole GEMM, before any scale.

    Shapes: `a` [K, M], `b` [K, N]; the result [M, N].
    Exactness: the bits of an H200, on the recorded cases; its library chooses `split_k`, so it is an argument.
    """
    # [CHAIN-3] Slices of one length, a multiple; the last is shorter, and where K is used up there are fewer.
    multiple = model.split_k_multiple
    length = max(-(-a.k // (split_k * multiple)) * multiple, multiple)
    total = np.zeros((a.rows, b.rows), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(0, a.k, length):
            part = slice(k, k + length)
            # Each slice starts from zero; its partials are promoted [CHAIN-2], then the slices are added in order.
            slice_total = np.zeros_like(total)
            for partial in partials(a.part(k=part), b.part(k=part), model):
                slice_total = _sum(slice_total, partial, model.accumulator)
            total = total + slice_total
    return total


def multiply_add(a: Decoded, b: Decoded, c: NDArray[np.float32], model: AccumulationModel) -> NDArray[np.float32]:
    """`dot(a, b) + c` of each case, c being the first accumulator, or the first total of a model that promotes.

    Shapes: paired `a`, `b` [K, cases]; c and the result [cases].
    """
    if model.promote_k is None:
        return chain(a, b, model, c)
    for partial in partials(a, b, model):
        c = _sum(c, partial, model.accumulator)  # [CHIP-3]
    return c


def _normalized(total: Float64, model: AccumulationModel) -> Float64:
    """`total` cut or rounded to `1 + result_fraction_bits` significant bits, in its format's range [ACC-5].

    Below the smallest normal the weight of the last place stays, as in the format; beyond the largest is infinity.
    """
    to_places = to_last_place(total, model)
    places = total * to_places
    kept = np.rint(places) if model.rounding is Rounding.NEAREST_EVEN else np.trunc(places)
    result = kept / to_places + 0.0  # a sum of 0 is +0
    is_beyond = np.abs(result) > model.accumulator.max
    return np.where(is_beyond, np.copysign(INFINITY, result), result) if is_beyond.any() else result


def to_last_place(total: Float64, model: AccumulationModel) -> Float64:
    """The factor from numbers to multiples of the last place that a result of this size keeps [ACC-5]."""
    return power_of_two(model.result_fraction_bits - _limited_exponents(total, model.accumulator))


def _sum(total: NDArray[np.float32], partial: NDArray[np.float32], format: Format) -> NDArray[np.float32]:
    """`total + partial` of two numbers of a format, rounded to it to nearest even, as float32 [CHAIN-2], [CHIP-3].

    Exactness: float32 has 24 bits, twice the 11 of float16 and two more, so rounding twice is rounding once.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = total + partial
        return result if format == FLOAT32 else np.asarray(result, np.float16).astype(np.float32)
