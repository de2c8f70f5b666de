"""Shared by all commands: errors as messages, lines, pages and reports."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from f8emu.cli.progress import progress_bar
from f8emu.cli.screen import STDOUT, report, say, show
from f8emu.environment import write_beside
from f8emu.spec import F8Error, SpecError
from f8emu.spec.chips import GPUS
from f8emu.verdict import Exit, Verdict

if TYPE_CHECKING:
    from f8emu.conformance.run.result import Progress
    from f8emu.report.page import Page

STATUSES = (
    "Exit status: 0 all equal, or done; 1 a difference, or an error in a subject; 2 not verified, since nothing ran or "
    "something is missing, bad usage, a missing package, a file that cannot be read or written, or a failure of f8emu "
    "itself; 3 no difference, but a part of what was asked could not be compared; 130 interrupted by Ctrl-C or SIGTERM."
)


CHIP = "The chip: H100, H200, L40S, B200, RTX 5090, MI300X, or an architecture: Hopper, Ada, Blackwell, CDNA3."


def chip_names(incomplete: str) -> list[str]:
    """Names of chips that begin with a text, in its case, for completion in a shell."""
    named = [name for name in GPUS if name.casefold().startswith(incomplete.casefold())]
    return [incomplete + name[len(incomplete) :] for name in named]


def ending(*examples: str, differs: str = "", left: str = "", statuses: str = "") -> str:
    """The end of a command's help: lines that can be pasted, then its exit statuses.

    `differs` and `left` say what 1 and 3 mean; a command without a meaning for one never ends with it.
    """
    failed = "bad usage, a missing package, a file that cannot be read or written, or a failure of f8emu itself"
    meanings = {
        0: "all equal, or done" if differs else "done",
        1: differs,
        2: f"nothing could be compared, {failed}" if differs else failed,
        3: left,
        130: "interrupted by Ctrl-C or SIGTERM",
    }
    listed = "; ".join(f"{status} {meaning}" for status, meaning in meanings.items() if meaning)
    return "\n\n".join(["Examples:", *examples, f"Exit status: {statuses or listed}."])


MOST = 1 << 15
"""The most lines that an option may ask for, or rows of a GEMM, or seconds for one."""
JSON = "Write the report as data; - is standard output."
HTML = "Write the report as one page; - is standard output."
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
        for line in str(error).splitlines():
            say(line, sys.stderr)
        return Exit.UNVERIFIED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except (Exception, SystemExit):  # Python would exit with the status of a difference, a kernel with any
        traceback.print_exc()
        return Exit.UNVERIFIED


def find_modules_here() -> None:
    """An own kernel may be in the current directory, as for `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


class Run(Protocol):
    """The result of a run: a dataclass, whose fields are its report as JSON."""

    @property
    def verdict(self) -> Verdict: ...


_R = TypeVar("_R", bound=Run)


def run_and_show(
    command: str,
    files: tuple[Path | None, Path | None],
    run: "Callable[[Progress], _R]",
    page_of: "Callable[[_R], Page]",
) -> int:
    """The exit status of a command, after its page, its verdict in the last line, and its JSON and HTML, `files`.

    `run` learns of Ctrl-C by KeyboardInterrupt, and returns what it has so far.
    """
    from f8emu.report.page import render

    start = time.perf_counter()
    with progress_bar() as progress:
        result = run(progress)
    page = page_of(result)
    write(command, files[1], lambda: render(f"f8emu {command}", page))
    show(page)
    seconds = time.perf_counter() - start
    say(f"{result.verdict.line}; {seconds:.1f} s")
    head = result.verdict.to_json(command=command_line(), seconds=seconds)
    write_json(command, files[0], {**head, **asdict(cast(Any, result))})
    return result.verdict.status


def write(command: str, path: Path | None, text: Callable[[], str]) -> None:
    """A report, whole or not at all; nothing, and no text is made, without a path."""
    try:
        if path == STDOUT:
            report(text())
        elif path is not None:
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
