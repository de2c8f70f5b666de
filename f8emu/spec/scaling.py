"""How a tensor gets its scales: granularity, the scale rule, and the rule of delayed scaling; and what it gets.

Scales and states are of any array type (`Any` below), as every backend returns them.

Glossary:

- `amax`: the largest magnitude of the elements that share one scale.
- `inv_scale`: the float32 factor multiplied while quantising: `code = cast(value * inv_scale)`.
- `scale`: the factor that decodes, `value = decode(code) * scale`, as `torch._scaled_mm` takes it; always
  `1 / inv_scale`, correctly rounded. A float32, or an E8M0 byte under MXFP8.

An operand of a GEMM is seen as `[rows, K]`, K being the dimension that is summed over.
"""

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from f8emu.shown import fields_of
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import E8M0FNU, FLOAT32, Format, changed_fields
from f8emu.spec.members import member_by_name
from f8emu.spec.names import TensorName

TENSORS: tuple[TensorName, ...] = ("input", "weight", "grad_output")
"""The tensors of a linear layer that are cast."""
BLOCK = 128
"""Elements along K, and rows of a square, that share a scale under blockwise scaling [EPI-5]."""
MX_BLOCK = 32
"""Elements along K that share an E8M0 scale under MXFP8 [MX-1]."""


