"""Two captures side by side: the first stage, in the order of execution, whose bits differ.

Stages are compared as they were captured; nothing is computed. Records are matched by layer, GEMM and call; steps by
number and rank, or where each capture is one step, whatever their numbers: so two ranks, or two steps, are compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from f8emu.capture.compared import Finding, absences, absent_ranks, numbered
from f8emu.capture.read import Arrays, CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, GemmRecord, Record, StepHeader
from f8emu.conformance.compare import different, distances, mismatches
from f8emu.conformance.run.result import Progress
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
class CaptureDiff:
    """What two captures have in common, and where they part."""

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
    missing: list[str] = field(default_factory=list)
    """What was left out, never finished, there twice or of a rank that captured nothing: it was not compared."""
    damaged: list[str] = field(default_factory=list)
    """Files that are not what was written, by their SHA-256, or that hold no record of a capture, and why."""
    is_interrupted: bool = False

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
    try:
        for step_a, step_b in _paired(a, b, found):
            # 1. What the two steps say of themselves: how they were made, what is missing or broken.
            found.steps += 1
            found.context += [text for text in _context(step_a, step_b) if text not in found.context]
            found.damaged += [*step_a.damaged, *step_b.damaged]
            ours, others = _by_key("A", step_a, found), _by_key("B", step_b, found)
            # 2. Records of one layer, GEMM and turn are compared; a damaged one costs itself alone.
            if progress is not None:
                progress.begin("diff", step_a.name, len(ours))
            for key, one in ours.items():
                other = others.pop(key, None)
                if other is not None:
                    try:
                        _record(step_a, one, other, found, errors)
                    except CaptureError as error:
                        found.damaged.append(str(error))
                elif not _is_excused(step_b, one):
                    found.only_a.append(f"{step_a.name}: {one.record.place}")
                if progress is not None:
                    progress.advance()
            # 3. What is on one side only counts unless the other side says that it lacks it.
            unmatched = [one for one in others.values() if not _is_excused(step_a, one)]
            found.only_b += [f"{step_b.name}: {one.record.place}" for one in unmatched]
    except KeyboardInterrupt:
        found.is_interrupted = True
    else:
        if found.damaged and not found.stages:
            raise CaptureError(found.damaged[0])
    return found


def _paired(
    a: Sequence[CapturedStep], b: Sequence[CapturedStep], found: CaptureDiff
) -> Iterator[tuple[CapturedStep, CapturedStep]]:
    (of_a, twice_a), (of_b, twice_b) = numbered(a), numbered(b)
    found.missing += [f"A: {text}" for text in (*twice_a, *absent_ranks(a))]
    found.missing += [f"B: {text}" for text in (*twice_b, *absent_ranks(b))]
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
    for key in of_a:
        if key in of_b:
            yield of_a[key], of_b[key]


def _by_key(side: str, step: CapturedStep, found: CaptureDiff) -> dict[tuple[str, str, int], CapturedRecord]:
    """Layer, GEMM and call -> the record; what the step lacks is noted, and a second record of one place."""
    found.missing += [f"{side}: {text}" for text in absences(step)]
    records: dict[tuple[str, str, int], CapturedRecord] = {}
    for one in step.records:
        if records.setdefault(one.record.key, one) is not one:
            found.missing.append(f"{side}: {step.name}: {one.record.place} appears twice: {one.path}")
    return records


def _is_excused(step: CapturedStep, one: CapturedRecord) -> bool:
    """Whether a step says itself why it has no such record."""
    # A list of what was left out may end with "N more", which stands for any record.
    places = [left.place for left in step.left_out]
    is_told = any(one.record.place.startswith(place) or place.endswith(" more") for place in places)
    return is_told or not step.is_complete


def _context(a: CapturedStep, b: CapturedStep) -> Iterator[str]:
    # What may explain a difference: said first, and no difference in itself.
    def shown(header: StepHeader) -> dict[str, str]:
        names = ", ".join(sorted(recipe.label for recipe in header.recipes.values()))
        versions = {name: str(version) for name, version in header.versions.items() if version is not None}
        own = {"step": str(header.step), "rank": f"{header.rank} of {header.world_size}", "recipe": names}
        return own | {"framework": header.framework, "device": header.device, "plan": header.plan} | versions

    if a.path.resolve() == b.path.resolve():
        yield f"{a.name} is the same on both sides: {a.path}"
    # A key that only one side has is a difference too.
    of_a, of_b = shown(a.header), shown(b.header)
    for name in dict.fromkeys((*of_a, *of_b)):
        if of_a.get(name) != of_b.get(name):
            yield f"{name}: {of_a.get(name, 'none')} / {of_b.get(name, 'none')}"
    engines = [
        ", ".join(sorted({one.record.engine for one in step.records if isinstance(one.record, GemmRecord)}))
        for step in (a, b)
    ]
    if engines[0] != engines[1]:
        yield f"engine: {engines[0]} / {engines[1]}"


def _record(step: CapturedStep, a: CapturedRecord, b: CapturedRecord, found: CaptureDiff, errors: int) -> None:
    of_a, of_b = a.load(), b.load()
    found.damaged += [one.named for one in (a, b) if not one.is_intact()]
    equal: dict[str, bool] = {}
    # in the order of computation: a product is judged by whether its operands were equal
    for part in _ORDER:
        if part not in of_a and part not in of_b:
            continue
        divergence = _stage(step, a, b, part, of_a, of_b, equal, errors)
        equal[part] = divergence is None
        found.stages += 1
        found.stages_equal += divergence is None
        size = max(arrays[part].size for arrays in (of_a, of_b) if part in arrays)
        found.elements += size
        found.elements_equal += size - (0 if divergence is None else divergence.elements_different)
        if divergence is not None:
            found.divergences.append(divergence)


def _stage(
    step: CapturedStep,
    a: CapturedRecord,
    b: CapturedRecord,
    part: str,
    of_a: Arrays,
    of_b: Arrays,
    equal: dict[str, bool],
    errors: int,
) -> Divergence | None:
    def found(different: int, total: int, **more: Any) -> Divergence:
        place = {"step": step.name, "place": a.record.place, "part": part, "tensor": _tensor(a.record, part)}
        return Divergence(**place, elements=total, elements_different=different, **more)

    # 1. Parts that cannot be compared: all of their elements count as different.
    if part not in of_a or part not in of_b:
        size = of_a[part].size if part in of_a else of_b[part].size
        return found(size, size, fault=f"only {'A' if part in of_a else 'B'} has it")
    x, y = of_a[part], of_b[part]
    if x.dtype != y.dtype or x.shape != y.shape:
        size = max(x.size, y.size)
        return found(size, size, fault=f"{x.dtype.name}{list(x.shape)} / {y.dtype.name}{list(y.shape)}")
    # 2. Bits, and how far apart those are that differ.
    wrong = different(x, y)
    count = int(np.count_nonzero(wrong))
    if not count:
        return None
    distance, nonfinite = ulps(x[wrong], y[wrong])
    return found(
        count,
        x.size,
        ulps_median=float(np.median(distance)) if distance.size else 0.0,
        ulps_max=int(distance.max(initial=0)),
        nonfinite=nonfinite,
        options=_options(a.record, b.record) if part == "product" else "",
        cause="of equal operands: the GEMM itself" if part == "product" and all(equal.values()) else "",
        mismatches=tuple(islice(mismatches(f"{step.name}: {a.record.place}", part, x, y), errors)),
    )


def _tensor(record: Record, part: str) -> str:
    """What a stage is, or was made of."""
    if not isinstance(record, GemmRecord):
        return record.tensor
    return "" if part == "product" else OPERANDS[record.gemm]["ab".index(part[0])]


def _options(a: Record, b: Record) -> str:
    found = ((name, getattr(a, name), getattr(b, name)) for name in _OPTIONS)
    return ", ".join(f"{name} {of_a} / {of_b}" for name, of_a, of_b in found if of_a != of_b)


def ulps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, int]:
    """How many numbers of the format lie between, of elements that are finite on both sides; and how many are not.

    Codes of one sign are ordered as their values; +0 and -0 are one apart.
    """
    distance, apart = distances(x, y)
    with np.errstate(invalid="ignore"):
        crosses_zero = np.signbit(x) != np.signbit(y)
    return (np.abs(distance) + crosses_zero)[~apart], int(np.count_nonzero(apart))
