"""What an inspected run says: its events, its worst places, and those over time; as a page and as plain data."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from f8emu.report.inspection_log import LOWER_IS_WORSE, Place, Run
from f8emu.report.page import Block, Cell, Facts, Page, Plot, Row, Section, Table, Text
from f8emu.report.svg import Svg, number, ticks

COMMAND = "f8emu inspect"
_FACTS = ("f8emu", "torch", "device", "recipe", "layers", "every")
_MEASURES = ("sqnr", "underflow", "saturation", "error_total", "nan", "inf")
_LINES = 6
"""Places in the figure: more cannot be told apart."""
_MOST_EVENTS = 20
"""Shown; all are in the JSON."""
_UNITS = {
    "sqnr": "signal to noise of the cast, dB",
    "underflow": "share that underflows",
    "saturation": "share beyond the largest value",
}
_COLOURS = ("below", "above", "apart")
_DASHES = ("", "7 4")
_MARKS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "m-3.5-3.5h7v7h-7z",
    "m0-5l5 5l-5 5l-5-5z",
    "m-4 0h8m-4-4v8",
    "m-3.5-3.5l7 7m-7 0l7-7",
    "m0-5l4.5 8h-9z",
)
"""Circle, square, diamond, two crosses and a triangle, about a point."""
_MOST_MARKS = 40
"""Of a curve: more would hide it."""
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
    head = run.headers[0]
    blocks: list[Block] = [Facts(items=[(name, str(head[name])) for name in _FACTS if name in head]), table]
    if worst:
        blocks.append(_plot(worst[:_LINES], by))
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
    places = [_plain(place) for place in worst]
    return {"runs": run.headers, "events": run.events, "worst": places, "lines_skipped": run.skipped}


def _plain(place: Place) -> dict[str, Any]:
    worst = {name: value for name in place.curves if (value := place.worst(name)) is not None}
    found = {name: value if math.isfinite(value) else str(value) for name, value in worst.items()}
    names = {"layer": place.layer, "gemm": place.gemm, "operand": place.operand, "tensor": place.tensor}
    return {**names, "cast": place.cast, "steps": len(set(place.steps)), **found}


def _events(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The first ones: what follows may come of them."""
    for event in events[:_MOST_EVENTS]:
        place = f"{event.get('layer')} {event.get('gemm')} {event.get('operand')} ({event.get('tensor')})"
        amount = event.get("amount")
        share = f", {amount:.3%}" if event.get("event") == "overflow" and isinstance(amount, float) else ""
        yield f"step {event.get('step')}: {event.get('event')} in {place}{share}"
    if len(events) > _MOST_EVENTS:
        yield f"and {len(events) - _MOST_EVENTS} more events; all are in the JSON of {COMMAND} --json"


def _row(place: Place, by: str, measures: Sequence[str]) -> Row:
    values = [_shown(name, place.worst(name)) for name in measures]
    names = (place.layer, place.gemm, f"{place.operand} ({place.tensor})", place.cast)
    return [*names, *values, str(_worst_step(place, by)), str(len(set(place.steps)))]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in ("underflow", "saturation"):
        return f"{value:.3%}"
    return f"{value:.3g}" if name.startswith("error") else f"{value:.1f}" if name == "sqnr" else f"{value:.0f}"


def _plot(places: Sequence[Place], by: str) -> Plot:
    """The measure over steps, a line for each place; told apart by dashes and marks, not by colour alone."""
    # 1. The range of steps and of values, with a margin.
    curves = [_curve(place, by) for place in places]
    steps = [step for curve in curves for step in curve[0]]
    values = [value for curve in curves for value in curve[1]]
    x0, x1 = (min(steps), max(steps)) if steps else (0, 1)
    y0, y1 = (min(values), max(values)) if values else (0.0, 1.0)
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
    # 3. A line for each place, its marks, and its row of the legend.
    for i, (place, curve) in enumerate(zip(places, curves, strict=True)):
        kind, mark = _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]
        dash = f'stroke-dasharray="{_DASHES[i // len(_COLOURS) % len(_DASHES)]}"'
        name = f"{place.layer} {place.gemm} {place.operand}"
        points = [at(step, value) for step, value in zip(*_thinned(*curve), strict=True)]
        line = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        if len(points) > 1:
            figure.path(f"M{line}", f"curve {kind}", name, dash)
        every = -(-len(curve[0]) // _MOST_MARKS) or 1
        for step, value in list(zip(*curve, strict=True))[::every]:
            x, y = at(step, value)
            figure.path(f"M{number(x)} {number(y)}{mark}", f"mark {kind}", f"{name}, step {step}: {value:.4g}")
        row = top + height + 50 + 20 * i
        figure.line(left - 50, row, left - 14, row, f"curve {kind}", dash)
        figure.path(f"M{left - 32} {row}{mark}", f"mark {kind}")
        figure.text(left - 6, row + 4, name)
    words = [f"{p.layer} {p.gemm} {p.operand}: worst {p.worst(by):.4g} at step {_worst_step(p, by)}" for p in places]
    alt = "; ".join(words) + "."
    return Plot(svg=figure.html(alt), title=f"{by} over the run, of the worst places", alt=alt)


def _thinned(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """A curve that looks the same with fewer points: of every piece of a long one, its lowest and its highest."""
    if len(steps) <= _MOST_POINTS:
        return steps, values
    size = -(-2 * len(steps) // _MOST_POINTS)
    kept: list[int] = []
    for start in range(0, len(steps), size):
        piece = range(start, min(start + size, len(steps)))
        kept += sorted({min(piece, key=values.__getitem__), max(piece, key=values.__getitem__)})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _curve(place: Place, by: str) -> tuple[list[int], list[float]]:
    """The worst of each step that has a finite value."""
    # Several ranks or calls may have the same step: the worst of them counts.
    found: dict[int, float] = {}
    choose = min if by in LOWER_IS_WORSE else max
    for step, value in zip(place.steps, place.curves[by], strict=True):
        if math.isfinite(value):
            found[step] = choose(found.get(step, value), value)
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _worst_step(place: Place, by: str) -> int:
    return place.steps[place.curves[by].index(place.worst(by))]  # pyright: ignore[reportArgumentType]
