"""Progress on standard error: a bar on a terminal; elsewhere, and while nothing counts, a line every 30 seconds."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from f8emu.cli.screen import is_quiet
from f8emu.environment import printable

if TYPE_CHECKING:
    from f8emu.conformance.run.result import Progress

INTERVAL = 30.0
"""Seconds from one line to the next."""


@dataclass(slots=True)
class _Work:
    command: str = ""
    started: float = 0.0
    part: str = ""
    done: int = 0
    total: int = 0

    def start(self, command: str) -> None:
        self.command, self.started = command, time.perf_counter()
        self.part, self.done, self.total = "", 0, 0

    def begin(self, subject: str, stage: str, cases: int) -> None:
        self.part, self.done, self.total = f": {subject}: {stage}", 0, cases

    def advance(self) -> None:
        self.done += 1

    def line(self) -> str:
        count = f", {self.done} of {self.total}" if self.total else ""
        return printable(f"f8emu {self.command}{self.part}{count}; {time.perf_counter() - self.started:.0f} s")


_work = _Work()
"""What the command of this process does now."""


@contextmanager
def reported(command: str) -> Iterator[None]:
    """While a command runs whose standard error is no terminal: what it does, every INTERVAL seconds."""
    _work.start(command)
    if is_quiet() or sys.stderr.isatty():
        yield
        return
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(INTERVAL):
            print(_work.line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A bar on a terminal; elsewhere the counts for the lines of `reported`."""
    if is_quiet() or not sys.stderr.isatty():
        yield _work
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False)

        def begin(subject: str, stage: str, cases: int) -> None:
            bar.reset(task, description=f"{subject}: {stage}", total=cases, visible=True)

        yield cast("Progress", SimpleNamespace(begin=begin, advance=lambda: bar.advance(task)))
