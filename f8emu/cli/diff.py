"""`f8emu diff`: where two captures part."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import STATUSES, guarded, opened, say, status_of

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def diff(
        a: Annotated[Path, typer.Argument(metavar="A", help="A capture, or one of its step-... directories.")],
        b: Annotated[Path, typer.Argument(metavar="B", help="Another: from a process, machine, framework or rank.")],
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report.")] = None,
        errors: Annotated[int, typer.Option(min=0, help="How many lines of each kind to print.")] = 20,
    ) -> None:
        """Name the first stage, in the order of execution, at which two captured runs have different bits.

        Steps are matched by number and rank; if each capture has one step, those two are compared. Ctrl-C ends it, and
        the findings so far are reported.
        """
        raise typer.Exit(guarded(_diff, a, b, json_file, errors))


def _diff(a: Path, b: Path, json_file: Path | None, errors: int) -> int:
    from f8emu.capture import report as capture_report
    from f8emu.capture.diff import diff_captures
    from f8emu.capture.read import read_capture
    from f8emu.conformance.run.report import progress_bar

    start = time.perf_counter()
    with opened("diff", json_file) as out:
        steps = read_capture(a), read_capture(b)
        with progress_bar() as progress:
            found = diff_captures(*steps, errors=errors, progress=progress)
        for line in capture_report.diff_lines(found, errors):
            say(line)
        seconds = time.perf_counter() - start
        say(f"{capture_report.diff_verdict(found)}; {seconds:.1f} s")
        if out is not None:
            command = ["f8emu", *sys.argv[1:]]
            out.write_json(capture_report.to_json(found, command=command, seconds=seconds))
    return status_of(found)
