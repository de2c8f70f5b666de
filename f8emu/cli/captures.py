"""Commands on files of a run: `f8emu inspect` reads its log, `f8emu replay` and `f8emu diff` its captured steps."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import HTML, JSON, MOST, ending, guarded, run_and_show, write, write_json
from f8emu.cli.paths import Input, ReportOrNone
from f8emu.cli.screen import say, show

if TYPE_CHECKING:
    import typer


class Oracle(Enum):
    """The oracle that computes the step again."""

    NUMPY = "f8ref.numpy"
    JAX = "f8ref.jax"


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer

    json_option = typer.Option("--json", metavar="OUT", help=JSON)
    html_option = typer.Option("--html", metavar="OUT", help=HTML)
    errors_option = typer.Option(min=0, max=MOST, help="How many lines of each kind to print.")
    by_help = "Sort by sqnr, underflow, saturation, error_total, error_quantization, error_accumulation, nan or inf."
    oracle_help = "By default f8ref.numpy; for GEMMs of a GPU f8ref.jax, if JAX is installed."
    outputs_help = "Check at most this many outputs of each product, chosen at random. All by default."
    map_help = "Rename the layers of A to match those of B; may be repeated."
    map_option = typer.Option(None, "--map", metavar="REGEX=REPLACEMENT", help=map_help)

    @app.command(
        epilog=ending("f8emu inspect run.jsonl", "f8emu inspect run.jsonl --by saturation --top 5 --html run.html")
    )
    def inspect(
        log: Annotated[Input, typer.Argument(metavar="FILE.jsonl", help="The log that f8emu.torch.inspect wrote.")],
        by: str = typer.Option("sqnr", help=by_help),
        top: Annotated[int, typer.Option(min=1, max=MOST, help="Most rows and lines of events on the screen.")] = 20,
        json_file: Annotated[ReportOrNone, json_option] = None,
        html_file: Annotated[ReportOrNone, html_option] = None,
    ) -> None:
        """Show the worst layers and the events of an inspected training run."""
        raise typer.Exit(guarded(_inspect, log, by, top, json_file, html_file))

    @app.command(
        epilog=ending(
            "f8emu replay captured",
            "f8emu replay captured/step-00000100-rank-00000 --outputs 1000",
            differs="a bit differs, or a file is damaged",
            left="no bit differs, but a record is missing or a product was not computed again",
        )
    )
    def replay(
        path: Annotated[Input, typer.Argument(help="A capture, or one of its step-... directories.")],
        oracle: Annotated[Oracle | None, typer.Option(help=oracle_help)] = None,
        outputs: Annotated[int | None, typer.Option(min=1, max=1 << 40, help=outputs_help)] = None,
        json_file: Annotated[ReportOrNone, json_option] = None,
        html_file: Annotated[ReportOrNone, html_option] = None,
        errors: Annotated[int, errors_option] = 20,
    ) -> None:
        """Recompute a captured training step without a GPU, and name the first stage whose bits differ.

        Scales and codes follow from the tensors before their casts, where they were captured; products from the
        captured operands. Ctrl-C ends it, and the findings so far are reported.
        """
        options = {"oracle": oracle and oracle.value, "outputs": outputs, "errors": errors}
        raise typer.Exit(guarded(_run, "replay", [path], (json_file, html_file), options))

    @app.command(
        epilog=ending(
            "f8emu diff run_a run_b",
            "f8emu diff trainer server --map 'model\\.(.*)=\\1' --html diff.html",
            differs="a bit differs, or one capture lacks a step or a record",
            left="no bit differs, but a part of a capture is missing, or a stack does not show it",
        )
    )
    def diff(
        a: Annotated[Input, typer.Argument(metavar="A", help="A capture, or one of its step-... directories.")],
        b: Annotated[Input, typer.Argument(metavar="B", help="Another: from a process, machine, framework or rank.")],
        names: list[str] | None = map_option,
        json_file: Annotated[ReportOrNone, json_option] = None,
        html_file: Annotated[ReportOrNone, html_option] = None,
        errors: Annotated[int, errors_option] = 20,
    ) -> None:
        """Find the first stage where two captured runs differ, and explain why.

        A may be a trainer and B a server of another stack: fused layers are compared shard by shard, and where codes
        or scales part, the dialects that give those of each side are named.

        Steps are matched by number and rank; if each capture has one step, those two are compared. Ctrl-C ends it, and
        the findings so far are reported.
        """
        options = {"errors": errors, "names": names or ()}
        raise typer.Exit(guarded(_run, "diff", [a, b], (json_file, html_file), options))


def _run(command: str, paths: list[Path], files: tuple[Path | None, Path | None], options: dict[str, Any]) -> int:
    from f8emu.capture.diffing import diff, diff_page
    from f8emu.capture.replaying import replay, replay_page

    run: Any = {"diff": diff, "replay": replay}[command]
    page: Any = {"diff": diff_page, "replay": replay_page}[command]
    return run_and_show(
        command,
        files,
        lambda progress: run(*paths, progress=progress, **options),
        lambda result: page(result, options["errors"]),
    )


def _inspect(log: Path, by: str, top: int, json_file: Path | None, html_file: Path | None) -> int:
    from f8emu.report.inspection import COMMAND, inspect, page, to_json
    from f8emu.report.page import render

    inspection = inspect(log, by=by, top=top)
    shown = page(inspection)
    write_json("inspect", json_file, to_json(inspection))
    write("inspect", html_file, lambda: render(COMMAND, shown))
    show(shown)
    if shown.verdict is not None:
        say(shown.verdict.text)
    return 0
