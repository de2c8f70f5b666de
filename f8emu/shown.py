"""How a result shows itself where Python prints it: a screen for a terminal, and in a notebook what `--html` writes."""

import re
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from math import prod
from shutil import get_terminal_size
from textwrap import indent, wrap
from typing import Any, ClassVar

LINES, COLUMNS, NARROWEST = 25, 120, 20
"""The most that a result takes of a terminal, and the narrowest one that it fits."""
_MOST_ITEMS = 16
"""Items of a field that are shown."""


class Shown:
    """A result with a short `repr`, and HTML for notebooks: those of its page, or of its fields if it has none."""

    __slots__ = ()
    _page: ClassVar[str] = ""
    """`module:function` of what makes its page, loaded when it is shown: pages are on a higher floor."""

    _rest: ClassVar[str] = "more lines"
    """What stands behind the number of lines that a screen leaves out."""

    def __repr__(self) -> str:
        if not self._page:
            return fields_of(self)
        return screen(self._lines(columns()), name=type(self).__name__, rest=self._rest)

    def _repr_html_(self) -> str:
        if not self._page:
            from html import escape  # of no use to a program that shows nothing

            return f"<pre>{escape(repr(self))}</pre>"
        return import_module("f8emu.report.page").fragment(self._made_page())

    def _lines(self, columns: int) -> list[str]:
        page = self._made_page()
        lines = import_module("f8emu.report.terminal").page_lines(page, columns)
        return [*([page.verdict.text] if page.verdict else []), *lines]

    def _made_page(self) -> Any:
        module, _, function = self._page.partition(":")
        return getattr(import_module(module), function)(self)


def columns(most: int = COLUMNS) -> int:
    """The width of the terminal; `most` of a wider one, and where there is none."""
    return max(min(get_terminal_size((most, LINES)).columns, most), NARROWEST)


def screen(lines: Iterable[str], *, name: str = "", most: int = COLUMNS, rest: str = "more lines") -> str:
    """At most `LINES` lines as wide as the terminal, folded between words; lines that do not fit are counted."""
    every = [line for text in lines for line in text.splitlines() or [""]]
    if name:
        every[:1] = [f"{name}: {line}" for line in every[:1] or [""]]
    folded = [part for line in every for part in _folded(line.rstrip(), columns(most))]
    if (more := len(folded) - LINES + 1) > 1:
        folded[LINES - 1 :] = [f"... {more} {rest}"]
    return "\n".join(folded)


def _folded(line: str, most: int) -> list[str]:
    # A shape or a scalar of JAX, `Array(0., dtype=float32)`, is one word.
    words = re.sub(r", (?=[^][()]{,20}[])])", ",\xa0", line)
    further = " " * (len(line) - len(line.lstrip()) + 4)
    parts = wrap(words, most, subsequent_indent=further, replace_whitespace=False, break_on_hyphens=False)
    return [part.replace("\xa0", " ") for part in parts] or [""]


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
