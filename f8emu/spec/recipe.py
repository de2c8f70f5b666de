"""The training recipe of a linear layer: three GEMMs (`f8emu.spec.gemm`), the rule of their scales, and the chip.

A bias is added to the rounded output, in the output's dtype, as torchao does. All three products have the dtype of
`input`. An operand kept in high precision is bfloat16: the GEMM is then the hardware's bfloat16 matmul [BF16-1].
"""

import hashlib
import json
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from f8emu.spec.cast_plan import CastPlans, RecipePlans, cast_plans
from f8emu.spec.chip import Chip
from f8emu.spec.chips import BLACKWELL_TCGEN05, CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import SpecError, did_you_mean, warn_of_old_name
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.spec.gemm import GEMM_NAMES as GEMM_NAMES
from f8emu.spec.gemm import HIGH_PRECISION_CAST as HIGH_PRECISION_CAST
from f8emu.spec.gemm import OPERANDS as OPERANDS
from f8emu.spec.gemm import TRANSPOSED as TRANSPOSED
from f8emu.spec.gemm import Cast as Cast
from f8emu.spec.gemm import Gemm as Gemm
from f8emu.spec.members import member_by_name
from f8emu.spec.names import ChipName, RecipeName
from f8emu.spec.scaling import TENSORS, DelayedScaling, E8M0Rule, Granularity, ScaleRule

SCHEMA = 1
"""Version of the layout of recipes as text; raised when a recipe's text changes its meaning."""
_EQUATIONS = {
    "output": "[M, N] = cast(input [M, K]) @ cast(weight [N, K]^T), summed over K",
    "grad_input": "[M, K] = cast(grad_output [M, N]) @ cast(weight [N, K]), summed over N",
    "grad_weight": "[N, K] = cast(grad_output [M, N]^T) @ cast(input [M, K]), summed over M",
}


