"""The three GEMMs of a linear layer, and one of them: the casts of its operands and how the tensor core adds.

With `input` [M, K], `weight` [N, K] and `grad_output` [M, N] the layer computes

- `output`      [M, N] = input [M, K]         @ weight [N, K]^T,         summed over K
- `grad_input`  [M, K] = grad_output [M, N]   @ (weight^T [K, N])^T,     summed over N
- `grad_weight` [N, K] = grad_output^T [N, M] @ (input^T [K, M])^T,      summed over M

Each GEMM is `a @ b^T` of two operands seen as `[rows, summed dimension]`, and each operand is cast along the
dimension that its own GEMM sums over. A trace holds what the three computed, in any array type (`Any` below).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from f8emu.shown import fields_of
from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS, HOPPER, OPERAND_FORMATS
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import Format
from f8emu.spec.names import GemmName
from f8emu.spec.scaling import Granularity, ScaleRule, granularity_by_name

GEMM_NAMES: tuple[GemmName, ...] = ("output", "grad_input", "grad_weight")
"""The three GEMMs of a linear layer, in the order in which they run."""
OPERANDS: dict[str, tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""GEMM -> the tensors that its operands a and b come from."""
TRANSPOSED: dict[str, tuple[bool, bool]] = {
    "output": (False, False),
    "grad_input": (False, True),
    "grad_weight": (True, True),
}
"""GEMM -> whether its operands a and b, seen as `[rows, summed dimension]`, are the transposes of their tensors."""
LAYER_LAYOUTS: dict[str, str] = {"output": "tn", "grad_input": "nn", "grad_weight": "nt"}
"""GEMM -> the layout of its operands in cuBLAS's letters, as `TRANSPOSED` has them: first b, then a [PLAN-3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """How one operand of one GEMM becomes float8; `format=None` leaves it in high precision (bfloat16)."""

    format: Format | None
    granularity: Granularity = Granularity.TENSORWISE
    scale_rule: ScaleRule | None = None
    """The rule of its scales, the same in both casts of a tensor; None: that of the recipe."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "granularity", granularity_by_name("Cast", self.granularity))
        if self.format is not None and self.format not in OPERAND_FORMATS:
            known = " or ".join(f.name for f in OPERAND_FORMATS)
            raise SpecError(
                f"Cast: format must be the Format {known}, or None for high precision; "
                f"got the {type(self.format).__name__} {self.format}"
            )
        if self.is_high_precision and self.granularity is not Granularity.TENSORWISE:
            raise SpecError(
                f"Cast: a high precision operand has no scales; got granularity {self.granularity.value}. "
                "Leave the granularity out, or give a float8 format"
            )
        if self.is_high_precision and self.scale_rule is not None:
            raise SpecError(
                f"Cast: a high precision operand has no scales; got {self.scale_rule}. "
                "Leave scale_rule out, or give a float8 format"
            )

        if self.granularity.is_microscaled and self.scale_rule is not None and self.scale_rule.e8m0 is None:
            raise SpecError(f"Cast: scales of {self.granularity.value} are E8M0; give a ScaleRule with e8m0")

    @property
    def is_high_precision(self) -> bool:
        return self.format is None

    def to_dict(self) -> dict[str, object]:
        scale = {} if self.format is None else {"granularity": self.granularity.value}
        rule = {} if self.scale_rule is None else {"scale_rule": self.scale_rule.to_dict()}
        return {"format": str(self.format or self), **scale, **rule}

    def __repr__(self) -> str:
        return f"Cast({self})" if self.scale_rule is None else f"Cast({self}, {self.scale_rule})"

    def __str__(self) -> str:
        return "bfloat16" if self.format is None else f"{self.format.name} {self.granularity.value}"


HIGH_PRECISION_CAST = Cast(format=None)
"""No cast to float8: the operand stays in high precision, bfloat16."""


