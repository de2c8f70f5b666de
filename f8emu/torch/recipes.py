"""Recipes as callers give them: a recipe, its name, or torchao's configuration. torchao is not imported."""

from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.members import member_by_name
from f8emu.spec.names import RecipeName
from f8emu.spec.recipe import HIGH_PRECISION_CAST, RECIPES, Cast, CastFrom, Gemm, Recipe, recipe_by_name
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.chip import CHIP, float8_format

_GRANULARITIES = {"tensorwise": Granularity.TENSORWISE, "axiswise": Granularity.ROWWISE}
_OPTIONS = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate")  # of torchao's configuration, beyond a recipe


class TorchaoConfig(Protocol):
    """torchao's `Float8LinearConfig`."""

    @property
    def gemm_config_output(self) -> Any: ...


RecipeLike = Recipe | RecipeName | Enum | TorchaoConfig
"""A recipe, its name, or torchao's `Float8LinearRecipeName` or `Float8LinearConfig` for it."""


def torchao_options(config: RecipeLike | None) -> set[str]:
    """Which options of a conversion torchao's configuration sets beyond a recipe; none of another recipe."""
    return {name for name in _OPTIONS if type(config).__name__ == "Float8LinearConfig" and getattr(config, name, False)}


def resolve_recipe(call: str, config: RecipeLike | str, cast_weight_from: CastFrom | str | None = None) -> Recipe:
    """The recipe itself, the one of that name, or the one that torchao's configuration or enum stands for.

    `cast_weight_from` takes the place of the recipe's own, unless it is None.
    """
    # torchao's by the names of their classes: it need not be installed.
    kind = type(config).__name__
    if isinstance(config, Enum) and kind == "Float8LinearRecipeName":
        config = str(config.value)
    if isinstance(config, str):
        config = recipe_by_name(config)
    recipe = _of_torchao(call, config) if kind == "Float8LinearConfig" else config
    if not isinstance(recipe, Recipe):
        raise SpecError(f"{call}: the recipe must be a Recipe or the name of one; got {kind}; see f8emu.RECIPES")
    for _, _, cast in recipe.casts():
        if cast.format is not None and cast.format not in CHIP.operand_formats:
            known = " or ".join(format.name for format in CHIP.operand_formats)
            raise UnsupportedError(
                f"{call}: layers cast to {known}; recipe {recipe.label} to {cast.format}; train with "
                f"f8emu.jax.dot_general, or multiply with scaled_mm(..., chip={recipe.chip!r})"
            )
    if cast_weight_from is None:
        return recipe
    source = member_by_name(call, "cast_weight_from", CastFrom, cast_weight_from)
    return replace(recipe, cast_weight_from=source)


def _of_torchao(call: str, config: Any) -> Recipe:
    """The recipe with the same casts, scales and accumulation, a named one if there is one."""
    try:
        # torchao fills in casts that were left out.
        recipe = Recipe(
            name="torchao",
            output=_gemm(config, "output", "input", "weight"),
            grad_input=_gemm(config, "grad_input", "grad_output", "weight_for_grad_input"),
            grad_weight=_gemm(config, "grad_weight", "grad_output_for_grad_weight", "input_for_grad_weight"),
            scale_rule=ScaleRule(power_of_two=config.round_scales_to_power_of_2),
        )
    except SpecError as error:
        raise SpecError(
            f"{call}: no recipe matches this Float8LinearConfig: {error}; choose one of {', '.join(RECIPES)}"
        ) from None
    return next((named for named in RECIPES.values() if named == recipe), recipe)


def _gemm(config: Any, gemm: str, a: str, b: str) -> Gemm:
    cast_a, cast_b = (_cast(getattr(config, f"cast_config_{operand}")) for operand in (a, b))
    is_float8 = not (cast_a.is_high_precision and cast_b.is_high_precision)
    is_fast = getattr(config, f"gemm_config_{gemm}").use_fast_accum
    return Gemm(a=cast_a, b=cast_b, use_fast_accum=is_fast and is_float8)


def _cast(config: Any) -> Cast:
    kind = config.scaling_type.value
    if kind == "disabled":
        return HIGH_PRECISION_CAST
    if kind != "dynamic":
        raise SpecError(f'its {kind} scaling is the recipe "delayed" here')
    format = float8_format("Float8LinearConfig", config.target_dtype)
    return Cast(format=format, granularity=_GRANULARITIES[config.scaling_granularity.value])
