"""Recipes as TOML and JSON: what is written can be read, and what is malformed names its place."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import E4M3FN, E5M2, Format
from f8emu.spec.gemm import HIGH_PRECISION_CAST, Cast, Gemm
from f8emu.spec.recipe import BLOCKWISE, DELAYED, TENSORWISE, Recipe
from f8emu.spec.scaling import (
    MAX_MARGIN,
    MIN_AMAX_FLOOR,
    TENSORS,
    AmaxHistoryReduction,
    DelayedScaling,
    Granularity,
    ScaleRule,
)
from f8emu.spec.serialize import recipe_from_dict, recipe_from_json, recipe_from_toml

T, R = Granularity.TENSORWISE, Granularity.ROWWISE
PAIRS = (*HOPPER.granularity_pairs, (T, R), (R, T))

DELAYED_TOML = """\
schema = 1
name = "delayed"

[scale_rule]
power_of_two = false
amax_floor = 1e-12

[delayed]
history_length = 16
reduction = "max"
margin = 0

[output]
a = { format = "float8_e4m3fn", granularity = "tensorwise" }
b = { format = "float8_e4m3fn", granularity = "tensorwise" }
use_fast_accum = true

[grad_input]
a = { format = "float8_e5m2", granularity = "tensorwise" }
b = { format = "float8_e4m3fn", granularity = "tensorwise" }
use_fast_accum = false

[grad_weight]
a = { format = "float8_e5m2", granularity = "tensorwise" }
b = { format = "float8_e4m3fn", granularity = "tensorwise" }
use_fast_accum = false
"""

SHORTEST_TOML = """\
name = "shortest"
output = { a = { format = "bfloat16" }, b = { format = "bfloat16" } }
grad_input = { a = { format = "float8_e4m3fn" }, b = { format = "float8_e4m3fn" } }
grad_weight = { a = { format = "bfloat16" }, b = { format = "bfloat16" } }
"""


@st.composite
def gemms(
    draw: st.DrawFn,
    a: Format,
    b: Format,
    pairs: tuple[tuple[Granularity, Granularity], ...],
    rules: tuple[ScaleRule | None, ScaleRule | None],
) -> Gemm:
    if (a, b) == (E5M2, E5M2) or draw(st.booleans()):
        return Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST)
    possible = [pair for pair in pairs if E5M2 not in (a, b) or not any(g.is_blockwise for g in pair)]
    granularity_a, granularity_b = draw(st.sampled_from(possible))
    return Gemm(
        a=Cast(format=a, granularity=granularity_a, scale_rule=rules[0]),
        b=Cast(format=b, granularity=granularity_b, scale_rule=rules[1]),
        split_k=draw(st.booleans()) or granularity_a is not Granularity.BLOCKWISE_1X128,
        use_fast_accum=draw(st.booleans()) and not (granularity_a.is_blockwise or granularity_b.is_blockwise),
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe that the spec allows."""
    input, weight, grad_output = draw(st.tuples(*[st.sampled_from(HOPPER.operand_formats)] * 3))
    delayed = draw(
        st.none()
        | st.builds(
            DelayedScaling,
            history_length=st.integers(1, 2**40),
            reduction=st.sampled_from(AmaxHistoryReduction),
            margin=st.integers(0, MAX_MARGIN),
            tensors=st.sampled_from((TENSORS, TENSORS[:2], TENSORS[1:], TENSORS[2:])),
        )
    )
    pairs = PAIRS if delayed is None else ((T, T),)
    rule = st.builds(ScaleRule, power_of_two=st.booleans(), amax_floor=st.floats(MIN_AMAX_FLOOR, 1, exclude_max=True))
    own = draw(st.tuples(*[st.none() if delayed else st.none() | rule] * 3))
    return Recipe(
        name=draw(st.text()),
        output=draw(gemms(input, weight, pairs, (own[0], own[1]))),
        grad_input=draw(gemms(grad_output, weight, pairs, (own[2], own[1]))),
        grad_weight=draw(gemms(grad_output, input, pairs, (own[2], own[0]))),
        scale_rule=draw(rule),
        delayed=delayed,
    )


@given(recipes())
def test_every_recipe_survives_toml_and_json(recipe: Recipe) -> None:
    texts = recipe_from_toml(recipe.to_toml()), recipe_from_json(recipe.to_json()), recipe_from_dict(recipe.to_dict())
    for read in texts:
        assert (read, read.name, read.content_hash) == (recipe, recipe.name, recipe.content_hash)


@given(recipes(), recipes())
def test_equal_hashes_are_equal_recipes(one: Recipe, other: Recipe) -> None:
    assert (one.content_hash == other.content_hash) == (one == other)


@pytest.mark.parametrize(
    "name", ['"', "\\", "a\nb", "\x00\x1f\x7f", "\x85\u2028", "\U0001f525", "ein Rezept \u00df", ""]
)
def test_awkward_names_survive(name: str) -> None:
    recipe = dataclasses.replace(TENSORWISE, name=name)
    assert recipe_from_toml(recipe.to_toml()).name == name
    assert recipe_from_json(recipe.to_json()).name == name


def test_texts() -> None:
    assert DELAYED.to_toml() == DELAYED_TOML
    text = BLOCKWISE.to_json()
    assert text.startswith('{\n  "schema": 1,\n  "name": "blockwise",\n') and json.loads(text) == BLOCKWISE.to_dict()


def test_what_is_left_out_has_its_default() -> None:
    high, cast = Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST), Cast(format=E4M3FN)
    expected = Recipe(name="shortest", output=high, grad_input=Gemm(a=cast, b=cast), grad_weight=high)
    assert recipe_from_toml(SHORTEST_TOML) == expected
