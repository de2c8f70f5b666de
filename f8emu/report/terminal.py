"""A page on a terminal: its text, tables and code, in order."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from f8emu.report.page import Block, Cell, Code, Page, Section, Share, Table, Text
from f8emu.untrusted import printable

if TYPE_CHECKING:
    import rich.table

_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "quiet": "dim"}


def parts(page: Page) -> "Iterator[str | Code | rich.table.Table]":
    """Lines that are wrapped, lines that are not, and tables; an empty line between sections."""
    shown = filter(None, (_shown(section) for outer in page.sections for section in _flat(outer)))
    for i, section in enumerate(shown):
        yield from [""] * bool(i)
        yield from section


def _flat(section: Section) -> Iterator[Section]:
    yield section
    for inner in section.sections:
        yield from _flat(inner)


def _shown(section: Section) -> list[Any]:
    return [section.lead] * bool(section.lead) + [part for block in section.blocks for part in _block(block)]


def _block(block: Block) -> Iterator[Any]:
    match block:
        case Text(only="" | "terminal"):
            yield from block.points
        case Table(only="" | "terminal"):
            yield _table(block)
        case Code():
            yield block
        case _:  # figures, facts, and what is for HTML
            return


def _table(table: Table) -> "rich.table.Table":
    from rich.table import Table as Drawn
    from rich.text import Text as Words

    title = Words(printable(table.caption), style="bold")
    drawn = Drawn(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if i in table.numeric else "left", overflow="fold")
    for i, row in enumerate(table.rows):
        if i in table.starts:
            drawn.add_section()
        drawn.add_row(*_words(row))
    return drawn


def _words(row: Sequence[str | Cell | Share]) -> Iterator[Any]:
    from rich.text import Text as Words

    for cell in row:
        tone = cell.tone if isinstance(cell, Cell) else ""
        yield Words(printable(cell if isinstance(cell, str) else cell.text), style=_STYLES.get(tone, ""))
