"""What a kernel does instead: every alteration that the suite knows is tried on small telling GEMMs.

`diagnose` puts the probes of each kind of GEMM to a subject once, and then looks for the rules that give its bits:
single alterations first, then a second and a third on top of the best.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from f8emu.conformance.altered import Memory, Part, compute
from f8emu.conformance.compare import different, shape_fault
from f8emu.conformance.distributions import dtype_of
from f8emu.conformance.gemm import GemmCase
from f8emu.conformance.hypotheses import Alteration, alterations
from f8emu.conformance.probes import KINDS, Kind, probes
from f8emu.conformance.rules import Rules, rules_of
from f8emu.conformance.subject import NotOffered, Subject
from f8emu.conformance.verify import Progress
from f8emu.spec import HOPPER, Chip, MissingExtraError

_BEAMS = (4, 2)
"""How many of the best are tried with a second, and with a third alteration."""
_TRIED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One hypothesis and how far it goes."""

    alterations: tuple[str, ...]
    sentence: str
    outputs_equal: int
    outputs_total: int

    @property
    def is_complete(self) -> bool:
        """Every bit is explained."""
        return self.outputs_equal == self.outputs_total

    @property
    def share(self) -> float:
        """Of the outputs that it explains."""
        return self.outputs_equal / self.outputs_total


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One kind of GEMM of a subject."""

    kind: str
    cases: int
    outputs_equal: int
    """Under the chip's own rules."""
    outputs_total: int
    best: Explanation | None
    """None: it follows the chip's rules, or it failed."""
    tried: tuple[Explanation, ...]
    """The best first."""
    error: str = ""
    """What the subject raised on a probe; then nothing is diagnosed."""

    @property
    def is_right(self) -> bool:
        """It follows the chip's rules."""
        return not self.error and self.outputs_equal == self.outputs_total


def diagnose(
    subject: Subject, *, kinds: Iterable[Kind] = KINDS, chip: Chip = HOPPER, progress: Progress | None = None
) -> tuple[Diagnosis, ...]:
    """One diagnosis for each kind of GEMM that the subject offers; of those that differ the rules that they follow.

    Exactness: an explanation that is complete gives every output of the probes of its kind, bit for bit.
    """
    memory = Memory()
    found: list[Diagnosis] = []
    for kind in kinds:
        asked = _asked(subject, kind)
        if isinstance(asked, str):
            found.append(
                Diagnosis(kind=kind.name, cases=0, outputs_equal=0, outputs_total=0, best=None, tried=(), error=asked)
            )
        elif asked:
            found.append(_Search(asked, chip, memory, progress, f"{subject.name}: {kind.name}").run(kind.name))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """A probe and what the subject gave."""

    case: GemmCase
    at: Part | None
    observed: np.ndarray
    """Of the outputs that are looked at."""

    @property
    def size(self) -> int:
        return self.observed.size


def _asked(subject: Subject, kind: Kind) -> list[_Asked] | str:
    """The probes of a kind that the subject offers; empty if none, a text if it failed."""
    found: list[_Asked] = []
    for probe in probes(kind, takes_any_size=subject.takes_any_size):
        for case in probe.cases():
            try:
                output = subject.gemm(case)
            except (NotOffered, MissingExtraError):
                continue
            except Exception as error:  # a subject may raise anything
                return f"{case.id}: raised {type(error).__name__}: {str(error).strip()[:200]}"
            fault = shape_fault(output, np.empty(case.output_shape, dtype_of(case.out_dtype)))
            if fault:
                return f"{case.id}: {fault}"
            observed = output if probe.at is None else output[np.ix_(*probe.at)]
            found.append(_Asked(case=case, at=probe.at, observed=observed))
            if not probe.needs_all:
                break
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    steps: tuple[Alteration, ...]
    equal: tuple[int, ...]
    """Outputs of each probe."""

    def order(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Whole probes count first: each stands for one concern."""
        return sum(e == s for e, s in zip(self.equal, sizes, strict=True)), sum(self.equal)


class _Search:
    """Single alterations, then on the best of them a second, then a third."""

    def __init__(self, asked: list[_Asked], chip: Chip, memory: Memory, progress: Progress | None, name: str) -> None:
        self.asked, self.chip, self.memory, self.progress, self.name = asked, chip, memory, progress, name
        self.sizes = tuple(one.size for one in asked)
        self.seen: set[tuple[Rules, ...]] = set()

    def run(self, kind: str) -> Diagnosis:
        total = sum(self.sizes)
        own = self._try(())
        assert own is not None, "nothing was seen before"
        if sum(own.equal) == total:
            return Diagnosis(
                kind=kind, cases=len(self.asked), outputs_equal=total, outputs_total=total, best=None, tried=()
            )
        tried = list(self._level([own], "one alteration"))
        for beam, level in zip(_BEAMS, ("two alterations", "three alterations"), strict=True):
            if any(sum(one.equal) == total for one in tried):
                break
            best = sorted(tried, key=lambda one: one.order(self.sizes), reverse=True)[:beam]
            tried += self._level([one for one in best if one.order(self.sizes) > own.order(self.sizes)], level)
        ranked = sorted(tried, key=lambda one: sum(one.equal), reverse=True)
        explained = tuple(_explanation(one, total) for one in ranked[:_TRIED])
        best = explained[0] if explained and explained[0].outputs_equal > sum(own.equal) else _unexplained(own, total)
        return Diagnosis(
            kind=kind,
            cases=len(self.asked),
            outputs_equal=sum(own.equal),
            outputs_total=total,
            best=best,
            tried=explained,
        )

    def _level(self, bases: list[_Tried], level: str) -> Iterator[_Tried]:
        if self.progress is not None:
            self.progress.begin(self.name, level, len(bases) * len(alterations()))
        for base in bases:
            for alteration in alterations():
                if self.progress is not None:
                    self.progress.advance()
                one = None if alteration in base.steps else self._try((*base.steps, alteration))
                if one is not None:
                    yield one

    def _try(self, steps: tuple[Alteration, ...]) -> _Tried | None:
        """None where the last step alters nothing, or what it gives was tried."""
        all_rules: list[Rules] = []
        for one in self.asked:
            rules = rules_of(self.chip, one.case)
            for alteration in steps:
                rules = alteration.change(rules)
            all_rules.append(rules)
        if tuple(all_rules) in self.seen:
            return None
        self.seen.add(tuple(all_rules))
        equal = [
            one.size - int(np.count_nonzero(different(one.observed, self._computed(one, rules))))
            for one, rules in zip(self.asked, all_rules, strict=True)
        ]
        return _Tried(steps=steps, equal=tuple(equal))

    def _computed(self, one: _Asked, rules: Rules) -> np.ndarray:
        return compute(one.case, rules, at=one.at, memory=self.memory)


def _explanation(tried: _Tried, total: int) -> Explanation:
    return Explanation(
        alterations=tuple(step.name for step in tried.steps),
        sentence="it " + "; and it ".join(step.sentence for step in tried.steps),
        outputs_equal=sum(tried.equal),
        outputs_total=total,
    )


def _unexplained(own: _Tried, total: int) -> Explanation:
    return Explanation(
        alterations=(),
        sentence="none of the alterations that the suite knows explains more than the chip's own rules",
        outputs_equal=sum(own.equal),
        outputs_total=total,
    )
