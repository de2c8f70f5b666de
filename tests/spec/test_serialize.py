"""Recipes as TOML and JSON: what is written can be read, and what is malformed names its place."""

import dataclasses
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import SpecError
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


MALFORMED: list[tuple[str, str, str]] = [
    ("schema = 1", "schema 1", "recipe_from_toml: not TOML: Expected '=' after a key"),
    ("schema = 1", "schema = 1\nschema = 1", "recipe_from_toml: not TOML: Cannot overwrite a value"),
    ("schema = 1", f"schema = {'1' * 5000}", "recipe_from_toml: not TOML: Exceeds the limit"),
    ("schema = 1", f"schema = {'[' * 5000}", "recipe_from_toml: not TOML: maximum recursion"),
    ("schema = 1", "schema = 2", "recipe: schema 2 is unknown; this version of f8emu reads schema 1"),
    ("schema = 1", "schema = true", "recipe: schema must be of type int; got True"),
    ('name = "delayed"', "", "recipe: recipe has keys ["),
    ('name = "delayed"', 'nam = "x"\nname = "x"', "unknown ['nam']"),
    ('name = "delayed"', "name = 3", "recipe: name must be of type str; got 3"),
    ("[grad_input]", "[other]", "missing ['grad_input']"),
    ("[scale_rule]\npower_of_two = false\namax_floor = 1e-12", "scale_rule = 1", "recipe: scale_rule must be a table;"),
    ("power_of_two", "power_of_2", "recipe: scale_rule has keys ['power_of_two', 'amax_floor']; unknown ['power_of_2'"),
    ("1e-12", "true", "recipe: scale_rule.amax_floor must be of type float; got True"),
    ("1e-12", "1", "recipe: scale_rule: ScaleRule: amax_floor must be in [2^-110, 1)"),
    (
        '[delayed]\nhistory_length = 16\nreduction = "max"\nmargin = 0',
        "[[delayed]]\nmargin = 0",
        "recipe: delayed must be a table; got [{'margin': 0}]",
    ),
    ("margin", "margins", "recipe: delayed has keys ['history_length', 'reduction', 'margin', 'tensors']; unknown ['m"),
    ("16", "16.0", "recipe: delayed.history_length must be of type int; got 16.0"),
    ("16", "0", "recipe: delayed: DelayedScaling: history_length must be at least 1; got 0"),
    ("margin = 0", "margin = 7", "recipe: delayed: DelayedScaling: margin must be in 0..6"),
    ('"max"', '"mean"', "recipe: delayed.reduction must be one of max, most_recent; got 'mean'"),
    ("a = {", "c = {", "recipe: output has keys ['a', 'b', 'use_fast_accum', 'split_k']; missing ['a']"),
    ("use_fast_accum", "fast", "recipe: output has keys ['a', 'b', 'use_fast_accum', 'split_k']; unknown ['fast']"),
    ('a = { format = "float8_e4m3fn", granularity = "tensorwise" }', 'a = "float8_e4m3fn"', "recipe: output.a must be"),
    (
        'format = "float8_e4m3fn", ',
        "",
        "recipe: output.a has keys ['format', 'granularity', 'scale_rule']; missing ['format']",
    ),
    (
        "float8_e4m3fn",
        "float8_e4m3",
        "recipe: output.a.format: format_by_name: unknown format 'float8_e4m3'; known",
    ),
    ('"float8_e4m3fn"', "8", "recipe: output.a.format must be of type str; got 8"),
    ("float8_e4m3fn", "float16", "recipe: output.a: Cast: format must be the Format float8_e4m3fn or"),
    ('"tensorwise"', '"axiswise"', "recipe: output.a.granularity must be one of tensorwise, rowwise, blockwise_1x128,"),
    ("float8_e4m3fn", "bfloat16", "recipe: output.a is bfloat16 and has no granularity and no scale_rule; remove"),
    (
        'float8_e4m3fn", granularity = "tensorwise" }\nuse_fast_accum = false',
        'float8_e5m2", granularity = "tensorwise" }\nuse_fast_accum = false',
        "recipe: grad_input: Gemm: Hopper multiplies float8_e4m3fn x float8_e4m3fn, ",
    ),
    ("float8_e4m3fn", "float8_e5m2", "Recipe 'delayed': input is cast to float8_e4m3fn and float8_e5m2"),
]
"""What is changed in the text above (old, new) -> the start of the error. `output` is the first table with an `a`."""


@pytest.mark.parametrize(
    ("old", "new", "text"), MALFORMED, ids=[f"{i} {row[2][:40]}" for i, row in enumerate(MALFORMED)]
)
def test_malformed_toml_names_the_place(old: str, new: str, text: str) -> None:
    assert old in DELAYED_TOML
    with pytest.raises(SpecError) as caught:
        recipe_from_toml(DELAYED_TOML.replace(old, new, 1))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "recipe_from_json: not JSON: Expecting value"),
        ("{", "recipe_from_json: not JSON: Expecting property name"),
        ("[]", "recipe: recipe must be a table; got []"),
        ("null", "recipe: recipe must be a table; got None"),
        ('{"a": 1, "name": "x", "name": "y"}', "recipe_from_json: not JSON: the key 'name' appears twice"),
        ("1" * 5000, "recipe_from_json: not JSON: Exceeds the limit"),
        ("[" * 100_000, "recipe_from_json: not JSON: maximum recursion depth exceeded"),
        ('{"name": "x", "output": 1, "grad_input": 1, "grad_weight": 1}', "recipe: output must be a table; got 1"),
        ("{}", "missing ['name', 'output', 'grad_input', 'grad_weight']"),
    ],
)
def test_malformed_json_names_the_place(text: str, error: str) -> None:
    with pytest.raises(SpecError) as caught:
        recipe_from_json(text)
    assert error in str(caught.value)


def test_json_number_that_is_none() -> None:
    with pytest.raises(SpecError, match=r"recipe: scale_rule: ScaleRule: amax_floor must be in .*; got nan"):
        recipe_from_json(TENSORWISE.to_json().replace("1e-12", "NaN"))


@pytest.mark.parametrize("read", [recipe_from_toml, recipe_from_json])
def test_the_other_language_is_refused(read: Callable[[str], Recipe]) -> None:
    other = TENSORWISE.to_json() if read is recipe_from_toml else TENSORWISE.to_toml()
    with pytest.raises(SpecError, match=rf"^{read.__name__}: not (TOML|JSON): "):
        read(other)
