"""Recipes from plain dicts, JSON and TOML; `Recipe` itself writes them.

The text is strict: an unknown key, a missing key or a wrong type is an error that names its place. The layout is
versioned by `schema`.
"""

import json
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

from f8emu.spec.errors import SpecError
from f8emu.spec.formats import format_by_name
from f8emu.spec.recipe import GEMM_NAMES, HIGH_PRECISION_CAST, SCHEMA, Cast, Gemm, Recipe
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, Granularity, ScaleRule

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)
_Reader = Callable[[object, str], Any]
"""A value and its place -> what it stands for."""


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
    """The recipe in a TOML text.

    Raises:
        SpecError: not TOML, or not a recipe; the message names the place.
    """
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
    top = _table(data, "recipe", required=("name", *GEMM_NAMES), optional=tuple(_TOP)[:-1])
    schema = _typed(int, top.pop("schema", SCHEMA), "schema")
    if schema != SCHEMA:
        raise SpecError(f"recipe: schema {schema} is unknown; this version of f8emu reads schema {SCHEMA}")
    return Recipe(**{key: _TOP.get(key, _gemm)(value, key) for key, value in top.items()})


@contextmanager
def _at(place: str) -> Generator[None, None, None]:
    """Names the place in the errors of the part that is built there."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"recipe: {place}: {error}") from None


def _typed(kind: type[_T], value: object, place: str) -> _T:
    # TOML and JSON may write 1 for 1.0; a bool is an int of Python's, and no number here.
    is_number = kind is float and isinstance(value, int) and not isinstance(value, bool)
    if type(value) is not kind and not is_number:
        raise SpecError(f"recipe: {place} must be of type {kind.__name__}; got {value!r}")
    return value  # type: ignore[return-value]


def _enum(kind: type[_E], value: object, place: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise SpecError(f"recipe: {place} must be one of {known}; got {value!r}") from None


def _names(value: object, place: str) -> tuple[str, ...]:
    return tuple(_typed(str, name, place) for name in cast(list[object], _typed(list, value, place)))


def _table(
    data: object, place: str, *, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise SpecError(f"recipe: {place} must be a table; got {data!r}")
    # A key too many is an error: a misspelt one would silently mean its default.
    table = dict(cast(dict[str, Any], data))
    missing = [key for key in required if key not in table]
    unknown = [key for key in table if key not in required + optional]
    if missing or unknown:
        found = f"missing {missing}" if missing else f"unknown {unknown}"
        raise SpecError(f"recipe: {place} has keys {[*required, *optional]}; {found}")
    return table


def _part(kind: Callable[..., Any], readers: dict[str, _Reader], required: tuple[str, ...] = ()) -> _Reader:
    """Reads a table into a part of a recipe; keys that are not required have the part's defaults."""
    optional = tuple(key for key in readers if key not in required)

    def read(data: object, place: str) -> Any:
        table = _table(data, place, required=required, optional=optional)
        values = {key: reader(table[key], f"{place}.{key}") for key, reader in readers.items() if key in table}
        with _at(place):
            return kind(**values)

    return read


def _cast(data: object, place: str) -> Cast:
    table = _table(data, place, required=("format",), optional=("granularity",))
    if table["format"] == str(HIGH_PRECISION_CAST):
        if "granularity" in table:
            raise SpecError(f"recipe: {place} is {HIGH_PRECISION_CAST} and has no granularity; remove the key")
        return HIGH_PRECISION_CAST
    return _FLOAT8_CAST(data, place)


def _float8_cast(format: str, **granularity: Granularity) -> Cast:
    return Cast(format=format_by_name(format), **granularity)


_text: _Reader = partial(_typed, str)
_integer: _Reader = partial(_typed, int)
_boolean: _Reader = partial(_typed, bool)
_FLOAT8_CAST = _part(_float8_cast, {"format": _text, "granularity": partial(_enum, Granularity)}, ("format",))
_gemm = _part(Gemm, {"a": _cast, "b": _cast, "use_fast_accum": _boolean}, ("a", "b"))
_TOP: dict[str, _Reader] = {
    "schema": _integer,
    "chip": _text,
    "scale_rule": _part(ScaleRule, {"power_of_two": _boolean, "amax_floor": partial(_typed, float)}),
    "delayed": _part(
        DelayedScaling,
        {
            "history_length": _integer,
            "reduction": partial(_enum, AmaxHistoryReduction),
            "margin": _integer,
            "tensors": _names,
        },
    ),
    "name": _text,
}


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object, whose keys may not repeat, as in TOML; JSON's own rule, the last one wins, would hide a slip."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return table
