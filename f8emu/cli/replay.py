"""`f8emu replay`: compute a captured step again."""

import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import STATUSES, console, guarded, opened, say, status_of

if TYPE_CHECKING:
    import typer


class Oracle(Enum):
    """Who computes again."""

    NUMPY = "f8ref.numpy"
    JAX = "f8ref.jax"


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def replay(
        path: Annotated[Path, typer.Argument(help="What f8emu.torch.capture wrote: all steps, or one step-...")],
        oracle: Annotated[
            Oracle | None,
            typer.Option(help="By default f8ref.jax for what a GPU computed, f8ref.numpy for what was emulated."),
        ] = None,
        outputs: Annotated[
            int | None,
            typer.Option(
                min=1, help="Of every product, compute this many outputs at most: rows and columns at random."
            ),
        ] = None,
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report.")] = None,
        errors: Annotated[int, typer.Option(min=0, help="Lines to print of each kind.")] = 20,
    ) -> None:
        """Compute a captured training step again, without a GPU, and name the first stage whose bits differ.

        Scales and codes follow from the tensors before their casts, where they were captured; products from the
        captured operands. Ctrl-C ends it; what was found is reported.
        """
        judge = None if oracle is None else oracle.value
        raise typer.Exit(guarded(_replay, path, judge, outputs, json_file, errors))


def _replay(path: Path, oracle: str | None, outputs: int | None, json_file: Path | None, errors: int) -> int:
    from f8emu.conformance.captures import report as capture_report
    from f8emu.conformance.captures.file import read_capture
    from f8emu.conformance.captures.replay import replay
    from f8emu.conformance.report import progress_bar

    start = time.perf_counter()
    with opened("replay", json_file) as out:
        steps = read_capture(path)
        with progress_bar() as progress:
            found = replay(steps, oracle=oracle, outputs=outputs, errors=errors, progress=progress)
        console().print(capture_report.replay_table(found))
        for line in capture_report.replay_lines(found, errors):
            say(line)
        seconds = time.perf_counter() - start
        say(f"{capture_report.replay_verdict(found)}; {seconds:.1f} s")
        if out is not None:
            command = ["f8emu", *sys.argv[1:]]
            out.write_json(capture_report.to_json(found, command=command, seconds=seconds))
    return status_of(found)
