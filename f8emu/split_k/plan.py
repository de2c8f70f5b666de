"""The split-K of a library, as data [PLAN-1..7]: the `split_k` that a GEMM's bits depend on.

cuBLAS chooses S from M, N, K, the layout and the types, by a heuristic that depends on its version and on the chip
[CHAIN-3]. Recorded shapes are looked up. For other shapes S is predicted by decision trees. The trees were fitted to
the heuristic's answers for other shapes, so that all recorded rows test them. Everything is in `data/`: for each chip
and library one file, and a second one that is read when it is needed, with the trees that only a bare bfloat16 `mm` in
tn, nn or tt asks.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import NamedTuple

from f8emu.spec.chip import Chip
from f8emu.spec.chips import H100, HOPPER
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import E4M3FN, E5M2, HIGH_PRECISION
from f8emu.spec.scaling import Granularity

BLOCKWISE_GEMMS = {
    "blockwise_1x128_1x128": (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128),
    "blockwise_1x128_128x128": (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128),
    "blockwise_128x128_1x128": (Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128),
}
"""Float8 GEMMs with block scales: the name holds the granularity of a, then the one of b."""
GEMMS = ("tensorwise", "rowwise", *BLOCKWISE_GEMMS, "bfloat16")
"""What multiplies: float8 with scales of some kind, or bfloat16."""
ACCUMULATIONS = ("fast", "promoted")
"""[CHAIN-1] and [CHAIN-2]; a bfloat16 GEMM has only one accumulation, without a name."""
LAYOUTS = ("tn", "nt", "nn", "tt")
"""The names of cuBLAS, whose first operand is `b`: t if K is contiguous in `b`, then n if K is contiguous in `a`."""
LIBRARY = "cuBLAS 13.1.0.3"
CHIP = HOPPER.plan
_OPERANDS = (E4M3FN.name, E5M2.name)
_OUTPUTS = tuple(fmt.name for fmt in HIGH_PRECISION)
_ALIGNED = 8
"""The number of bfloat16 in 16 bytes."""

MAX_M, MAX_N, MAX_K = 8192, 32768, 32768
"""[PLAN-4] The range of the shapes on which the trees were fitted."""


class Source(Enum):
    """How well S is known."""

    RECORDED = "recorded"
    """Measured for this shape."""
    PREDICTED = "predicted"
    """Predicted by the rule."""
    ASKED = "asked"
    """What the library of the GPU at hand says, `f8emu.split_k.ask`."""
    UNKNOWN = "unknown"
    """None of these: S is 1, and the hardware's may be another."""


class Split(NamedTuple):
    """The plan of one GEMM."""

    split_k: int
    source: Source


