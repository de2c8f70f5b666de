"""An inspected run as a result, a page and data: its events, its worst places, and its statistics over the steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from f8emu.environment import spanned
from f8emu.report.charts import Curve, curves, heat
from f8emu.report.inspection_log import MEASURES, NAMES, Place, Run, read_run, worse
from f8emu.report.page import Cell, Element, Facts, Page, Plot, Plots, Row, Section, Table, Text
from f8emu.shown import Shown
from f8emu.spec import SpecError

COMMAND = "f8emu inspect"
_SHOWN = ("sqnr", "underflow", "saturation", "error_total", "nan", "inf")
_FORMS = {"underflow": ".3%", "saturation": ".3%", "sqnr": ".1f", "nan": ".0f", "inf": ".0f"}
_FACTS = ("f8emu", "torch", "device", "recipe", "layers", "every")
_CURVES = (("sqnr", "dB", False), ("underflow", "share", True), ("saturation", "share", True), ("amax", "amax", True))
"""Measure, unit of its axis, whether that is logarithmic."""
_TITLES = {"sqnr": "SQNR", "underflow": "Underflow", "saturation": "Saturation"}
_MOST_ROWS = 40
"""Layers of the heat map; of more the worst are shown."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(Shown):
    """What the log of an inspected run holds."""

    log: Path
    run: Run
    by: str
    """The measure by which places are sorted."""
    worst: Sequence[Place]
    """The places where it is worst, the worst first."""
    top: int = 20
    """The most rows of places, and the most lines of events."""
    _page: ClassVar[str] = "f8emu.report.inspection:page"

    @property
    def events(self) -> Sequence[dict[str, Any]]:
        """NaN, infinities and overflows, as the log has them."""
        return self.run.events


def inspect(log: str | Path, *, by: str = "sqnr", top: int = 20) -> Inspection:
    """The worst places and the events of a run whose log `f8emu.torch.inspect` wrote, as `f8emu inspect` shows them.

    Args:
        log: the JSON lines.
        by: the measure that sorts: sqnr, underflow, saturation, error_total, error_quantization, error_accumulation,
            nan or inf.
        top: the most places, and the most lines of events.

    Raises:
        SpecError: another measure, or a file that is no such log.
    """
    if by not in MEASURES:
        raise SpecError(f"inspect: --by must be one of {', '.join(MEASURES)}; got {by!r}")
    run = read_run(Path(log))
    return Inspection(log=Path(log), run=run, by=by, worst=run.worst(by, top), top=top)