def granularities_that_run(a: Granularity, b: Granularity) -> tuple[Granularity, Granularity]:
    """The granularities of the GEMM that runs: a tensorwise scale beside rowwise ones is repeated for every row."""
    is_mixed = {a, b} == {Granularity.TENSORWISE, Granularity.ROWWISE}
    return (Granularity.ROWWISE, Granularity.ROWWISE) if is_mixed else (a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One GEMM `a @ b^T`: the casts of its operands and the accumulation of the tensor core."""

    a: Cast
    b: Cast
    use_fast_accum: bool = False
    split_k: bool = True
    """Whether K may be split, as cuBLAS does where a GEMM has few outputs and a long K [CHAIN-3]. False, for 1x128
    scales of a: it never is, as in DeepGEMM."""
    scaled_gemm_granularities: tuple[Granularity, Granularity] = field(init=False, compare=False)
    """`granularities_that_run` of its casts."""

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        object.__setattr__(self, "scaled_gemm_granularities", granularities_that_run(a.granularity, b.granularity))
        if a.is_high_precision != b.is_high_precision:
            raise SpecError(
                f"Gemm: both operands must be float8 or both high precision; got {a} and {b}. "
                "No matrix unit multiplies the two kinds; set format=None for both, or for neither"
            )
        if a.is_high_precision and self.use_fast_accum:
            raise SpecError("Gemm: use_fast_accum needs float8 operands; a high precision GEMM has no such mode")
        if not self.split_k and a.granularity is not Granularity.BLOCKWISE_1X128:
            raise SpecError(f"Gemm: split_k=False needs 1x128 scales of a; got {a} and {b}; leave it out")
        if all(self.refusal(chip) for chip in CHIPS.values()):
            # What to mend: the refusal of a chip that has such scales, if any has.
            pair = self.scaled_gemm_granularities
            nearest = next((chip for chip in CHIPS.values() if pair in chip.granularity_pairs), HOPPER)
            raise SpecError(f"Gemm: {self.refusal(nearest)}")

    def __repr__(self) -> str:
        fast = ", use_fast_accum=True" if self.use_fast_accum else ""
        whole = "" if self.split_k else ", split_k=False"
        return f"Gemm({self.a} @ {self.b}{fast}{whole})"

    @property
    def is_high_precision(self) -> bool:
        return self.a.is_high_precision

    def to_dict(self) -> dict[str, object]:
        # The texts and hashes of recipes are older than split_k.
        whole = {} if self.split_k else {"split_k": False}
        return {"a": self.a.to_dict(), "b": self.b.to_dict(), "use_fast_accum": self.use_fast_accum, **whole}

    def refusal(self, chip: Chip) -> str | None:
        """Why `chip` has no such GEMM, and the remedy; None if it has one."""
        if self.a.format is None or self.b.format is None:
            return None
        formats, granularities = (self.a.format, self.b.format), self.scaled_gemm_granularities
        return chip.refusal(formats, granularities, use_fast_accum=self.use_fast_accum)


def error_parts(exact: Any, dequantized: Any, accumulated: Any, product: Any) -> dict[str, Any]:
    """The error of a GEMM by its causes, the last of them all together; of float64 arrays of any kind.

    Args:
        exact: the product of the operands before their casts.
        dequantized: the product of what their codes and scales stand for.
        accumulated: the tensor core's float32, scales applied.
        product: the output.
    """
    return {
        "error_quantization": dequantized - exact,
        "error_accumulation": accumulated - dequantized,
        "error_rounding": product - accumulated,
        "error_total": product - exact,
    }


class OperandTrace(NamedTuple):
    """One operand of one GEMM, seen as `[rows, summed dimension]`."""

    amax: Any
    """Float32, the amax of this tensor now, also under delayed scaling, where the scale comes from earlier steps."""
    inv_scale: Any
    scale: Any
    codes: Any
    """[rows, summed dimension], of the cast's float8 dtype; in a high precision GEMM the bfloat16 values, and
    amax, inv_scale and scale are None."""

    def __repr__(self) -> str:
        return fields_of(self)


class GemmTrace(NamedTuple):
    """One GEMM: `product = a @ b^T`."""

    a: OperandTrace
    b: OperandTrace
    product: Any
    """[rows of a, rows of b], in the dtype of the layer's input; before a bias."""

    def __repr__(self) -> str:
        return fields_of(self)


class LinearTrace(NamedTuple):
    """Forward and backward of one linear layer; None for parts that were not requested."""

    output: GemmTrace
    grad_input: GemmTrace | None
    grad_weight: GemmTrace | None
    result: Any
    """[M, N], the layer's output: `output.product`, plus the bias, if there is one."""

    def __repr__(self) -> str:
        return fields_of(self)
