"""How products are added under any `Rules`: chains, promotion, slices of K; no scale of an accumulator yet.

A chain of cut tensor-core steps is f8ref.numpy's own. Other adders and roundings are written here.
Operands are [K, rows], K first, as f8ref.numpy decodes them; or, several chains side by side, [K, chains, rows].
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules, ScaleOrder
from f8emu.spec import BFLOAT16, FLOAT16, HOPPER, AccumulationModel
from f8ref.numpy.accumulate import Operand, chain, exponents_of, operand, power_of_two, side_by_side, to_last_place
from f8ref.numpy.cast import convert
from f8ref.numpy.codec import canonical_nan
from f8ref.numpy.scaled_mm import rounded_sum

_PRODUCTS = 1 << 17
"""Made at a time."""
Chain = Callable[[Operand, Operand, Rules], np.ndarray]
"""One chain over all of K, from zero, [M, N] float32."""


def adding_rules(rules: Rules, k: int, split_k: int) -> tuple[object, ...]:
    """The rules that the accumulators of so much of K depend on: equal ones give the same bits."""
    return rules.adder, _lengths(rules.model, k, split_k), rules.lanes, rules.terms, rules.sums


@lru_cache(maxsize=1 << 14)
def _lengths(model: AccumulationModel, k: int, split_k: int) -> tuple[AccumulationModel, int | None]:
    """The model, and the length of a slice of K; one that is no shorter than what it cuts is None."""
    k += -k % len(model.order or (0,))
    length = _slice_length(k, split_k, model.split_k_multiple)
    is_promoted = model.promote_k is not None and model.promote_k < min(length, k)
    cut = replace(model, promote_k=model.promote_k if is_promoted else None, split_k_multiple=1)
    return cut, length if length < k else None


def _chain(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    match rules.adder:
        case Adder.TENSOR_CORE if rules.terms is Rounding.CUT and rules.sums is Rounding.CUT:
            return chain(a, b, rules.model)
        case Adder.TENSOR_CORE:
            sums = _rounded_chain(a, b, rules)
        case Adder.FLOAT32:
            lanes = np.zeros((rules.lanes, *a.values.shape[1:], b.rows), np.float32)
            for turns in _products_in_lanes(_finite(a), _finite(b), rules.lanes):  # exact in float32
                turns = turns.astype(np.float32)
                turns[0] += lanes
                lanes = np.add.accumulate(turns)[-1]
            sums = _pairwise_sum(lanes)
        case Adder.EXACT:
            sums = _exact(a, b)
    # [SPEC-1] What is not finite adds as IEEE 754 says, whatever adds the rest.
    if np.isfinite(a.values).all() and np.isfinite(b.values).all():
        return sums
    ieee = np.einsum("k...m,k...n->...mn", _signs(a), _signs(b))
    return np.where(np.isfinite(ieee), sums, canonical_nan(ieee))


def _products_in_lanes(a: np.ndarray, b: np.ndarray, lanes: int) -> Iterator[np.ndarray]:
    """The products of operands [K, .., M] and [K, .., N] in the order of K: [turns, lanes, .., M, N] at a time.

    The last turn is filled up with zeros.
    """
    turns = max(_PRODUCTS // (lanes * max(a[0].size * b.shape[-1], 1)), 1)
    for k in range(0, len(a), turns * lanes):
        part = slice(k, k + turns * lanes)
        products = a[part, ..., :, None] * b[part, ..., None, :]
        if missing := -len(products) % lanes:
            products = np.concatenate([products, np.zeros((missing, *products.shape[1:]))])
        yield products.reshape(-1, lanes, *products.shape[1:])


def _pairwise_sum(lanes: np.ndarray) -> np.ndarray:
    """The sum over the first axis, a power of two long: neighbours first."""
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    return lanes[0]


def _rounded_chain(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """Tensor-core steps [ACC-1..5] whose terms or sums are rounded to nearest."""
    model = rules.model
    # Exact: numbers have at most 16 significant bits, or 24, and are below 2^52.
    terms, sums = (np.trunc if x is Rounding.CUT else np.rint for x in (rules.terms, rules.sums))
    accumulator = np.zeros((*a.values.shape[1:], b.rows))
    for k in range(0, a.k, model.step_k):
        one, other = (x.part(k=slice(k, k + model.step_k)) for x in (a, b))
        # [OP-2] Exact products. [ACC-2] The largest exponent, of the accumulator too.
        product = _finite(one)[..., :, None] * _finite(other)[..., None, :]
        exponent = (one.exponents[..., :, None] + other.exponents[..., None, :]).max(axis=0)
        largest = np.maximum(exponent, exponents_of(accumulator, model.accumulator))
        to_units = power_of_two(model.aligned_fraction_bits - largest)
        # [ACC-3] Terms in units. [ACC-4] Their exact sum.
        total = (terms(product * to_units).sum(axis=0) + terms(accumulator * to_units)) / to_units
        # [ACC-5] The places that are kept of it.
        to_places = to_last_place(total, model)
        accumulator = sums(total * to_places) / to_places + 0.0
    return accumulator.astype(np.float32)


def _finite(x: Operand) -> np.ndarray:
    """[K, rows] float64, 0 for what is not finite."""
    return np.where(np.isfinite(x.values), x.values, 0).astype(np.float64)


def _signs(x: Operand) -> np.ndarray:
    """Infinities and NaN as they are, finite numbers as their sign: their products do not overflow."""
    return np.where(np.isfinite(x.values), np.sign(x.values), x.values).astype(np.float32)


def _exact(a: Operand, b: Operand) -> np.ndarray:
    """The exact sum of float8 products, rounded once: Python's integers, in units below every bit of theirs."""
    units = [int(x.exponents[x.values != 0].min(initial=0)) - FLOAT16.fraction_bits for x in (a, b)]
    whole = [
        np.array([int(value) for value in np.ldexp(_finite(x), -unit).flat], object).reshape(x.values.shape)
        for x, unit in zip((a, b), units, strict=True)
    ]
    left, right = (np.moveaxis(x, 0, -2) for x in whole)
    sums = left.swapaxes(-1, -2) @ right
    return np.array([_rounded_once(int(x), sum(units)) for x in sums.flat], np.float32).reshape(sums.shape)