def page(inspection: Inspection) -> Page:
    """The whole run."""
    run, by, log, top = inspection.run, inspection.by, inspection.log, inspection.top
    worst = _folded(run.worst(by, len(run.places)))[:top]
    # The measure that sorts is shown, also where it is none of the usual ones.
    measures = [name for name in dict.fromkeys((*_SHOWN, by)) if any(name in places[0].worst for places in worst)]
    heads = ["sqnr dB" if measure == "sqnr" else measure for measure in measures]
    columns = ("layer", "GEMM", "operand", "cast", *heads, "at step", "steps")
    rows: list[Row] = []
    for places in worst:
        place = places[0]
        values_of = {name: place.worst[name][0] for name in measures if name in place.worst}
        values = [format(values_of[name], _FORMS.get(name, ".3g")) if name in values_of else "" for name in measures]
        gemms, operands = (", ".join(dict.fromkeys(getattr(p, name) for p in places)) for name in ("gemm", "operand"))
        names = (place.layer, gemms, _of_tensor(operands, place.tensor), place.cast)
        rows.append([*names, *values, str(place.worst[by][1]), str(len(place.steps))])
    caption = f"{log.name}: the worst places by {by}, each value the worst of its steps"
    numeric, names = frozenset(range(4, len(columns))), frozenset(range(4))
    table = Table(caption=caption, columns=columns, rows=rows, numeric=numeric, names=names)
    head = run.headers[0] if run.headers else {}
    blocks: list[Element] = [Facts(items=[(name, str(head[name])) for name in _FACTS if name in head]), table]
    # What is not there, or could not be read.
    remedy = "name it in the statistics of the inspection, or sort by another"
    faults = [] if worst else [f"no record has {by}; {remedy}"]
    if run.skipped:
        faults.append(f"lines skipped because they are not JSON: {run.skipped:,} (a crash leaves one)")
    if run.is_cut:
        faults.append("the last line is incomplete: the run was ended while it wrote")
    sections = [Section(title=f"Worst by {by}", blocks=[*blocks, Text(points=faults)] if faults else blocks)]
    count, lines = _tried(run)
    tried: list[Row] = [[name, f"{line[-1][1]:.1f}"] for name, line in lines.items() if line]
    if tried:
        caption = f"What other recipes would give: mean SQNR of {count} casts at the last step"
        table = Table(caption=caption, columns=("recipe", "sqnr dB"), rows=tried, numeric=frozenset((1,)))
        sections.append(Section(title="Other recipes", blocks=[table]))
    if drawn := [*_curves(run), *_heat(run), *_what_if(run)]:
        sections.insert(0, Section(title="Over the steps", blocks=[Plots(plots=drawn)]))
    words = "no NaN, no infinity, no overflow"
    if run.events:
        words = f"{len(run.events)} event{'s' if len(run.events) > 1 else ''}"
        sections.insert(0, Section(title="Events", blocks=[Text(points=list(_events(run.events, top)))]))
    verdict = Cell(text=words, tone="bad" if run.events else "good")
    return Page(title=f"Inspection of {log.name}", verdict=verdict, sections=sections)


def _folded(places: Sequence[Place]) -> list[list[Place]]:
    # One cast may be an operand of two GEMMs; products are never one.
    casts: dict[tuple[Any, ...], list[Place]] = {}
    for place in places:
        key = (place.layer, place.tensor, place.cast or place.gemm, len(place.steps), *sorted(place.worst.items()))
        casts.setdefault(key, []).append(place)
    return list(casts.values())


def _of_tensor(operand: str, tensor: str) -> str:
    return operand if operand == tensor else f"{operand} ({tensor})"


def _events(events: Sequence[dict[str, Any]], most: int) -> Iterator[str]:
    # The first ones, those of one kind and place together: what follows may come of them.
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for event in events:
        kinds.setdefault(tuple(str(event.get(name)) for name in ("event", *NAMES)), []).append(event)
    for (kind, layer, gemm, operand, tensor), of_kind in islice(kinds.items(), most):
        shares = [event["amount"] for event in of_kind if kind == "overflow" and isinstance(event.get("amount"), float)]
        share = f", {max(shares):.3%}{' at most' if len(shares) > 1 else ''}" if shares else ""
        count = f", {len(of_kind)} times" if len(of_kind) > 1 else ""
        known: list[Any] = [event["step"] for event in of_kind if isinstance(event.get("step"), int)] or ["?"]
        steps = spanned("step", min(known), max(known))
        yield f"{steps}: {kind} in {layer or '(the model)'} {gemm} {_of_tensor(operand, tensor)}{share}{count}"
    if (more := len(kinds) - most) > 0:
        yield f"and events of {more} more kinds and places; all are in the JSON of {COMMAND} --json"


def to_json(inspection: Inspection) -> dict[str, Any]:
    """Headers, events, all places, the worst first, and the mean SQNR under each recipe that was tried."""
    run = inspection.run
    places: list[dict[str, Any]] = []
    for place in run.worst(inspection.by, len(run.places)):
        values = {name: place.worst[name][0] for name in MEASURES if name in place.worst}
        plain = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        names = {name: getattr(place, name) for name in (*NAMES, "cast")}
        places.append({**names, "steps": len(place.steps), **plain})
    count, lines = _tried(run)
    what_if = {
        "casts": count,
        "sqnr": {name: [{"step": x, "mean": y} for x, y in line] for name, line in lines.items()},
    }
    told = {"worst": places, "what_if": what_if, "lines_skipped": run.skipped}
    return {"schema": 1, "runs": run.headers, "events": run.events, **told}


