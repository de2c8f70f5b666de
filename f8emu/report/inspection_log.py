"""What the JSON lines of `f8emu.torch.inspect` say: the worst places of a run, and its events."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from f8emu.spec import SpecError
from f8emu.untrusted import open_regular

SCHEMA = 1
"""The newest that this reader knows."""
_LONGEST = 1 << 20
"""Bytes of a line; ours have a few hundred, with first values at most a third of this."""
_LAST_STEP = 2**63 - 1
_NAMES = ("layer", "gemm", "operand", "tensor")
MEASURES = (
    *("sqnr", "underflow", "saturation"),
    *("error_total", "error_quantisation", "error_accumulation", "nan", "inf"),
)
"""The measures by which places can be sorted; of sqnr the lowest is the worst, of all others the highest."""


def worst_of(measure: str, *values: float) -> float:
    """The worst of several values."""
    return min(values) if measure == "sqnr" else max(values)


@dataclass(slots=True)
class Place:
    """An operand or product of one GEMM of a layer, over all steps and ranks."""

    layer: str
    gemm: str
    operand: str
    tensor: str
    cast: str
    steps: set[int] = field(default_factory=set)
    curves: dict[str, dict[int, float]] = field(default_factory=lambda: {measure: {} for measure in MEASURES})
    """Measure -> step -> the worst value of its ranks and calls."""

    def worst(self, measure: str) -> tuple[int, float] | None:
        """The first step with the worst value of a measure, and the value; None if it was not taken."""
        curve = self.curves[measure]
        value = worst_of(measure, *curve.values()) if curve else math.nan
        return next(((step, found) for step, found in curve.items() if found == value), None)

    def add(self, step: int, record: dict[str, Any]) -> None:
        """The statistics of one step, as `JsonLog` writes them; what is no number was not taken."""
        self.steps.add(step)
        for measure, curve in self.curves.items():
            value = record.get(measure)
            try:
                number = math.nan if value is None or isinstance(value, bool) else float(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if not math.isnan(number):
                curve[step] = worst_of(measure, number, curve.get(step, number))


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

    def faults(self) -> list[str]:
        """What could not be read."""
        skipped = [f"lines skipped because they are not JSON: {self.skipped:,} (a crash leaves one)"]
        cut = ["the last line is incomplete: the run was ended while it wrote"]
        return skipped * bool(self.skipped) + cut * self.is_cut

    def worst(self, measure: str, count: int) -> list[Place]:
        """The places where a measure is worst, the worst first."""
        found = [(worst[1], place) for place in self.places if (worst := place.worst(measure)) is not None]
        found.sort(key=lambda pair: pair[0], reverse=measure != "sqnr")
        return [place for _, place in found[:count]]


def read_run(path: Path) -> Run:
    """Read a file, line by line.

    Raises:
        SpecError: a file that cannot be read, is no inspection, or was written by a newer f8emu.
    """
    run = Run()
    places: dict[tuple[str, ...], Place] = {}
    for number, record in _records(path, run):
        if not run.headers and "schema" not in record:
            raise _bad(path, number, "the first line must be the one that f8emu.torch.inspect writes, with its schema")
        # 1. A header: of the first run, or of one that went on with the file.
        if "schema" in record:
            if not isinstance(record["schema"], int) or record["schema"] > SCHEMA:
                found = f"not {record['schema']!r}: a newer f8emu wrote it"
                raise _bad(path, number, f"schema must be at most {SCHEMA}, {found}")
            run.headers.append(record)
        # 2. An event, or the statistics of one place at one step; casts under other recipes are left out.
        elif "event" in record:
            run.events.append(record)
        elif "recipe" not in record:
            if missing := [name for name in (*_NAMES, "step") if name not in record]:
                raise _bad(path, number, f"a record must have {', '.join(_NAMES)} and step, not lack {missing[0]}")
            step, key = record["step"], tuple(str(record[name]) for name in _NAMES)
            if type(step) is not int or not 0 <= step <= _LAST_STEP:
                raise _bad(path, number, f"step must be an integer from 0 to 2^63 - 1, not {step!r:.40}")
            place = places.setdefault(key, Place(*key, cast=str(record.get("cast", ""))))
            place.add(step, record)
    run.places = list(places.values())
    return run


def _records(path: Path, run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    # (number, object) of each line; lines that cannot be read are counted in `run`.
    number = 0
    try:
        with open_regular(path) as file:
            while line := file.readline(_LONGEST):
                number += 1
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    run.is_cut = True
                    return
                # A crash cuts one line off, and the next run goes on behind it; a first line that is no JSON is
                # another file.
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if number > 1 and len(line) < _LONGEST:
                        run.skipped += 1
                        continue
                    raise _bad(path, number, f"every line must be a JSON object: {error}") from None
                if not isinstance(record, dict):
                    raise _bad(path, number, f"every line must be a JSON object, not a {type(record).__name__}")
                yield number, record
    except OSError as error:
        remedy = "give the path of a file of f8emu.torch.inspect"
        raise SpecError(f"inspect: cannot read {path}: {error}; {remedy}") from None
    if number == 0:
        raise _bad(path, 0, "it is empty")


def _bad(path: Path, line: int, what: str) -> SpecError:
    return SpecError(f"inspect: {path}, line {line}: {what}; give a file that f8emu.torch.inspect wrote")
