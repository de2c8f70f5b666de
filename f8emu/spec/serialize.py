"""Recipes as plain dicts, JSON and TOML, and back.

The text is strict: an unknown key, a missing key or a wrong type is an error that names its place. The layout is
versioned by `schema`.
"""

import json
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar, cast

from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import format_by_name
from f8emu.spec.recipe import GEMM_NAMES, HIGH_PRECISION_CAST, Cast, Gemm, Recipe
from f8emu.spec.scaling import TENSORS, AmaxHistoryReduction, DelayedScaling, Granularity, ScaleRule

SCHEMA = 1
"""Version of the layout; raised when a recipe's text changes its meaning."""

_HIGH_PRECISION = "bfloat16"

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)


def recipe_to_dict(recipe: Recipe) -> dict[str, object]:
    """Plain dict of strings, numbers, booleans and dicts, with every default written out."""
    data: dict[str, object] = {"schema": SCHEMA, "name": recipe.name}
    if recipe.chip != HOPPER.name:  # left out, so that recipes of before chips could be named keep text and hash
        data["chip"] = recipe.chip
    data["scale_rule"] = {
        "power_of_two": recipe.scale_rule.power_of_two,
        "amax_floor": recipe.scale_rule.amax_floor,
    }
    if recipe.delayed is not None:
        data["delayed"] = {
            "history_length": recipe.delayed.history_length,
            "reduction": recipe.delayed.reduction.value,
            "margin": recipe.delayed.margin,
            **({} if recipe.delayed.tensors == TENSORS else {"tensors": list(recipe.delayed.tensors)}),
        }
    for name, gemm in recipe.gemms.items():
        data[name] = {
            "a": _cast_to_dict(gemm.a),
            "b": _cast_to_dict(gemm.b),
            "use_fast_accum": gemm.use_fast_accum,
        }
    return data


def recipe_to_json(recipe: Recipe) -> str:
    """JSON text, indented by two."""
    return json.dumps(recipe_to_dict(recipe), indent=2) + "\n"


def recipe_to_toml(recipe: Recipe) -> str:
    """TOML text: top-level keys, then one table for each part."""
    data = recipe_to_dict(recipe)
    tables = {key: cast(dict[str, object], value) for key, value in data.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in data.items() if key not in tables]
    for key, table in tables.items():
        lines += ["", f"[{key}]"]
        lines += [f"{k} = {_toml_value(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


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
    """The recipe in a plain dict, as `recipe_to_dict` writes it.

    Raises:
        SpecError: an unknown, missing or ill-typed key, or an impossible recipe; the message names the place.
    """
    top = _table(data, "recipe", required=("name", *GEMM_NAMES), optional=("schema", "chip", "scale_rule", "delayed"))
    schema = _typed(top.get("schema", SCHEMA), "schema", int)
    if schema != SCHEMA:
        raise SpecError(f"recipe: schema {schema} is unknown; this version of f8emu reads schema {SCHEMA}")
    return Recipe(
        name=_typed(top["name"], "name", str),
        output=_gemm_from_dict(top["output"], "output"),
        grad_input=_gemm_from_dict(top["grad_input"], "grad_input"),
        grad_weight=_gemm_from_dict(top["grad_weight"], "grad_weight"),
        scale_rule=_scale_rule_from_dict(top.get("scale_rule", {}), "scale_rule"),
        delayed=_delayed_from_dict(top["delayed"], "delayed") if "delayed" in top else None,
        chip=_typed(top.get("chip", HOPPER.name), "chip", str),
    )


@contextmanager
def _at(place: str) -> Generator[None, None, None]:
    """Names the place in the errors of the part that is built there."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"recipe: {place}: {error}") from None


def _scale_rule_from_dict(data: object, place: str) -> ScaleRule:
    table = _table(data, place, optional=("power_of_two", "amax_floor"))
    for key, kind in (("power_of_two", bool), ("amax_floor", float)):
        if key in table:
            _typed(table[key], f"{place}.{key}", kind)
    with _at(place):
        return ScaleRule(**table)


def _delayed_from_dict(data: object, place: str) -> DelayedScaling:
    table = dict(_table(data, place, optional=("history_length", "reduction", "margin", "tensors")))
    for key in ("history_length", "margin"):
        if key in table:
            _typed(table[key], f"{place}.{key}", int)
    if "tensors" in table:
        names = cast(list[object], _typed(table["tensors"], f"{place}.tensors", list))
        table["tensors"] = tuple(_typed(name, f"{place}.tensors", str) for name in names)
    if "reduction" in table:
        table["reduction"] = _enum(AmaxHistoryReduction, table["reduction"], f"{place}.reduction")
    with _at(place):
        return DelayedScaling(**table)


def _cast_to_dict(cast: Cast) -> dict[str, object]:
    if cast.format is None:
        return {"format": _HIGH_PRECISION}
    return {"format": cast.format.name, "granularity": cast.granularity.value}


def _cast_from_dict(data: object, place: str) -> Cast:
    table = _table(data, place, required=("format",), optional=("granularity",))
    name = _typed(table["format"], f"{place}.format", str)
    if name == _HIGH_PRECISION:
        if "granularity" in table:
            raise SpecError(f"recipe: {place} is {_HIGH_PRECISION} and has no granularity; remove the key")
        return HIGH_PRECISION_CAST
    granularity = _enum(Granularity, table.get("granularity", Granularity.TENSORWISE.value), f"{place}.granularity")
    with _at(place):
        return Cast(format=format_by_name(name), granularity=granularity)


def _gemm_from_dict(data: object, place: str) -> Gemm:
    table = _table(data, place, required=("a", "b"), optional=("use_fast_accum",))
    a = _cast_from_dict(table["a"], f"{place}.a")
    b = _cast_from_dict(table["b"], f"{place}.b")
    use_fast_accum = _typed(table.get("use_fast_accum", False), f"{place}.use_fast_accum", bool)
    with _at(place):
        return Gemm(a=a, b=b, use_fast_accum=use_fast_accum)


def _table(
    data: object, place: str, *, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise SpecError(f"recipe: {place} must be a table; got {data!r}")
    table = cast(dict[str, Any], data)
    missing = [key for key in required if key not in table]
    unknown = [key for key in table if key not in required + optional]
    if missing or unknown:
        found = f"missing {missing}" if missing else f"unknown {unknown}"
        raise SpecError(f"recipe: {place} has keys {[*required, *optional]}; {found}")
    return table


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object, whose keys may not repeat, as in TOML; JSON's own rule, the last one wins, would hide a slip."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return table


def _typed(value: object, place: str, kind: type[_T]) -> _T:
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


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # TOML knows no surrogate pairs, so text stays as it is; and it wants DEL escaped, which JSON does not.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            table = cast(dict[str, object], value)
            return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in table.items()) + " }"
        case list():
            return "[" + ", ".join(map(_toml_value, cast(list[object], value))) + "]"
        case _:
            raise AssertionError(f"no TOML form for {value!r}")
