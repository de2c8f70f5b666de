"""Two captures side by side: the first stage, in the order of execution, whose bits differ.

Stages are compared as they were captured; nothing is computed. Records are matched by layer, GEMM and call; steps by
number and rank, or where each capture is one step, whatever their numbers: so two ranks, or two steps, are compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from f8emu.capture.findings import Finding, Found, absences, findings_page, numbered
from f8emu.capture.read import CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, GemmRecord, Record, TensorRecord
from f8emu.conformance.compare import different, distances, mismatches
from f8emu.conformance.run.result import Progress
from f8emu.report.page import Page
from f8emu.spec import OPERANDS, SpecError

_ORDER = ("value", "a.scale", "a.codes", "b.scale", "b.codes", "product")
_OPTIONS = ("a_format", "b_format", "granularity_a", "granularity_b", "out_dtype", "use_fast_accum", "chip", "split_k")
"""Options of a GEMM; if they differ, the bits may differ too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Finding):
    """One stage whose bits differ between the two captures."""

    ulps_median: float = 0.0
    """The median difference of the elements that differ, in ulps of their format, NaN and infinities left out."""
    ulps_max: int = 0
    nonfinite: int = 0
    """The number of elements that are NaN or infinite in one capture only."""
    fault: str = ""
    """Why they cannot be compared: another dtype or shape."""
    options: str = ""
    """Options of the GEMM that differ."""

    @property
    def share(self) -> str:
        """How many elements differ, and how far; or why they cannot be compared."""
        if self.fault:
            return self.fault
        share = f"{self.elements_different} of {self.elements} differ ({self.elements_different / self.elements:.2%})"
        ulps = f", by {self.ulps_median:g} ulps (median), {self.ulps_max} at most" if self.ulps_max else ""
        special = f", {self.nonfinite} finite on one side only" if self.nonfinite else ""
        return share + ulps + special + (f"; {self.options}" if self.options else "")


@dataclass(slots=True, kw_only=True)
class CaptureDiff(Found):
    """What two captures have in common, and where they part. What is missing was not compared."""

    context: list[str] = field(default_factory=list)
    """Differences in how the two were made: device, versions, recipe, ..."""
    steps: int = 0
    stages: int = 0
    stages_equal: int = 0
    elements: int = 0
    elements_equal: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    """All divergences in the order of execution: the first is where the captures part."""
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    """Steps and records that the other does not have, and does not say that it left out or never finished."""

    @property
    def has_difference(self) -> bool:
        return bool(self.divergences or self.only_a or self.only_b or self.damaged)

    @property
    def is_equal(self) -> bool:
        """Something was compared, nothing is missing on either side, and nothing differed."""
        return not self.has_difference and not self.missing and not self.is_interrupted and self.stages > 0


def diff_captures(
    a: Sequence[CapturedStep], b: Sequence[CapturedStep], *, errors: int = 20, progress: Progress | None = None
) -> CaptureDiff:
    """Compare two captures of `read_capture`. KeyboardInterrupt ends it, and the findings so far are returned.

    Raises:
        SpecError: the captures have no step in common.
        CaptureError: no two records could be read.
    """
    found = CaptureDiff()

    def tasks() -> Iterator[tuple[str, list[Callable[[], None]]]]:
        for step_a, step_b in _paired(a, b, found):
            # 1. How the two were made, and what is broken.
            found.steps += 1
            found.context += [text for text in _context(step_a, step_b) if text not in found.context]
            found.damaged += [*step_a.damaged, *step_b.damaged]
            ours, others = _by_key("A", step_a, found), _by_key("B", step_b, found)
            # 2. Records of one layer, GEMM and call.
            both = [key for key in ours if key in others]
            yield step_a.name, [partial(_record, step_a.name, ours[key], others[key], found, errors) for key in both]
            # 3. What is on one side only counts unless the other side says that it lacks it.
            for lone, step, of, other in (
                (found.only_a, step_a, ours, step_b),
                (found.only_b, step_b, others, step_a),
            ):
                unmatched = [one for key, one in of.items() if key not in both and not _is_excused(other, one)]
                lone += [f"{step.name}: {one.record.place}" for one in unmatched]

    found.examine("diff", tasks(), progress)
    if found.damaged and not found.stages and not found.is_interrupted:
        raise CaptureError(found.damaged[0])
    return found


