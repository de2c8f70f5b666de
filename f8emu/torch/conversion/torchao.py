"""torchao's `Float8LinearConfig` and its recipe enum as recipes of f8emu. torchao itself is not imported."""

from enum import Enum
from typing import Any, Protocol

from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.formats import Format
from f8emu.spec.recipe import HIGH_PRECISION_CAST, RECIPES, Cast, Gemm, Recipe, recipe_by_name
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.dtypes import CHIP, float8_format

_GRANULARITIES = {"tensorwise": Granularity.TENSORWISE, "axiswise": Granularity.ROWWISE}
_OPTIONS = {
    "enable_fsdp_float8_all_gather": "pass enable_fsdp_float8_all_gather=True to convert_to_float8_training",
    "pad_inner_dim": "pass pad=True to convert_to_float8_training",
    "emulate": 'pass engine="emulated" to convert_to_float8_training, whose bits are the hardware\'s',
}
"""Field of torchao's configuration, which no recipe holds -> what to do."""


class TorchaoConfig(Protocol):
    """torchao's `Float8LinearConfig`, as far as its GEMMs go."""

    @property
    def gemm_config_output(self) -> Any: ...
    @property
    def gemm_config_grad_input(self) -> Any: ...
    @property
    def gemm_config_grad_weight(self) -> Any: ...


RecipeLike = Recipe | str | Enum | TorchaoConfig
"""A recipe, its name, or torchao's `Float8LinearRecipeName` or `Float8LinearConfig` for it."""


def resolve_recipe(call: str, config: RecipeLike) -> Recipe:
    """The recipe itself, the one of that name, or the one that torchao's configuration or enum stands for.

    Raises:
        SpecError: no such recipe, or not a recipe.
        UnsupportedError: a recipe with formats of another chip that layers do not cast to.
    """
    if isinstance(config, str):
        return recipe_by_name(config)
    config = recipe_of_torchao(call, config) or config
    if not isinstance(config, Recipe):
        raise SpecError(
            f"{call}: the recipe must be a Recipe or the name of one; got {type(config).__name__}; see f8emu.RECIPES"
        )
    for _, _, cast in config.casts():
        if cast.format is not None and cast.format not in CHIP.operand_formats:
            known = " or ".join(format.name for format in CHIP.operand_formats)
            raise UnsupportedError(
                f"{call}: layers cast to {known}; recipe {config.label} to {cast.format}; train with "
                f"f8emu.jax.dot_general, or multiply with scaled_mm(..., chip={config.chip!r})"
            )
    return config


def recipe_of_torchao(call: str, config: object) -> Recipe | None:
    """The named recipe with the same casts, scales and accumulation; None if `config` is not torchao's.

    Raises:
        SpecError: no named recipe does the same; the message has the expression or the argument to use instead.
    """
    if isinstance(config, Enum) and type(config).__name__ == "Float8LinearRecipeName":
        return recipe_by_name(str(config.value))
    if type(config).__name__ != "Float8LinearConfig":
        return None
    for option, remedy in _OPTIONS.items():
        if getattr(config, option, False):
            raise SpecError(f"{call}: Float8LinearConfig must have {option}=False here; got True; {remedy}")
    try:
        recipe = _recipe(config)
    except SpecError as error:
        raise SpecError(
            f"{call}: no recipe matches this Float8LinearConfig: {error}; choose one of {', '.join(RECIPES)}"
        ) from None
    for named in RECIPES.values():
        if named == recipe:
            return named
    raise SpecError(
        f"{call}: Float8LinearConfig must be one of its named recipes; got another one; pass "
        f"config={_expression(recipe)} instead, with the names of f8emu"
    )


def _recipe(config: Any) -> Recipe:
    """The fields of a `Float8LinearConfig`, which fills in casts that were left out, as a recipe."""
    c = config
    return Recipe(
        name="from torchao",
        output=_gemm(c.cast_config_input, c.cast_config_weight, c.gemm_config_output),
        grad_input=_gemm(c.cast_config_grad_output, c.cast_config_weight_for_grad_input, c.gemm_config_grad_input),
        grad_weight=_gemm(
            c.cast_config_grad_output_for_grad_weight,
            c.cast_config_input_for_grad_weight,
            c.gemm_config_grad_weight,
        ),
        scale_rule=ScaleRule(power_of_two=c.round_scales_to_power_of_2),
    )


def _gemm(a: Any, b: Any, gemm: Any) -> Gemm:
    cast_a, cast_b = _cast(a), _cast(b)
    is_float8 = not (cast_a.is_high_precision and cast_b.is_high_precision)
    return Gemm(a=cast_a, b=cast_b, use_fast_accum=gemm.use_fast_accum and is_float8)


def _cast(config: Any) -> Cast:
    kind = config.scaling_type.value
    if kind == "disabled":
        return HIGH_PRECISION_CAST
    if kind != "dynamic":
        raise SpecError(f'its {kind} scaling is the recipe "delayed" here')
    format = float8_format("Float8LinearConfig", config.target_dtype)
    return Cast(format=format, granularity=_GRANULARITIES[config.scaling_granularity.value])


def _expression(recipe: Recipe) -> str:
    """The recipe as an expression: the named recipe that needs the fewest changes, and the changes."""

    def changes(named: Recipe) -> dict[str, str]:
        changed = {name: _gemm_text(gemm) for name, gemm in recipe.gemms.items() if gemm != named.gemms[name]}
        if recipe.scale_rule != named.scale_rule:
            changed["scale_rule"] = f"ScaleRule(power_of_two={recipe.scale_rule.power_of_two})"
        return changed

    nearest = min((named for named in RECIPES.values() if named.delayed is None), key=lambda n: len(changes(n)))
    arguments = "".join(f", {name}={text}" for name, text in changes(nearest).items())
    return f'dataclasses.replace({nearest.name.upper()}, name="mine"{arguments})'


def _gemm_text(gemm: Gemm) -> str:
    fast = ", use_fast_accum=True" if gemm.use_fast_accum else ""
    return f"Gemm(a={_cast_text(gemm.a)}, b={_cast_text(gemm.b)}{fast})"


def _cast_text(cast: Cast) -> str:
    if cast.format is None:
        return "Cast(format=None)"
    own = "" if cast.granularity is Granularity.TENSORWISE else f", granularity=Granularity.{cast.granularity.name}"
    return f"Cast(format={_format_text(cast.format)}{own})"


def _format_text(format: Format) -> str:
    return format.name.removeprefix("float8_").upper()
