"""How products are added under any `Rules`: chains, promotion, slices of K; no scale yet.

A chain of cut tensor-core steps is f8ref.numpy's own. Other adders and roundings are written here.
Operands are [K, rows], K first, as f8ref.numpy unpacks them.
"""

from collections.abc import Iterator

import numpy as np

from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules
from f8emu.conformance.distributions import codes_of
from f8emu.spec import FLOAT32
from f8ref.numpy.accumulate import Operand, chain, times_power_of_two
from f8ref.numpy.codec import canonical_nan, unpack


def adding_rules(rules: Rules) -> tuple[object, ...]:
    """The rules that the accumulators of a GEMM depend on, beside the split of K."""
    return rules.adder, rules.model, rules.lanes, rules.terms, rules.sums


def _chain(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """One chain over all of K, from zero, [M, N] float32."""
    match rules.adder:
        case Adder.TENSOR_CORE if rules.terms is Rounding.CUT and rules.sums is Rounding.CUT:
            return chain(a, b, rules.model)
        case Adder.TENSOR_CORE:
            sums = _rounded_chain(a, b, rules)
        case Adder.FLOAT32:
            left, right = _values(a), _values(b)
            lanes = np.zeros((rules.lanes, a.rows, b.rows), np.float32)
            for k in range(a.k):
                lane = k % rules.lanes
                lanes[lane] = lanes[lane] + (left[k, :, None] * right[k]).astype(np.float32)  # products are exact
            sums = pairwise_sum(lanes)
        case Adder.EXACT:
            sums = _exact(a, b)
    if a.numbers.nonfinite is None and b.numbers.nonfinite is None:
        return sums
    ieee = np.einsum("km,kn->mn", _signs(a), _signs(b))
    return np.where(np.isfinite(ieee), sums, canonical_nan(ieee))


def pairwise_sum(lanes: np.ndarray) -> np.ndarray:
    """The sum over the first axis, a power of two long: neighbours first."""
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    return lanes[0]


def _rounded_chain(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """Tensor-core steps [ACC-1..5] whose terms or sums are rounded to nearest."""
    model, fraction_bits = rules.model, a.fraction_bits + b.fraction_bits
    accumulator = np.zeros((a.rows, b.rows), np.float32)
    for k in range(0, a.k, model.step_k):
        step = slice(k, k + model.step_k)
        one, other = a.part(k=step).numbers, b.part(k=step).numbers
        start = unpack(codes_of(accumulator), FLOAT32, np.int64)
        product = one.significand[:, :, None].astype(np.int64) * other.significand[:, None, :]
        exponent = one.exponent[:, :, None].astype(np.int64) + other.exponent[:, None, :]
        unit = np.maximum(exponent.max(axis=0), start.exponent) - model.aligned_fraction_bits
        terms = _shifted(product, exponent - fraction_bits - unit, rules.terms)
        first = _shifted(start.significand, start.exponent - FLOAT32.fraction_bits - unit, rules.terms)
        total = terms.sum(axis=0) + first
        length = np.frexp(np.abs(total).astype(np.float64))[1]
        last_place = np.maximum(unit + length - 1, FLOAT32.min_exponent) - model.result_fraction_bits
        kept = _shifted(total, unit - last_place, rules.sums)
        accumulator = np.ldexp(kept.astype(np.float64), last_place).astype(np.float32)
    return accumulator


def _shifted(x: np.ndarray, n: np.ndarray, rounding: Rounding) -> np.ndarray:
    """`x * 2^n` in integers, cut or rounded."""
    if rounding is Rounding.CUT:
        return times_power_of_two(x, n)
    down = np.clip(-n, 0, 62)
    magnitude = np.abs(x) << np.maximum(n, 0)
    half = np.where(down > 0, np.int64(1) << np.maximum(down - 1, 0), 0)
    even = (magnitude >> down) & 1 if rounding is Rounding.NEAREST else 1
    rounded = (magnitude + np.where(down > 0, half - 1 + even, 0)) >> down
    return np.where(x < 0, -rounded, rounded)


def _values(x: Operand) -> np.ndarray:
    """[K, rows] float64, 0 for what is not finite."""
    return np.ldexp(x.numbers.significand.astype(np.float64), x.numbers.exponent - x.fraction_bits)


def _signs(x: Operand) -> np.ndarray:
    """Infinities and NaN as they are, finite numbers as their sign: their products do not overflow."""
    significand, _, nonfinite = x.numbers
    return (np.sign(significand) if nonfinite is None else nonfinite).astype(np.float32)


def _exact(a: Operand, b: Operand) -> np.ndarray:
    """The exact sum of float8 products, rounded once: Python's integers, in units of the smallest product."""
    lowest = [int(np.where(x.numbers.significand == 0, 99, x.numbers.exponent).min(initial=99)) for x in (a, b)]
    whole = [
        np.where(x.numbers.significand == 0, 0, x.numbers.significand.astype(object) * 2 ** (
            np.where(x.numbers.significand == 0, 0, x.numbers.exponent - low)).astype(object))
        for x, low in zip((a, b), lowest, strict=True)
    ]  # fmt: skip
    unit = sum(lowest) - a.fraction_bits - b.fraction_bits
    return _float32_of(whole[0].T @ whole[1], unit)


def _float32_of(integers: np.ndarray, unit: int) -> np.ndarray:
    """Python's integers times `2^unit`, rounded once."""

    def one(x: int) -> float:
        # Rounded to odd at 50 bits first: these are exact in float64, and a float32 of them rounds as one.
        drop = max(abs(x).bit_length() - 50, 0)
        kept = abs(x) >> drop
        kept |= (kept << drop) != abs(x)
        return float(np.ldexp(float(kept if x >= 0 else -kept), drop + unit))

    return np.array([one(int(x)) for x in integers.ravel()], np.float64).astype(np.float32).reshape(integers.shape)


def sliced(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """The accumulator of a whole GEMM, [M, N] float32: the sum of its slices of K [CHAIN-3]."""
    total = np.zeros((a.rows, b.rows), np.float32)
    for part in slices(a.k, rules.split_k, rules.model.split_k_multiple):
        total = total + promoted(a.part(k=part), b.part(k=part), rules)
    return total


def promoted(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """The float32 total of the chains of one slice [CHAIN-1], [CHAIN-2], [M, N]."""
    length = rules.model.promote_k or max(a.k, 1)
    total = np.zeros((a.rows, b.rows), np.float32)
    for k in range(0, a.k, length):
        part = slice(k, k + length)
        total = total + _chain(a.part(k=part), b.part(k=part), rules)
    return total


def slices(k: int, split_k: int, multiple: int) -> Iterator[slice]:
    """The slices of K [CHAIN-3]: one length, a multiple; the last is shorter."""
    length = max(-(-k // (split_k * multiple)) * multiple, multiple)
    return (slice(start, min(start + length, k)) for start in range(0, k, length))
