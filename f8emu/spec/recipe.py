"""The training recipe of a linear layer: three GEMMs, two operands each.

With `input` [M, K], `weight` [N, K] and `grad_output` [M, N] the layer computes

- `output`      [M, N] = input [M, K]         @ weight [N, K]^T,         summed over K
- `grad_input`  [M, K] = grad_output [M, N]   @ (weight^T [K, N])^T,     summed over N
- `grad_weight` [N, K] = grad_output^T [N, M] @ (input^T [K, M])^T,      summed over M

Each GEMM is `a @ b^T` of two operands seen as `[rows, summed dimension]`, and each operand is cast along the
dimension that its own GEMM sums over. A bias is added to the rounded output, in the output's dtype, as torchao does.
All three products have the dtype of `input`. An operand kept in high precision is bfloat16: the
GEMM is then the hardware's bfloat16 matmul [BF16-1].
"""

import hashlib
import json
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from f8emu.spec.chips import CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.spec.gemm import HIGH_PRECISION_CAST as HIGH_PRECISION_CAST
from f8emu.spec.gemm import Cast as Cast
from f8emu.spec.gemm import Gemm as Gemm
from f8emu.spec.scaling import TENSORS, DelayedScaling, Granularity, ScaleRule

SCHEMA = 1
"""Version of the layout of recipes as text; raised when a recipe's text changes its meaning."""


GEMM_NAMES = ("output", "grad_input", "grad_weight")
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

