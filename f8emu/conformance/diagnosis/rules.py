"""What a scaled GEMM does, as data: how it adds, scales, adds the bias, rounds, and what it misreads.

The right rules are a chip's (`rules_of`). Other values of the same fields describe a wrong kernel, and
`compute.compute` gives its bits. Rule ids: reference/NUMERICS.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.spec import AccumulationModel, Chip, Format, Granularity


class Choice(Enum):
    """One value of a rule, in words, and the name of the alteration that makes a rule so."""

    _value_: str
    alteration: str

    def __new__(cls, words: str, alteration: str = "") -> "Choice":
        one = object.__new__(cls)
        one._value_, one.alteration = words, alteration
        return one


class Adder(Choice):
    """What adds the products of one chain."""

    TENSOR_CORE = "tensor core"  # steps of aligned and cut terms [ACC-1..5]
    FLOAT32 = "float32"  # one product after the other, each sum rounded to nearest even
    EXACT = "exact"  # in float64, which no sum of E4M3 exceeds, then one rounding


class Rounding(Choice):
    """What becomes of the bits that do not fit."""

    CUT = "cut toward zero"
    CUT_BFLOAT16 = "cut toward zero in bfloat16, nearest even in other types"
    NEAREST = "nearest even"
    NEAREST_AWAY = "nearest, ties away from zero"


class ScaleOrder(Choice):
    """Where the scales are multiplied; p is the accumulator of one block of K, total the float32 sum of blocks."""

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

    @property
    def is_before_dot(self) -> bool:
        return self in (ScaleOrder.BEFORE_DOT, ScaleOrder.BEFORE_DOT_BFLOAT16)

    @property
    def is_fused(self) -> bool:
        return self in (ScaleOrder.FMA_PRODUCT, ScaleOrder.FMA_ROW_FIRST, ScaleOrder.FMA_COLUMN_FIRST)


class BiasRule(Choice):
    """Where the bias is added."""

    ADDED = "after the scales, a rounding of its own"
    FUSED = "in one rounding with the last scale", "bias by FMA"
    BEFORE_SCALES = "to the accumulator, before the scales", "bias before the scales"
    AFTER_OUTPUT = "after the output type, which rounds again", "bias after the output type"
    IGNORED = "not at all", "bias ignored"


class Misreading(Choice):
    """Arguments taken for something else."""

    SCALES_SWAPPED = "scale_a and scale_b exchanged", "scales swapped"
    SCALES_INVERTED = "scales divide instead of multiply", "scales inverted"
    SCALES_TRANSPOSED = "block scales read in the other memory order", "block scales transposed"
    SCALES_FIRST_BLOCK = "the scales of the first block of K used for all of K", "first block's scales everywhere"
    SCALES_IGNORED = "scales not used", "scales ignored"
    SCALES_UNSIGNED = "the sign of a scale dropped", "sign of scales dropped"
    OPERANDS_SWAPPED = "a and b exchanged, scales in place", "operands swapped"
    OUTPUT_TRANSPOSED = "the output written transposed", "output transposed"
    NAN_AS_NUMBER = "NaN codes of float8_e4m3fn taken for 480", "NaN codes as numbers"


class Reading(Choice):
    """The format that the codes of an operand are decoded in."""

    OWN = "its own"
    E4M3 = "float8_e4m3fn", "E4M3"
    E5M2 = "float8_e5m2", "E5M2"
    OTHER = "that of the other operand", "the other's"
    FNUZ = "the FNUZ format of as many bits", "FNUZ"


class Places(Choice):
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


class Taken(Enum):
    """Which place stands for place i of n, given a size s: its words, and the place as a function of all i and s."""

    _value_: tuple[str, Callable[[np.ndarray, int], np.ndarray]]
    SHIFTED = "{i} {sign} {size}", lambda i, s: (i - s).clip(0, len(i) - 1)
    ROLLED = "{i} {sign} {size} round about", lambda i, s: (i - s) % len(i)
    SWAPPED = "{i} xor {size}", lambda i, s: np.where(i ^ s < len(i), i ^ s, i)
    REPEATED = "{i} mod {size}", lambda i, s: i % s
    FIRST_OF_TILE = "{i} - {i} mod {size}", lambda i, s: i - i % s
    ONE = "{size}", lambda i, s: np.full(len(i), min(s, len(i) - 1))
    NOWHERE = "{i} is {nothing}", lambda i, s: np.full(len(i), -1)
    """A scale of one; a bias or an output of zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """Scales, biases or outputs that stand in the place of others."""

    of: Places
    taken: Taken
    size: int = 0
    start: int = 0  # the first place that is wrong

    def __str__(self) -> str:
        """`scale_a of row m - 64, for m >= 64`."""
        i = {"row": "m", "column": "n", "block": "g"}[self.of.value.split()[-1]]
        nothing = "zero" if self.of.is_output or self.of is Places.BIAS else "one"
        sign, size = "-" if self.size > 0 else "+", abs(self.size)
        taken = self.taken.value[0].format(i=i, sign=sign, size=size, nothing=nothing)
        return f"{self.of.value} {taken}" + (f", for {i} >= {self.start}" if self.start else "")

    def places(self, n: int) -> np.ndarray:
        """The place that stands for each of n, -1 for none."""
        i = np.arange(n)
        return np.where(i < self.start, i, self.taken.value[1](i, self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One way to compute a GEMM."""

    adder: Adder = Adder.TENSOR_CORE
    model: AccumulationModel  # [ACC-1..5], [CHAIN-1..3]; other adders have only its promote_k and split_k_multiple
    lanes: int = 1  # float32 sums that take turns along K, and are added up pairwise, neighbours first
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
    misreads: frozenset[Misreading] = frozenset()
    reads: tuple[Reading, Reading] = (Reading.OWN, Reading.OWN)  # the formats of a and b
    k_less: int = 0  # how much of K is left out at its end
    k_multiple: int = 1  # the rest of K is rounded down to this
    misplaced: tuple[Misplaced, ...] = ()  # at most one of each `Places`

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain data, for JSON."""
        return _plain(self)


def _plain(value: Any) -> Any:
    if isinstance(value, (Format, Misplaced)):
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