def _rounded_once(x: int, unit: int) -> np.float32:
    """`x * 2^unit`. Rounded to odd at 50 bits first: that is exact in float64, and float32 rounds it as it would x."""
    # A sticky bit stands for all that is dropped. It is 26 places below the last of float32: it makes no tie.
    drop = max(abs(x).bit_length() - 50, 0)
    kept = abs(x) >> drop
    kept |= (kept << drop) != abs(x)
    return np.float32(np.ldexp(float(kept if x >= 0 else -kept), drop + unit))


def sliced(a: Operand, b: Operand, rules: Rules, adds: Chain = _chain) -> np.ndarray:
    """The accumulator of a whole GEMM, [M, N] float32: the sum of its slices of K [CHAIN-3]."""
    total = np.zeros((a.rows, b.rows), np.float32)
    for part in slices(a.k, rules.split_k, rules.model.split_k_multiple):
        total = total + promoted(a.part(k=part), b.part(k=part), rules, adds)
    return total


def promoted(a: Operand, b: Operand, rules: Rules, adds: Chain = _chain) -> np.ndarray:
    """The float32 total of the chains of one slice [CHAIN-1], [CHAIN-2], [M, N]."""
    total = np.zeros((*a.values.shape[1:], b.rows), np.float32)
    for chains in side_by_side(a, b, rules.model.promote_k or max(a.k, 1)):
        for partial_sum in adds(*chains, rules):
            total = total + partial_sum
    return total


def slices(k: int, split_k: int, multiple: int) -> Iterator[slice]:
    """The slices of K [CHAIN-3]: one length, a multiple; the last is shorter."""
    length = _slice_length(k, split_k, multiple)
    return (slice(start, min(start + length, k)) for start in range(0, k, length))


def _slice_length(k: int, split_k: int, multiple: int) -> int:
    return max(-(-k // (split_k * multiple)) * multiple, multiple)


def scaled_first(
    operands: tuple[np.ndarray, np.ndarray], scales: tuple[np.ndarray, np.ndarray], rules: Rules
) -> np.ndarray:
    """The accumulator of float32 operands [M, K], [N, K] that are scaled already, [M, N].

    `scales`, [M, 1] and [1, N]: what each product is multiplied by under that rule.
    """
    if rules.scales is ScaleOrder.BEFORE_DOT_BFLOAT16:
        rules = replace(rules, model=replace(HOPPER.bfloat16, promote_k=rules.model.promote_k))
        a, b = (operand(convert(x, BFLOAT16), BFLOAT16, rules.model) for x in operands)
        return sliced(a, b, rules)
    left, right = (x.T.astype(np.float64) for x in operands)
    if rules.adder is Adder.EXACT:
        return (left.T @ right).astype(np.float32)
    a, b = (Operand(x, np.zeros(x.shape, np.int32)) for x in (left, right))
    each_product = scales if rules.scales is ScaleOrder.EACH_PRODUCT else None
    return sliced(a, b, rules, partial(_fma_chain, scales=each_product))


def _fma_chain(a: Operand, b: Operand, rules: Rules, *, scales: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Products that float32 does not hold, each added by FMA; or scaled first, every step rounded."""
    lanes = np.zeros((rules.lanes, *a.values.shape[1:], b.rows), np.float32)
    for turns in _products_in_lanes(a.values, b.values, rules.lanes):
        for turn in turns:
            if scales is not None:
                turn = ((turn.astype(np.float32) * scales[0]) * scales[1]).astype(np.float64)
            lanes = rounded_sum(turn, lanes)
    return _pairwise_sum(lanes)