class CastFrom(Enum):
    """Which values of a weight its casts read."""

    PARAMETER = "parameter"
    """The parameter's, in its own dtype: float32 of a float32 master."""
    BFLOAT16 = "bfloat16"
    """The values of a bfloat16 copy, which a server gets that quantizes a bfloat16 checkpoint."""


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
    chip: ChipName = "Hopper"
    """The chip whose bits the emulation gives: a name in `f8emu.spec.CHIPS`, or another name of one, such as `H200`."""
    cast_weight_from: CastFrom = CastFrom.PARAMETER
    """Which values of the weight are cast, everywhere: layer, autocast, all-gather, weights at rest, export."""
    cast_plans: RecipePlans = field(init=False, compare=False)
    """The passes from which the two operands of each tensor come."""

    def __repr__(self) -> str:
        """The label: the name, and what tells a changed recipe from the named one; `explain()` says it all."""
        return f"Recipe({self.label!r})"

    def _repr_html_(self) -> str:
        from html import escape  # here and below: what few programs need takes no time at their start

        return f"<pre>{escape(self.explain())}</pre>"

    def __post_init__(self) -> None:
        # 1. The chip has these GEMMs.
        call = f"Recipe {self.name!r}"
        source = member_by_name(call, "cast_weight_from", CastFrom, self.cast_weight_from)
        object.__setattr__(self, "cast_weight_from", source)
        chip = chip_by_name(call, self.chip)
        object.__setattr__(self, "chip", chip.name)
        for name, gemm in self.gemms.items():
            refusal = gemm.refusal(chip)
            if refusal is not None:
                raise SpecError(f"{call}: {name}: {refusal}; or choose another chip")
        # 2. A tensor has one float8 format.
        for tensor in TENSORS:
            formats = {cast.format.name for _, _, cast in self.casts(tensor) if cast.format is not None}
            if len(formats) > 1:
                names = " and ".join(sorted(formats))
                raise SpecError(
                    f"{call}: {tensor} is cast to {names}; one tensor has one float8 format in all its GEMMs"
                )
            if len({cast.scale_rule for _, _, cast in self.casts(tensor) if cast.format is not None}) > 1:
                raise SpecError(
                    f"{call}: the casts of {tensor} have different scale rules; one reading of a tensor gives both, so "
                    "give both the same scale_rule"
                )
            rules = [self.rule_of(cast) for _, _, cast in self.casts(tensor) if cast.format is not None]
            kinds = [cast.granularity for _, _, cast in self.casts(tensor) if cast.format is not None]
            if any((rule.e8m0 is None) is kind.is_microscaled for rule, kind in zip(rules, kinds, strict=True)):
                raise SpecError(
                    f"{call}: scales of {Granularity.BLOCKWISE_1X32.value} are E8M0, and no others are; {tensor} has "
                    f"{', '.join(kind.value for kind in kinds)} with {rules[0]}; set e8m0 of its scale_rule, or change "
                    "its granularity"
                )
        # 3. Delayed scales are tensorwise; so is the granularity of what is not cast.
        for gemm, tensor, cast in self.casts():
            if self.delayed_scaling_of(tensor) is not None and cast.granularity is not Granularity.TENSORWISE:
                raise SpecError(
                    f"{call}: delayed scaling keeps one amax a tensor, so every cast of one must be tensorwise; "
                    f"{tensor} of {gemm} is {cast.granularity.value}; leave {tensor} out of delayed.tensors"
                )
            if self.delayed is not None and cast.scale_rule is not None:
                raise SpecError(
                    f"{call}: delayed scaling has one scale rule for all its states; {tensor} of {gemm} has its own; "
                    "set scale_rule of the recipe, or leave delayed out"
                )
        object.__setattr__(self, "cast_plans", RecipePlans(*map(self._cast_plans, TENSORS)))

    def _cast_plans(self, tensor: str) -> CastPlans:
        (_, _, rows), (_, _, cols) = self.casts(tensor)
        delayed = self.delayed_scaling_of(tensor)
        return cast_plans(rows, cols, self.rule_of(rows, cols), 0 if delayed is None else delayed.margin)

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

    def rule_of(self, *casts: Cast | None) -> ScaleRule:
        """The scale rule of one tensor's casts, of which None was not asked for: their own, or that of the recipe."""
        for cast in casts:
            if cast is not None and cast.scale_rule is not None:
                return cast.scale_rule
        return self.scale_rule

    @property
    def delayed_tensors(self) -> tuple[str, ...]:
        """The tensors that have a state of delayed scaling: those with delayed scales that are cast at all."""
        is_cast = [tensor for tensor in TENSORS if self.cast_plans.of(tensor).both.format is not None]
        return tuple(tensor for tensor in is_cast if self.delayed_scaling_of(tensor) is not None)

    @property
    def content_hash(self) -> str:
        """SHA-256 of all fields but the name, in hex: two recipes with equal hashes give equal bits."""
        # The text without the name: a renamed recipe gives the same bits.
        content = {k: v for k, v in self.to_dict().items() if k != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def label(self) -> str:
        """The name. Unless it is a named recipe, the start of the content hash follows, and what of its chip and
        its weights is not the default.
        """
        if NAMED_RECIPES.get(self.name) == self:
            return self.name
        on = "" if self.chip == HOPPER.name else f" on {CHIPS[self.chip]}"
        of = "" if self.cast_weight_from is CastFrom.PARAMETER else f" of {self.cast_weight_from.value} weights"
        return f"{self.name} ({self.content_hash[:12]}){on}{of}"

    def to_dict(self) -> dict[str, object]:
        """A plain dict of strings, numbers and booleans, as in TOML and JSON, with every default written out."""
        # But for the default chip, source of weights and tensors of delayed scaling: texts and hashes are older.
        data: dict[str, object] = {"schema": SCHEMA, "name": self.name}
        if self.chip != HOPPER.name:
            data["chip"] = self.chip
        if self.cast_weight_from is not CastFrom.PARAMETER:
            data["cast_weight_from"] = self.cast_weight_from.value
        data["scale_rule"] = self.scale_rule.to_dict()
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
        lines, chip, delayed = [f"{self.name}  ({self.content_hash[:12]})"], CHIPS[self.chip], self.delayed
        if chip != HOPPER:
            lines.append(f"chip: {chip.name}, {chip.evidence.value}")
        if delayed is None:
            lines.append("scales: dynamic, from the amax of the tensor that is cast")
        else:
            some = f", of {' and '.join(delayed.tensors)}; the others dynamic" if delayed.tensors != TENSORS else ""
            lines.append(
                f"scales: delayed, from the {delayed.reduction.value} of the last {delayed.history_length} amaxes, "
                f"margin {delayed.margin} (format max * 2^-{delayed.margin}){some}"
            )
        lines.append(f"        inv_scale = {_inv_scale(self.scale_rule)}")
        rules = {tensor: self.rule_of(*(cast for _, _, cast in self.casts(tensor))) for tensor in TENSORS}
        lines += [f"        of {t}: {_inv_scale(rule)}" for t, rule in rules.items() if rule != self.scale_rule]
        if self.cast_weight_from is CastFrom.BFLOAT16:
            lines.append("weight: rounded to bfloat16 before its casts")
        for name, gemm in self.gemms.items():
            lines += [f"{name} {_EQUATIONS[name]}", f"    a: {gemm.a}", f"    b: {gemm.b}"]
            lines.append(f"    {_accumulation(gemm, chip)}")
        return "\n".join(lines)


def _inv_scale(rule: ScaleRule) -> str:
    if rule.e8m0 is not None:
        return f"2^-e, e an E8M0 exponent by the rule {rule.e8m0.name}"
    return f"max / max(amax, {rule.amax_floor:.9g})" + (", cut to a power of two" if rule.power_of_two else "")


def _accumulation(gemm: Gemm, chip: Chip) -> str:
    if gemm.is_high_precision:
        return "bfloat16 matmul, one chain"
    if gemm.a.granularity.is_microscaled:
        return "one chain, scales inside its steps"
    promote_k = (chip.float8_fast if gemm.use_fast_accum else chip.float8).promote_k
    if promote_k is not None:
        return f"accumulation promoted to float32 every {promote_k}" + ("" if gemm.split_k else ", K never split")
    return "fast accumulation: one chain" if gemm.use_fast_accum else "one chain"


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        items = typing.cast(dict[str, object], value).items()
        return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in items) + " }"
    # JSON's text of the others is TOML's, but for two: TOML has no surrogate pairs, and escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _alike(
    name: str, input: Cast, weight: Cast, grad_output: Cast, *, fast_output: bool = True, **fields: typing.Any
) -> Recipe:
    """A recipe that casts each tensor alike in both of its GEMMs."""
    return Recipe(
        name=name,
        output=Gemm(a=input, b=weight, use_fast_accum=fast_output),
        grad_input=Gemm(a=grad_output, b=weight),
        grad_weight=Gemm(a=grad_output, b=input),
        **fields,
    )


