"""A page as one self-contained file that asks nothing of the network, and runs nothing.

A content security policy forbids scripts and everything from elsewhere, also what a name or a message of a foreign
kernel might smuggle in.
"""

from html import escape
from importlib.resources import files
from typing import assert_never

from f8emu.report.page import Block, Cell, Code, Facts, Page, Plot, Plots, Section, Share, Table, Text, Tone


def render(command: str, page: Page) -> str:
    """The page as HTML; `command` is what made it."""
    style = (files("f8emu.report") / "page.css").read_text(encoding="utf-8")
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


def _verdict(verdict: Cell | None) -> str:
    if verdict is None:
        return ""
    words = f"{_sign(verdict.tone)}<span>{escape(verdict.text)}</span>"
    return f'<p class="verdict {verdict.tone}" id="verdict">{words}</p>'


def _section(section: Section, key: str, level: int) -> str:
    lead = f"<p>{escape(section.lead)}</p>" if section.lead else ""
    blocks = "".join(_block(block, f"{key}-{i}") for i, block in enumerate(section.blocks, 1))
    parts = "".join(_section(part, f"{key}-s{i}", level + 1) for i, part in enumerate(section.sections, 1))
    heading = f'<h{level} id="{key}-title">{escape(section.title)}</h{level}>'
    return f'<section id="{key}" aria-labelledby="{key}-title">{heading}{lead}{blocks}{parts}</section>\n'


def _block(block: Block, key: str) -> str:
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
        names += ["mono"] * cell.is_code + [cell.tone] * bool(cell.tone)
    return f' class="{" ".join(names)}"' if names else ""
