"""The events and the worst places of a run, from the JSON lines of `f8emu.torch.inspect`, as a page and as data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from f8emu.report.page import Cell, Element, Facts, Page, Row, Section, Table, Text
from f8emu.spec import SpecError
from f8emu.strict import Fault, faults_as, open_regular, parsed, require

COMMAND = "f8emu inspect"
SCHEMA = 1
"""The newest that this reader knows."""
MEASURES = tuple("sqnr underflow saturation error_total error_quantisation error_accumulation nan inf".split())
"""The measures by which places can be sorted; of sqnr the lowest is the worst, of all others the highest."""
_SHOWN = ("sqnr", "underflow", "saturation", "error_total", "nan", "inf")
_FORMS = {"underflow": ".3%", "saturation": ".3%", "sqnr": ".1f", "nan": ".0f", "inf": ".0f"}
_FACTS = ("f8emu", "torch", "device", "recipe", "layers", "every")
_NAMES = ("layer", "gemm", "operand", "tensor")
_LONGEST = 1 << 20
"""Bytes of a line; ours have a few hundred, with first values at most a third of this."""
_LAST_STEP = 2**63 - 1
_REMEDY = "give a file that f8emu.torch.inspect wrote"
_MOST_EVENTS = 20
"""Shown; all are in the JSON."""


# 1 The file


@dataclass(slots=True)
class Place:
    """An operand or product of one GEMM of a layer, over all steps and ranks."""

    layer: str
    gemm: str
    operand: str
    tensor: str
    cast: str
    steps: set[int] = field(default_factory=set)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Measure -> its worst value, and the first step that has it; nothing where it was not taken."""

    def add(self, step: int, record: dict[str, Any]) -> None:
        """The statistics of one step, as `JsonLog` writes them; what is no number was not taken."""
        self.steps.add(step)
        for measure in MEASURES:
            try:
                value = float("nan" if isinstance(record.get(measure), bool) else record.get(measure, "nan"))
            except (TypeError, ValueError, OverflowError):
                continue
            known = self.worst.get(measure)
            is_worse = known is None or (value < known[0] if measure == "sqnr" else value > known[0])
            if is_worse and not math.isnan(value):
                self.worst[measure] = value, step


@dataclass(slots=True, kw_only=True)
class Run:
    """A whole file."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    is_cut: bool = False
    """Whether the last line is incomplete: the run was ended while it wrote."""
    skipped: int = 0
    """Lines within that are no JSON: a crash cut one off, and the next run ended it; more are damage."""

    def worst(self, measure: str, count: int) -> list[Place]:
        """The places where a measure is worst, the worst first."""
        places = [place for place in self.places if measure in place.worst]
        return sorted(places, key=lambda place: place.worst[measure][0], reverse=measure != "sqnr")[:count]


def read_run(path: Path) -> Run:
    """Read a file, line by line."""
    run = Run()
    places: dict[tuple[str, ...], Place] = {}
    number = 0
    with faults_as(SpecError, "inspect", path, _REMEDY), open_regular(path) as file:
        while line := file.readline(_LONGEST):
            number += 1
            if not line.endswith(b"\n") and len(line) < _LONGEST:
                run.is_cut = True
                break
            with faults_as(SpecError, "inspect", f"{path}, line {number}", _REMEDY):
                try:
                    record = parsed(line, "a JSON object")
                except Fault:
                    # A crash cuts one line off, and the next run goes on behind it; a first line that is no JSON is
                    # another file.
                    if number == 1 or len(line) == _LONGEST:
                        raise
                    run.skipped += 1
                    continue
                require(isinstance(record, dict), "a JSON object", type(record).__name__)
                _add(run, places, record)
        require(number > 0, "the lines that f8emu.torch.inspect writes", "an empty file")
    run.places = list(places.values())
    return run


def _add(run: Run, places: dict[tuple[str, ...], Place], record: dict[str, Any]) -> None:
    require(bool(run.headers) or "schema" in record, "a first line with the schema", "none")
    # 1. A header: of the first run, or of one that went on with the file.
    if "schema" in record:
        schema = record["schema"]
        is_known = isinstance(schema, int) and schema <= SCHEMA
        require(is_known, f"schema {SCHEMA} at most", f"{schema!r}: a newer f8emu wrote it")
        run.headers.append(record)
    # 2. An event, or the statistics of one place at one step; casts under other recipes are left out.
    elif "event" in record:
        run.events.append(record)
    elif "recipe" not in record:
        missing = [name for name in (*_NAMES, "step") if name not in record]
        require(not missing, f"a record with {', '.join(_NAMES)} and step", f"none of {', '.join(missing)}")
        step, key = record["step"], tuple(str(record[name]) for name in _NAMES)
        is_step = type(step) is int and 0 <= step <= _LAST_STEP
        require(is_step, "step to be an integer from 0 to 2^63 - 1", repr(step))
        places.setdefault(key, Place(*key, cast=str(record.get("cast", "")))).add(step, record)


# 2 The page, and the data


def page(run: Run, worst: Sequence[Place], by: str, log: Path) -> Page:
    """The whole run."""
    # The measure that sorts is shown, also where it is none of the usual ones.
    measures = _SHOWN if by in _SHOWN else (*_SHOWN, by)
    columns = ("layer", "GEMM", "operand", "cast", *("sqnr dB" if m == "sqnr" else m for m in measures), "at", "steps")
    rows: list[Row] = []
    for place in worst:
        values_of = {name: place.worst[name][0] for name in measures if name in place.worst}
        values = [format(values_of[name], _FORMS.get(name, ".3g")) if name in values_of else "" for name in measures]
        names = (place.layer, place.gemm, f"{place.operand} ({place.tensor})", place.cast)
        rows.append([*names, *values, str(place.worst[by][1]), str(len(place.steps))])
    caption = f"{log.name}: the worst places by {by}, each value the worst of its steps"
    table = Table(caption=caption, columns=columns, rows=rows, numeric=frozenset(range(4, len(columns))))
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
    if run.events:
        sections.insert(0, Section(title="Events", blocks=[Text(points=list(_events(run.events)))]))
    words = f"{len(run.events)} events" if run.events else "no NaN, no infinity, no overflow"
    verdict = Cell(text=words, tone="bad" if run.events else "good")
    return Page(title=f"Inspection of {log.name}", verdict=verdict, sections=sections)


def _events(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    # The first ones: what follows may come of them.
    for event in events[:_MOST_EVENTS]:
        place = f"{event.get('layer')} {event.get('gemm')} {event.get('operand')} ({event.get('tensor')})"
        amount = event.get("amount")
        share = f", {amount:.3%}" if event.get("event") == "overflow" and isinstance(amount, float) else ""
        yield f"step {event.get('step')}: {event.get('event')} in {place}{share}"
    if len(events) > _MOST_EVENTS:
        yield f"and {len(events) - _MOST_EVENTS} more events; all are in the JSON of {COMMAND} --json"


def to_json(run: Run, worst: Sequence[Place]) -> dict[str, Any]:
    """Headers, events and worst places."""
    places: list[dict[str, Any]] = []
    for place in worst:
        values = {name: place.worst[name][0] for name in MEASURES if name in place.worst}
        plain = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        names = {name: getattr(place, name) for name in (*_NAMES, "cast")}
        places.append({**names, "steps": len(place.steps), **plain})
    return {"schema": 1, "runs": run.headers, "events": run.events, "worst": places, "lines_skipped": run.skipped}
