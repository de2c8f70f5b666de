"""Recipes from plain dicts, JSON and TOML; `Recipe` itself writes them."""

import tomllib
from typing import Any, cast

from f8emu.spec.errors import SpecError
from f8emu.spec.formats import Format, format_by_name
from f8emu.spec.gemm import HIGH_PRECISION_CAST, Cast
from f8emu.spec.recipe import SCHEMA, Recipe
from f8emu.strict import Fault, faults_as, parsed, part, read, require


def recipe_from_json(text: str) -> Recipe:
    """The recipe in a JSON text.

    Raises:
        SpecError: not JSON, or not a recipe; the message names the place.
    """
    with faults_as(SpecError, "recipe_from_json"):
        return _recipe(parsed(text, "a recipe"))


def recipe_from_toml(text: str) -> Recipe:
    """The recipe in a TOML text; it raises as `recipe_from_json`."""
    with faults_as(SpecError, "recipe_from_toml"):
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise Fault(f"expected a recipe; found no TOML: {error}") from None
        return _recipe(data)


def recipe_from_dict(data: object) -> Recipe:
    """The recipe in a plain dict, as `Recipe.to_dict` writes it.

    Raises:
        SpecError: an unknown, missing or ill-typed key, or an impossible recipe; the message names the place.
    """
    with faults_as(SpecError, "recipe_from_dict"):
        return _recipe(data)


def _recipe(data: Any) -> Recipe:
    require(isinstance(data, dict), "a recipe of type object", repr(data))
    table = dict(data)
    schema = read(int, table.pop("schema", SCHEMA), "schema")
    require(schema == SCHEMA, f"schema {SCHEMA}, which this version of f8emu reads", schema)
    return part(Recipe, table, readers={Format: _format, Cast: _cast})


def _format(value: object, place: str) -> Format | None:
    name = read(str, value, place)
    return None if name == str(HIGH_PRECISION_CAST) else format_by_name(name)


def _cast(value: Any, place: str) -> Cast:
    table = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    is_plain = table.get("format") == str(HIGH_PRECISION_CAST)
    rest = [key for key in table if key != "format"] if is_plain else []
    require(not rest, f"{place} to be {HIGH_PRECISION_CAST}, without granularity and scale_rule", ", ".join(rest))
    return part(Cast, value, place, {Format: _format})