# Pictures: a layer has the worst value of its casts.


def _by_layer(places: Sequence[Place], measure: str) -> dict[str, Curve]:
    layers: dict[str, dict[int, float]] = {}
    for place in places:
        of_layer = layers.setdefault(place.layer, {})
        for step, value in place.series.get(measure, {}).items():
            of_layer[step] = worse(measure, value, of_layer.get(step, value))
    return {layer: sorted(of_steps.items()) for layer, of_steps in layers.items() if of_steps}


def _worst_first(layers: dict[str, Curve], measure: str) -> list[tuple[str, float]]:
    worst = {layer: reduce(partial(worse, measure), (y for _, y in line)) for layer, line in layers.items()}
    return sorted(worst.items(), key=lambda pair: pair[1], reverse=measure != "sqnr")


def _curves(run: Run) -> Iterator[Plot]:
    for measure, unit, is_log in _CURVES:
        layers = _by_layer(run.places, measure)
        ranked = [(layer, value) for layer, value in _worst_first(layers, measure) if value or not is_log]
        if not ranked:
            continue
        (layer, value), more = ranked[0], len(ranked) - 5
        at = next(x for x, y in layers[layer] if y == value)
        alt = f"The worst of {len(layers)} layers is {layer} at step {at:g}: {_valued(measure, value)}"
        alt += f". {more} more {'is' if more == 1 else 'are'} grey." if more > 0 else "."
        chart = curves({layer: layers[layer] for layer, _ in ranked}, unit=unit, log=is_log)
        yield Plot(svg=chart.html(alt), title=f"{_TITLES.get(measure, measure)} by layer", alt=alt)


def _heat(run: Run) -> Iterator[Plot]:
    layers = _by_layer(run.places, "sqnr")
    kept = {layer for layer, _ in _worst_first(layers, "sqnr")[:_MOST_ROWS]}
    values = [y for line in layers.values() for _, y in line if math.isfinite(y)]
    if len(layers) < 2 or not values:
        return
    alt = f"{len(kept)} of {len(layers)} layers in the order of the model; full is {min(values):.1f} dB."
    rows = {layer: line for layer, line in layers.items() if layer in kept}
    chart = heat(rows, good=max(values), bad=min(values), form=lambda value: f"{value:.1f} dB")
    yield Plot(svg=chart.html(alt), title="SQNR of layers by steps", alt=alt)


def _tried(run: Run) -> tuple[int, dict[str, Curve]]:
    # How many places every recipe casts, and their mean SQNR by step: recipes are compared on the same tensors.
    recipe = str(run.headers[0].get("recipe", "in use")) if run.headers else "in use"
    recipes = {f"{recipe} (in use)": run.places, **run.tried}
    series = {
        name: {(p.layer, p.gemm, p.operand): p.series["sqnr"] for p in places if "sqnr" in p.series}
        for name, places in recipes.items()
    }
    shared = set.intersection(*(set(of) for of in series.values()))
    if not run.tried or not shared:
        return 0, {}
    lines: dict[str, Curve] = {}
    for name, places in series.items():
        steps: dict[int, list[float]] = {}
        for key in shared:
            for step, value in places[key].items():
                if math.isfinite(value):
                    steps.setdefault(step, []).append(value)
        lines[name] = sorted((step, sum(values) / len(values)) for step, values in steps.items())
    return len(shared), lines


def _what_if(run: Run) -> Iterator[Plot]:
    count, lines = _tried(run)
    last = [f"{name} {line[-1][1]:.1f} dB" for name, line in lines.items() if line]
    alt = f"Mean SQNR of {count} casts; at the last step {', '.join(last)}."
    if lines:
        yield Plot(svg=curves(lines, unit="dB").html(alt), title="What other recipes would give", alt=alt)


def _valued(measure: str, value: float) -> str:
    return f"{value:.1f} dB" if measure == "sqnr" else f"{value:.3g}"