_DIMENSIONS: dict[str, tuple[str, str, str, str]] = {
    "output": ("[M, N]", "input [M, K]", "weight [N, K]^T", "K"),
    "grad_input": ("[M, K]", "grad_output [M, N]", "weight [N, K]", "N"),
    "grad_weight": ("[N, K]", "grad_output [M, N]^T", "input [M, K]", "M"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the three GEMMs of a linear layer are scaled, cast and accumulated.

    A recipe is hashable, immutable and free of array code. Reading what `to_toml` or `to_json` wrote gives an equal
    recipe.

    Raises:
        SpecError: an impossible combination; the message names it and the remedy.
    """

    name: str = field(compare=False)
    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    scale_rule: ScaleRule = ScaleRule()
    delayed: DelayedScaling | None = None
    """The rule of delayed scaling; None is dynamic scaling: every cast uses its own amax."""
    chip: str = HOPPER.name
    """The chip whose bits the emulation gives: a name in `f8emu.spec.CHIPS`."""

    def __repr__(self) -> str:
        """The label: the name, and what tells a changed recipe from the named one; `explain()` says it all."""
        return f"Recipe({self.label!r})"

    def __post_init__(self) -> None:
        # 1. The chip has these GEMMs. 2. One float8 format a tensor. 3. Delayed scales are tensorwise.
        with_chip = chip_by_name(f"Recipe {self.name!r}", self.chip)
        for name, gemm in self.gemms.items():
            refusal = gemm.refusal(with_chip)
            if refusal is not None:
                raise SpecError(f"Recipe {self.name!r}: {name}: {refusal}; or choose another chip")
        for tensor in TENSORS:
            formats = {c.format for _, _, c in self.casts(tensor) if c.format is not None}
            if len(formats) > 1:
                names = " and ".join(sorted(f.name for f in formats))
                raise SpecError(
                    f"Recipe {self.name!r}: {tensor} is cast to {names}; "
                    "one tensor has one float8 format in all its GEMMs"
                )
        if self.delayed is not None:
            for gemm, operand, cast in self.casts():
                if operand not in self.delayed.tensors:
                    continue
                if not cast.is_high_precision and cast.granularity is not Granularity.TENSORWISE:
                    raise SpecError(
                        f"Recipe {self.name!r}: delayed scaling keeps one amax a tensor, so every cast of one must be "
                        f"tensorwise; {operand} of {gemm} is {cast.granularity.value}; leave {operand} out of "
                        "delayed.tensors"
                    )

    @property
    def gemms(self) -> dict[str, Gemm]:
        """GEMM name -> GEMM, in the order in which they run."""
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    def casts(self, tensor: str | None = None) -> Iterator[tuple[str, str, Cast]]:
        """(GEMM name, tensor name, cast) of the six operands, or of the two that come from `tensor`."""
        for name, gemm in self.gemms.items():
            for source, cast in zip(OPERANDS[name], (gemm.a, gemm.b), strict=True):
                if tensor in (None, source):
                    yield name, source, cast

    def delayed_scaling_of(self, tensor: str) -> DelayedScaling | None:
        """The delayed scaling of `tensor`; None if its casts use their own amax."""
        return self.delayed if self.delayed is not None and tensor in self.delayed.tensors else None

    @property
    def delayed_tensors(self) -> tuple[str, ...]:
        """The tensors that have a state of delayed scaling: those with delayed scales that are cast at all."""
        is_cast = {source for _, source, cast in self.casts() if not cast.is_high_precision}
        return tuple(t for t in TENSORS if self.delayed_scaling_of(t) is not None and t in is_cast)

    @property
    def content_hash(self) -> str:
        """SHA-256 of all fields but the name, in hex: two recipes with equal hashes give equal bits."""
        # The text without the name: a renamed recipe gives the same bits.
        content = {k: v for k, v in self.to_dict().items() if k != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def label(self) -> str:
        """The name. Unless it is a named recipe, the start of the content hash and a chip other than Hopper follow."""
        if RECIPES.get(self.name) == self:
            return self.name
        on = "" if self.chip == HOPPER.name else f" on {CHIPS[self.chip]}"
        return f"{self.name} ({self.content_hash[:12]}){on}"

    def to_dict(self) -> dict[str, object]:
        """A plain dict of strings, numbers and booleans, the content of TOML and JSON, with every default written out.

        A chip and tensors of delayed scaling that are the defaults are left out: so texts and hashes from before these
        fields stay as they were.
        """
        data: dict[str, object] = {"schema": SCHEMA, "name": self.name}
        if self.chip != HOPPER.name:
            data["chip"] = self.chip
        data["scale_rule"] = asdict(self.scale_rule)
        if self.delayed is not None:
            changed = {"reduction": self.delayed.reduction.value, "tensors": list(self.delayed.tensors)}
            delayed = asdict(self.delayed) | changed
            if self.delayed.tensors == TENSORS:
                del delayed["tensors"]
            data["delayed"] = delayed
        return data | {name: gemm.to_dict() for name, gemm in self.gemms.items()}

    def to_json(self) -> str:
        """JSON text, indented by two."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_toml(self) -> str:
        """TOML text: top-level keys, then one table for each part."""
        lines: list[str] = []
        for key, value in self.to_dict().items():
            if isinstance(value, dict):
                table = typing.cast(dict[str, object], value)
                lines += ["", f"[{key}]", *(f"{k} = {_toml_value(v)}" for k, v in table.items())]
            else:
                lines.append(f"{key} = {_toml_value(value)}")
        return "\n".join(lines) + "\n"

    def explain(self) -> str:
        """The recipe in words and its three GEMMs as equations."""
        lines = [f"{self.name}  ({self.content_hash[:12]})"]
        chip = CHIPS[self.chip]
        if chip != HOPPER:
            lines.append(f"chip: {chip.name}, {chip.evidence.value}")
        if self.delayed is None:
            lines.append("scales: dynamic, from the amax of the tensor that is cast")
        else:
            d = self.delayed
            lines.append(
                f"scales: delayed, from the {d.reduction.value} of the last {d.history_length} amaxes, "
                f"margin {d.margin} (format max * 2^-{d.margin})"
                + ("" if d.tensors == TENSORS else f", of {' and '.join(d.tensors)}; the others dynamic")
            )
        rule = f"        inv_scale = max / max(amax, {self.scale_rule.amax_floor!r})"
        lines.append(rule + (", cut to a power of two" if self.scale_rule.power_of_two else ""))
        for name, gemm in self.gemms.items():
            shape, a, b, k = _DIMENSIONS[name]
            lines.append(f"{name} {shape} = cast({a}) @ cast({b}), summed over {k}")
            lines.append(f"    a: {gemm.a}")
            lines.append(f"    b: {gemm.b}")
            model = chip.float8_fast if gemm.use_fast_accum else chip.float8
            if gemm.is_high_precision:
                lines.append("    bfloat16 matmul, one chain")
            elif model.promote_k is not None:
                lines.append(f"    accumulation promoted to float32 every {model.promote_k}")
            else:
                lines.append("    fast accumulation: one chain" if gemm.use_fast_accum else "    one chain")
        return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        items = typing.cast(dict[str, object], value).items()
        return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in items) + " }"
    # JSON's text of the others is TOML's, but for two: TOML has no surrogate pairs, and escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _three_gemms(input: Cast, weight: Cast, grad_output: Cast, *, fast_output: bool) -> dict[str, Any]:
    return {
        "output": Gemm(a=input, b=weight, use_fast_accum=fast_output),
        "grad_input": Gemm(a=grad_output, b=weight),
        "grad_weight": Gemm(a=grad_output, b=input),
    }


_TENSOR_E4M3 = Cast(format=E4M3FN)
_TENSOR_E5M2 = Cast(format=E5M2)
_ROW_E4M3 = Cast(format=E4M3FN, granularity=Granularity.ROWWISE)
_VECTOR_E4M3 = Cast(format=E4M3FN, granularity=Granularity.BLOCKWISE_1X128)
_SQUARE_E4M3 = Cast(format=E4M3FN, granularity=Granularity.BLOCKWISE_128X128)
_POWER_OF_TWO = ScaleRule(power_of_two=True)

TENSORWISE = Recipe(name="tensorwise", **_three_gemms(_TENSOR_E4M3, _TENSOR_E4M3, _TENSOR_E5M2, fast_output=True))
"""One scale per tensor, torchao's default. E4M3 forward, E5M2 gradients."""

ROWWISE = Recipe(
    name="rowwise",
    **_three_gemms(_ROW_E4M3, _ROW_E4M3, _ROW_E4M3, fast_output=True),
    scale_rule=_POWER_OF_TWO,
)
"""One power-of-two scale per row of each operand; E4M3 everywhere, as in torchao."""

ROWWISE_WITH_GW_HP = Recipe(
    name="rowwise_with_gw_hp",
    output=Gemm(a=_ROW_E4M3, b=_ROW_E4M3, use_fast_accum=True),
    grad_input=Gemm(a=_ROW_E4M3, b=_TENSOR_E4M3),
    grad_weight=Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST),
    scale_rule=_POWER_OF_TWO,
)
"""Rowwise, with `grad_weight` in high precision and a tensorwise weight in `grad_input`, as in torchao."""

