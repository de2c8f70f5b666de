"""An inspected run as a page: its events, its worst places, and those over time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from f8emu.conformance.inspection_log import LOWER_IS_WORSE, Place, Run
from f8emu.conformance.page import palette
from f8emu.conformance.page.html import render, require_plotly
from f8emu.conformance.page.page import Block, Cell, Facts, Page, Plot, Section, Table, Text

COMMAND = "f8emu inspect"
_FACTS = ("f8emu", "torch", "device", "recipe", "layers", "every")
_LINES = 6
"""Places in the figure: more cannot be told apart."""
_MOST_EVENTS = 50
_UNITS = {
    "sqnr": "signal to noise of the cast, dB",
    "underflow": "share that underflows",
    "saturation": "share beyond the largest value",
}
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")


def to_html(run: Run, worst: Sequence[Place], by: str, log: Path) -> str:
    """One self-contained page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    require_plotly(f"{COMMAND} --html")
    head = run.headers[0]
    facts = [(name, str(head[name])) for name in _FACTS if name in head]
    columns = ("layer", "GEMM", "operand", "cast", by, "at step", "steps")
    rows = [_row(place, by) for place in worst]
    blocks: list[Block] = [Facts(items=facts)]
    if worst:
        blocks.append(_plot(worst[:_LINES], by))
        caption = f"The worst places by {by}, the worst first"
        blocks.append(Table(caption=caption, columns=columns, rows=rows, numeric=frozenset((4, 5, 6))))
    else:
        blocks.append(Text(points=[f"No record has {by}."]))
    if faults := run.faults():
        blocks.append(Text(points=faults))
    sections = [Section(title=f"Worst by {by}", blocks=blocks)]
    if run.events:
        sections.insert(0, _events(run.events))
    words = f"{len(run.events)} events" if run.events else "no NaN, no infinity, no overflow"
    verdict = Cell(text=words, tone="bad" if run.events else "good")
    found = Page(title=f"Inspection of {log.name}", verdict=verdict, sections=sections)
    return render(COMMAND, found)


def _events(events: Sequence[dict[str, Any]]) -> Section:
    """The first event of each step, where it began, and below it the others."""
    columns = ("step", "rank", "event", "layer", "gemm", "operand", "tensor", "values")
    first: dict[tuple[str, str], list[str]] = {}
    for event in events:
        row = [str(event.get(key, "")) for key in columns[:-1]]
        amount = event.get("amount", 0)
        row.append(f"{amount:.3%}" if event.get("event") == "overflow" and isinstance(amount, float) else str(amount))
        first.setdefault((row[0], row[1]), row)
    caption = "Where each step's first NaN, infinity or overflow was; what follows may come of it"
    rows = list(first.values())[:_MOST_EVENTS]
    more = f"{len(events):,} events in {len(first):,} steps; all are in the JSON of {COMMAND} --json"
    table = Table(caption=caption, columns=columns, rows=rows, numeric=frozenset((7,)))
    return Section(title="Events", blocks=[table, Text(points=[more])])


def _row(place: Place, by: str) -> list[str]:
    value, steps = f"{place.worst(by):.4g}", str(len(set(place.steps)))
    operand = f"{place.operand} ({place.tensor})"
    return [place.layer, place.gemm, operand, place.cast, value, str(_worst_step(place, by)), steps]


def _plot(places: Sequence[Place], by: str) -> Plot:
    """The measure over steps, a line for each place; told apart by dashes and symbols, not by colour alone."""
    from plotly.graph_objects import Figure, Scatter

    colours = (palette.BELOW, palette.ABOVE, palette.APART)
    figure = Figure()
    for i, place in enumerate(places):
        steps, values = _curve(place, by)
        line = {"color": colours[i % len(colours)], "dash": _DASHES[i // len(colours) % len(_DASHES)]}
        marker = {"symbol": _SYMBOLS[i % len(_SYMBOLS)], "size": 7}
        name = f"{place.layer} {place.gemm} {place.operand}"
        figure.add_trace(Scatter(x=steps, y=values, name=name, mode="lines+markers", line=line, marker=marker))
    axis = {"gridcolor": palette.LINE, "zerolinecolor": palette.QUIET, "linecolor": palette.QUIET, "automargin": True}
    figure.update_layout(
        template={"layout": {"xaxis": {**axis, "showgrid": False}, "yaxis": axis}},
        height=320 + 22 * len(places),
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        showlegend=True,
        legend={"orientation": "v", "y": -0.2, "yanchor": "top", "x": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": palette.INK, "size": 12, "family": "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif"},
    )
    figure.update_xaxes(title={"text": "step"})
    figure.update_yaxes(title={"text": _UNITS.get(by, by)})
    words = [f"{p.layer} {p.gemm} {p.operand}: worst {p.worst(by):.4g} at step {_worst_step(p, by)}" for p in places]
    return Plot(figure=figure, title=f"{by} over the run, of the worst places", alt="; ".join(words) + ".")


def _curve(place: Place, by: str) -> tuple[list[int], list[float]]:
    """The worst of each step that has a finite value."""
    found: dict[int, float] = {}
    choose = min if by in LOWER_IS_WORSE else max
    for step, value in zip(place.steps, place.curves[by], strict=True):
        if math.isfinite(value):
            found[step] = choose(found.get(step, value), value)
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _worst_step(place: Place, by: str) -> int:
    return place.steps[place.curves[by].index(place.worst(by))]  # pyright: ignore[reportArgumentType]
