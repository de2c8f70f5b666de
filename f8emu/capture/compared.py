"""What a replay and a diff find: stages whose bits differ, and what a capture lacks by what it says itself."""

from collections.abc import Iterable
from dataclasses import dataclass

from f8emu.capture.read import CapturedStep
from f8emu.conformance.compare import Mismatch, counted


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
        """How many elements differ."""
        return f"{self.elements_different} of {self.elements} differ"

    def line(self) -> str:
        """One line."""
        of = f" ({self.tensor})" if self.tensor else ""
        cause = f"; {self.cause}" if self.cause else ""
        return f"{self.step}: {self.place} {self.part}{of}: {self.share}{cause}"


def numbered(steps: Iterable[CapturedStep]) -> tuple[dict[tuple[int, int], CapturedStep], list[str]]:
    """(step, rank) -> step, a finished one rather than an unfinished one; and a line for each that is left over."""
    # Finished steps come first in the order, and so keep their number.
    found: dict[tuple[int, int], CapturedStep] = {}
    left_over: list[CapturedStep] = []
    for step in sorted(steps, key=lambda step: not step.is_complete):
        if found.setdefault((step.header.step, step.header.rank), step) is not step:
            left_over.append(step)
    return found, [
        f"{step.name} appears twice: {found[step.header.step, step.header.rank].path}, {step.path}"
        for step in left_over
    ]


def absent_ranks(steps: Iterable[CapturedStep]) -> list[str]:
    """A line for each step that some ranks did not capture; not of one that was given by its own path."""
    # Of a step that any rank captured, all ranks are expected.
    ranks: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for header in (step.header for step in steps if not step.is_alone):
        ranks.setdefault(header.step, set()).add(header.rank)
        sizes[header.step] = max(header.world_size, sizes.get(header.step, 0))
    return [
        f"step {step}: {counted(size - len(ranks[step]), 'rank')} of {size} did not capture it"
        for step, size in sorted(sizes.items())
        if size > len(ranks[step])
    ]


def absences(step: CapturedStep) -> list[str]:
    """What the step itself says that it does not hold."""
    unfinished = [] if step.is_complete else [f"{step.name} was never finished: {step.path}"]
    return unfinished + [f"{step.name}: {one.place} was left out: {one.reason}" for one in step.left_out]
