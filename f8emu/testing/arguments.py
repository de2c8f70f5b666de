"""Checks of the arguments of assertions."""

from collections.abc import Collection

from f8emu.spec.errors import SpecError


def count(call: str, name: str, value: int) -> None:
    """Refuse what is no integer of at least 0."""
    if not isinstance(value, int) or value < 0:
        raise SpecError(f"{call}: {name} must be an integer of at least 0; got {value!r}")


def names(call: str, name: str, value: str | Collection[str]) -> tuple[str, ...]:
    """Names; a string is one."""
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, Collection) or not all(isinstance(text, str) for text in listed):
        raise SpecError(f"{call}: {name} must be names, or one; got {value!r}")
    return tuple(listed)