_TENSOR, _ROW, _VECTOR, _SQUARE, _MX = (Cast(format=E4M3FN, granularity=granularity) for granularity in Granularity)
_HIGH = Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST)

TENSORWISE = _alike("tensorwise", _TENSOR, _TENSOR, Cast(format=E5M2))
"""One scale per tensor, torchao's default. E4M3 forward, E5M2 gradients."""
ROWWISE = replace(_alike("rowwise", _ROW, _ROW, _ROW), scale_rule=ScaleRule(power_of_two=True))
"""One power-of-two scale per row of each operand; E4M3 everywhere, as in torchao."""
ROWWISE_FAST = replace(
    ROWWISE,
    name="rowwise_fast",
    grad_input=replace(ROWWISE.grad_input, use_fast_accum=True),
    grad_weight=replace(ROWWISE.grad_weight, use_fast_accum=True),
)
"""Rowwise, with fast accumulation in all three GEMMs, as torchao's mixtures of experts have it."""
ROWWISE_WITH_GW_HP = replace(ROWWISE, name="rowwise_with_gw_hp", grad_input=Gemm(a=_ROW, b=_TENSOR), grad_weight=_HIGH)
"""Rowwise, with `grad_weight` in high precision and a tensorwise weight in `grad_input`, as in torchao."""
DELAYED = replace(TENSORWISE, name="delayed", delayed=DelayedScaling())
"""One scale per tensor from the amax of earlier steps, as float8_experimental intended."""
BLOCKWISE = _alike("blockwise", _VECTOR, _SQUARE, _VECTOR, fast_output=False)
"""1x128 blocks of activations and gradients, 128x128 blocks of weights; E4M3 everywhere."""

