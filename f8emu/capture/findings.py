"""What `f8emu replay` and `f8emu diff` share: findings, what captures lack, the walk through records, and the page."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from f8emu.capture.read import CapturedStep
from f8emu.capture.record import CaptureError
from f8emu.conformance.compare import Mismatch, counted
from f8emu.conformance.run.result import Progress, Silent
from f8emu.report.page import Block, Page, Section, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
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
    cause: str = ""
    """What the pattern of the difference says."""
    mismatches: tuple[Mismatch, ...] = ()
    """The first ones."""

    @property
    def share(self) -> str:
        return f"{self.elements_different} of {self.elements} differ"

    def line(self) -> str:
        """One line."""
        of = f" ({self.tensor})" if self.tensor else ""
        return f"{self.step}: {self.place} {self.part}{of}: {self.share}" + (f"; {self.cause}" if self.cause else "")


@dataclass(slots=True, kw_only=True)
class Found:
    """What a replay or a diff found; also of one that was interrupted."""

    damaged: list[str] = field(default_factory=list)
    """Files that are not what was written, by their SHA-256, or that hold no record of a capture, and why."""
    missing: list[str] = field(default_factory=list)
    """What was left out, never finished, is there twice, or is of a rank that captured nothing."""
    is_interrupted: bool = False

    def examine(
        self, command: str, steps: Iterable[tuple[str, Sequence[Callable[[], None]]]], progress: Progress | None
    ) -> None:
        """The tasks of each step, one a record. A CaptureError costs its record alone; Ctrl-C ends the walk."""
        told = progress or Silent()
        try:
            for name, tasks in steps:
                told.begin(command, name, len(tasks))
                for task in tasks:
                    try:
                        task()
                    except CaptureError as error:
                        self.damaged.append(str(error))
                    told.advance()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def verdict(self, done: str, of: str, *, difference: str, nothing: str, lacks: Sequence[str]) -> str:
        """The last line: `done` is how much is equal, `of` what was compared; the worst that was found names it."""
        ctrl_c = "INTERRUPTED, " if self.is_interrupted else ""
        lacks = [*lacks, *[counted(len(self.missing), "thing is missing", "things are missing")] * bool(self.missing)]
        if difference:
            return f"{ctrl_c}{difference}; equal: {done}{of}"
        if nothing:
            return f"{ctrl_c or 'NOT VERIFIED: '}{nothing}"
        if self.is_interrupted:
            return f"INTERRUPTED: equal so far: {of}"
        return f"NOT VERIFIED: {', '.join(lacks)}; equal: {of}" if lacks else f"equal: every bit of {of}"


def findings_page(
    command: str,
    above: Sequence[Block | str],
    findings: Sequence[Finding],
    lists: Mapping[str, Sequence[str]],
    errors: int,
    shown: Callable[[Mismatch], str] = Mismatch.line,
) -> Page:
    """What is above, the first finding with its mismatches, the others, then titled lists."""
    blocks = [Text(points=[one]) if isinstance(one, str) else one for one in above]
    lines: list[str] = []
    if findings:
        first, *others = findings
        what = "divergence" if command == "diff" else "difference"
        lines = [f"first {what}: {first.line()}", *(f"  {shown(one)}" for one in first.mismatches[:errors])]
        lists = {"also differ": [one.line() for one in others], **lists}
    for title, of in lists.items():
        if of:
            lines += [f"{title} ({len(of)}):", *(f"  {line}" for line in of[:errors])]
            lines += [f"  ... and {len(of) - errors} more"] * (len(of) > errors)
    section = Section(title=command, blocks=[*blocks, Text(points=lines)])
    return Page(title=f"f8emu {command}", sections=[section])


def numbered(steps: Iterable[CapturedStep]) -> tuple[dict[tuple[int, int], CapturedStep], list[str]]:
    """(step, rank) -> step, a finished one rather than an unfinished one; and a line for each that is left over."""
    # Finished steps come first in the order, and so keep their number.
    found: dict[tuple[int, int], CapturedStep] = {}
    twice: list[str] = []
    for step in sorted(steps, key=lambda step: not step.is_complete):
        kept = found.setdefault((step.header.step, step.header.rank), step)
        if kept is not step:
            twice.append(f"{step.name} appears twice: {kept.path}, {step.path}")
    return found, twice


def absences(steps: Sequence[CapturedStep]) -> Iterator[str]:
    """What the steps themselves say that the capture does not hold."""
    for step in steps:
        if not step.is_complete:
            yield f"{step.name} was never finished: {step.path}"
        yield from (f"{step.name}: {one.place} was left out: {one.reason}" for one in step.left_out)
    # Of a step that any rank captured, all ranks are expected; but a step given by its own path stands alone.
    headers = [step.header for step in steps if not step.is_alone]
    for number in sorted({header.step for header in headers}):
        size = max(header.world_size for header in headers if header.step == number)
        lacking = size - len({header.rank for header in headers if header.step == number})
        if lacking > 0:
            yield f"step {number}: {counted(lacking, 'rank')} of {size} did not capture it"
