"""The order in which a kernel adds along K, read off its outputs alone (the idea of FPRev, arXiv 2411.00442).

A large product M stands at the first place of K and -M at another one, j; every other place has the same tiny product,
which any sum that holds M or -M swallows. The output counts those that were added after M and -M had met. So
`n - count` is how many products the smallest sum has that holds both: the step of a tensor core at first, the chain,
the promoted total, the slice of K, and at last all of it.
"""

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.diagnosis.probes import Kind, Pair, in_type
from f8emu.conformance.diagnosis.rules import Adder
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, MissingExtraError

Formats = tuple[Format, Format]
LEAVES = 128
"""Places of K that hold a product: their count is exact in every output type."""
_LARGE, _SMALL = 2.0**8, 2.0**-9
"""M is 2^16 and the tiny product 2^-18: 128 of them are swallowed by float32 too."""
_NORMAL = {E4M3FN: 2.0**-6, E5M2: 2.0**-14}
"""The smallest normal numbers, for a kernel that takes subnormal codes for zero; with M of 2^23 and E5M2 for a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the outputs tell about adding."""

    adder: Adder | None
    """None: an order that is not known here."""
    step_k: int | None = None
    lanes: int = 1
    promote_k: int | None = None
    split_k: int = 1
    """Slices at the longer of the two K that are looked at."""
    split_length: int | None = None
    is_known: bool = True
    """False: float32 sums in an order that no rules here describe; they take the plain one for it."""
    smallest_sums: tuple[int, ...] = ()
    """`n - count` for each place of the first 128 of K."""

    @property
    def sentence(self) -> str:
        """The same in words."""
        lanes = f"{self.lanes} lanes that take turns" if self.lanes > 1 else "one product after the other"
        unknown = f"an unknown order; smallest sums {self.smallest_sums[1:9]}..."
        return {
            Adder.EXACT: "nothing is lost: exact, or wider than float32",
            Adder.FLOAT32: f"float32, {lanes}" if self.is_known else f"float32, in {unknown}",
            Adder.TENSOR_CORE: f"steps of {self.step_k} products, each on the sum of those before",
            None: unknown,
        }[self.adder]


def _run(
    subject: Subject, kind: Kind, name: str, values: Pair, formats: Formats = (E4M3FN, E4M3FN)
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


def _smallest_sums(subject: Subject, kind: Kind, k: int) -> np.ndarray | None:
    """For each of 128 places along K how many products the smallest sum has that holds it and the first, [128].

    The first entry is 0. None if the subject offers no such GEMM.
    """
    # M and the tiny product are as large as float8 codes allow, or normal where subnormals are lost.
    stride, flushes = k // LEAVES, _flushes_subnormals(subject, kind)
    formats = (E5M2, E4M3FN) if flushes else (E4M3FN, E4M3FN)
    small = [_NORMAL[fmt] if flushes else _SMALL for fmt in formats]
    large = [2.0**15 if fmt is E5M2 else _LARGE for fmt in formats]
    a, b = np.zeros((2, LEAVES, k), np.float32)
    places = np.arange(LEAVES) * stride
    # Row and column j belong together: outputs beside the diagonal are not looked at.
    a[:, places], b[:, places] = small
    a[:, 0], b[:, 0] = large
    a[np.arange(LEAVES), places], b[np.arange(LEAVES), places] = -large[0], large[1]
    output = _run(subject, kind, f"order of adding, K={k}", (a, b), formats)
    if output is None:
        return None
    sums = LEAVES - np.rint(np.diagonal(output) / (small[0] * small[1])).astype(int)
    sums[0] = 0
    return sums


def _flushes_subnormals(subject: Subject, kind: Kind) -> bool:
    """Whether the smallest subnormal code times one gives zero."""
    a, b = np.zeros((2, LEAVES, LEAVES), np.float32)
    a[:, 0], b[:, 0] = _SMALL, 1
    output = _run(subject, kind, "a subnormal code", (a, b))
    return output is not None and not output.any()


def measure_order(subject: Subject, kind: Kind) -> Order | None:
    """The order of adding of one kind of GEMM; None if the subject offers none."""
    # 1. Within 128 of K: the step of a tensor core, or the lanes of float32.
    fine = _smallest_sums(subject, kind, LEAVES)
    if fine is None:
        return None
    found = _of_a_chain(fine)
    if kind.is_blockwise:  # the blocks are summed by the scales' rule
        return found
    # 2. Along a longer K: where chains, promotions and slices end.
    lengths = []
    for k in (4 * LEAVES, 8 * LEAVES):
        coarse = _smallest_sums(subject, kind, k)
        lengths.append(None if coarse is None else _chains(coarse, k // LEAVES))
    short, long = lengths
    if found.adder is Adder.EXACT or short is None or long is None:
        return found
    # 3. A promotion has one length, also where it is too long for the shorter K; slices grow with K.
    inner = next((length for length in long if length in short), None)
    if inner is None and long and not short:
        inner = long[0]
    outer = next((length for length in long if length != inner), None)
    slices = 1 if outer is None else -(-8 * LEAVES // outer)
    return replace(found, promote_k=inner, split_k=slices, split_length=outer)


def aligned_fraction_bits(subject: Subject, kind: Kind) -> int | None:
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


def _of_a_chain(sums: np.ndarray) -> Order:
    told = tuple(int(x) for x in sums)
    if sums.max() <= 2:
        return Order(adder=Adder.EXACT, smallest_sums=told)
    twos = np.flatnonzero(sums[1:] == 2) + 1
    if twos.size:  # one product meets the first alone: one after the other, in lanes
        lanes = int(twos[0])
        is_known = np.array_equal(sums[lanes::lanes], np.arange(2, 2 + len(sums[lanes::lanes])))
        lanes = lanes if is_known else 1
        return Order(adder=Adder.FLOAT32, lanes=lanes, is_known=is_known, smallest_sums=told)
    step = int(np.argmax(sums[1:] != sums[1])) + 1 if (sums[1:] != sums[1]).any() else len(sums)
    if sums[1] == step:
        return Order(adder=Adder.TENSOR_CORE, step_k=step, smallest_sums=told)
    return Order(adder=None, smallest_sums=told)


def _chains(sums: np.ndarray, stride: int) -> list[int]:
    """The lengths of chains within the whole, short ones first: where a run of places begins that meet the first
    product all at once, as far from it as the run is long.
    """
    # 1. Runs of places with one smallest sum. 2. Each that is longer than all before, and not cut off, is a chain.
    runs, start, found = [], 0, []
    for _, group in groupby([int(sums[1]), *sums[1:].tolist()]):  # the first place belongs to the first run
        length = len(list(group))
        runs.append((start, length))
        start += length
    longest = runs[0][1]
    for start, length in runs[1:]:
        if length > longest and length >= min(start, LEAVES - start):
            found.append(start * stride)
            longest = length
    return found