_UNKNOWN = Split(1, Source.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGemm:
    """What S depends on.

    Raises:
        SpecError: a size below 1, or a name that is not known.
    """

    m: int
    n: int
    k: int
    gemm: str
    accumulation: str = ""
    """The accumulation of float8 operands. Block scales have only one, promoted, which need not be named."""
    layout: str = "tn"
    out_dtype: str
    a_dtype: str = E4M3FN.name
    b_dtype: str = E4M3FN.name
    """The dtypes of `a` and `b`, in a float8 GEMM only."""

    def __post_init__(self) -> None:
        for name in "mnk":
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise SpecError(f"{name} must be an integer of at least 1; got {size!r}")
        _one_of("gemm", self.gemm, GEMMS)
        _one_of("out_dtype", self.out_dtype, _OUTPUTS)
        _one_of("a_dtype", self.a_dtype, _OPERANDS)
        _one_of("b_dtype", self.b_dtype, _OPERANDS)
        if self.gemm == "bfloat16":
            _one_of("layout", self.layout, LAYOUTS)
            _one_of("accumulation", self.accumulation, ("", *ACCUMULATIONS))
        else:
            _one_of("layout of a float8 GEMM", self.layout, ("tn",))
            known = ("", "promoted") if self.is_blockwise else ACCUMULATIONS
            _one_of(f"accumulation of a {self.gemm} GEMM", self.accumulation, known)

    @property
    def is_blockwise(self) -> bool:
        return self.gemm in BLOCKWISE_GEMMS

    @property
    def bytes_of_k(self) -> int:
        """The bytes of K in one row of an operand."""
        return self.k * (2 if self.gemm == "bfloat16" else 1)

    @property
    def table(self) -> str:
        """The name of the recorded rows and of the rule that apply.

        [PLAN-3] The output type of a bfloat16 GEMM makes no difference, nor does the accumulation of a float8 GEMM.
        """
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


def scaled_gemm_name(granularities: tuple[Granularity, Granularity]) -> str:
    """`PlannedGemm.gemm` of float8 operands whose scales are of these kinds (a, b)."""
    for name, pair in BLOCKWISE_GEMMS.items():
        if pair == granularities:
            return name
    return granularities[0].value


def _one_of(key: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise SpecError(f"{key} must be one of {', '.join(filter(None, known))}; got {value!r}")


PLAIN_FEATURES = (
    *("m", "n", "k", "m n", "power of two in m", "power of two in n", "power of two in k"),
    *("slices by k", "slices"),
)
"""A power of two is the largest one, up to 128, that divides a size: so rows lie in memory. Slices by K are the most
that [PLAN-2] leaves, slices the most that [PLAN-2] and [PLAN-4] leave."""
Feature = str | tuple[int, int] | tuple[int, int, str, int]
"""A question of a tree about a GEMM: one of `PLAIN_FEATURES`; (n, m): of how many tiles of n by m the output consists;
(n, m, "at least", blocks): the fewest slices with so many tiles; (n, m, "at most", blocks): the most slices with no
more tiles. Neither is above slices."""
LEAF = 128


class Tree(NamedTuple):
    """A decision tree over integers, its nodes in preorder. The first branch is taken up to the limit."""

    codes: bytes
    """128 + S of a leaf, or the index of a feature."""
    to_come: bytes
    """The number of subtrees that start at a node or behind it: one more after an inner node, one less after a leaf."""
    limits: Sequence[int]
    """The limits of the inner nodes."""

    def split_k(self, value: Callable[[int], int]) -> int:
        """S, where `value` gives a feature by its index."""
        codes, to_come, limits = self
        at = 0
        while (code := codes[at]) < LEAF:
            # Inner nodes before this one: all before it are inner nodes or leaves, and to_come is 1 + their difference.
            inner = (at + to_come[at] - 1) // 2
            # The second branch starts where as many subtrees are to come as here: the first branch adds one.
            at = at + 1 if value(code) <= limits[inner] else to_come.find(to_come[at], at + 1)
        return code - LEAF


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTree:
    """S of a tree, and no more than [PLAN-2] and [PLAN-4] leave."""

    tree: Callable[[], Tree]
    """Decodes the tree when it is first asked for.

    Raises:
        SpecError: the file is damaged.
    """
    features: tuple[Feature, ...]
    workspace_bytes: int
    """[PLAN-4] The float32 results of all slices take less."""
    slice_bytes: int
    """The plan's `slice_bytes`."""

    def split_k(self, gemm: PlannedGemm) -> int:
        """S of a shape."""
        by_k = _most_slices(gemm, self.slice_bytes)
        slices = min(by_k, _most_stored(gemm, self.workspace_bytes))
        if slices == 1:
            return 1

        sizes = (gemm.rows, gemm.n, gemm.k)
        plain = (*sizes, gemm.rows * gemm.n, *map(_power_of_two, sizes), by_k, slices)
        plain_features = dict(zip(PLAIN_FEATURES, plain, strict=True))

        def value(index: int) -> int:
            feature = self.features[index]
            if isinstance(feature, str):
                return plain_features[feature]
            tiles = _tiles(gemm, feature[:2])
            if len(feature) == 2:
                return tiles
            return min(slices, -(-feature[3] // tiles) if feature[2] == "at least" else feature[3] // tiles)

        return min(self.tree().split_k(value), slices)


def _power_of_two(size: int) -> int:
    """The largest one, up to 128, that divides a size."""
    return min(size & -size, 128)


def _most_slices(gemm: PlannedGemm, slice_bytes: int) -> int:
    """[PLAN-2] How many slices of more than `slice_bytes` there are room for."""
    return max(1, (gemm.bytes_of_k - 1) // slice_bytes)


def _most_stored(gemm: PlannedGemm, workspace_bytes: int) -> int:
    """How many slices have float32 results of less than `workspace_bytes`; one slice stores none."""
    return max(1, (workspace_bytes - 1) // (gemm.rows * gemm.n * 4))


def _tiles(gemm: PlannedGemm, tile: Sequence[int]) -> int:
    return -(-gemm.n // tile[0]) * -(-gemm.rows // tile[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one library on one chip."""

    library: str
    chip: str
    torch: str = ""
    """The version of torch that called the library."""
    recorded: Mapping[tuple[str, int, int, int], int]
    """(table, M, N, K) -> S."""
    rules: Mapping[str, FittedTree] = field(default_factory=dict[str, FittedTree])
    more_rules: Callable[[], Mapping[str, FittedTree]] = field(default=dict[str, FittedTree], compare=False)
    """Those that are read when a GEMM has none in `rules`."""
    slice_bytes: int | None = None
    """[PLAN-2] A slice of K is longer than this; None in a file that holds recorded shapes only."""

    def split_k(self, gemm: PlannedGemm) -> Split:
        """S of a GEMM: looked up if it was recorded, else predicted."""
        found = self.recorded.get((gemm.table, gemm.rows, gemm.n, gemm.k))
        return self.predicted(gemm) if found is None else Split(found, Source.RECORDED)

    def over(self, base: "Plan") -> "Plan":
        """This plan, with what `base` knows besides if both are of the same library and chip."""
        if (self.library, self.chip) != (base.library, base.chip):
            return self
        return replace(base, recorded={**base.recorded, **self.recorded})

    def predicted(self, gemm: PlannedGemm) -> Split:
        """S of a GEMM by the rule alone; unknown beyond the range of the rule."""
        if self.slice_bytes is None or not gemm.is_aligned:
            return _UNKNOWN
        if gemm.gemm == "rowwise" or gemm.bytes_of_k <= 2 * self.slice_bytes:
            return Split(1, Source.PREDICTED)
        if gemm.k > MAX_K:
            return _UNKNOWN
        # [PLAN-6] Of block scales, float16 outputs have the rule of bfloat16 ones.
        rule = self.rules.get(gemm.table) or self.rules.get(f"{gemm.gemm} bfloat16")
        rule = rule or self.more_rules().get(gemm.table)
        if rule is None:
            return _UNKNOWN
        if 8 * gemm.rows * gemm.n >= rule.workspace_bytes:  # [PLAN-4]: two slices would not fit
            return Split(1, Source.PREDICTED)
        if gemm.m > MAX_M or gemm.n > MAX_N:
            return _UNKNOWN
        return Split(rule.split_k(gemm), Source.PREDICTED)


def split_k(gemm: PlannedGemm, *, library: str = LIBRARY, chip: str = CHIP) -> Split:
    """The number of slices S into which `library` cuts K on `chip`, and how well S is known.

    Exactness: recorded shapes as measured; the others as accurate as `reference/NUMERICS.md` 10 says.

    Raises:
        SpecError: the plan file of this installation is damaged.
    """
    return shipped_plan(chip).split_k(gemm) if library == LIBRARY and chip in PLANS else _UNKNOWN


def is_planned(caller: str, chip: Chip) -> bool:
    """Whether there is a plan for the GEMMs of `chip`; if not, S is 1 of unknown source, and a warning says so once."""
    if not chip.plan:
        warn_without_plan(caller, str(chip))
    return bool(chip.plan)


def plans_of(chips: Iterable[Chip]) -> str:
    """The plans of some chips, in words for a report."""
    return " and ".join(sorted({f"{LIBRARY} on {chip.plan}" for chip in chips if chip.plan})) or "none"


@cache
def warn_without_plan(caller: str, chip: str) -> None:
    """Warn that S of a chip's GEMMs is not known."""
    warnings.warn(
        f"{caller}: there is no split-K plan for {chip}; its GEMMs are emulated without split-K. Pass split_k if you "
        "know it. This warning appears once",
        stacklevel=3,
    )


PLANS = {HOPPER.plan: "h200_cublas_13_1_0_3_split_k", H100.plan: "h100_cublas_13_1_0_3_split_k"}
"""GPU -> the name of its file."""


@cache
def shipped_plan(chip: str = CHIP) -> Plan:
    """The plan for a chip that f8emu comes with, read once.

    Raises:
        SpecError: a chip without one, or the file is damaged.
    """
    _one_of("chip", chip, tuple(PLANS))
    return replace(_read(PLANS[chip]), more_rules=lambda: _read(f"{PLANS[chip]}_mm").rules)


@cache
def _read(name: str) -> Plan:
    from importlib.resources import files

    from f8emu.split_k.tables import plan_from_json

    return plan_from_json((files("f8emu.split_k") / "data" / f"{name}.json").read_text(encoding="utf-8"), name)
