"""How a result shows itself where Python prints it: a screen for a terminal, and in a notebook what `--html` writes."""

from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from math import prod
from textwrap import indent
from typing import Any, ClassVar

LINES, COLUMNS = 25, 120
"""The most that a result takes of a terminal."""
_MOST_ITEMS = 16
"""Items of a field that are shown."""


class Shown:
    """A result with a short `repr`, and HTML for notebooks: those of its page, or of its fields if it has none."""

    __slots__ = ()
    _page: ClassVar[str] = ""
    """`module:function` of what makes its page, loaded when it is shown: pages are on a higher floor."""

    def __repr__(self) -> str:
        if not self._page:
            return fields_of(self)
        page = self._made_page()
        lines = import_module("f8emu.report.terminal").page_lines(page, COLUMNS)
        return screen([page.verdict.text, *lines] if page.verdict else lines, name=type(self).__name__)

    def _repr_html_(self) -> str:
        if not self._page:
            from html import escape  # of no use to a program that shows nothing

            return f"<pre>{escape(repr(self))}</pre>"
        return import_module("f8emu.report.page").fragment(self._made_page())

    def _made_page(self) -> Any:
        module, _, function = self._page.partition(":")
        return getattr(import_module(module), function)(self)


def screen(lines: Iterable[str], *, name: str = "") -> str:
    """At most `LINES` lines of `COLUMNS` columns; what does not fit is cut off, and counted."""
    every = [line.rstrip() for text in lines for line in text.splitlines() or [""]]
    if name:
        every[:1] = [f"{name}: {line}" for line in every[:1] or [""]]
    if (more := len(every) - LINES + 1) > 1:
        every[LINES - 1 :] = [f"... {more} more lines"]
    return "\n".join(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in every)


def fields_of(record: Any) -> str:
    """A dataclass or a named tuple as it prints itself, without what is empty, shapes in the place of arrays.

    One line where that fits, else one for each field.
    """
    names = getattr(record, "_fields", ()) or [field.name for field in fields(record) if field.repr]
    held = [(name, getattr(record, name)) for name in names]
    texts = [f"{name}={_short(value)}" for name, value in held if value is not None and not _is_empty(value)]
    name, whole = type(record).__name__, ", ".join(texts)
    if "\n" not in whole and len(name) + len(whole) < COLUMNS - 2:
        return f"{name}({whole})"
    return screen([f"{name}(", *(f"{indent(text, '  ')}," for text in texts), ")"])


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | tuple | list | dict) and not value


def _short(value: Any) -> str:
    if prod(getattr(value, "shape", ())) > 1:
        return f"{value.dtype}{list(value.shape)}"
    if type(value) in (tuple, list, dict) and (len(value) > _MOST_ITEMS or "\n" in repr(value)):
        return f"<{len(value)} items>"
    return repr(value)
