"""`f8emu inspect`: the worst layers of a run, and where a NaN or an overflow began."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import console, guarded, opened
from f8emu.untrusted import printable

if TYPE_CHECKING:
    import typer

    from f8emu.report.inspection_log import Place, Run

_COLUMNS = ("sqnr", "underflow", "saturation", "error_total", "nan", "inf")
_MOST_EVENTS = 20
"""Shown; all are in the JSON."""


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
    from f8emu.report.inspection_log import MEASURES, read_run
    from f8emu.spec import SpecError

    if by not in MEASURES:
        raise SpecError(f"inspect: --by must be one of {', '.join(MEASURES)}; got {by!r}")
    with opened("inspect", json_file) as out, opened("inspect", html_file) as page:
        run = read_run(log)
        worst = run.worst(by, top)
        if out is not None:
            places = [_plain(place) for place in worst]
            found = {"runs": run.headers, "events": run.events, "worst": places, "lines_skipped": run.skipped}
            out.write_json(found)
        if page is not None:
            from f8emu.report.inspection import to_html

            page.write(to_html(run, worst, by, log))
    _print(run, worst, by, log)
    return 0


def _print(run: "Run", worst: "list[Place]", by: str, log: Path) -> None:
    from rich.markup import escape
    from rich.table import Table

    terminal = console()
    for event in run.events[:_MOST_EVENTS]:
        place = f"{event.get('layer')} {event.get('gemm')} {event.get('operand')} ({event.get('tensor')})"
        line = printable(f"step {event.get('step')}: {event.get('event')} in {place}")
        terminal.print(line, markup=False, highlight=False)
    if len(run.events) > _MOST_EVENTS:
        terminal.print(f"and {len(run.events) - _MOST_EVENTS} more events")
    table = Table(title=escape(printable(f"{log.name}: the worst places by {by}, each value the worst of its steps")))
    for name in ("layer", "GEMM", "operand", "cast"):
        table.add_column(name, overflow="fold")
    measures = _COLUMNS if by in _COLUMNS else (*_COLUMNS, by)
    for name in (*measures, "steps"):
        table.add_column("sqnr dB" if name == "sqnr" else name, justify="right", overflow="fold")
    for place in worst:
        cells = [_shown(name, place.worst(name)) for name in measures]
        steps = str(len(set(place.steps)))
        names = (place.layer, place.gemm, f"{place.operand} ({place.tensor})", place.cast)
        table.add_row(*(escape(printable(name)) for name in names), *cells, steps)
    terminal.print(table)
    if not worst:
        terminal.print(f"no record has {by}; name it in the statistics of the inspection, or sort by another")
    for fault in run.faults():
        terminal.print(fault)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in ("underflow", "saturation"):
        return f"{value:.3%}"
    return f"{value:.3g}" if name.startswith("error") else f"{value:.1f}" if name == "sqnr" else f"{value:.0f}"


def _plain(place: "Place") -> dict[str, Any]:
    worst = {name: value for name in place.curves if (value := place.worst(name)) is not None}
    found = {name: value if math.isfinite(value) else str(value) for name, value in worst.items()}
    names = {"layer": place.layer, "gemm": place.gemm, "operand": place.operand, "tensor": place.tensor}
    return {**names, "cast": place.cast, "steps": len(set(place.steps)), **found}