class Granularity(Enum):
    """Which elements of an operand `[rows, K]` share one scale."""

    TENSORWISE = "tensorwise"
    """The whole operand. Scale shape `[1, 1]`."""
    ROWWISE = "rowwise"
    """One row, over all of K (torchao: "axiswise"). Scale shape `[rows, 1]`."""
    BLOCKWISE_1X128 = "blockwise_1x128"
    """128 neighbours along K in one row. Scale shape `[rows, ceil(K / 128)]`."""
    BLOCKWISE_128X128 = "blockwise_128x128"
    """A square of 128 rows by 128 along K. Scale shape `[ceil(rows / 128), ceil(K / 128)]`."""
    BLOCKWISE_1X32 = "blockwise_1x32"
    """32 neighbours along K in one row, with an E8M0 scale: MXFP8 [MX-1]. Scale shape `[rows, ceil(K / 32)]`."""

    @property
    def block(self) -> tuple[int | None, int | None]:
        """(rows, K) that share a scale; None is the whole extent."""
        return _BLOCKS[self]

    @property
    def is_blockwise(self) -> bool:
        """Whether a row has more than one scale along K."""
        return self not in (Granularity.TENSORWISE, Granularity.ROWWISE)

    @property
    def is_microscaled(self) -> bool:
        """Whether the scales are E8M0 and scale the products inside a step [MX-2], not its result."""
        return self is Granularity.BLOCKWISE_1X32

    @property
    def scale_format(self) -> Format:
        """The format of the scales that a GEMM takes."""
        return E8M0FNU if self.is_microscaled else FLOAT32

    @property
    def is_transposable(self) -> bool:
        """Whether the codes of a tensor also serve its transpose: the transpose of each group is a group again."""
        return self in (Granularity.TENSORWISE, Granularity.BLOCKWISE_128X128)

    def scale_shape(self, rows: int, k: int) -> tuple[int, int]:
        """Shape of the scales of an operand `[rows, k]`."""
        block_rows, block_k = self.block
        return 1 if block_rows is None else -(-rows // block_rows), 1 if block_k is None else -(-k // block_k)


_BLOCKS: dict[Granularity, tuple[int | None, int | None]] = {
    Granularity.TENSORWISE: (None, None),
    Granularity.ROWWISE: (1, None),
    Granularity.BLOCKWISE_1X128: (1, BLOCK),
    Granularity.BLOCKWISE_128X128: (BLOCK, BLOCK),
    Granularity.BLOCKWISE_1X32: (1, MX_BLOCK),
}


def granularity_by_name(call: str, granularity: Granularity | str) -> Granularity:
    """The granularity that `call` scales at, given itself or by name.

    Raises:
        SpecError: an unknown granularity; the message lists the known ones.
    """
    return member_by_name(call, "granularity", Granularity, granularity)


def scale_number(call: str, name: str, value: float) -> float:
    """A scale that is given as a number of Python's and is a float32."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except (OverflowError, struct.error):  # the latter of an integer beyond float64
        rounded = None
    if rounded != value and value == value:
        raise OperandError(
            f"{call}: {name} must be float32; got {value!r}, which float32 does not hold; round it first, into a "
            "float32 array of one element"
        )
    return float(value)


MIN_AMAX_FLOOR = 2.0**-110
"""Smallest floor: an amax of 0 then has an inv_scale below 2^126 in every format, and its scale is a normal float32."""


class E8M0Rule(Enum):
    """How an amax becomes an E8M0 scale `2^e` of a format whose largest finite value is `max`, of exponent `emax`.

    `e` is limited to -127..127, and its byte is `e + 127`. An amax of 0 gives byte 0, NaN gives byte 255. Infinity
    counts as 2^128; RCEIL limits it to byte 254.
    Sources: OCP Microscaling Formats 1.0, section 6.3 (FLOOR); the names are torchao's `ScaleCalculationMode`.
    """

    FLOOR = "floor"
    """`floor(log2(amax)) - emax`: values of the block may exceed `max` and saturate."""
    CEIL = "ceil"
    """`ceil(log2(amax)) - emax`."""
    EVEN = "even"
    """`floor(log2(r)) - emax` of r, amax rounded to the fraction bits of the format, ties up."""
    RCEIL = "rceil"
    """`ceil(log2(amax / max))`, the smallest `e` at which nothing saturates: NVIDIA's and TransformerEngine's rule.

    They round `amax * fl(1/max)` first, which gives byte 0 for one amax more, the first above `max * 2^-127`, and else
    the same byte for every float32 (`benchmarks.proofs.exhaustive`).
    """

    def carry(self, format: Format) -> int:
        """What an amax's float32 bits lack, at most, for the exponent to grow: `byte = ((bits + carry) >> 23) - emax`.

        A byte below 0 is 0. Infinity has `infinity_byte`.
        """
        match self:
            case E8M0Rule.FLOOR:
                return 0
            case E8M0Rule.CEIL:
                return FLOAT32.fraction_mask
            case E8M0Rule.EVEN:
                return 1 << (FLOAT32.fraction_bits - format.fraction_bits - 1)
            case E8M0Rule.RCEIL:  # where the fraction is above that of max
                largest = format.max_code & format.fraction_mask
                return FLOAT32.fraction_mask - (largest << (FLOAT32.fraction_bits - format.fraction_bits))

    def infinity_byte(self, format: Format) -> int:
        """The scale of an infinite amax."""
        return 254 if self is E8M0Rule.RCEIL else 255 - format.max_exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """The rule that turns an amax into a scale.

    `inv_scale = float32(float64(format.max) / max(float64(amax), amax_floor))`, which is the correctly rounded
    float32 quotient. With `power_of_two`, `inv_scale` is then cut to the power of two below it by clearing its fraction
    bits. `scale = float32(1 / inv_scale)`, correctly rounded.

    Edge cases are propagated, never hidden: amax 0 gives `max / amax_floor`; amax inf gives inv_scale 0 and scale inf;
    amax NaN gives NaN for both, with `power_of_two` too.
    Quantising is `cast(clamp(float32(x) * inv_scale, -max, max))`; a NaN stays NaN.
    This is bit for bit the rule of torchao 0.17 to 0.19, except for `power_of_two` just below a power of two, where
    torchao's `exp2(floor(log2(s)))` rounds up (NUMERICS 6).

    With `e8m0` the scale is an E8M0 byte by that rule, `inv_scale = 2^(127 - byte)`, and the other fields keep their
    defaults: for `Granularity.BLOCKWISE_1X32` alone.
    """

    power_of_two: bool = False
    amax_floor: float = 1e-12
    e8m0: E8M0Rule | None = None

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        if not MIN_AMAX_FLOOR <= self.amax_floor < 1:
            raise SpecError(
                f"ScaleRule: amax_floor must be in [2^-110, 1), so that no scale is subnormal; got {self.amax_floor!r}"
            )
        if self.e8m0 is None:
            return
        object.__setattr__(self, "e8m0", member_by_name("ScaleRule", "e8m0", E8M0Rule, self.e8m0))
        if (self.power_of_two, self.amax_floor) != (False, 1e-12):
            raise SpecError(f"ScaleRule: E8M0 scales are powers of two without a floor; got {self!r}; leave both out")

    def to_dict(self) -> dict[str, object]:
        """Its fields; the texts and hashes of recipes are older than e8m0."""
        data: dict[str, object] = {"power_of_two": self.power_of_two, "amax_floor": self.amax_floor}
        return data if self.e8m0 is None else data | {"e8m0": self.e8m0.value}

    @property
    def scale_format(self) -> Format:
        """The format of the scales that it gives."""
        return FLOAT32 if self.e8m0 is None else E8M0FNU


MAX_MARGIN = 6
"""Largest margin: with it `448 * 2^-margin / FLT_MAX` is still a normal float32."""


def check_rule(call: str, rule: ScaleRule, margin: int, *, is_delayed: bool = False) -> None:
    """Refuse a margin out of range, and with E8M0 scales any margin and delayed scaling.

    Raises:
        SpecError: one of these.
    """
    if not 0 <= margin <= MAX_MARGIN:
        raise SpecError(f"{call}: margin must be in 0..{MAX_MARGIN}; got {margin}; it counts powers of two")
    if rule.e8m0 is not None and (is_delayed or margin):
        what = "delayed scaling" if is_delayed else f"margin {margin}"
        raise SpecError(
            f"{call}: E8M0 scales are those of the amax itself; got {what}; leave it out, or e8m0 of the rule"
        )


class AmaxHistoryReduction(Enum):
    """Which amax of the history sets the scale."""

    MAX = "max"
    MOST_RECENT = "most_recent"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling:
    """Scales from the amax of earlier steps: the behaviour that float8_experimental intended.

    The state of one tensor is `amax_history` (`history_length` float32, newest first, zeros at the start), `inv_scale`
    (float32, 1 at the start) and `initialized` (false at the start).

    - A cast uses the state's `inv_scale`. While `initialized` is false it uses its own amax, margin included.
    - Between two updates the state keeps the maximum of the amaxes of all casts. An update takes it, for every tensor
      that was cast. `f8emu.torch` updates at the end of every backward pass; in JAX the caller does.
    - The update shifts the history by one and drops the oldest entry. The new entry is `amax`, or 0 if amax is 0 or not
      finite.
    - If amax is positive and finite, `reference` is the history's maximum (`max`) or newest entry (`most_recent`),
      `inv_scale` becomes `float32(format.max * 2^-margin / max(reference, amax_floor))`, cut to a power of two if the
      scale rule says so, and `initialized` becomes true. If not, both stay as they are.
    """

    history_length: int = 16
    reduction: AmaxHistoryReduction = AmaxHistoryReduction.MAX
    margin: int = 0
    tensors: tuple[str, ...] = TENSORS
    """The tensors with delayed scales. Each cast of another tensor is scaled by its own amax, without the margin."""

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        reduction = member_by_name("DelayedScaling", "reduction", AmaxHistoryReduction, self.reduction)
        object.__setattr__(self, "reduction", reduction)
        if not self.tensors or self.tensors != tuple(tensor for tensor in TENSORS if tensor in self.tensors):
            raise SpecError(
                f"DelayedScaling: tensors must be some of {', '.join(TENSORS)}, in this order; got {self.tensors!r}; "
                "a recipe without such a tensor has delayed=None"
            )
        if self.history_length < 1:
            raise SpecError(f"DelayedScaling: history_length must be at least 1; got {self.history_length}")
        if not 0 <= self.margin <= MAX_MARGIN:
            raise SpecError(
                f"DelayedScaling: margin must be in 0..{MAX_MARGIN}, so that no scale is subnormal; got {self.margin}"
            )


class Scales(NamedTuple):
    """Factors of one operand; shapes are those of `Granularity.scale_shape`."""

    inv_scale: Any
    """The float32 factor that is multiplied while quantising."""
    scale: Any
    """The factor that decodes: `value = decode(code) * scale`. Float32, or E8M0 if the rule says so."""


class DelayedState(NamedTuple):
    """State of one tensor under `DelayedScaling`."""

    amax_history: Any
    """[history_length] float32, newest first."""
    inv_scale: Any
    """[] float32."""
    initialized: Any
    """[] bool."""

    def __repr__(self) -> str:
        return fields_of(self)


class Float8State(NamedTuple):
    """The states of delayed scaling of a linear layer; None for a tensor without delayed scales.

    JAX differentiates floating-point leaves only, so `initialized` is a float32 here, 0 or 1. None says that the scale
    is known to be set, which saves a pass over the tensor. In a cotangent, `amax_history[0]` is the amax of the casts.
    """

    input: DelayedState | None
    weight: DelayedState | None
    grad_output: DelayedState | None

    def __repr__(self) -> str:
        return fields_of(self)
