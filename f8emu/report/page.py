"""Pages of text, tables and figures, for HTML (`render`) and for a terminal (`parts`).

    page = Page(title="Worst layers", sections=[Section(title="layers.3", blocks=[Table(...), Plot(...)])])
    Path("out.html").write_text(render("f8emu inspect", page), encoding="utf-8")

Every figure has a title and a description: a page can be read without colours, and without the figures. A terminal
shows text, tables and code, without titles of sections.

The HTML is one self-contained file that asks nothing of the network, and runs nothing: a content security policy
forbids scripts and everything from elsewhere, also what a name or a message of a foreign kernel might smuggle in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, Literal, assert_never

from f8emu.environment import percent
from f8emu.report.svg import style as figure_style
from f8emu.verdict import Exit, Verdict

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
    names: frozenset[int] = frozenset()
    """Columns that say whose row it is; a narrow terminal has them on lines of their own."""
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
Element = Table | Facts | Text | Code | Plots


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part with a heading, and parts of its own."""

    title: str
    lead: str = ""
    blocks: Sequence[Element] = ()
    sections: "Sequence[Section]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    verdict: Cell | None = None
    sections: Sequence[Section] = ()


def verdict_cell(verdict: Verdict) -> Cell:
    """The verdict in its colour."""
    tones: dict[Exit, Tone] = {Exit.EQUAL: "good", Exit.DIFFERENT: "bad"}
    return Cell(text=verdict.line, tone=tones.get(verdict.status, "warn"))


def parts(page: Page) -> Iterator[str | Code | Table]:
    """Lines that are wrapped, lines that are not, and tables; an empty line between sections."""
    is_first = True
    for section in _flat(page.sections):
        shown: list[Any] = [section.lead] if section.lead else []
        shown += [part for block in section.blocks for part in _terminal_block(block)]
        if shown:
            if not is_first:
                yield ""
            yield from shown
            is_first = False


def _flat(sections: Sequence[Section]) -> Iterator[Section]:
    for section in sections:
        yield section
        yield from _flat(section.sections)


def _terminal_block(block: Element) -> Iterator[Any]:
    match block:
        case Text(only="" | "terminal"):
            yield from block.points
        case Table(only="" | "terminal"):
            yield block
        case Code():
            yield block
        case _:  # figures, facts, and what is for HTML
            return


def fragment(page: Page) -> str:
    """The page as a part of another, a notebook's: its own colours are those of figures alone."""
    key = f"f8emu-{id(page):x}"  # cells of a notebook are in one document
    body = "".join(_section(part, f"{key}-{i}", 4) for i, part in enumerate(page.sections, 1))
    style = f"{figure_style()}.f8emu figcaption strong {{ display: block; }}"
    return f'<div class="f8emu"><style>{style}</style>{_verdict(page.verdict, key)}{body}</div>'


