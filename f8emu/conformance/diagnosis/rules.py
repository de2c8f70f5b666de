"""What a scaled GEMM does, as data: how it adds, scales, adds the bias, rounds, and what it misreads.

The right rules are those of a chip (`rules_of`). A wrong kernel is described by other values of the same fields, and
`product.product` gives its bits. Rule ids: reference/NUMERICS.md.
"""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.spec import AccumulationModel, Chip, FlooredSum, Format, Granularity


class Adder(Enum):
    """What adds the products of one chain."""

    TENSOR_CORE = "tensor core"
    """Steps of aligned and cut terms [ACC-1..5]."""
    FLOAT32 = "float32"
    """One product after the other, each sum rounded to float32, nearest even."""
    EXACT = "exact"
    """Exactly, then rounded once to float32."""


class Rounding(Enum):
    """What becomes of the bits that do not fit."""

    CUT = "cut toward zero"
    CUT_BFLOAT16 = "cut toward zero in bfloat16, nearest even in other types"
    NEAREST = "nearest even"
    NEAREST_AWAY = "nearest, ties away from zero"


class ScaleOrder(Enum):
    """Where the scales are multiplied; p is the accumulator of one block of K, total the float32 sum of blocks."""

    PRODUCT = "acc * (sa * sb)"
    COLUMN_FIRST = "(acc * sb) * sa"
    ROW_FIRST = "(acc * sa) * sb"
    FMA_PRODUCT = "fma(p, sa * sb, total)"
    FMA_ROW_FIRST = "fma(p * sa, sb, total)"
    FMA_COLUMN_FIRST = "fma(p * sb, sa, total)"
    BEFORE_DOT = "before the dot: (a * sa) @ (b * sb) in float32, each product added by FMA"
    BEFORE_DOT_BFLOAT16 = "before the dot: (a * sa) @ (b * sb) in bfloat16"
    EACH_PRODUCT = "on each product: the float32 sum of (a * b * sa) * sb, every step rounded"
    AFTER_OUTPUT = "after the output type: round(acc) * (sa * sb)"

    @property
    def is_before_dot(self) -> bool:
        return self in (ScaleOrder.BEFORE_DOT, ScaleOrder.BEFORE_DOT_BFLOAT16, ScaleOrder.EACH_PRODUCT)

    @property
    def is_fused(self) -> bool:
        return self in (ScaleOrder.FMA_PRODUCT, ScaleOrder.FMA_ROW_FIRST, ScaleOrder.FMA_COLUMN_FIRST)


class BiasRule(Enum):
    """Where the bias is added."""

    ADDED = "after the scales, a rounding of its own"
    FUSED = "in one rounding with the last scale"
    BEFORE_SCALES = "to the accumulator, before the scales"
    AFTER_OUTPUT = "after the output type, which rounds again"
    IGNORED = "not at all"


class Misreading(Enum):
    """Arguments taken for something else."""

    SCALES_SWAPPED = "scale_a and scale_b exchanged"
    SCALES_INVERTED = "scales divide instead of multiply"
    SCALES_TRANSPOSED = "block scales read in the other memory order"
    SCALES_FIRST_BLOCK = "the scales of the first block of K used for all of K"
    SCALES_IGNORED = "scales not used"
    SCALES_UNSIGNED = "the sign of a scale dropped"
    OPERANDS_SWAPPED = "a and b exchanged, scales in place"
    OUTPUT_TRANSPOSED = "the output written transposed"
    NAN_AS_NUMBER = "NaN codes of float8_e4m3fn taken for 480"


class Reading(Enum):
    """The format that the codes of an operand are decoded in."""

    OWN = "its own"
    OTHER = "that of the other operand"
    E4M3 = "float8_e4m3fn"
    E5M2 = "float8_e5m2"
    FNUZ = "the FNUZ format of as many bits"


class Taken(Enum):
    """Which place stands for place i of n, in terms of a size s. Nowhere is a scale of one, or an output of zero."""

    SHIFTED = "i - s, at the ends the last one"
    ROLLED = "i - s, at the ends round about"
    SWAPPED = "i in the other tile of a pair of tiles of s"
    REPEATED = "i in the first tile of s"
    FIRST_OF_TILE = "the first of i's tile of s"
    ONE = "s for all"
    NOWHERE = "none"


