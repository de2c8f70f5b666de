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
_CUT: dict[str, Any] = {"": "cut"}
_NAMES = ("layer", "gemm", "operand", "tensor")
HIGHER_IS_WORSE = ("underflow", "saturation", "error_total", "error_quantisation", "error_accumulation", "nan", "inf")
LOWER_IS_WORSE = ("sqnr",)
MEASURES = (*LOWER_IS_WORSE, *HIGHER_IS_WORSE)
"""The measures by which places can be sorted."""


@dataclass(slots=True, kw_only=True)
class Place:
    """An operand or product of one GEMM of a layer, over all steps and ranks."""

    layer: str
    gemm: str
    operand: str
    tensor: str
    cast: str
    steps: list[int] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Measure -> its value at each of `steps`; NaN where it was not taken."""

    def worst(self, measure: str) -> float | None:
        """The worst value of a measure; None if it was not taken."""
        values = [value for value in self.curves.get(measure, []) if not math.isnan(value)]
        if not values:
            return None
        return min(values) if measure in LOWER_IS_WORSE else max(values)


@dataclass(slots=True, kw_only=True)
class Run:
    """A whole file."""

    headers: list[dict[str, Any]]
    events: list[dict[str, Any]]
    places: list[Place]
    is_cut: bool
    """Whether the last line is incomplete: the run was ended while it wrote."""
    skipped: int = 0
    """Lines within that are no JSON: a crash cut one off, and the next run ended it; more are damage."""

    def faults(self) -> list[str]:
        """What could not be read."""
        said = [f"lines skipped because they are not JSON: {self.skipped:,} (a crash leaves one)"]
        said = said if self.skipped else []
        return [*said, "the last line is incomplete: the run was ended while it wrote"] if self.is_cut else said

    def worst(self, measure: str, count: int) -> list[Place]:
        """The places where a measure is worst, the worst first."""
        found = [(value, place) for place in self.places if (value := place.worst(measure)) is not None]
        found.sort(key=lambda pair: pair[0], reverse=measure in HIGHER_IS_WORSE)
        return [place for _, place in found[:count]]


def read_run(path: Path) -> Run:
    """Read a file, line by line.

    Raises:
        SpecError: a file that cannot be read, is no inspection, or was written by a newer f8emu.
    """
    headers: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    places: dict[tuple[str, ...], Place] = {}
    is_cut, skipped = False, 0
    for number, record in _records(path):
        if record is None or record == _CUT:
            is_cut = record == _CUT
            skipped += not is_cut
            continue
        if not headers and "schema" not in record:
            raise _bad(path, number, "the first line must be the one that f8emu.torch.inspect writes, with its schema")
        # 1. A header: of the first run, or of one that went on with the file.
        if "schema" in record:
            if not isinstance(record["schema"], int) or record["schema"] > SCHEMA:
                found = f"not {record['schema']!r}: a newer f8emu wrote it"
                raise _bad(path, number, f"schema must be at most {SCHEMA}, {found}")
            headers.append(record)
        # 2. An event, or the statistics of one place at one step.
        elif "event" in record:
            events.append(record)
        elif "recipe" not in record:
            if missing := [name for name in (*_NAMES, "step") if name not in record]:
                raise _bad(path, number, f"a record must have {', '.join(_NAMES)} and step, not lack {missing[0]}")
            key, step = tuple(str(record[name]) for name in _NAMES), record["step"]
            if type(step) is not int or not 0 <= step <= _LAST_STEP:
                raise _bad(path, number, f"step must be an integer from 0 to 2^63 - 1, not {step!r:.40}")
            names = dict(zip(_NAMES, key, strict=True))
            place = places.setdefault(key, Place(**names, cast=str(record.get("cast", ""))))
            for measure in MEASURES:
                curve = place.curves.setdefault(measure, [])
                curve.append(_number(record.get(measure)))
            place.steps.append(step)
    return Run(headers=headers, events=events, places=list(places.values()), is_cut=is_cut, skipped=skipped)


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(number, object) of each line; None where a line is no JSON, `_CUT` where the last one has no end."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(_LONGEST):
                number += 1
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    yield number, _CUT
                    return
                # A crash cuts one line off, and the next run goes on behind it; a first line that is no JSON is
                # another file.
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if number > 1 and len(line) < _LONGEST:
                        yield number, None
                        continue
                    raise _bad(path, number, f"every line must be a JSON object: {error}") from None
                if not isinstance(record, dict):
                    raise _bad(path, number, f"every line must be a JSON object, not a {type(record).__name__}")
                yield number, record
            if number == 0:
                raise _bad(path, 0, "it is empty")
    except OSError as error:
        raise SpecError(
            f"inspect: cannot read {path}: {error}; give the path of a file of f8emu.torch.inspect"
        ) from None


def _number(value: object) -> float:
    """A number as `JsonLog` writes it; NaN if it is none."""
    try:
        return math.nan if value is None or isinstance(value, bool) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _bad(path: Path, line: int, what: str) -> SpecError:
    return SpecError(f"inspect: {path}, line {line}: {what}; give a file that f8emu.torch.inspect wrote")
