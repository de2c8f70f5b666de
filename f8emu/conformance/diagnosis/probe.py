"""What a probe is: a small GEMM with a point, the kinds of GEMM that are probed apart, and what probes share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of, rng
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.diagnosis.reading import Part
from f8emu.spec import E4M3FN, HOPPER, Format, Granularity

SHORT_K, MIDDLE_K, LONG_K = 128, 240, 2304
"""One promotion; a tail of promotion and step; many promotions, but too short for a library to split [PLAN-2].

Rounded down to a multiple of 32, 64, 128 and 256, 240 is another number each time. Slices of 2304, in multiples of 128,
are 1152, 768, 640 and 384 long: none is a promotion that the suite knows.
"""
MANY = 288
"""Rows or columns of several tiles, of 256 too, the last one not full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A family of GEMMs that a kernel may treat in its own way."""

    pair: tuple[Granularity, Granularity]
    use_fast_accum: bool
    with_bias: bool

    @property
    def name(self) -> str:
        if self.pair[0].is_blockwise:
            return f"{self.pair[0].value} x {self.pair[1].value}"
        chain = "fast" if self.use_fast_accum else "promoted"
        return f"{self.pair[0].value} {chain}" + (" with bias" if self.with_bias else "")


KINDS: tuple[Kind, ...] = (
    *(
        Kind(pair=(granularity, granularity), use_fast_accum=fast, with_bias=with_bias)
        for granularity in (Granularity.TENSORWISE, Granularity.ROWWISE)
        for with_bias in (False, True)
        for fast in (True, False)
    ),
    *(
        Kind(pair=pair, use_fast_accum=False, with_bias=False)
        for pair in HOPPER.granularity_pairs
        if pair[0].is_blockwise
    ),
)
"""What is diagnosed apart, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One GEMM, in the output types that show its point; of several the first that the subject offers, or all."""

    case: GemmCase
    out_dtypes: tuple[Format, ...]
    needs_all: bool = False
    at: Part | None = None
    """The outputs that are looked at."""

    def cases(self) -> Iterator[GemmCase]:
        """The GEMM in each of its output types."""
        for fmt in self.out_dtypes:
            bias = None if self.case.bias is None else self.case.bias.astype(dtype_of(fmt))
            yield replace(self.case, id=f"{self.case.id} -> {fmt}", out_dtype=fmt, bias=bias)


def codes_of_values(x: np.ndarray) -> np.ndarray:
    """E4M3 codes of numbers that have one."""
    return x.astype(np.float32).astype(dtype_of(E4M3FN))


def known(integers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Operands whose accumulator is `integers` [M], below 2^14, in every column; exact under any rule of adding.

    Both have as many rows as there are integers.
    """
    a, b = np.zeros((2, len(integers), SHORT_K), np.float32)
    for place, shift in enumerate((12, 8, 4, 0)):
        a[:, place] = (integers >> shift) % 16 * (16 if place == 0 else 1)
    b[:, :4] = (256, 256, 16, 1)  # weights of the four digits: (d3 * 16, d2, d1, d0)
    return codes_of_values(a), codes_of_values(b)


def tie_of_a_step(fmt: Format, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands of one step, at the end of K, whose sum is a tie of a 16-bit type and 2^-7, 2^-8, ... in the rows.

    The tie lies above an even number, so that it goes down unless the sum of the step keeps what is beyond it: what
    a cut to 13 bits loses shows through 16 bits. The largest exponent of a product is 0, of the sum 5: terms are
    multiples of 2^-13, and the last place that is kept is 2^-8.
    """
    a, b = np.zeros((2, rows, SHORT_K), np.float32)
    a[:, -30:], b[:, -30:] = 1, 1
    a[:, -4:] = 1.5
    a[:, -31], b[:, -31] = 1, 2.0 ** (4 - fmt.fraction_bits)
    a[:, -32], b[:, -32] = 2.0 ** -(1 + np.arange(rows) % 8), 2.0**-6
    return codes_of_values(a), codes_of_values(b)


def alternating(x: np.ndarray) -> np.ndarray:
    """Every second number with the other sign, the first one too."""
    signs = np.where(np.arange(x.size) % 2 == 0, -1, 1).astype(x.dtype)
    return x * signs.reshape(x.shape)


def taken_back(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first half of K, and the same products with the other sign in another order: an exact sum of zero."""
    k = a.shape[1] // 2
    order = rng("order", k).permutation(k)
    negative = (b.view(np.uint8)[:, order] ^ 0x80).view(b.dtype)
    return np.concatenate([a[:, :k], a[:, order]], axis=1), np.concatenate([b[:, :k], negative], axis=1)
