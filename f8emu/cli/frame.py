"""Shared by all commands: errors as messages, lines, pages and reports."""

import json
import os
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from f8emu.environment import printable, write_beside
from f8emu.spec import F8Error, SpecError
from f8emu.verdict import Exit, Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from f8emu.conformance.run.result import Progress
    from f8emu.report.page import Page

STATUSES = (
    "Exit status: 0 all equal, or done; 1 a difference, or an error in a subject; 2 not verified, since nothing ran or "
    "something is missing, bad usage, a missing package, a file that cannot be read or written, or a failure of f8emu "
    "itself; 3 no difference, but a part of what was asked could not be compared; 130 interrupted by Ctrl-C or SIGTERM."
)
_NARROWEST = 20
"""The narrowest output in columns; longer words are broken."""
MOST = 1 << 15
"""The most lines that an option may ask for, or rows of a GEMM, or seconds for one."""
SECONDS = "Time limit for one GEMM, compilation included; 120 by default."
HERE = (
    "Run your own code in this process, for a debugger. By default it has its own process, where a crash or a hang "
    "fails only one case; with --here, whatever ends the process ends the run."
)


class Arrays(Enum):
    """The framework whose arrays your own kernel takes."""

    TORCH = "torch"
    NUMPY = "numpy"
    JAX = "jax"


def guarded(command: Callable[..., int], *args: object) -> int:
    """The exit status of a command; an error of ours is a message and bad usage, not a traceback."""
    try:
        return command(*args)
    except (F8Error, OSError) as error:
        print("\n".join(map(printable, str(error).splitlines())), file=sys.stderr)
        return Exit.UNVERIFIED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except (Exception, SystemExit):  # Python would exit with the status of a difference, a kernel with any
        traceback.print_exc()
        return Exit.UNVERIFIED


def say(line: str) -> None:
    """Print a line of which parts are from a file, wrapped: what a terminal would obey is escaped."""
    indent = line[: len(line) - len(line.lstrip())]
    more = {"subsequent_indent": f"{indent}    ", "break_on_hyphens": False, "replace_whitespace": False}
    print("\n".join(textwrap.wrap(printable(line), width(), **more)))


def width() -> int:
    """Columns of a line: `COLUMNS`, the terminal's, or 80 where there is none."""
    return max(shutil.get_terminal_size().columns, _NARROWEST)


def find_modules_here() -> None:
    """An own kernel may be in the current directory, as for `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def console() -> "Console":
    """The console that draws tables."""
    from rich.console import Console

    return Console(width=width())


def show(page: "Page") -> None:
    """Text, tables and code of a page; what is pasted is not wrapped."""
    from f8emu.report.page import Code, parts

    screen = console()
    for part in parts(page):
        if isinstance(part, str):
            say(part)
        elif isinstance(part, Code):
            print("\n".join(map(printable, part.lines)))
        else:
            screen.print(part, markup=False)


class Run(Protocol):
    """The result of a run: a dataclass, whose fields are its report as JSON."""

    @property
    def verdict(self) -> Verdict: ...


_R = TypeVar("_R", bound=Run)


def run_and_show(
    command: str,
    json_file: Path | None,
    run: "Callable[[Progress], _R]",
    page_of: "Callable[[_R], Page]",
    html_file: Path | None = None,
) -> int:
    """The exit status of a command, after its page, its verdict in the last line, its JSON and its HTML.

    `run` learns of Ctrl-C by KeyboardInterrupt, and returns what it has so far.
    """
    from f8emu.report.page import render

    start = time.perf_counter()
    with progress_bar() as progress:
        result = run(progress)
    page = page_of(result)
    write(command, html_file, lambda: render(f"f8emu {command}", page))
    show(page)
    seconds = time.perf_counter() - start
    say(f"{result.verdict.line}; {seconds:.1f} s")
    head = result.verdict.to_json(command=command_line(), seconds=seconds)
    write_json(command, json_file, {**head, **asdict(cast(Any, result))})
    return result.verdict.status


def write(command: str, path: Path | None, text: Callable[[], str]) -> None:
    """A report, whole or not at all; nothing, and no text is made, without a path."""
    try:
        if path is not None:
            write_beside(path, text().encode())
    except OSError as error:
        raise unwritable(command, path or Path(), error) from None


def write_json(command: str, path: Path | None, data: object) -> None:
    """Plain data."""
    write(command, path, lambda: json.dumps(data, indent=1) + "\n")


def unwritable(command: str, path: Path, error: OSError) -> SpecError:
    """The error of a path at which no report can be."""
    remedy = "give the path of a file" if path.is_dir() else "give a path in a directory that exists"
    return SpecError(f"{command}: cannot write {path}: [Errno {error.errno}] {error.strerror}; {remedy}")


def command_line() -> list[str]:
    """The words of this command, for reports."""
    return ["f8emu", *sys.argv[1:]]


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False)

        def begin(subject: str, stage: str, cases: int) -> None:
            bar.reset(task, description=f"{subject}: {stage}", total=cases, visible=True)

        yield cast("Progress", SimpleNamespace(begin=begin, advance=lambda: bar.advance(task)))