_UE8M0 = replace(
    _alike(
        "blockwise_ue8m0",
        replace(_VECTOR, scale_rule=ScaleRule(power_of_two=True, amax_floor=448 * 1e-10)),
        replace(_SQUARE, scale_rule=ScaleRule(power_of_two=True, amax_floor=9.999999747378752e-05)),
        _VECTOR,
        fast_output=False,
    ),
    scale_rule=ScaleRule(power_of_two=True),
)
BLOCKWISE_UE8M0 = replace(_UE8M0, output=replace(_UE8M0.output, split_k=False))
"""Blockwise with scales that are powers of two, UE8M0, and K of `output` whole, as vLLM serves with DeepGEMM on Hopper.
The floors are those of vLLM's `per_token_group_quant` for the input, 1e-10 of a scale, and of DeepGEMM's casts for the
weight, 1e-4 in float32 of an amax. No server casts gradients: their floor is that of `BLOCKWISE`."""

RECIPES: dict[RecipeName, Recipe] = {
    "tensorwise": TENSORWISE,
    "rowwise": ROWWISE,
    "rowwise_fast": ROWWISE_FAST,
    "rowwise_with_gw_hp": ROWWISE_WITH_GW_HP,
    "delayed": DELAYED,
    "blockwise": BLOCKWISE,
}
"""The named recipes."""

SERVING_RECIPES: dict[RecipeName, Recipe] = {"blockwise_ue8m0": BLOCKWISE_UE8M0}
"""Named recipes that are one of `RECIPES` but for a serving stack's scale rules."""

MXFP8 = _alike(
    "mxfp8",
    *(_MX, _MX, _MX),
    fast_output=False,
    scale_rule=ScaleRule(e8m0=E8M0Rule.RCEIL),
    chip=BLACKWELL_TCGEN05.name,
)
"""MXFP8 as TransformerEngine trains: E8M0 scales of 32 along the summed dimension, rounded up; E4M3 everywhere."""
MXFP8_FLOOR = replace(MXFP8, name="mxfp8_floor", scale_rule=ScaleRule(e8m0=E8M0Rule.FLOOR))
"""MXFP8 with the scale rule of the OCP specification, torchao's default."""

MX_RECIPES: dict[RecipeName, Recipe] = {"mxfp8": MXFP8, "mxfp8_floor": MXFP8_FLOOR}
"""Named recipes of a Blackwell GPU, whose GEMMs were never recorded (`Evidence.AGREES_WITH_MODEL`)."""

NAMED_RECIPES: dict[str, Recipe] = {**RECIPES, **SERVING_RECIPES, **MX_RECIPES}
"""Every named recipe."""

RECIPE_ALIASES: dict[str, RecipeName] = {
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
    if name in RECIPE_ALIASES:
        warn_of_old_name(f"recipe {name!r}", repr(RECIPE_ALIASES[name]))
    recipe = NAMED_RECIPES.get(RECIPE_ALIASES.get(name, name))
    if recipe is None:
        known, near = ", ".join(NAMED_RECIPES), did_you_mean(name, NAMED_RECIPES)
        older = ", ".join(f"{old} (= {new})" for old, new in RECIPE_ALIASES.items())
        raise SpecError(f"recipe_by_name: unknown recipe {name!r}{near}; known recipes: {known}; older names: {older}")
    return recipe
