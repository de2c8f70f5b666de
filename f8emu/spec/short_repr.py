"""Short reprs: a default argument of a signature is a word or two, not a screen."""

from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any


def changed_fields(data: Any) -> str:
    """`Name(field=value)` of a dataclass: fields without a default, and those that differ from it; enums by name."""
    shown = [
        f"{field.name}={_value(getattr(data, field.name))}"
        for field in fields(data)
        if field.repr and getattr(data, field.name) != _default(field)
    ]
    return f"{type(data).__name__}({', '.join(shown)})"


def _value(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


def _default(field: "Field[Any]") -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
