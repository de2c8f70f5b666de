"""Recipes from plain dicts, JSON and TOML; `Recipe` itself writes them.

The text is strict: an unknown key, a missing key or a wrong type is an error that names its place.
"""

import json
import tomllib
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, cast, get_args

from f8emu.spec.errors import SpecError
from f8emu.spec.formats import Format, format_by_name
from f8emu.spec.gemm import HIGH_PRECISION_CAST, Cast
from f8emu.spec.recipe import SCHEMA, Recipe


def recipe_from_json(text: str) -> Recipe:
    """The recipe in a JSON text.

    Raises:
        SpecError: not JSON, or not a recipe; the message names the place.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"recipe_from_json: not JSON: {error}") from None
    return recipe_from_dict(data)


def recipe_from_toml(text: str) -> Recipe:
    """The recipe in a TOML text; it raises as `recipe_from_json`."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"recipe_from_toml: not TOML: {error}") from None
    return recipe_from_dict(data)


def recipe_from_dict(data: object) -> Recipe:
    """The recipe in a plain dict, as `Recipe.to_dict` writes it.

    Raises:
        SpecError: an unknown, missing or ill-typed key, or an impossible recipe; the message names the place.
    """
    table = _table(Recipe, data, "recipe", "schema")
    schema = _read(int, table.pop("schema", SCHEMA), "schema")
    if schema != SCHEMA:
        raise SpecError(f"recipe: schema {schema} is unknown; this version of f8emu reads schema {SCHEMA}")
    return Recipe(**_values(Recipe, table))


def _read(kind: Any, value: object, place: str) -> Any:
    """`value` as a field of type `kind` holds it; a dataclass is read field by field."""
    if isinstance(kind, types.UnionType):  # a part that may be left out
        kind = get_args(kind)[0]
    if kind is Format:
        name = _read(str, value, place)
        return None if name == str(HIGH_PRECISION_CAST) else _at(place, format_by_name, name)
    if is_dataclass(kind):
        return _part(kind, value, place)
    if kind == tuple[str, ...]:
        return tuple(_read(str, name, place) for name in _read(list, value, place))
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise SpecError(f"recipe: {place} must be one of {known}; got {value!r}") from None
    # TOML and JSON may write 1 for 1.0; a bool is an int of Python's, and no number here.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise SpecError(f"recipe: {place} must be of type {kind.__name__}; got {value!r}")
    return value


def _part(kind: Any, data: object, place: str) -> Any:
    values = _values(kind, _table(kind, data, place), f"{place}.")
    if kind is Cast and values["format"] is None and len(values) > 1:
        raise SpecError(
            f"recipe: {place} is {HIGH_PRECISION_CAST} and has no granularity and no scale_rule; remove the key"
        )
    return _at(place, kind, **values)


def _table(kind: Any, data: object, place: str, *others: str) -> dict[str, Any]:
    """A table with the fields of a dataclass as keys, and `others`; those without a default must be there."""
    if not isinstance(data, dict):
        raise SpecError(f"recipe: {place} must be a table; got {data!r}")
    # A key too many is an error: a misspelt one would silently mean its default.
    parts = [field for field in fields(kind) if field.init]
    table, known = dict(cast(dict[str, Any], data)), [*(field.name for field in parts), *others]
    missing = [field.name for field in parts if field.default is MISSING and field.name not in table]
    unknown = [key for key in table if key not in known]
    if missing or unknown:
        fault = f"missing {missing}" if missing else f"unknown {unknown}"
        raise SpecError(f"recipe: {place} has keys {known}; {fault}")
    return table


def _values(kind: Any, table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    kinds: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    return {key: _read(kinds[key], value, prefix + key) for key, value in table.items()}


def _at(place: str, build: Callable[..., Any], *args: Any, **values: Any) -> Any:
    try:
        return build(*args, **values)
    except SpecError as error:
        raise SpecError(f"recipe: {place}: {error}") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object, whose keys may not repeat, as in TOML; JSON's own rule, the last one wins, would hide a slip."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return table