def _paired(
    a: Sequence[CapturedStep], b: Sequence[CapturedStep], found: CaptureDiff
) -> Iterator[tuple[CapturedStep, CapturedStep]]:
    (of_a, twice_a), (of_b, twice_b) = numbered(a), numbered(b)
    found.missing += [f"A: {text}" for text in (*twice_a, *absences(a))]
    found.missing += [f"B: {text}" for text in (*twice_b, *absences(b))]
    # Two steps that were named are compared whatever their numbers and ranks are.
    if len(of_a) == len(of_b) == 1:
        yield next(iter(of_a.values())), next(iter(of_b.values()))
        return
    if not of_a.keys() & of_b.keys():
        names = (", ".join(step.name for step in steps[:8]) for steps in (a, b))
        raise SpecError(
            f"diff: no step of one capture is in the other: {' against '.join(names)}; give one step of each, "
            "PATH/step-..., to compare steps or ranks with each other"
        )
    found.only_a += [of_a[key].name for key in of_a if key not in of_b]
    found.only_b += [of_b[key].name for key in of_b if key not in of_a]
    yield from ((of_a[key], of_b[key]) for key in of_a if key in of_b)


def _by_key(side: str, step: CapturedStep, found: CaptureDiff) -> dict[tuple[str, str, int], CapturedRecord]:
    # Layer, GEMM and call -> the record; a second record of one place is noted.
    records: dict[tuple[str, str, int], CapturedRecord] = {}
    for one in step.records:
        if records.setdefault(one.record.key, one) is not one:
            found.missing.append(f"{side}: {step.name}: {one.record.place} appears twice: {one.path}")
    return records


def _is_excused(step: CapturedStep, one: CapturedRecord) -> bool:
    # A list of what was left out may end with "N more", which stands for any record.
    places = [left.place for left in step.left_out]
    is_told = any(one.record.place.startswith(place) or place.endswith(" more") for place in places)
    return is_told or not step.is_complete


def _context(a: CapturedStep, b: CapturedStep) -> Iterator[str]:
    # What may explain a difference: said first, and no difference in itself.

    def shown(step: CapturedStep) -> dict[str, str]:
        header = step.header
        engines = {one.record.engine for one in step.records if isinstance(one.record, GemmRecord)}
        own = {"step": str(header.step), "rank": f"{header.rank} of {header.world_size}"}
        own |= {"recipe": ", ".join(sorted(recipe.label for recipe in header.recipes.values()))}
        own |= {"framework": header.framework, "device": header.device, "plan": header.plan}
        own |= {name: version for name, version in header.versions.items() if version is not None}
        return own | {"engine": ", ".join(sorted(engines))}

    if a.path.resolve() == b.path.resolve():
        yield f"{a.name} is the same on both sides: {a.path}"
    # A key that only one side has is a difference too.
    of_a, of_b = shown(a), shown(b)
    for name in dict.fromkeys((*of_a, *of_b)):
        if of_a.get(name) != of_b.get(name):
            yield f"{name}: {of_a.get(name, 'none')} / {of_b.get(name, 'none')}"


