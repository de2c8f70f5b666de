"""The rules of a scaled GEMM as data: how it adds, scales, adds the bias, rounds, and what it misreads.

The right rules are a chip's (`rules_of`). Other values of the same fields describe a wrong kernel, and
`compute.compute` gives its bits. Rule ids: reference/NUMERICS.md.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.diagnosis.groups import OWN_GROUPS, GroupRule
from f8emu.conformance.diagnosis.places import Choice, Misplaced, Places
from f8emu.spec import AccumulationModel, Chip, Format, Granularity


class Adder(Choice):
    """The adder of the products of one chain."""

    TENSOR_CORE = "tensor core"  # steps of aligned and cut terms [ACC-1..5]
    FLOAT32 = "float32"  # one product after the other, each sum rounded to nearest even
    EXACT = "exact"  # in float64, which no sum of E4M3 exceeds, then one rounding
    FLOAT64 = "float64"  # so are scales and bias; what follows rounds once, as numpy and ml_dtypes do


class Rounding(Choice):
    """The rounding of bits that do not fit."""

    CUT = "cut toward zero"
    CUT_BFLOAT16 = "cut toward zero in bfloat16, nearest even in other types"
    NEAREST = "nearest even"
    NEAREST_AWAY = "nearest, ties away from zero"


class ScaleOrder(Choice):
    """The order of scales; p is the accumulator of one block of K, total the float32 sum of blocks."""

    PRODUCT = "acc * (sa * sb)"
    COLUMN_FIRST = "(acc * sb) * sa"
    ROW_FIRST = "(acc * sa) * sb"
    FMA_PRODUCT = "fma(p, sa * sb, total)"
    FMA_ROW_FIRST = "fma(p * sa, sb, total)"
    FMA_COLUMN_FIRST = "fma(p * sb, sa, total)"
    BEFORE_DOT = (
        "before the dot: (a * sa) @ (b * sb) in float32, each product added by FMA",
        "scales before the dot, in float32",
    )
    BEFORE_DOT_BFLOAT16 = "before the dot: (a * sa) @ (b * sb) in bfloat16", "scales before the dot, in bfloat16"
    AFTER_OUTPUT = "after the output type: round(acc) * (sa * sb)", "scales after the output type"
    IN_STEP = "inside a step: (a * b) * (sa * sb), exact"  # E8M0
    AFTER_BLOCK = "after each block of 32: total + p * (sa * sb), in float32", "scales after each block"

    @property
    def is_before_dot(self) -> bool:
        return self in (ScaleOrder.BEFORE_DOT, ScaleOrder.BEFORE_DOT_BFLOAT16)

    @property
    def is_fused(self) -> bool:
        return self in (ScaleOrder.FMA_PRODUCT, ScaleOrder.FMA_ROW_FIRST, ScaleOrder.FMA_COLUMN_FIRST)


class BiasRule(Choice):
    """The use of the bias, in words that follow "it"."""

    ADDED = "adds the bias after the scales, with a rounding of its own"
    FUSED = "adds the bias by FMA, in one rounding with the last scale", "bias by FMA"
    BEFORE_SCALES = "adds the bias to the accumulator, before the scales", "bias before the scales"
    AFTER_OUTPUT = "rounds to the output type before it adds the bias", "bias after the output type"
    IGNORED = "ignores the bias", "bias ignored"


class ScaleValue(Choice):
    """The values of a scale as they are used, in words that follow "it"."""

    OWN = "uses the values of {}"
    INVERTED = "divides by {} instead of multiplying", "{} inverted"
    IGNORED = "ignores {}", "{} ignored"
    BFLOAT16 = "rounds {} to bfloat16", "{} rounded to bfloat16"
    FLOAT16 = "rounds {} to float16", "{} rounded to float16"
    POWER_UP = "rounds {} up to a power of two", "{} rounded up to a power of two"
    POWER_DOWN = "rounds {} down to a power of two", "{} rounded down to a power of two"
    POWER_NEAREST = "rounds {} to the nearest power of two", "{} rounded to the nearest power of two"
    POWER_LOG = "rounds log2 of {} to an integer", "log2 of {} rounded"


class ScaleSign(Choice):
    """The use of a negative scale, in words that follow "it"."""

    OWN = "keeps the sign of {}"
    DROPPED = "drops the sign of {}", "sign of {} dropped"
    NAN = "takes negative {} for NaN, as a logarithm does", "negative {} as NaN"


class Grid(Choice):
    """The memory order in which the scales of blocks are read, in words that follow "it"."""

    OWN = "reads the grid of {} as it lies"
    AS_COLUMNS = "reads the grid of {} as column-major, and it is row-major", "grid of {} read as column-major"
    AS_ROWS = "reads the grid of {} as row-major, and it is column-major", "grid of {} read as row-major"
    SWIZZLED = "reads {} in tiles of 128 x 4, and they lie row by row", "{} read as swizzled", "MX-2"
    PLAIN = "reads {} row by row, and they lie in tiles of 128 x 4", "swizzled {} read as rows", "MX-2"


class EqualScales(Choice):
    """Which row scales, where all are equal, make a GEMM a tensorwise one, in words that follow "it"."""

    ROWWISE = "scales rowwise whatever the values of the scales"
    BOTH = "takes the tensorwise epilogue where all scales are equal", "equal scales as tensorwise"
    OF_A = "takes the tensorwise epilogue where all of scale_a are equal", "equal scale_a as tensorwise"


class Misreading(Choice):
    """Arguments taken for something else, and their order, in words that follow "it"."""

    SCALES_SWAPPED = "takes scale_a for scale_b, and scale_b for scale_a", "scales swapped"
    SCALES_FIRST_BLOCK = "uses the scales of the first block of K for all of K", "first block's scales everywhere"
    OPERANDS_SWAPPED = "takes a for b and b for a, with the scales in place", "operands swapped"
    OUTPUT_TRANSPOSED = "writes the output transposed", "output transposed"
    NAN_AS_NUMBER = "takes NaN codes of float8_e4m3fn for 480", "NaN codes as numbers"
    SCALE_255 = "takes byte 255 of a scale for 2^128, and it is NaN", "byte 255 as 2^128", "MX-1"
    SCALE_0 = "takes byte 0 of a scale for zero, and it is 2^-127", "byte 0 as zero", "MX-1"
    SCALE_PRODUCT = "saturates products of scales to a byte, 2^-127 to 2^127", "product of scales saturated", "MX-2"
    SCALE_PADDING = "multiplies by scales beyond the operand, which are NaN", "padding of scales read", "MX-2"
    K_BACKWARDS = "adds the steps of K from the last to the first", "K backwards", "MX-4"
    FLOAT32_STEPS = "adds the exact sum of each step in float32, without a cut", "steps in float32", "MX-4"


class Reading(Choice):
    """The format that the codes of an operand are decoded in."""

    OWN = "its own"
    E4M3 = "float8_e4m3fn", "E4M3"
    E5M2 = "float8_e5m2", "E5M2"
    OTHER = "that of the other operand", "the other's"
    FNUZ = "the FNUZ format of as many bits", "FNUZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One way to compute a GEMM."""

    mode: Mode
    adder: Adder = Adder.TENSOR_CORE
    model: AccumulationModel  # [ACC-1..5], [CHAIN-1..3]; other adders have only its promote_k and split_k_multiple
    lanes: int = 1  # float32 sums that take turns along K, and are added up pairwise, neighbours first
    lanes_of_rows: tuple[int, ...] = ()  # the lanes of one row or another, each row with one of these
    goto_k: int = 0  # float32 sums begin anew after this much of K, the last two alike, as in GotoBLAS
    terms: Rounding = Rounding.CUT  # [ACC-3] products and the accumulator, when they are aligned
    sums: Rounding = Rounding.CUT  # [ACC-5] the sum of a step
    split_k: int = 1  # [CHAIN-3]
    split_above: int = 0  # a K up to this is not split
    scales: ScaleOrder = ScaleOrder.PRODUCT  # [EPI-1], [EPI-2], [EPI-5]
    adds_zero: bool = False  # [EPI-1] a scaled result of -0 becomes +0, before the bias
    bias: BiasRule = BiasRule.ADDED  # [EPI-3]
    output: Rounding = Rounding.NEAREST  # [EPI-4]
    output_through: str = ""  # a format that the result is rounded to before the output type
    saturates: bool = False  # a finite result beyond the output type becomes its largest number, not infinity
    flushes_operands: bool = False  # subnormal codes of float8 count as zero
    flushes_results: bool = False  # float32 results below the smallest normal number become zero
    scale_values: tuple[ScaleValue, ScaleValue] = (ScaleValue.OWN, ScaleValue.OWN)  # of a and b
    scale_signs: tuple[ScaleSign, ScaleSign] = (ScaleSign.OWN, ScaleSign.OWN)  # of a and b
    grids: tuple[Grid, Grid] = (Grid.OWN, Grid.OWN)  # of a and b
    equal_scales: EqualScales = EqualScales.ROWWISE
    misreads: frozenset[Misreading] = frozenset()
    reads: tuple[Reading, Reading] = (Reading.OWN, Reading.OWN)  # the formats of a and b
    k_less: int = 0  # how much of K is left out at its end
    k_multiple: int = 1  # the rest of K is rounded down to this
    misplaced: tuple[Misplaced, ...] = ()  # at most one of each `Places`
    groups: GroupRule = OWN_GROUPS  # [EPI-6]

    def of_rows(self) -> "tuple[Rules, ...]":
        """The rules of which each row of an output follows one."""
        return tuple(replace(self, lanes=lanes, lanes_of_rows=()) for lanes in self.lanes_of_rows) or (self,)

    def parts(self) -> dict[str, Any]:
        """Every single choice by name: two rules that differ in no part of one name can be combined."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        model, misreads, misplaced = (parts.pop(name) for name in ("model", "misreads", "misplaced"))
        for name in ("reads", "scale_values", "scale_signs", "grids"):
            parts |= {f"{name} of {side}": choice for side, choice in zip("ab", parts.pop(name), strict=True)}
        parts |= {f"misreads {misreading.name}": misreading in misreads for misreading in Misreading}
        parts |= {of.name: next((wrong for wrong in misplaced if wrong.of is of), None) for of in Places}
        return parts | {name: getattr(model, name) for name in MODEL_PARTS}

    @property
    def scales_and_id(self) -> str:
        """The order of the scales as a formula, and the id of the rule about it."""
        return f"{self.scales.value}{' + 0' if self.adds_zero else ''} [{_ORDER_IDS[self.mode]}]"

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain data, for JSON."""
        return _plain(self)


