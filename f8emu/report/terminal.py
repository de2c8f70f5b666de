"""Tables of a page as lines of text: at their own width in a pipe, within so many columns in a terminal.

No word is cut or folded. A table that is too wide sets its names on lines of their own and wraps other cells between
words; where even that is too wide, every cell has a line of its own. Columns without a text are left out.
"""

import textwrap
from collections.abc import Iterator, Sequence

from f8emu.environment import printable
from f8emu.report.page import Cell, Code, Page, Share, Table, Tone, parts

_GAP, _INDENT = "  ", "  "
_CODES: dict[Tone, str] = {"good": "32", "bad": "1;31", "warn": "33", "quiet": "2"}


def wrapped(line: str, columns: int) -> list[str]:
    """A line in several, between words alone; those after the first are indented by four more."""
    text = printable(line)
    indent = text[: len(text) - len(text.lstrip())]
    return _folded(text, columns, f"{indent}    ") or [""]


def page_lines(page: Page, columns: int, *, is_colored: bool = False) -> Iterator[str]:
    """The text, the tables and the code of a page; what is pasted is not wrapped."""
    for part in parts(page):
        if isinstance(part, str):
            yield from wrapped(part, columns)
        elif isinstance(part, Code):
            yield from map(printable, part.lines)
        else:
            yield from table_lines(part, columns, is_colored=is_colored)


def table_lines(table: Table, columns: int, *, is_colored: bool = False) -> Iterator[str]:
    """The caption, the heads and the rows, none of which is longer than `columns` but for a name that alone is."""
    rows = [[Cell(text=cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows]
    kept = [i for i in range(len(table.columns)) if any(row[i].text for row in rows)]
    names, others = [i for i in kept if i in table.names], [i for i in kept if i not in table.names]
    yield from wrapped(table.caption, columns)
    for shown, indent in ((kept, ""), (others, _INDENT)):
        heads = [table.columns[i] for i in shown]
        texts = [heads, *([printable(row[i].text) for i in shown] for row in rows)]
        widths = _widths(texts, columns - len(indent), is_folded=shown is others)
        if widths is None:
            continue
        is_right = [i in table.numeric for i in shown]
        if shown is others:
            yield from _named([table.columns[i] for i in names], columns)
        plain: list[Tone] = [""] * len(shown)
        yield from _row(heads, widths, is_right, plain, indent)
        before: list[str] = []
        for row, cells in zip(rows, texts[1:], strict=True):
            title = [printable(row[i].text) for i in names] if shown is others else []
            if title != before:
                yield from _named(title, columns)
            before = title
            tones: list[Tone] = [_tone(row[i]) for i in shown]
            yield from _row(cells, widths, is_right, tones if is_colored else plain, indent)
        return
    yield from _named([table.columns[i] for i in names], columns)
    for row in rows:
        yield from _named([printable(row[i].text) for i in names], columns)
        for i in others:
            if row[i].text:
                yield from wrapped(f"{_INDENT}{table.columns[i]}: {row[i].text}", columns)


def _named(names: Sequence[str], columns: int) -> Iterator[str]:
    line = _GAP.join(filter(None, names))
    if len(line) <= columns:
        yield from filter(None, [line])
    else:
        yield from (f"{_INDENT if i else ''}{name}" for i, name in enumerate(filter(None, names)))


def _widths(texts: Sequence[Sequence[str]], columns: int, *, is_folded: bool) -> list[int] | None:
    # The widest column gives way until all fit; none is narrower than its longest word.
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    least = [max(len(word) for text in column for word in text.split() or [""]) for column in zip(*texts, strict=True)]
    room = columns - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        loose = [i for i in range(len(widths)) if is_folded and widths[i] > least[i]]
        if not loose:
            return None
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def _row(
    cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool], tones: Sequence[Tone], indent: str
) -> Iterator[str]:
    columns = [_folded(text, max(width, 1)) for text, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, columns), default=0)):
        line = indent
        for lines, width, right, tone in zip(columns, widths, is_right, tones, strict=True):
            text = lines[number] if number < len(lines) else ""
            padding = " " * (width - len(text))
            inked = f"\x1b[{_CODES[tone]}m{text}\x1b[0m" if text and tone else text
            line += (padding + inked if right else inked + padding) + _GAP
        yield line.rstrip()


def _tone(cell: Cell | Share) -> Tone:
    return cell.tone if isinstance(cell, Cell) else ""


def _folded(text: str, columns: int, indent: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=indent, replace_whitespace=False)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)