class Places(Enum):
    """What has places."""

    SCALES_A = "scale_a of row"
    SCALES_B = "scale_b of column"
    BLOCKS_A = "scale_a of block"
    BLOCKS_B = "scale_b of block"
    BIAS = "bias of column"
    ROWS = "output of row"
    COLUMNS = "output of column"

    @property
    def is_output(self) -> bool:
        return self in (Places.ROWS, Places.COLUMNS)

    @property
    def index(self) -> str:
        return {"row": "m", "column": "n", "block": "g"}[self.value.split()[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """Scales, biases or outputs that stand in the place of others."""

    of: Places
    taken: Taken
    size: int = 0
    start: int = 0
    """The first place that is wrong."""

    @property
    def words(self) -> str:
        """`scale_a of row m - 64, for m >= 64`."""
        i, size = self.of.index, self.size
        shifted = f"{i} {'-' if size > 0 else '+'} {abs(size)}"
        is_zero = self.of.is_output or self.of is Places.BIAS
        taken = {
            Taken.NOWHERE: f"{i} is {'zero' if is_zero else 'one'}",
            Taken.SHIFTED: shifted,
            Taken.ROLLED: f"{shifted} round about",
            Taken.SWAPPED: f"{i} xor {size}",
            Taken.REPEATED: f"{i} mod {size}",
            Taken.FIRST_OF_TILE: f"{i} - {i} mod {size}",
            Taken.ONE: str(size),
        }[self.taken]
        return f"{self.of.value} {taken}" + (f", for {i} >= {self.start}" if self.start else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One way to compute a GEMM."""

    adder: Adder = Adder.TENSOR_CORE
    model: AccumulationModel
    """[ACC-1..5], [CHAIN-1..3]; of another adder than the tensor core only `promote_k` and `split_k_multiple` count."""
    lanes: int = 1
    """The number of float32 sums that take turns along K; they are added up pairwise, neighbours first."""
    terms: Rounding = Rounding.CUT
    """[ACC-3] Products and the accumulator, when they are aligned."""
    sums: Rounding = Rounding.CUT
    """[ACC-5] The sum of a step."""
    split_k: int = 1
    """[CHAIN-3]."""
    split_above: int = 0
    """K up to this is not split."""
    scales: ScaleOrder = ScaleOrder.PRODUCT
    """[EPI-1], [EPI-2], [EPI-5]."""
    adds_zero: bool = False
    """[EPI-1] A scaled result of -0 becomes +0, before the bias."""
    bias: BiasRule = BiasRule.ADDED
    """[EPI-3]."""
    output: Rounding = Rounding.NEAREST
    """[EPI-4]."""
    output_through: str = ""
    """A format that the result is rounded to before the output type."""
    saturates: bool = False
    """A finite result beyond the output type becomes its largest number, not infinity."""
    flushes_operands: bool = False
    """Subnormal codes of float8 count as zero."""
    flushes_results: bool = False
    """Float32 results below the smallest normal number become zero."""
    misreads: frozenset[Misreading] = frozenset()
    reads: tuple[Reading, Reading] = (Reading.OWN, Reading.OWN)
    """The formats of a and b."""
    k_less: int = 0
    k_multiple: int = 1
    """So much less of K, rounded down to a multiple, takes part."""
    misplaced: tuple[Misplaced, ...] = ()
    """At most one of each `Places`."""

    def lines(self) -> tuple[str, ...]:
        """These rules in words, one a line; without those that a fit never finds."""
        model = self.model
        lanes = f"in {self.lanes} lanes along K, added up pairwise" if self.lanes > 1 else "one product after the other"
        adds = {
            Adder.TENSOR_CORE: f"adds {model.step_k} products at a time, aligned to {model.aligned_fraction_bits} "
            f"fraction bits ({self.terms.value}), the sum kept with {model.result_fraction_bits} ({self.sums.value})",
            Adder.FLOAT32: f"adds in float32, {lanes}",
            Adder.EXACT: "adds exactly",
        }
        return (
            adds[self.adder],
            f"promotes to float32 every {model.promote_k} of K" if model.promote_k else "one chain over all of K",
            "no split of K" if self.split_k == 1 else f"{self.split_k} slices of K",
            f"scales: {self.scales.value}" + (" + 0" if self.adds_zero else ""),
            f"bias: {self.bias.value}",
            f"output: {self.output.value}" + (f", through {self.output_through}" if self.output_through else ""),
            *["saturates"] * self.saturates,
            *["subnormal codes count as zero"] * self.flushes_operands,
            *["subnormal results become zero"] * self.flushes_results,
            *sorted(misreading.value for misreading in self.misreads),
            *(
                f"{name} is read in another format: {reading.value}"
                for name, reading in zip("ab", self.reads, strict=True)
                if reading is not Reading.OWN
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain data, for JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    """Data of the spec by its name, other data classes by their fields."""
    match value:
        case Enum():
            return value.value
        case Format():
            return value.name
        case Misplaced():
            return value.words
        case AccumulationModel() | FlooredSum():
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        case frozenset():
            return sorted(map(_plain, value))
        case tuple():
            return list(map(_plain, value))
        case _:
            return value


_ORDERS = {
    Mode.TENSORWISE: ScaleOrder.PRODUCT,
    Mode.ROWWISE: ScaleOrder.COLUMN_FIRST,
    Mode.BLOCKWISE: ScaleOrder.FMA_PRODUCT,
}
"""[EPI-1], [EPI-2], [EPI-5]."""


def rules_of(chip: Chip, case: GemmCase) -> Rules:
    """The right rules of a GEMM with scales on a chip."""
    pair = case.granularity_a, case.granularity_b
    both_vectors = pair == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)
    return Rules(
        model=chip.accumulation(pair, use_fast_accum=case.use_fast_accum),
        split_k=case.split_k,
        scales=ScaleOrder.FMA_ROW_FIRST if both_vectors else _ORDERS[case.mode],
        adds_zero=case.mode is Mode.TENSORWISE,
    )