def render(command: str, page: Page) -> str:
    """The page as HTML; `command` is what made it."""
    style = (files("f8emu.report") / "page.css").read_text(encoding="utf-8") + figure_style()
    links = "".join(f'<li><a href="#part-{i}">{escape(s.title)}</a></li>' for i, s in enumerate(page.sections, 1))
    body = "".join(_section(part, f"part-{i}", 2) for i, part in enumerate(page.sections, 1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(page.title)} - {escape(command)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">To the content</a>
<header><div>
<div class="kicker">{escape(command)}</div>
<h1>{escape(page.title)}</h1>
{_verdict(page.verdict)}
{f'<nav aria-label="Parts"><ul>{links}</ul></nav>' if len(page.sections) > 1 else ""}
</div></header>
<main id="content">
{body}
</main>
<footer><p>One file, readable offline: it loads nothing and sends nothing.</p></footer>
</body>
</html>
"""


_SIGNS: dict[Tone, str] = {"good": "\N{CHECK MARK}", "bad": "\N{MULTIPLICATION X}", "warn": "\N{WARNING SIGN}"}


def _sign(tone: Tone) -> str:
    # Before the words, for the eye alone.
    return f'<span aria-hidden="true">{_SIGNS[tone]}\N{NO-BREAK SPACE}</span>' if tone in _SIGNS else ""


def _verdict(verdict: Cell | None, key: str = "verdict") -> str:
    if verdict is None:
        return ""
    words = f"{_sign(verdict.tone)}<span>{escape(verdict.text)}</span>"
    return f'<p class="verdict {verdict.tone}" id="{key}">{words}</p>'


def _section(section: Section, key: str, level: int) -> str:
    lead = f"<p>{escape(section.lead)}</p>" if section.lead else ""
    blocks = "".join(_block(block, f"{key}-{i}") for i, block in enumerate(section.blocks, 1))
    parts = "".join(_section(part, f"{key}-s{i}", level + 1) for i, part in enumerate(section.sections, 1))
    heading = f'<h{level} id="{key}-title">{escape(section.title)}</h{level}>'
    return f'<section id="{key}" aria-labelledby="{key}-title">{heading}{lead}{blocks}{parts}</section>\n'


def _block(block: Element, key: str) -> str:
    match block:
        case Table(only="terminal") | Text(only="terminal"):
            return ""
        case Table():
            return _table(block)
        case Facts():
            items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.items)
            return f"<dl>{items}</dl>"
        case Text():
            if len(block.points) == 1:
                return f"<p>{escape(block.points[0])}</p>"
            return f'<ul class="points">{"".join(f"<li>{escape(point)}</li>" for point in block.points)}</ul>'
        case Code():
            return f'<pre class="scroll" tabindex="0">{escape(chr(10).join(block.lines))}</pre>'
        case Plots():
            return f'<div class="plots">{"".join(_plot(p, f"{key}-{i}") for i, p in enumerate(block.plots, 1))}</div>'
    assert_never(block)


def _plot(plot: Plot, key: str) -> str:
    caption = f'<strong id="{key}-title">{escape(plot.title)}</strong>{escape(plot.alt)}'
    return (
        f'<figure aria-labelledby="{key}-title"><figcaption>{caption}</figcaption>'
        f'<div class="frame" tabindex="0" role="group" aria-labelledby="{key}-title">{plot.svg}</div></figure>\n'
    )


def _table(table: Table) -> str:
    heads = "".join(f"<th scope=col{_class(i, table)}>{escape(name)}</th>" for i, name in enumerate(table.columns))
    cells = (("".join(_cell(cell, i, table) for i, cell in enumerate(row))) for row in table.rows)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    caption = f"<caption>{escape(table.caption)}</caption>"
    # wide tables scroll by themselves, also by the keyboard
    label = f'tabindex="0" role="region" aria-label="{escape(table.caption)}"'
    inner = f"{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll" {label}><table>{inner}</table></div>'


def _cell(cell: str | Cell | Share, column: int, table: Table) -> str:
    # what heads the cell on a narrow screen, where rows are stacked
    label = f' data-label="{escape(table.columns[column])}"'
    if isinstance(cell, Share):
        width = f"{100 * cell.value:.2f}%"
        bar = f'<span class="track"><span{"" if cell.value else " class=none"} style="width:{width}"></span></span>'
        return f'<td{label}><div class="share">{bar}<span>{escape(cell.text)}</span></div></td>'
    cell = Cell(text=cell) if isinstance(cell, str) else cell
    tag, scope = ("th", " scope=row") if column == 0 else ("td", label)
    return f"<{tag}{scope}{_class(column, table, cell)}>{_sign(cell.tone)}{escape(cell.text)}</{tag}>"


def _class(column: int, table: Table, cell: Cell | None = None) -> str:
    names = ["number"] if column in table.numeric else []
    if cell is not None:
        names += ["mono"] if cell.is_code else []
        names += [cell.tone] if cell.tone else []
    return f' class="{" ".join(names)}"' if names else ""