DELAYED = Recipe(
    name="delayed",
    **_three_gemms(_TENSOR_E4M3, _TENSOR_E4M3, _TENSOR_E5M2, fast_output=True),
    delayed=DelayedScaling(),
)
"""One scale per tensor from the amax of earlier steps, as float8_experimental intended."""

BLOCKWISE = Recipe(name="blockwise", **_three_gemms(_VECTOR_E4M3, _SQUARE_E4M3, _VECTOR_E4M3, fast_output=False))
"""1x128 blocks of activations and gradients, 128x128 blocks of weights; E4M3 everywhere."""

RECIPES: dict[str, Recipe] = {r.name: r for r in (TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, DELAYED, BLOCKWISE)}
"""The named recipes."""

RECIPE_ALIASES: dict[str, str] = {
    "all_tensorwise": "tensorwise",
    "all_axiswise": "rowwise",
    "lw_axiswise_with_gw_hp": "rowwise_with_gw_hp",
}
"""Older names, from torchao and torchtitan -> the present name."""


def recipe_by_name(name: str) -> Recipe:
    """The recipe called `name`, under its present or an older name.

    Raises:
        SpecError: an unknown recipe; the message lists the known names.
    """
    recipe = RECIPES.get(RECIPE_ALIASES.get(name, name))
    if recipe is None:
        known = ", ".join(RECIPES)
        older = ", ".join(f"{old} (= {new})" for old, new in RECIPE_ALIASES.items())
        raise SpecError(f"recipe_by_name: unknown recipe {name!r}; known recipes: {known}; older names: {older}")
    return recipe