def _record(step: str, a: CapturedRecord, b: CapturedRecord, found: CaptureDiff, errors: int) -> None:
    arrays = a.load(), b.load()
    found.damaged += [one.named for one in (a, b) if not one.is_intact()]
    divergences: list[Divergence] = []
    # in the order of computation: a product is judged by whether its operands were equal
    for part in (part for part in _ORDER if part in arrays[0] or part in arrays[1]):
        x, y = (of.get(part) for of in arrays)
        facts = _compared(x, y, f"{step}: {a.record.place}", part, errors)
        size = max(array.size for array in (x, y) if array is not None)
        found.stages += 1
        found.stages_equal += not facts
        found.elements += size
        found.elements_equal += size - facts.get("elements_different", 0)
        if not facts:
            continue
        if part == "product" and "fault" not in facts:
            pairs = [(name, getattr(a.record, name), getattr(b.record, name)) for name in _OPTIONS]
            facts["options"] = ", ".join(f"{name} {of_a} / {of_b}" for name, of_a, of_b in pairs if of_a != of_b)
            facts["cause"] = "" if divergences else "of equal operands: the GEMM itself"
        place = {"step": step, "place": a.record.place, "part": part, "tensor": _tensor(a.record, part)}
        divergences.append(Divergence(**place, elements=size, **facts))
    found.divergences += divergences


def _compared(x: np.ndarray | None, y: np.ndarray | None, case: str, part: str, errors: int) -> dict[str, Any]:
    # 1. Parts that cannot be compared: all of their elements count as different.
    if x is None or y is None:
        size = max(one.size for one in (x, y) if one is not None)
        return {"elements_different": size, "fault": f"only {'B' if x is None else 'A'} has it"}
    if x.dtype != y.dtype or x.shape != y.shape:
        fault = f"{x.dtype.name}{list(x.shape)} / {y.dtype.name}{list(y.shape)}"
        return {"elements_different": max(x.size, y.size), "fault": fault}
    # 2. Bits, and how far apart those are that differ.
    wrong = different(x, y)
    if not wrong.any():
        return {}
    distance, nonfinite = ulps(x[wrong], y[wrong])
    return {
        "elements_different": int(np.count_nonzero(wrong)),
        "ulps_median": float(np.median(distance)) if distance.size else 0.0,
        "ulps_max": int(distance.max(initial=0)),
        "nonfinite": nonfinite,
        "mismatches": tuple(islice(mismatches(case, part, x, y), errors)),
    }


def _tensor(record: Record, part: str) -> str:
    if isinstance(record, TensorRecord):
        return record.tensor
    return "" if part == "product" else OPERANDS[record.gemm]["ab".index(part[0])]


def ulps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, int]:
    """How many numbers of the format lie between, of elements that are finite on both sides; and how many are not.

    Codes of one sign are ordered as their values; +0 and -0 are one apart.
    """
    distance, apart = distances(x, y)
    with np.errstate(invalid="ignore"):
        crosses_zero = np.signbit(x) != np.signbit(y)
    return (np.abs(distance) + crosses_zero)[~apart], int(np.count_nonzero(apart))


def diff_page(found: CaptureDiff, errors: int) -> tuple[Page, str]:
    """Differences in how the captures were made, then where they part."""
    lists = {"A alone has": found.only_a, "B alone has": found.only_b}
    lists |= {"missing": found.missing, "damaged": found.damaged}
    above = [f"A / B: {text}" for text in found.context]
    page = findings_page(
        "diff",
        above,
        found.divergences,
        lists,
        errors,
        lambda one: f"{one.part} [{', '.join(map(str, one.index))}]: A {one.observed}  B {one.expected}",
    )
    return page, diff_verdict(found)


def diff_verdict(found: CaptureDiff) -> str:
    """The last line."""
    difference = "NOT EQUAL: the captures do not hold the same" if found.has_difference else ""
    if found.divergences:
        first = found.divergences[0]
        difference = f"NOT EQUAL, first at {first.step}: {first.place} {first.part}"
    return found.verdict(
        "",
        f"{found.stages_equal} of {found.stages} stages, {found.elements_equal} of {found.elements} elements",
        difference=difference,
        nothing="" if found.stages else "nothing was compared",
        lacks=(),
    )
