"""Shared by `f8emu replay` and `f8emu diff`: findings, missing records, the walk through records, and the page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from f8emu.capture.read import CapturedStep
from f8emu.capture.record import CaptureError
from f8emu.conformance.compare import Mismatch, counted, different, distances, mismatches
from f8emu.conformance.run.result import Progress, Silent
from f8emu.report.charts import Stage, stages
from f8emu.report.page import Element, Page, Plot, Plots, Section, Text, verdict_cell
from f8emu.shown import Shown
from f8emu.verdict import Exit, Verdict


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Shown):
    """One stage whose bits differ."""

    step: str
    place: str
    """Layer and GEMM or tensor."""
    part: str
    """`value` (a tensor before its casts), `a.scale`, `a.codes`, ..., `product`."""
    tensor: str
    """The tensor itself, or the one that the operand was cast from; empty for a product."""
    elements: int
    elements_different: int
    ulps_median: float = 0.0
    """The median difference of the elements that differ, in ulps of their format, without other signs and NaN."""
    ulps_max: int = 0
    signs_different: int = 0
    """The number of elements with opposite signs, which have no distance; +0 and -0 are a pair of these."""
    nonfinite: int = 0
    """The number of elements that are NaN or infinite on one side only."""
    fault: str = ""
    """Why they cannot be compared: another dtype or shape."""
    block: str = ""
    """The first block of codes that share a scale in which something differs, and how many there are."""
    options: str = ""
    """Options of the GEMM that differ."""
    cause: str = ""
    """What the pattern of the difference says."""
    mismatches: tuple[Mismatch, ...] = ()
    """The first ones."""

    @property
    def where(self) -> str:
        # A layer of a Sequential is called by its number, which is quoted.
        layer, _, rest = self.place.partition(" ")
        return f"{self.step}: {f'{layer!r} {rest}' if layer.isdecimal() else self.place} {self.part}"

    @property
    def share(self) -> str:
        """How many elements differ, and how far; or why they cannot be compared."""
        if self.fault:
            return self.fault
        share = f"{self.elements_different} of {self.elements} differ ({self.elements_different / self.elements:.2%})"
        median = f"{self.ulps_median:.1f}".removesuffix(".0")
        ulps = f"{median} {'ulp' if median == '1' else 'ulps'}"
        ulps += f" (median), {self.ulps_max} at most" if median != str(self.ulps_max) else ""
        far = [share, *([f"by {ulps}"] if self.ulps_max else [])]
        far += [f"{self.signs_different} in sign"] if self.signs_different else []
        far += [f"{self.nonfinite} finite on one side only"] if self.nonfinite else []
        return "; ".join(filter(None, (", ".join(far), self.block, self.options)))

    def line(self) -> str:
        """One line."""
        of = f" ({self.tensor})" if self.tensor and self.part != "value" else ""  # its place names it
        return f"{self.where}{of}: {self.share}" + (f"; {self.cause}" if self.cause else "")


def compared(x: np.ndarray | None, y: np.ndarray | None, case: str, part: str, errors: int) -> dict[str, Any]:
    """How two arrays differ, as fields of a Difference. None marks a missing array; equal arrays give {}."""
    if x is None or y is None or x.dtype != y.dtype or x.shape != y.shape:
        there = [one for one in (x, y) if one is not None]
        kinds = " / ".join(f"{array.dtype.name}{list(array.shape)}" for array in there)
        fault = kinds if len(there) == 2 else f"only {'B' if x is None else 'A'} has it"
        return {"elements_different": max(array.size for array in there), "fault": fault}
    wrong = different(x, y)
    if not wrong.any():
        return {}
    distance, signs_different, nonfinite = ulps(x[wrong], y[wrong])
    return {
        "elements_different": int(np.count_nonzero(wrong)),
        "ulps_median": float(np.median(distance)) if distance.size else 0.0,
        "ulps_max": int(distance.max(initial=0)),
        "signs_different": signs_different,
        "nonfinite": nonfinite,
        "mismatches": tuple(islice(mismatches(case, part, x, y), errors)),
    }


def ulps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, int, int]:
    """How many numbers of the format lie between, of elements of one sign; how many have opposite signs; how many NaN.

    NaN stands for what is NaN or infinite on one side only. Between opposite signs lie the numbers around zero, most of
    the format: their count says nothing.
    """
    distance, apart = distances(x, y)
    with np.errstate(invalid="ignore"):
        crosses_zero = (np.signbit(x) != np.signbit(y)) & ~apart
    return np.abs(distance)[~apart & ~crosses_zero], int(np.count_nonzero(crosses_zero)), int(np.count_nonzero(apart))


class Course:
    """The stages that were compared, in the order of execution: for the picture, no part of the report as JSON."""

    __slots__ = ("course",)
    course: list[Stage]


@dataclass(slots=True, kw_only=True, repr=False)
class Comparison(Shown, Course):
    """The result of a replay or a diff, which may have been interrupted."""

    damaged: list[str] = field(default_factory=list)
    """Files that are not what was written, by their SHA-256, or that hold no record of a capture, and why."""
    missing: list[str] = field(default_factory=list)
    """What was left out, never finished, is there twice, or is of a rank that captured nothing."""
    is_interrupted: bool = False

    def __post_init__(self) -> None:
        self.course = []

    def examine(
        self, command: str, steps: Iterable[tuple[str, Sequence[Callable[[], None]]]], progress: Progress | None
    ) -> None:
        """The tasks of each step, one a record. A CaptureError costs its record alone; Ctrl-C ends the walk."""
        bar = progress or Silent()
        try:
            for name, tasks in steps:
                bar.begin(command, name, len(tasks))
                for task in tasks:
                    try:
                        task()
                    except CaptureError as error:
                        self.damaged.append(str(error))
                    bar.advance()
        except KeyboardInterrupt:
            self.is_interrupted = True

    @property
    def verdict(self) -> Verdict:
        """The end of the run."""
        raise NotImplementedError

    @property
    def is_equal(self) -> bool:
        """Something was compared, nothing is missing, and nothing differed."""
        return self.verdict.is_equal

    def judged(
        self, parts: Sequence[Difference], of: str, *, equal: str = "", otherwise: str, nothing: str, undone: str = ""
    ) -> Verdict:
        """The verdict: `of` is what was compared, `equal` how much of it is equal; the worst that was found names it.

        `otherwise` is a difference without a finding, `nothing` says that nothing was compared, `undone` how much.
        """
        difference = f"NOT EQUAL, first at {parts[0].where}" if parts else otherwise
        if difference:
            return Verdict(Exit.DIFFERENT, f"{difference}; equal: {equal}{of}").after(ctrl_c=self.is_interrupted)
        if self.is_interrupted:
            so_far = f", {nothing}" if nothing else f": equal so far: {of}"
            return Verdict(Exit.INTERRUPTED, f"INTERRUPTED{so_far}")
        if nothing:
            return Verdict(Exit.UNVERIFIED, f"NOT VERIFIED: {nothing}")
        missing = counted(len(self.missing), "thing is missing", "things are missing") if self.missing else ""
        if lacks := ", ".join(filter(None, (undone, missing))):
            return Verdict(Exit.INCOMPLETE, f"INCOMPLETE: no bit differs, but {lacks}; equal: {of}")
        return Verdict(Exit.EQUAL, f"equal: every bit of {of}")


def findings_page(
    command: str,
    result: Comparison,
    above: Sequence[Element | str],
    findings: Sequence[Difference],
    lists: Mapping[str, Sequence[str]],
    errors: int,
    shown: Callable[[Mismatch], str] = Mismatch.line,
) -> Page:
    """The stages, the blocks `above`, the first finding with its mismatches, the other findings, then titled lists."""
    blocks = [Text(points=[one]) if isinstance(one, str) else one for one in above]
    if course := result.course:
        differing = sum(not is_equal for _, _, is_equal in course)
        alt = f"{counted(len(course), 'stage')} in the order of execution; {differing} differ"
        alt += f", the first of them {findings[0].where}" if findings else ""
        blocks.append(Plots(plots=[Plot(svg=stages(course).html(alt), title="Stages", alt=alt)]))
    lines: list[str] = []
    if findings:
        first, *others = findings
        kind = "divergence" if command == "diff" else "difference"
        lines = [f"first {kind}: {first.line()}", *(f"  {shown(mismatch)}" for mismatch in first.mismatches[:errors])]
        lists = {"also differ": [one.line() for one in others], **lists}
    for title, of in lists.items():
        if of:
            lines += [f"{title} ({len(of)}):", *(f"  {line}" for line in of[:errors])]
            if len(of) > errors:
                lines.append(f"  ... and {len(of) - errors} more")
    section = Section(title=command, blocks=[*blocks, Text(points=lines)])
    return Page(title=f"f8emu {command}", verdict=verdict_cell(result.verdict), sections=[section])


Steps = dict[tuple[int, int], CapturedStep]
"""(step, rank) -> step."""


def paired(a: Sequence[CapturedStep], b: Sequence[CapturedStep]) -> tuple[Steps, Steps, list[str]]:
    """The steps of A and of B, of which those with one key are compared; and what is missing, or there twice."""
    (of_a, missing_a), (of_b, missing_b) = numbered(a), numbered(b)
    # Two steps that were named are compared whatever their numbers and ranks are.
    if len(of_a) == len(of_b) == 1:
        of_b = dict(zip(of_a, of_b.values(), strict=True))
    return of_a, of_b, [*(f"A: {text}" for text in missing_a), *(f"B: {text}" for text in missing_b)]


def numbered(steps: Sequence[CapturedStep]) -> tuple[Steps, list[str]]:
    """(step, rank) -> step, a finished one rather than an unfinished one; and what is missing, or there twice."""
    kept_steps: Steps = {}
    missing: list[str] = []
    # 1. Finished steps come first in the order, and so keep their number.
    for step in sorted(steps, key=lambda step: not step.is_complete):
        kept = kept_steps.setdefault((step.header.step, step.header.rank), step)
        if kept is not step:
            missing.append(f"{step.name} appears twice: {kept.path}, {step.path}")
    # 2. What the steps themselves say.
    for step in steps:
        if not step.is_complete:
            missing.append(f"{step.name} was never finished: {step.path}")
        missing += [f"{step.name}: {left_out.place} was left out: {left_out.reason}" for left_out in step.left_out]
    # 3. Of a step that any rank captured, all ranks are expected; but a step given by its own path stands alone.
    headers = [step.header for step in steps if not step.is_alone]
    for number in sorted({header.step for header in headers}):
        size = max(header.world_size for header in headers if header.step == number)
        lacking = size - len({header.rank for header in headers if header.step == number})
        if lacking:
            missing.append(f"step {number}: {counted(lacking, 'rank')} of {size} did not capture it")
    return kept_steps, missing
