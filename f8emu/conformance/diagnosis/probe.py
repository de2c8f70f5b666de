"""What a probe is: a small GEMM with a point, the kinds of GEMM that are probed apart, and what probes share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from f8emu.conformance.diagnosis.altered import Part
from f8emu.conformance.distributions import dtype_of, rng
from f8emu.conformance.gemm import GemmCase
from f8emu.spec import HOPPER, Format, Granularity

SHORT_K, MIDDLE_K, LONG_K = 128, 144, 1024
"""One promotion; a tail of promotion and step; many promotions, but too short for a library to split [PLAN-2]."""


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


def taken_back(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first half of K, and the same products with the other sign in another order: an exact sum of zero."""
    k = a.shape[1] // 2
    order = rng("order", k).permutation(k)
    negative = (b.view(np.uint8)[:, order] ^ 0x80).view(b.dtype)
    return np.concatenate([a[:, :k], a[:, order]], axis=1), np.concatenate([b[:, :k], negative], axis=1)
