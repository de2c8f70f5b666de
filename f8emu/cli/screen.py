"""What a command prints: lines, pages, and reports that go to standard output.

A terminal has lines of its width, wrapped between words. A pipe has whole lines, without colours.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from f8emu.report.page import Page

STDOUT = Path("-")
"""As the path of a report: standard output. The text for people then goes to standard error."""
_NARROWEST = 20
_UNLIMITED = 1 << 20
"""Columns of a pipe: nothing is wrapped."""
_quiet = ContextVar("quiet", default=False)
_reports: ContextVar[TextIO | None] = ContextVar("reports", default=None)


@contextmanager
def settings(*, quiet: bool, is_report: bool) -> Iterator[None]:
    """For one command: print results alone, and leave standard output to a report."""
    tokens = _quiet.set(quiet), _reports.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr if is_report else sys.stdout):
            yield
    finally:
        _quiet.reset(tokens[0])
        _reports.reset(tokens[1])


def is_quiet() -> bool:
    """Whether `--quiet` was given."""
    return _quiet.get()


def width(stream: TextIO | None = None) -> int:
    """Columns of a line: `COLUMNS`, the terminal's, or no limit where there is none."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(int(columns), _NARROWEST)
    try:
        return max(os.get_terminal_size((stream or sys.stdout).fileno()).columns, _NARROWEST)
    except (OSError, ValueError):
        return _UNLIMITED


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line of which parts are from a file, wrapped: what a terminal would obey is escaped."""
    from f8emu.report.terminal import wrapped

    print("\n".join(wrapped(line, width(stream))), file=stream)


def show(page: "Page") -> None:
    """Print a page of details, unless only the verdict is wanted."""
    if not is_quiet():
        draw(page)


def draw(page: "Page") -> None:
    """Print text, tables and code of a page; what is pasted is not wrapped."""
    from f8emu.report.terminal import page_lines

    is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    for line in page_lines(page, width(), is_colored=is_colored):
        print(line)


def report(text: str) -> None:
    """Write a report to standard output."""
    stream = _reports.get() or sys.stdout
    stream.write(text)
    stream.flush()
