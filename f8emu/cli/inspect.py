"""`f8emu inspect`: the worst layers of a run, and where a NaN or an overflow began."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import guarded, opened, show
from f8emu.spec import SpecError

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command()
    def inspect(
        log: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="The log that f8emu.torch.inspect wrote.")],
        by: Annotated[
            str,
            typer.Option(
                help="Sort by sqnr, underflow, saturation, error_total, error_quantisation, "
                "error_accumulation, nan or inf."
            ),
        ] = "sqnr",
        top: Annotated[int, typer.Option(min=1, help="How many places to show.")] = 20,
        json_file: Annotated[
            Path | None, typer.Option("--json", metavar="OUT", help="Write events and worst places.")
        ] = None,
        html_file: Annotated[
            Path | None, typer.Option("--html", metavar="OUT", help="Write events and worst places as one page.")
        ] = None,
    ) -> None:
        """Show the worst layers and the events of an inspected training run."""
        raise typer.Exit(guarded(_inspect, log, by, top, json_file, html_file))


def _inspect(log: Path, by: str, top: int, json_file: Path | None, html_file: Path | None) -> int:
    from f8emu.report import inspection
    from f8emu.report.html import render
    from f8emu.report.inspection_log import MEASURES, read_run

    if by not in MEASURES:
        raise SpecError(f"inspect: --by must be one of {', '.join(MEASURES)}; got {by!r}")
    with opened("inspect", json_file) as out, opened("inspect", html_file) as file:
        run = read_run(log)
        worst = run.worst(by, top)
        page = inspection.page(run, worst, by, log)
        if out is not None:
            out.write_json(inspection.to_json(run, worst))
        if file is not None:
            file.write(render(inspection.COMMAND, page))
    show(page)
    return 0
