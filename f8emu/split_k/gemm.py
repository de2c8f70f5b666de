"""What the split-K of a GEMM depends on [PLAN-3], [PLAN-5], and how well it is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import BFLOAT16, E4M3FN, E5M2, HIGH_PRECISION
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity

# Float8 GEMMs with block scales: the name holds the granularity of a, then the one of b
BLOCKWISE_GEMMS = {
    "blockwise_1x128_1x128": (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128),
    "blockwise_1x128_128x128": (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
    "blockwise_128x128_1x128": (Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128),
}
# What multiplies: float8 with scales of some kind, or bfloat16
GEMMS = ("tensorwise", "rowwise", *BLOCKWISE_GEMMS, "bfloat16")
# [CHAIN-1] and [CHAIN-2]; a bfloat16 GEMM has only one accumulation, without a name
ACCUMULATIONS = ("fast", "promoted")
# The names of cuBLAS, whose first operand is `b`: t if K is contiguous in `b`, then n if K is contiguous in `a`
LAYOUTS = ("tn", "nt", "nn", "tt")
_OPERANDS = (E4M3FN.name, E5M2.name)
_OUTPUTS = tuple(fmt.name for fmt in HIGH_PRECISION)
_LONGEST_WHOLE_K = 5120  # of float8 operands [PLAN-2]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGemm:
    """What S depends on; a SpecError refuses a size below 1, or a name that is not known."""

    m: int
    n: int
    k: int
    gemm: str
    accumulation: str = ""
    """The accumulation of float8 operands. Block scales have only one, promoted, which need not be named."""
    layout: str = "tn"
    out_dtype: str
    a_dtype: str = E4M3FN.name
    b_dtype: str = E4M3FN.name  # the dtypes of `a` and `b`, in a float8 GEMM only

    def __post_init__(self) -> None:
        # Plans are read from files: every field is checked by name.
        for name in "mnk":
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise SpecError(f"{name} must be an integer of at least 1; got {size!r}")
        for name, known in (("gemm", GEMMS), ("out_dtype", _OUTPUTS), ("a_dtype", _OPERANDS), ("b_dtype", _OPERANDS)):
            one_of(name, getattr(self, name), known)
        is_float8 = self.gemm != "bfloat16"
        one_of(f"layout of a {self.gemm} GEMM", self.layout, LAYOUTS[:1] if is_float8 else LAYOUTS)
        accumulations = ("", "promoted") if self.is_blockwise else ACCUMULATIONS if is_float8 else ("", *ACCUMULATIONS)
        one_of(f"accumulation of a {self.gemm} GEMM", self.accumulation, accumulations)

    @property
    def is_blockwise(self) -> bool:
        return self.gemm in BLOCKWISE_GEMMS

    @property
    def granularities(self) -> tuple[Granularity, Granularity] | None:
        """The granularities of scale_a and scale_b; None is a bfloat16 GEMM."""
        if self.gemm == "bfloat16":
            return None
        return BLOCKWISE_GEMMS.get(self.gemm) or (Granularity(self.gemm), Granularity(self.gemm))

    @property
    def bytes_of_k(self) -> int:
        return self.k * (2 if self.gemm == "bfloat16" else 1)

    @property
    def table(self) -> str:
        """The name of the recorded rows and of the rule that apply, as in the plan files [PLAN-3]."""
        # The output type of a bfloat16 GEMM makes no difference, nor does the accumulation of a float8 GEMM.
        if self.is_blockwise:
            return self.gemm if self.out_dtype == "float32" else f"{self.gemm} {self.out_dtype}"
        if self.gemm != "bfloat16":
            pair = "" if self.a_dtype == self.b_dtype == E4M3FN.name else f" {self.a_dtype} x {self.b_dtype}"
            return f"{self.gemm}{pair} {self.out_dtype}"
        return f"bfloat16 {self.layout_asked}"

    @property
    def layout_asked(self) -> str:
        """[PLAN-3] As the library sees it: a single row is contiguous in both directions, and no transposed operand."""
        return self.layout[0] + "n" if self.m == 1 else self.layout

    @property
    def rows(self) -> int:
        """M as the library sees it: beside 1x128 scales of `a` rows are padded."""
        is_padded = self.gemm.startswith("blockwise_1x128")
        return self.m + -self.m % HOPPER.vector_multiple if is_padded else self.m

    @property
    def is_aligned(self) -> bool:
        """[PLAN-5] Whether both operands can be read 16 bytes at a time; if not, older kernels run, with another S."""
        rows = self.m if self.table in ("bfloat16 nt", "bfloat16 tt") else _ALIGNED
        return not (rows % _ALIGNED or self.n % 16 or self.k % 16)


def planned_gemm(
    sizes: tuple[int, int, int],
    granularities: tuple[Granularity, Granularity] | None,
    dtypes: tuple[str, str, str],
    *,
    use_fast_accum: bool = False,
    layout: str = "tn",
) -> PlannedGemm:
    """A GEMM of `sizes` M, N and K, each at least 1, whose N and K are zero-padded before the library sees them.

    `granularities` are those of scale_a and scale_b, None of a bfloat16 GEMM; `dtypes` names those of the output, a
    and b; only a bfloat16 GEMM has a `layout`.
    """
    m, n, k = HOPPER.padded_sizes(*sizes)
    if granularities is None:
        return PlannedGemm(m=m, n=n, k=k, gemm="bfloat16", layout=layout, out_dtype=dtypes[0])
    gemm = next((name for name, pair in BLOCKWISE_GEMMS.items() if pair == granularities), granularities[0].value)
    kind = {"gemm": gemm, "accumulation": ACCUMULATIONS[not use_fast_accum]}
    return PlannedGemm(m=m, n=n, k=k, **kind, out_dtype=dtypes[0], a_dtype=dtypes[1], b_dtype=dtypes[2])


def of_call(call: GemmCall, layout: str = "tn") -> PlannedGemm:
    """A call of a GEMM, which is not empty."""
    dtypes = call.out.name, call.formats[0].name, call.formats[1].name
    return planned_gemm(call.sizes, call.granularities, dtypes, use_fast_accum=call.use_fast_accum, layout=layout)


def of_layer(spec: Gemm, sizes: tuple[int, int, int], out_dtype: str, layout: str) -> PlannedGemm:
    """A GEMM of a layer, which is not empty; `sizes` before padding, `layout` counts in high precision."""
    pair = None if spec.is_high_precision else spec.scaled_gemm_granularities
    sizes = sizes if spec.split_k else (unsplit_rows(*sizes), *sizes[1:])
    dtypes = out_dtype, (spec.a.format or BFLOAT16).name, (spec.b.format or BFLOAT16).name
    return planned_gemm(sizes, pair, dtypes, use_fast_accum=spec.use_fast_accum, layout=layout)


def unsplit_rows(m: int, n: int, k: int) -> int:
    """The rows with which a float8 GEMM [m, k] @ [k, n] is not split [PLAN-2], [PLAN-4]: those of zeros included."""
    return m if k <= _LONGEST_WHOLE_K else max(m, -(-_MOST_SPLIT // n))


def one_of(key: str, value: object, known: Sequence[str]) -> None:
    """Raise SpecError unless the value is known."""
    if value not in known:
        raise SpecError(f"{key} must be one of {', '.join(filter(None, known))}; got {value!r}")
