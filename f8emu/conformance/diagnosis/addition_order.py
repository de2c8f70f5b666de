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
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.diagnosis.probe import Kind
from f8emu.conformance.diagnosis.rules import Adder
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, MissingExtraError

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
        match self.adder:
            case Adder.EXACT:
                return "nothing is lost: exact, or wider than float32"
            case Adder.FLOAT32 if not self.is_known:
                return f"float32, in an unknown order; smallest sums {self.smallest_sums[1:9]}..."
            case Adder.FLOAT32:
                lanes = f"{self.lanes} lanes that take turns" if self.lanes > 1 else "one product after the other"
                return f"float32, {lanes}"
            case Adder.TENSOR_CORE:
                return f"steps of {self.step_k} products, each on the sum of those before"
        return f"an unknown order; smallest sums {self.smallest_sums[1:9]}..."


def ones_case(
    kind: Kind, a: np.ndarray, b: np.ndarray, out_dtype: Format, name: str, bias: np.ndarray | None = None
) -> GemmCase:
    """A GEMM of that kind with all scales one."""
    pair, k = kind.pair, a.shape[1]
    if kind.with_bias and bias is None:
        bias = np.zeros(len(b), dtype_of(out_dtype))
    return GemmCase(
        id=name,
        mode=Mode.BLOCKWISE if pair[0].is_blockwise else Mode(pair[0].value),
        a=a,
        b=b,
        scale_a=np.ones(pair[0].scale_shape(len(a), k), np.float32),
        scale_b=np.ones(pair[1].scale_shape(len(b), k), np.float32).T,
        granularity_a=pair[0],
        granularity_b=pair[1],
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=kind.use_fast_accum,
    )


def run(subject: Subject, case: GemmCase) -> np.ndarray | None:
    """The output as float64, in the widest type that the subject offers; None if it offers none."""
    for fmt in (FLOAT32, BFLOAT16, FLOAT16):
        bias = None if case.bias is None else case.bias.astype(dtype_of(fmt))
        try:
            return subject.gemm(replace(case, out_dtype=fmt, bias=bias)).astype(np.float64)
        except (NotOffered, MissingExtraError, NotImplementedError):
            continue
        except ValueError:  # f8emu's own: no bias beside float32
            if fmt == FLOAT16:
                raise
    return None


def smallest_sums(subject: Subject, kind: Kind, k: int) -> np.ndarray | None:
    """For each of 128 places along K how many products the smallest sum has that holds it and the first, [128].

    The first entry is 0. None if the subject offers no such GEMM.
    """
    stride, flushes = k // LEAVES, flushes_subnormals(subject, kind)
    formats = (E5M2, E4M3FN) if flushes else (E4M3FN, E4M3FN)
    small = [_NORMAL[fmt] if flushes else _SMALL for fmt in formats]
    large = [2.0**15 if fmt is E5M2 else _LARGE for fmt in formats]
    a, b = np.zeros((LEAVES, k), np.float32), np.zeros((LEAVES, k), np.float32)
    places = np.arange(LEAVES) * stride
    # Row and column j belong together: outputs beside the diagonal are not looked at.
    a[:, places], b[:, places] = small
    a[:, 0], b[:, 0] = large
    a[np.arange(LEAVES), places], b[np.arange(LEAVES), places] = -large[0], large[1]
    codes = [x.astype(dtype_of(fmt)) for x, fmt in zip((a, b), formats, strict=True)]
    output = run(subject, ones_case(kind, codes[0], codes[1], FLOAT32, f"order of adding, K={k}"))
    if output is None:
        return None
    sums = LEAVES - np.rint(np.diagonal(output) / (small[0] * small[1])).astype(int)
    sums[0] = 0
    return sums


def flushes_subnormals(subject: Subject, kind: Kind) -> bool:
    """Whether the smallest subnormal code times one gives zero."""
    a, b = np.zeros((LEAVES, LEAVES), np.float32), np.zeros((LEAVES, LEAVES), np.float32)
    a[:, 0], b[:, 0] = _SMALL, 1
    e4m3 = dtype_of(E4M3FN)
    output = run(subject, ones_case(kind, a.astype(e4m3), b.astype(e4m3), FLOAT32, "a subnormal code"))
    return output is not None and not output.any()


def measure_order(subject: Subject, kind: Kind) -> Order | None:
    """The order of adding of one kind of GEMM; None if the subject offers none."""
    fine = smallest_sums(subject, kind, LEAVES)
    if fine is None:
        return None
    found = _of_a_chain(fine)
    if kind.pair[0].is_blockwise:  # the blocks are summed by the scales' rule
        return found
    lengths = []
    for k in (4 * LEAVES, 8 * LEAVES):
        coarse = smallest_sums(subject, kind, k)
        lengths.append(None if coarse is None else _chains(coarse, k // LEAVES))
    short, long = lengths
    if found.adder is Adder.EXACT or short is None or long is None:
        return found
    # A promotion has one length, also where it is too long for the shorter K; slices grow with K.
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
    a, b = np.zeros((count, LEAVES), np.float32), np.zeros((count, LEAVES), np.float32)
    a[:, 0], b[:, 0] = _LARGE, _LARGE
    a[:, 1], b[:, 1] = 2.0 ** (8 - exponents // 2), 2.0 ** (8 - (exponents + 1) // 2)
    a[:, 2], b[:, 2] = -_LARGE, _LARGE
    rows = -(-count // 16) * 16 if not kind.pair[0].is_blockwise else LEAVES
    a, b = (np.concatenate([x, np.zeros((rows - count, LEAVES), np.float32)]) for x in (a, b))
    e4m3 = dtype_of(E4M3FN)
    output = run(subject, ones_case(kind, a.astype(e4m3), b.astype(e4m3), FLOAT32, "bits of a term"))
    if output is None:
        return None
    survives = np.diagonal(output)[:count] != 0
    return int(np.argmin(survives)) - 1 if not survives.all() else None


def _of_a_chain(sums: np.ndarray) -> Order:
    told = tuple(int(x) for x in sums)
    if sums.max() <= 2:
        return Order(adder=Adder.EXACT, smallest_sums=told)
    twos = np.flatnonzero(sums[1:] == 2) + 1
    if twos.size:  # somebody meets the first product alone: one after the other, in lanes
        lanes = int(twos[0])
        is_known = np.array_equal(sums[lanes::lanes], np.arange(2, 2 + len(sums[lanes::lanes])))
        return Order(
            adder=Adder.FLOAT32, lanes=lanes if is_known else 1, is_known=is_known, smallest_sums=told
        )  # fmt: skip
    step = int(np.argmax(sums[1:] != sums[1])) + 1 if (sums[1:] != sums[1]).any() else len(sums)
    if sums[1] == step:
        return Order(adder=Adder.TENSOR_CORE, step_k=step, smallest_sums=told)
    return Order(adder=None, smallest_sums=told)


def _chains(sums: np.ndarray, stride: int) -> list[int]:
    """The lengths of chains within the whole, short ones first: where a run of places begins that meet the first
    product all at once, as far from it as the run is long.
    """
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
