"""`f8emu diff`: where two captures part."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import STATUSES, guarded, run_and_show

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
    from f8emu.capture.diff import diff_captures
    from f8emu.capture.findings import diff_page
    from f8emu.capture.read import read_capture

    return run_and_show(
        "diff",
        json_file,
        lambda progress: diff_captures(read_capture(a), read_capture(b), errors=errors, progress=progress),
        lambda found: diff_page(found, errors),
    )
