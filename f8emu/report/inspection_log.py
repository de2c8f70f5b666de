"""The JSON lines of `f8emu.torch.inspect`, read back: events, and the statistics of every place by steps."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from f8emu.shown import Shown
from f8emu.spec import SpecError
from f8emu.spec.errors import warn_of_old_name
from f8emu.strict import Fault, faults_as, open_regular, parsed, require

SCHEMA = 1
"""The newest that this reader knows."""
MEASURES = tuple("sqnr underflow saturation error_total error_quantization error_accumulation nan inf".split())
"""The measures by which places can be sorted; of sqnr the lowest is the worst, of all others the highest."""
OLD_KEYS = {"error_quantisation": "error_quantization"}
"""Keys of files that an older f8emu wrote -> the present ones."""
NAMES = ("layer", "gemm", "operand", "tensor")
_LONGEST = 1 << 20
"""Bytes of a line; ours have a few hundred, with first values at most a third of this."""
_LAST_STEP = 2**63 - 1
_REMEDY = "give a file that f8emu.torch.inspect wrote"


@dataclass(slots=True, repr=False)
class Place(Shown):
    """An operand or product of one GEMM of a layer, over all steps and ranks."""

    layer: str
    gemm: str
    operand: str
    tensor: str
    cast: str
    steps: set[int] = field(default_factory=set, repr=False)
    series: dict[str, dict[int, float]] = field(default_factory=dict, repr=False)
    """Measure -> step -> its worst value, over passes and ranks."""
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Measure -> its worst value, and the first step that has it; nothing where it was not taken."""

    def add(self, step: int, record: dict[str, Any]) -> None:
        """The statistics of one step, as `JsonLog` writes them; what is no number was not taken."""
        self.steps.add(step)
        for measure in (*MEASURES, "amax"):
            try:
                value = float("nan" if isinstance(record.get(measure), bool) else record.get(measure, "nan"))
            except (TypeError, ValueError, OverflowError):
                continue
            if math.isnan(value):
                continue
            of_steps = self.series.setdefault(measure, {})
            of_steps[step] = worse(measure, value, of_steps.get(step, value))
            known = self.worst.get(measure)
            if known is None or worse(measure, value, known[0]) != known[0]:
                self.worst[measure] = value, step


def worse(measure: str, x: float, y: float) -> float:
    """The worse of two values of a measure."""
    return min(x, y) if measure == "sqnr" else max(x, y)


@dataclass(slots=True, kw_only=True, repr=False)
class Run(Shown):
    """A whole file."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    tried: dict[str, list[Place]] = field(default_factory=dict)
    """Recipe of `what_if` -> the places under its casts."""
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
    for (recipe, *_), place in places.items():
        (run.tried.setdefault(recipe, []) if recipe else run.places).append(place)
    return run


def _add(run: Run, places: dict[tuple[str, ...], Place], record: dict[str, Any]) -> None:
    require(bool(run.headers) or "schema" in record, "a first line with the schema", "none")
    for old in OLD_KEYS.keys() & record.keys():
        warn_of_old_name(f"the key {old!r} of an inspected run", repr(OLD_KEYS[old]))
        record[OLD_KEYS[old]] = record.pop(old)
    # 1. A header: of the first run, or of one that went on with the file.
    if "schema" in record:
        schema = record["schema"]
        is_known = isinstance(schema, int) and schema <= SCHEMA
        require(is_known, f"schema {SCHEMA} at most", f"{schema!r}: a newer f8emu wrote it")
        run.headers.append(record)
    # 2. An event, or the statistics of one place at one step, under the recipe in use or one that was tried.
    elif "event" in record:
        run.events.append(record)
    else:
        missing = [name for name in (*NAMES, "step") if name not in record]
        require(not missing, f"a record with {', '.join(NAMES)} and step", f"none of {', '.join(missing)}")
        step, key = record["step"], tuple(str(record.get(name, "")) for name in ("recipe", *NAMES))
        is_step = type(step) is int and 0 <= step <= _LAST_STEP
        require(is_step, "step to be an integer from 0 to 2^63 - 1", repr(step))
        places.setdefault(key, Place(*key[1:], cast=str(record.get("cast", "")))).add(step, record)
