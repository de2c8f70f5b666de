"""What a page is made of: sections of text, tables and figures, for `html.render` and for `terminal.parts`.

    page = Page(title="Worst layers", sections=[Section(title="layers.3", blocks=[Table(...), Plot(...)])])
    Path("out.html").write_text(render("f8emu inspect", page), encoding="utf-8")

Every figure has a title and a description: a page can be read without colours, and without the figures. A terminal
shows text, tables and code, without titles of sections.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from f8emu.conformance.run.breakdown import percent
from f8emu.untrusted import printable

if TYPE_CHECKING:
    import rich.table


Tone = Literal["", "good", "bad", "warn", "quiet"]
"""Says in colour what the words say already."""
Only = Literal["", "html", "terminal"]
"""The renderer that shows a block; empty: both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table; a plain `str` is a cell without tone."""

    text: str
    tone: Tone = ""
    is_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A cell with a share of 0 to 1: a bar and a percentage."""

    value: float

    @property
    def text(self) -> str:
        return percent(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns. The first column heads its row."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell | Share]]
    numeric: frozenset[int] = frozenset()
    """Columns that are set flush right."""
    only: Only = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and values."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph, or several points."""

    points: Sequence[str]
    only: Only = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Lines that a reader pastes."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure in the colours of the page."""

    svg: str
    """`Svg.html`."""
    title: str
    alt: str
    """What it shows, in words that stand in for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plots:
    """Figures, several of them side by side."""

    plots: Sequence[Plot]


Row = list[str | Cell | Share]
Block = Table | Facts | Text | Code | Plots


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part with a heading, and parts of its own."""

    title: str
    lead: str = ""
    blocks: Sequence[Block] = ()
    sections: "Sequence[Section]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    verdict: Cell | None = None
    sections: Sequence[Section] = ()


_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "quiet": "dim"}


def parts(page: Page) -> "Iterator[str | Code | rich.table.Table]":
    """Lines that are wrapped, lines that are not, and tables; an empty line between sections."""
    is_first = True
    for section in _flat(page.sections):
        shown = [section.lead] * bool(section.lead) + [part for block in section.blocks for part in _block(block)]
        if shown:
            yield from [""] * (not is_first)
            yield from shown
            is_first = False


def _flat(sections: Sequence[Section]) -> Iterator[Section]:
    for section in sections:
        yield section
        yield from _flat(section.sections)


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

    # Cells are words, not markup: a name of a foreign kernel may have brackets and control characters.
    title = Words(printable(table.caption), style="bold")
    drawn = Drawn(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if i in table.numeric else "left", overflow="fold")
    for row in table.rows:
        cells = [Cell(text=cell) if isinstance(cell, str) else cell for cell in row]
        tones = [cell.tone if isinstance(cell, Cell) else "" for cell in cells]
        words = zip(cells, tones, strict=True)
        drawn.add_row(*(Words(printable(cell.text), style=_STYLES.get(tone, "")) for cell, tone in words))
    return drawn
