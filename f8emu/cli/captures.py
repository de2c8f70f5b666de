"""Commands on files of a run: `f8emu inspect` reads its log, `f8emu replay` and `f8emu diff` its captured steps."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import MOST, STATUSES, guarded, run_and_show, show, write, write_json
from f8emu.cli.paths import Input, OutputOrNone

if TYPE_CHECKING:
    import typer


class Oracle(Enum):
    """The oracle that computes the step again."""

    NUMPY = "f8ref.numpy"
    JAX = "f8ref.jax"


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer

    json_option = typer.Option("--json", metavar="OUT", help="Write the report.")
    errors_option = typer.Option(min=0, max=MOST, help="How many lines of each kind to print.")
    by_help = "Sort by sqnr, underflow, saturation, error_total, error_quantisation, error_accumulation, nan or inf."
    events_option = typer.Option("--json", metavar="OUT", help="Write events and worst places.")
    html_option = typer.Option("--html", metavar="OUT", help="Write events and worst places as one page.")
    oracle_help = "By default f8ref.numpy; for GEMMs of a GPU f8ref.jax, if JAX is installed."
    outputs_help = "Most outputs to compute of every product, rows and columns drawn at random."
    map_help = "Makes the names of A's layers those of B's."
    map_option = typer.Option(None, "--map", metavar="REGEX=REPLACEMENT", help=map_help)

    @app.command()
    def inspect(
        log: Annotated[Input, typer.Argument(metavar="FILE.jsonl", help="The log that f8emu.torch.inspect wrote.")],
        by: str = typer.Option("sqnr", help=by_help),
        top: Annotated[int, typer.Option(min=1, max=MOST, help="How many places to show.")] = 20,
        json_file: Annotated[OutputOrNone, events_option] = None,
        html_file: Annotated[OutputOrNone, html_option] = None,
    ) -> None:
        """Show the worst layers and the events of an inspected training run."""
        raise typer.Exit(guarded(_inspect, log, by, top, json_file, html_file))

    @app.command(epilog=STATUSES)
    def replay(
        path: Annotated[Input, typer.Argument(help="A capture, or one of its step-... directories.")],
        oracle: Annotated[Oracle | None, typer.Option(help=oracle_help)] = None,
        outputs: Annotated[int | None, typer.Option(min=1, max=1 << 40, help=outputs_help)] = None,
        json_file: Annotated[OutputOrNone, json_option] = None,
        errors: Annotated[int, errors_option] = 20,
    ) -> None:
        """Compute a captured training step again, without a GPU, and name the first stage whose bits differ.

        Scales and codes follow from the tensors before their casts, where they were captured; products from the
        captured operands. Ctrl-C ends it, and the findings so far are reported.
        """
        options = {"oracle": oracle and oracle.value, "outputs": outputs, "errors": errors}
        raise typer.Exit(guarded(_run, "replay", [path], json_file, options))

    @app.command(epilog=STATUSES)
    def diff(
        a: Annotated[Input, typer.Argument(metavar="A", help="A capture, or one of its step-... directories.")],
        b: Annotated[Input, typer.Argument(metavar="B", help="Another: from a process, machine, framework or rank.")],
        names: list[str] | None = map_option,
        json_file: Annotated[OutputOrNone, json_option] = None,
        errors: Annotated[int, errors_option] = 20,
    ) -> None:
        """Name the first stage, in the order of execution, at which two captured runs have different bits, and why.

        A may be a trainer and B a server of another stack: fused layers are compared shard by shard, and where codes
        or scales part, the dialects that give those of each side are named.

        Steps are matched by number and rank; if each capture has one step, those two are compared. Ctrl-C ends it, and
        the findings so far are reported.
        """
        raise typer.Exit(guarded(_run, "diff", [a, b], json_file, {"errors": errors, "names": names or ()}))


def _run(command: str, paths: list[Path], json_file: Path | None, options: dict[str, Any]) -> int:
    from f8emu.capture.diffing import diff, diff_page
    from f8emu.capture.replaying import replay, replay_page

    run: Any = {"diff": diff, "replay": replay}[command]
    page: Any = {"diff": diff_page, "replay": replay_page}[command]
    return run_and_show(
        command,
        json_file,
        lambda progress: run(*paths, progress=progress, **options),
        lambda result: page(result, options["errors"]),
    )


def _inspect(log: Path, by: str, top: int, json_file: Path | None, html_file: Path | None) -> int:
    from f8emu.report.inspection import COMMAND, inspect, page, to_json
    from f8emu.report.page import render

    inspection = inspect(log, by=by, top=top)
    write_json("inspect", json_file, to_json(inspection))
    write("inspect", html_file, lambda: render(COMMAND, page(inspection)))
    show(page(inspection))
    return 0
