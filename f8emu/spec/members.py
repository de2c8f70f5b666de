"""Options of a few values: a member of an enum, or its name as text."""

from enum import Enum
from typing import TypeVar

from f8emu.spec.errors import SpecError

E = TypeVar("E", bound=Enum)


def member_by_name(call: str, argument: str, kind: type[E], value: E | str) -> E:
    """The member of `kind` that `call` takes as `argument`, given itself or by its name.

    Raises:
        SpecError: no such member; the message lists the known ones.
    """
    if isinstance(value, kind):  # Dynamo 2.11 cannot trace the call of an enum with one of its members
        return value
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise SpecError(f"{call}: {argument} must be one of {known}; got {value!r}") from None
