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
    """The oracle that computes the step again."""

    NUMPY = "f8ref.numpy"
    JAX = "f8ref.jax"


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def replay(
        path: Annotated[Path, typer.Argument(help="A capture, or one of its step-... directories.")],
        oracle: Annotated[
            Oracle | None,
            typer.Option(help="By default f8ref.jax for GEMMs of a GPU, f8ref.numpy for emulated ones."),
        ] = None,
        outputs: Annotated[
            int | None,
            typer.Option(min=1, help="Most outputs to compute of every product, rows and columns drawn at random."),
        ] = None,
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report.")] = None,
        errors: Annotated[int, typer.Option(min=0, help="How many lines of each kind to print.")] = 20,
    ) -> None:
        """Compute a captured training step again, without a GPU, and name the first stage whose bits differ.

        Scales and codes follow from the tensors before their casts, where they were captured; products from the
        captured operands. Ctrl-C ends it, and the findings so far are reported.
        """
        judge = None if oracle is None else oracle.value
        raise typer.Exit(guarded(_replay, path, judge, outputs, json_file, errors))


def _replay(path: Path, oracle: str | None, outputs: int | None, json_file: Path | None, errors: int) -> int:
    from f8emu.capture import report as capture_report
    from f8emu.capture.read import read_capture
    from f8emu.capture.replay import replay
    from f8emu.conformance.run.report import progress_bar

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
