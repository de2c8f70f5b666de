"""How products are added under any `Rules`: chains, promotion, slices of K; no scale yet.

A chain of cut tensor-core steps is f8ref.numpy's own. Other adders and roundings are written here.
Operands are [K, rows], K first, as f8ref.numpy decodes them.
"""

from collections.abc import Callable, Iterator

import numpy as np

from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules
from f8emu.spec import FLOAT16
from f8ref.numpy.accumulate import Operand, chain, exponents_of, power_of_two, to_last_place
from f8ref.numpy.codec import canonical_nan


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
            left, right = _finite(a), _finite(b)
            lanes = np.zeros((rules.lanes, a.rows, b.rows), np.float32)
            for k in range(a.k):
                lane = k % rules.lanes
                lanes[lane] = lanes[lane] + (left[k, :, None] * right[k]).astype(np.float32)  # products are exact
            sums = pairwise_sum(lanes)
        case Adder.EXACT:
            sums = _exact(a, b)
    if np.isfinite(a.values).all() and np.isfinite(b.values).all():
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
    model, format = rules.model, rules.model.accumulator
    terms, sums = _ROUNDED[rules.terms], _ROUNDED[rules.sums]
    accumulator = np.zeros((a.rows, b.rows))
    for k in range(0, a.k, model.step_k):
        one, other = (x.part(k=slice(k, k + model.step_k)) for x in (a, b))
        product = _finite(one)[:, :, None] * _finite(other)[:, None, :]
        exponent = (one.exponents[:, :, None] + other.exponents[:, None, :]).max(axis=0)
        to_units = power_of_two(model.aligned_fraction_bits - np.maximum(exponent, exponents_of(accumulator, format)))
        total = (terms(product * to_units).sum(axis=0) + terms(accumulator * to_units)) / to_units
        to_places = to_last_place(total, model)
        accumulator = sums(total * to_places) / to_places + 0.0
    return accumulator.astype(np.float32)


def _away(x: np.ndarray) -> np.ndarray:
    """To the nearest integers, ties away from zero."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


_ROUNDED: dict[Rounding, Callable[[np.ndarray], np.ndarray]] = {
    Rounding.CUT: np.trunc,
    Rounding.NEAREST: np.rint,
    Rounding.NEAREST_AWAY: _away,
}
"""To integers. Exact: numbers have at most 16 significant bits, or 24, and are below 2^52."""


def _finite(x: Operand) -> np.ndarray:
    """[K, rows] float64, 0 for what is not finite."""
    return np.where(np.isfinite(x.values), x.values, 0)


def _signs(x: Operand) -> np.ndarray:
    """Infinities and NaN as they are, finite numbers as their sign: their products do not overflow."""
    return np.where(np.isfinite(x.values), np.sign(x.values), x.values).astype(np.float32)


def _exact(a: Operand, b: Operand) -> np.ndarray:
    """The exact sum of float8 products, rounded once: Python's integers, in units below every bit of theirs."""
    finest = [int(x.exponents[x.values != 0].min(initial=0)) - FLOAT16.fraction_bits for x in (a, b)]
    whole = [_integers(np.ldexp(_finite(x), -unit)) for x, unit in zip((a, b), finest, strict=True)]
    return _float32_of(whole[0].T @ whole[1], sum(finest))


def _integers(x: np.ndarray) -> np.ndarray:
    """Whole float64 numbers as Python's integers."""
    return np.array([int(value) for value in x.flat], object).reshape(x.shape)


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
