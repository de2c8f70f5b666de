"""The order in which a kernel adds along K, read off its outputs alone (the idea of FPRev, arXiv 2411.00442).

A large product M stands at the first place of K and -M at another one, j; every other place has the same tiny product,
which any sum that holds M or -M swallows. The output counts those that were added after M and -M had met. So
`n - count` is how many products the smallest sum has that holds both: the step of a tensor core at first, the chain,
the promoted total, the slice of K, and at last all of it.
"""

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.diagnosis.probes import GemmKind, Pair, in_type
from f8emu.conformance.diagnosis.rules import Adder, Rules
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, MissingExtraError

LEAVES = 128
"""Places of K that hold a product: their count is exact in every output type."""
_LARGE, _SMALL = 2.0**8, 2.0**-9
"""M is 2^16 and the tiny product 2^-18: 128 of them are swallowed by float32 too."""


class Measured(NamedTuple):
    """One parameter of a kernel."""

    name: str
    value: str
    evidence: str
    """How it was measured."""


def measure_order(subject: Subject, kind: GemmKind, right: Rules) -> tuple[Rules, list[Measured]]:
    """`right` with the rules of adding that crafted operands tell, and what they tell."""
    # 1. Within 128 of K: the step of a tensor core, or the lanes of float32.
    fine = _smallest_sums(subject, kind, LEAVES)
    if fine is None:
        return right, [Measured("order of adding", "not told", "no such GEMM is offered")]
    rules, step, sentence = _of_a_chain(fine, right)
    values = {"order of adding": sentence}
    # 2. Along a longer K: where chains, promotions and slices end. Blocks are summed by the scales' rule.
    inner = outer = None
    if not kind.is_blockwise:
        if rules.adder is not Adder.EXACT:
            inner, outer = _lengths(subject, kind)
        values["promotion to float32"] = f"every {inner} of K" if inner else "one chain over all of K"
        values["split of K"] = f"slices of {outer} at K = {8 * LEAVES}" if outer else "none"
    model = replace(rules.model, promote_k=inner)
    evidence = "M and -M at two places of K, equal tiny products at all others, counted"
    measured = [Measured(name, value, evidence) for name, value in values.items()]
    # 3. The bits of a term.
    if step is not None:
        model = replace(model, step_k=step)
        bits = _aligned_fraction_bits(subject, kind)
        if bits is not None:
            model = replace(model, aligned_fraction_bits=bits)
            measured.append(Measured("fraction bits of a term", str(bits), "M, 2^-j M and -M in one step"))
    return replace(rules, model=model, split_k=-(-8 * LEAVES // outer) if outer else 1), measured


def _of_a_chain(sums: np.ndarray, rules: Rules) -> tuple[Rules, int | None, str]:
    """The adder of a chain within 128 of K, the step of a tensor core, and both in words."""
    unknown = f"an unknown order; smallest sums {tuple(sums[1:9].tolist())}..."
    if sums.max() <= 2:
        return replace(rules, adder=Adder.EXACT), None, "nothing is lost: exact, or wider than float32"
    twos = np.flatnonzero(sums[1:] == 2) + 1
    if twos.size:  # one product meets the first alone: one after the other, in lanes
        lanes = int(twos[0])
        rules = replace(rules, adder=Adder.FLOAT32)
        if not np.array_equal(sums[lanes::lanes], np.arange(2, 2 + len(sums[lanes::lanes]))):
            return rules, None, f"float32, in {unknown}"  # the plain order stands for it
        order = f"{lanes} lanes that take turns" if lanes > 1 else "one product after the other"
        return replace(rules, lanes=lanes), None, f"float32, {order}"
    step = _runs(sums)[0]
    if sums[1] != step:
        return rules, None, unknown
    return rules, step, f"steps of {step} products, each on the sum of those before"


def _lengths(subject: Subject, kind: GemmKind) -> tuple[int | None, int | None]:
    """The length of a promotion, and that of a slice at the longer K."""
    few, many = (_smallest_sums(subject, kind, k) for k in (4 * LEAVES, 8 * LEAVES))
    if few is None or many is None:
        return None, None
    short, long = _chains(few, 4), _chains(many, 8)
    # A promotion has one length, also where it is too long for the shorter K; slices grow with K.
    inner = next((length for length in long if length in short), None)
    if inner is None and long and not short:
        inner = long[0]
    return inner, next((length for length in long if length != inner), None)


def _runs(sums: np.ndarray) -> list[int]:
    """How many places in a row have one smallest sum; the first place belongs to the first run."""
    return [len(list(group)) for _, group in groupby([sums[1], *sums[1:]])]


def _chains(sums: np.ndarray, stride: int) -> list[int]:
    """The lengths of chains within the whole, short ones first: where a run of places begins that meet the first
    product all at once, as far from it as the run is long.
    """
    runs, lengths = _runs(sums), list[int]()
    start = longest = runs[0]
    for length in runs[1:]:
        # Longer than all before, and not cut off.
        if length > longest and length >= min(start, LEAVES - start):
            lengths.append(start * stride)
            longest = length
        start += length
    return lengths


def _smallest_sums(subject: Subject, kind: GemmKind, k: int) -> np.ndarray | None:
    """For each of 128 places along K how many products the smallest sum has that holds it and the first, [128].

    The first entry is 0. None if the subject offers no such GEMM.
    """
    # 1. M and the tiny product, as large as float8 codes allow; or normal, and E5M2 for a, where subnormals are lost.
    a, b = np.zeros((2, LEAVES, LEAVES), np.float32)
    a[:, 0], b[:, 0] = _SMALL, 1
    product = _run(subject, kind, "a subnormal code", (a, b))
    flushes = product is not None and not product.any()
    formats = (E5M2, E4M3FN) if flushes else (E4M3FN, E4M3FN)
    small = (2.0**-14, 2.0**-6) if flushes else (_SMALL, _SMALL)
    large = (2.0**15, _LARGE) if flushes else (_LARGE, _LARGE)
    # 2. Row and column j belong together: outputs beside the diagonal are not looked at.
    a, b = np.zeros((2, LEAVES, k), np.float32)
    places = np.arange(LEAVES) * (k // LEAVES)
    a[:, places], b[:, places] = small
    a[:, 0], b[:, 0] = large
    a[np.arange(LEAVES), places], b[np.arange(LEAVES), places] = -large[0], large[1]
    output = _run(subject, kind, f"order of adding, K={k}", (a, b), formats)
    if output is None:
        return None
    sums = LEAVES - np.rint(np.diagonal(output) / (small[0] * small[1])).astype(int)
    sums[0] = 0
    return sums


def _aligned_fraction_bits(subject: Subject, kind: GemmKind) -> int | None:
    """How far below the largest term of a step a smaller one survives: M, 2^-j M and -M in one step."""
    count = 34
    exponents = np.arange(count)
    a, b = np.zeros((2, LEAVES if kind.is_blockwise else 48, LEAVES), np.float32)  # rows that any kernel takes
    a[:count, 0], b[:count, 0] = _LARGE, _LARGE
    a[:count, 1], b[:count, 1] = 2.0 ** (8 - exponents // 2), 2.0 ** (8 - (exponents + 1) // 2)
    a[:count, 2], b[:count, 2] = -_LARGE, _LARGE
    output = _run(subject, kind, "bits of a term", (a, b))
    if output is None:
        return None
    survives = np.diagonal(output)[:count] != 0
    return int(np.argmin(survives)) - 1 if not survives.all() else None


def _run(
    subject: Subject, kind: GemmKind, name: str, values: Pair, formats: tuple[Format, Format] = (E4M3FN, E4M3FN)
) -> np.ndarray | None:
    """The output as float64, in the widest type that the subject offers, all scales one; None if it offers none."""
    a, b = (x.astype(np.float32).astype(dtype_of(fmt)) for x, fmt in zip(values, formats, strict=True))
    case = kind.gemm(name, (a, b))
    for fmt in (FLOAT32, BFLOAT16, FLOAT16):
        try:
            return subject.gemm(in_type(case, fmt)).astype(np.float64)
        except (NotOffered, MissingExtraError, NotImplementedError):
            continue
        except ValueError:  # f8emu's own: no bias beside float32
            if fmt == FLOAT16:
                raise
    return None
