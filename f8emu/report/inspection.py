"""What an inspected run says: its events, its worst places, and those over time; as a page and as plain data."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from f8emu.report.inspection_log import Place, Run
from f8emu.report.page import Block, Cell, Facts, Page, Plot, Row, Section, Table, Text
from f8emu.report.svg import Svg, number, ticks

COMMAND = "f8emu inspect"
_FACTS = ("f8emu", "torch", "device", "recipe", "layers", "every")
_MEASURES = ("sqnr", "underflow", "saturation", "error_total", "nan", "inf")
_MOST_EVENTS = 20
"""Shown; all are in the JSON."""
_UNITS = {
    "sqnr": "signal to noise of the cast, dB",
    "underflow": "share that underflows",
    "saturation": "share beyond the largest value",
}
_LINES = [(colour, dash) for dash in ("", "7 4") for colour in ("below", "above", "apart")]
"""Colours and dashes of the places in the figure: more could not be told apart."""
_MOST_POINTS = 400
"""Of a curve that is drawn; of a longer one the extremes of each piece."""


def page(run: Run, worst: Sequence[Place], by: str, log: Path) -> Page:
    """The whole run."""
    # The measure that sorts is shown, also where it is none of the usual ones.
    measures = _MEASURES if by in _MEASURES else (*_MEASURES, by)
    columns = ("layer", "GEMM", "operand", "cast", *("sqnr dB" if m == "sqnr" else m for m in measures), "at", "steps")
    table = Table(
        caption=f"{log.name}: the worst places by {by}, each value the worst of its steps",
        columns=columns,
        rows=[_row(place, by, measures) for place in worst],
        numeric=frozenset(range(4, len(columns))),
    )
    head = run.headers[0] if run.headers else {}
    blocks: list[Block] = [Facts(items=[(name, str(head[name])) for name in _FACTS if name in head]), table]
    if worst:
        blocks.append(_plot(worst[: len(_LINES)], by))
    else:
        remedy = "name it in the statistics of the inspection, or sort by another"
        blocks.append(Text(points=[f"no record has {by}; {remedy}"]))
    if faults := run.faults():
        blocks.append(Text(points=faults))
    sections = [Section(title=f"Worst by {by}", blocks=blocks)]
    if run.events:
        sections.insert(0, Section(title="Events", blocks=[Text(points=list(_events(run.events)))]))
    words = f"{len(run.events)} events" if run.events else "no NaN, no infinity, no overflow"
    verdict = Cell(text=words, tone="bad" if run.events else "good")
    return Page(title=f"Inspection of {log.name}", verdict=verdict, sections=sections)


def to_json(run: Run, worst: Sequence[Place]) -> dict[str, Any]:
    """Headers, events and worst places."""
    places = []
    for place in worst:
        values = {name: found[1] for name in place.curves if (found := place.worst(name)) is not None}
        plain = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        names = {name: getattr(place, name) for name in ("layer", "gemm", "operand", "tensor", "cast")}
        places.append({**names, "steps": len(place.steps), **plain})
    return {"runs": run.headers, "events": run.events, "worst": places, "lines_skipped": run.skipped}


def _events(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    # The first ones: what follows may come of them.
    for event in events[:_MOST_EVENTS]:
        place = f"{event.get('layer')} {event.get('gemm')} {event.get('operand')} ({event.get('tensor')})"
        amount = event.get("amount")
        share = f", {amount:.3%}" if event.get("event") == "overflow" and isinstance(amount, float) else ""
        yield f"step {event.get('step')}: {event.get('event')} in {place}{share}"
    if len(events) > _MOST_EVENTS:
        yield f"and {len(events) - _MOST_EVENTS} more events; all are in the JSON of {COMMAND} --json"


def _row(place: Place, by: str, measures: Sequence[str]) -> Row:
    forms = {"underflow": ".3%", "saturation": ".3%", "sqnr": ".1f", "nan": ".0f", "inf": ".0f"}
    found = {name: place.worst(name) for name in measures}
    values = ["" if worst is None else format(worst[1], forms.get(name, ".3g")) for name, worst in found.items()]
    at = found[by]
    names = (place.layer, place.gemm, f"{place.operand} ({place.tensor})", place.cast)
    return [*names, *values, "" if at is None else str(at[0]), str(len(place.steps))]


def _plot(places: Sequence[Place], by: str) -> Plot:
    # The measure over steps, a line for each place; told apart by dashes, not by colour alone.
    # 1. The range of steps and of values, with a margin.
    curves = [{s: v for s, v in sorted(place.curves[by].items()) if math.isfinite(v)} for place in places]
    steps = [step for curve in curves for step in curve] or [0, 1]
    values = [value for curve in curves for value in curve.values()] or [0.0, 1.0]
    (x0, x1), (y0, y1) = (min(steps), max(steps)), (min(values), max(values))
    margin = 0.06 * (y1 - y0) or abs(y1) * 0.1 or 1.0
    y0, y1 = y0 - margin, y1 + margin
    left, top, width, height = 62, 26, 460, 250
    figure = Svg(left + width + 16, top + height + 50 + 20 * len(places))

    def at(step: float, value: float) -> tuple[float, float]:
        across = (step - x0) / (x1 - x0) if x1 > x0 else 0.5
        return left + width * across, top + height * (1 - (value - y0) / (y1 - y0))

    # 2. The axes.
    figure.text(6, 14, _UNITS.get(by, by), kind="quiet")
    for value in ticks(y0, y1, 5):
        y = at(x0, value)[1]
        figure.line(left, y, left + width, y, "grid")
        figure.text(left - 6, y + 4, f"{value:.4g}", "end", kind="quiet")
    for step in ticks(x0, x1, 6):
        if step == int(step):
            figure.text(at(step, y0)[0], top + height + 16, f"{step:.0f}", "middle", kind="quiet")
    figure.line(left, top + height, left + width, top + height, "axis")
    figure.text(left + width / 2, top + height + 32, "step", "middle", kind="quiet")
    # 3. A line for each place, from a dot at its first step, and its row of the legend.
    words: list[str] = []
    for i, (place, curve) in enumerate(zip(places, curves, strict=True)):
        kind, dash = f"curve {_LINES[i][0]}", f'stroke-dasharray="{_LINES[i][1]}"'
        name, worst = f"{place.layer} {place.gemm} {place.operand}", place.worst(by)
        words += [] if worst is None else [f"{name}: worst {worst[1]:.4g} at step {worst[0]}"]
        points = [f"{number(x)} {number(y)}" for x, y in (at(*point) for point in _thinned(list(curve.items())))]
        if points:
            figure.path(f"M{points[0]}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", kind, words[-1])
            figure.path(f"M{'L'.join(points)}", kind, words[-1], dash)
        row = top + height + 50 + 20 * i
        figure.line(left - 50, row, left - 14, row, kind, dash)
        figure.text(left - 6, row + 4, name)
    alt = "; ".join(words) + "."
    return Plot(svg=figure.html(alt), title=f"{by} over the run, of the worst places", alt=alt)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    # A curve that looks the same with fewer points: of every piece of a long one, its lowest and its highest.
    size = -(-2 * len(points) // _MOST_POINTS)
    if len(points) <= _MOST_POINTS:
        return points
    pieces = (points[start : start + size] for start in range(0, len(points), size))
    ends = ({min(piece, key=lambda one: one[1]), max(piece, key=lambda one: one[1])} for piece in pieces)
    return [point for pair in ends for point in sorted(pair)]