MODEL_PARTS = frozenset(field.name for field in fields(AccumulationModel))


def _plain(value: Any) -> Any:
    if isinstance(value, (Format, Misplaced, GroupRule)):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (frozenset, tuple)):
        items = list(map(_plain, value))
        return sorted(items) if isinstance(value, frozenset) else items
    return value


_ORDERS = {
    Mode.TENSORWISE: ScaleOrder.PRODUCT,
    Mode.ROWWISE: ScaleOrder.COLUMN_FIRST,
    Mode.BLOCKWISE: ScaleOrder.FMA_PRODUCT,
    Mode.GROUPED_ROWWISE: ScaleOrder.ROW_FIRST,
    Mode.MX: ScaleOrder.IN_STEP,
    Mode.GROUPED_MX: ScaleOrder.IN_STEP,
}
_ORDER_IDS = dict(zip(_ORDERS, ("EPI-1", "EPI-2", "EPI-5", "EPI-6", "MX-2", "MX-2"), strict=True))


def rules_of(chip: Chip, case: GemmCase) -> Rules:
    """The right rules of a GEMM with scales on a chip."""
    pair = case.granularity_a, case.granularity_b
    if case.mode is Mode.GROUPED_ROWWISE:
        pair = Granularity.ROWWISE, Granularity.ROWWISE
    both_vectors = pair == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)
    return Rules(
        mode=case.mode,
        model=chip.accumulation(pair, use_fast_accum=case.use_fast_accum),
        split_k=case.split_k,
        scales=ScaleOrder.FMA_ROW_FIRST if both_vectors else _ORDERS[case.mode],
        adds_zero=case.mode is Mode.TENSORWISE,
    )
