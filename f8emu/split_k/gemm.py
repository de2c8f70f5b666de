"""A GEMM as far as its split-K depends on it [PLAN-3], [PLAN-5], and how well that is known."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import BFLOAT16, E4M3FN, E5M2, FORMATS, HIGH_PRECISION
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.scaling import Granularity

# Float8 GEMMs with block scales: the name holds the granularity of a, then the one of b
BLOCKWISE_GEMMS = {
    "blockwise_1x128_1x128": (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128),
    "blockwise_1x128_128x128": (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
    "blockwise_128x128_1x128": (Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128),
}
# GEMM -> the granularities of scale_a and scale_b; None: bfloat16 operands, without scales
GEMMS = {
    "tensorwise": (Granularity.TENSORWISE, Granularity.TENSORWISE),
    "rowwise": (Granularity.ROWWISE, Granularity.ROWWISE),
    **BLOCKWISE_GEMMS,
    "bfloat16": None,
}
_NAMES = {granularities: name for name, granularities in GEMMS.items()}
# [CHAIN-1] and [CHAIN-2]; a bfloat16 GEMM has only one accumulation, without a name
ACCUMULATIONS = ("fast", "promoted")
# The names of cuBLAS, whose first operand is `b`: t if K is contiguous in `b`, then n if K is contiguous in `a`
LAYOUTS = ("tn", "nt", "nn", "tt")
_OPERANDS = (E4M3FN.name, E5M2.name)
_OUTPUTS = tuple(fmt.name for fmt in HIGH_PRECISION)
LONGEST_WHOLE_K = 5120  # of float8 operands [PLAN-2]
_MOST_SPLIT = 131072  # outputs of a float8 GEMM, of which none with so many is split [PLAN-4]
_ALIGNED = 8  # the number of bfloat16 in 16 bytes


class Source(Enum):
    """How well S is known."""

    RECORDED = "recorded"  # measured for this shape
    PREDICTED = "predicted"  # predicted by the rule
    ASKED = "asked"  # what the library of the GPU at hand says, `f8emu.split_k.ask`
    UNKNOWN = "unknown"  # none of these: S is 1, and the hardware's may be another


class Split(NamedTuple):
    """The plan of one GEMM."""

    split_k: int
    source: Source


UNKNOWN = Split(1, Source.UNKNOWN)


class PlannedGemm(NamedTuple):
    """A GEMM as the library sees it: `planned` makes it of a call, `planned_gemm` of the words of a plan file."""

    call: GemmCall
    """No size is 0, and N and K are zero-padded."""
    layout: str = "tn"
    """One of `LAYOUTS`; float8 has tn alone."""

    def __str__(self) -> str:
        """The words of `planned_gemm`."""
        kind = f"layout={self.layout!r}"
        if self.granularities is not None:
            accumulation = ACCUMULATIONS[not self.call.use_fast_accum]
            a_dtype, b_dtype = (fmt.name for fmt in self.call.formats)
            kind = f"accumulation={accumulation!r}, a_dtype={a_dtype!r}, b_dtype={b_dtype!r}"
        return f"m={self.m}, n={self.n}, k={self.k}, gemm={self.gemm!r}, out_dtype={self.call.out.name!r}, {kind}"

    @property
    def m(self) -> int:
        return self.call.sizes[0]

    @property
    def n(self) -> int:
        return self.call.sizes[1]

    @property
    def k(self) -> int:
        return self.call.sizes[2]

    @property
    def granularities(self) -> tuple[Granularity, Granularity] | None:
        """The granularities of scale_a and scale_b; None for a bfloat16 GEMM."""
        return self.call.granularities

    @property
    def gemm(self) -> str:
        """Its name in `GEMMS`."""
        return _NAMES[self.granularities]

    @property
    def is_blockwise(self) -> bool:
        return self.granularities is not None and self.granularities[0].is_blockwise

    @property
    def bytes_of_k(self) -> int:
        return self.k * (2 if self.granularities is None else 1)

    @property
    def table(self) -> str:
        """The name of the recorded rows and of the rule that apply, as in the plan files [PLAN-3]."""
        # The output type of a bfloat16 GEMM makes no difference, nor does the accumulation of a float8 GEMM.
        if self.granularities is None:
            return f"bfloat16 {self.layout_seen}"
        out, (a, b) = self.call.out.name, self.call.formats
        if self.is_blockwise:
            return self.gemm if out == "float32" else f"{self.gemm} {out}"
        return f"{self.gemm} {out}" if a == b == E4M3FN else f"{self.gemm} {a.name} x {b.name} {out}"

    @property
    def layout_seen(self) -> str:
        """[PLAN-3] As the library sees it: a single row is contiguous in both directions, and no transposed operand."""
        return self.layout[0] + "n" if self.m == 1 else self.layout

    @property
    def rows(self) -> int:
        """M as the library sees it: beside 1x128 scales of `a` rows are padded."""
        is_padded = self.is_blockwise and self.gemm.startswith("blockwise_1x128")
        return self.m + -self.m % HOPPER.vector_multiple if is_padded else self.m

    @property
    def is_aligned(self) -> bool:
        """[PLAN-5] Whether both operands can be read 16 bytes at a time; if not, older kernels run, with another S."""
        rows = self.m if self.table in ("bfloat16 nt", "bfloat16 tt") else _ALIGNED
        return not (rows % _ALIGNED or self.n % 16 or self.k % 16)


def planned(call: GemmCall, layout: str) -> PlannedGemm:
    """A call, which is not empty, as the library sees it; `layout` counts in bfloat16 only."""
    is_float8 = call.granularities is not None
    return PlannedGemm(replace(call, sizes=call.chip.padded_sizes(*call.sizes)), "tn" if is_float8 else layout)


def planned_gemm(
    *,
    m: int,
    n: int,
    k: int,
    gemm: str,
    accumulation: str = "",
    layout: str = "tn",
    out_dtype: str,
    a_dtype: str = E4M3FN.name,
    b_dtype: str = E4M3FN.name,
) -> PlannedGemm:
    """The GEMM of these words; a SpecError refuses a size below 1, or a word that is not known.

    `accumulation` is that of float8 operands; block scales have one alone, promoted, which need not be named. `a_dtype`
    and `b_dtype` are those of a float8 GEMM, `layout` is that of a bfloat16 one.
    """
    # Plans are read from files: every word is checked.
    for name, size in (("m", m), ("n", n), ("k", k)):
        if type(size) is not int or size < 1:
            raise SpecError(f"{name} must be an integer of at least 1; got {size!r}")
    one_of("gemm", gemm, tuple(GEMMS))
    one_of("out_dtype", out_dtype, _OUTPUTS)
    one_of("a_dtype", a_dtype, _OPERANDS)
    one_of("b_dtype", b_dtype, _OPERANDS)
    is_float8 = gemm != "bfloat16"
    one_of(f"layout of a {gemm} GEMM", layout, LAYOUTS[:1] if is_float8 else LAYOUTS)
    accumulations = ACCUMULATIONS if is_float8 else ("", *ACCUMULATIONS)
    if gemm in BLOCKWISE_GEMMS:
        accumulations = ("", "promoted")
    one_of(f"accumulation of a {gemm} GEMM", accumulation, accumulations)
    call = GemmCall(
        call="scaled_mm" if is_float8 else "mm",
        sizes=(m, n, k),
        formats=(FORMATS[a_dtype], FORMATS[b_dtype]) if is_float8 else (BFLOAT16, BFLOAT16),
        granularities=GEMMS[gemm],
        out=FORMATS[out_dtype],
        use_fast_accum=is_float8 and accumulation == "fast",
    )
    return PlannedGemm(call, layout)


def unsplit_rows(m: int, n: int, k: int) -> int:
    """The rows with which a float8 GEMM [m, k] @ [k, n] is not split [PLAN-2], [PLAN-4]: those of zeros included."""
    return m if k <= LONGEST_WHOLE_K else max(m, -(-_MOST_SPLIT // n))


def one_of(key: str, value: object, known: Sequence[str]) -> None:
    """Raise SpecError unless the value is known."""
    if value not in known:
        raise SpecError(f"{key} must be one of {', '.join(filter(None, known))}; got {value!r}")
