"""How products are added under any `Rules`: chains, promotion, slices of K; no scale of an accumulator yet.

A chain of cut tensor-core steps is f8ref.numpy's own. Other adders and roundings are written here.
Operands are [K, rows], K first, as f8ref.numpy decodes them; or, several chains side by side, [K, chains, rows].
"""

from collections.abc import Iterator

import numpy as np

from f8emu.conformance.diagnosis.rules import Adder, Rounding, Rules, ScaleOrder
from f8ref.numpy.accumulate import Operand, chain, exponents_of, power_of_two, side_by_side, to_last_place
from f8ref.numpy.codec import canonical_nan
from f8ref.numpy.scaled_mm import rounded_sum

_PRODUCTS = 1 << 17  # made at a time


def sliced(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """The accumulator of a whole GEMM, [M, N] float32: the sum of its slices of K [CHAIN-3]."""
    total = np.zeros((a.rows, b.rows), np.float32)
    for part in slices(a.k, rules.split_k, rules.model.split_k_multiple):
        total = total + promoted(a.part(k=part), b.part(k=part), rules)
    return total


def slices(k: int, split_k: int, multiple: int) -> Iterator[slice]:
    """The slices of K [CHAIN-3]: one length, a multiple; the last is shorter."""
    length = max(-(-k // (split_k * multiple)) * multiple, multiple)
    return (slice(start, min(start + length, k)) for start in range(0, k, length))


def promoted(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """The float32 total of the chains of one slice [CHAIN-1], [CHAIN-2], [M, N]."""
    total = np.zeros((*a.values.shape[1:], b.rows), np.float32)
    for chains in side_by_side(a, b, rules.model.promote_k or max(a.k, 1)):
        for partial_sum in _chain(*chains, rules):
            total = total + partial_sum
    return total


def _chain(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """Chains over all of K, from zero, [chains, M, N] float32."""
    if rules.adder is Adder.TENSOR_CORE and rules.terms is Rounding.CUT and rules.sums is Rounding.CUT:
        return chain(a, b, rules.model)
    # 1. Finite numbers.
    left, right = (np.where(np.isfinite(x.values), x.values, 0).astype(np.float64) for x in (a, b))
    if rules.adder is Adder.TENSOR_CORE:
        sums = _rounded_steps(a, b, left, right, rules)
    elif rules.adder is Adder.FLOAT32:
        sums = _in_float32(left, right, rules)
    else:  # float64 holds the exact sum of E4M3 products, and of nearly all others
        sums = np.einsum("k...m,k...n->...mn", left, right, optimize=True).astype(np.float32)
    # 2. [SPEC-1] What is not finite adds as IEEE 754 says, whatever adds the rest; signs of numbers do not overflow.
    if np.isfinite(a.values).all() and np.isfinite(b.values).all():
        return sums
    signs = (np.where(np.isfinite(x.values), np.sign(x.values), x.values).astype(np.float32) for x in (a, b))
    ieee = np.einsum("k...m,k...n->...mn", *signs)
    return np.where(np.isfinite(ieee), sums, canonical_nan(ieee))


def _in_float32(left: np.ndarray, right: np.ndarray, rules: Rules) -> np.ndarray:
    """Float32 sums that take turns along K, added up pairwise at the end."""
    sums = np.zeros((rules.lanes, *left.shape[1:], right.shape[-1]), np.float32)
    turns = rules.lanes * max(_PRODUCTS // (rules.lanes * max(left[0].size * right.shape[-1], 1)), 1)
    for k in range(0, len(left), turns):
        products = left[k : k + turns, ..., :, None] * right[k : k + turns, ..., None, :]
        if missing := -len(products) % rules.lanes:
            products = np.concatenate([products, np.zeros((missing, *products.shape[1:]))])
        products = products.reshape(-1, *sums.shape)
        if rules.scales is ScaleOrder.BEFORE_DOT:  # float32 does not hold the products of scaled numbers
            for product in products:
                sums = rounded_sum(product, sums)
        else:
            exact = products.astype(np.float32)
            exact[0] += sums
            sums = np.add.accumulate(exact)[-1]
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    return sums[0]


def _rounded_steps(a: Operand, b: Operand, left: np.ndarray, right: np.ndarray, rules: Rules) -> np.ndarray:
    """Tensor-core steps [ACC-1..5] whose terms or sums are rounded to nearest."""
    # Exact: numbers have at most 16 significant bits, or 24, and are below 2^52.
    model = rules.model
    terms, sums = (np.trunc if x is Rounding.CUT else np.rint for x in (rules.terms, rules.sums))
    accumulator = np.zeros((*left.shape[1:], b.rows))
    for k in range(0, a.k, model.step_k):
        step = slice(k, k + model.step_k)
        # [OP-2] Exact products. [ACC-2] The largest exponent, of the accumulator too.
        product = left[step, ..., :, None] * right[step, ..., None, :]
        exponent = (a.exponents[step, ..., :, None] + b.exponents[step, ..., None, :]).max(axis=0)
        largest = np.maximum(exponent, exponents_of(accumulator, model.accumulator))
        to_units = power_of_two(model.aligned_fraction_bits - largest)
        # [ACC-3] Terms in units. [ACC-4] Their exact sum.
        total = (terms(product * to_units).sum(axis=0) + terms(accumulator * to_units)) / to_units
        # [ACC-5] The places that are kept of it.
        to_places = to_last_place(total, model)
        accumulator = sums(total * to_places) / to_places + 0.0
    return accumulator.astype(np.float32)
