"""What a kernel does instead: every alteration that the suite knows is tried on small telling GEMMs.

`diagnose` puts the probes of each kind of GEMM to a subject once, and then looks for the rules that give its bits:
single alterations first, all that explain every bit; where none does, a second and a third on top of the best.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import eq

from f8emu.conformance.compare import said_by
from f8emu.conformance.diagnosis.alterations import ALTERATIONS, Alteration, from_there_on
from f8emu.conformance.diagnosis.compute import Memory
from f8emu.conformance.diagnosis.observations import NoOutput, Observation, common_trait, first_wrong, observe_probes
from f8emu.conformance.diagnosis.probes import KINDS, Kind
from f8emu.conformance.diagnosis.rules import Rules, rules_of
from f8emu.conformance.run.breakdown import HIGH, Contrast
from f8emu.conformance.run.result import Progress, Result, Silent, Status
from f8emu.conformance.run.subject import Subject
from f8emu.spec import HOPPER

_SHOWN = 5
Steps = tuple[Alteration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One hypothesis and how far it goes."""

    steps: Steps
    rules: Rules
    outputs_equal: int = 0
    outputs_total: int = 0
    probes_equal: int = 0  # whole ones: each stands for one concern
    left: Contrast | None = None  # what the outputs have in common that it does not give

    @property
    def alterations(self) -> tuple[str, ...]:
        return tuple(step.name for step in self.steps)

    @property
    def sentence(self) -> str:
        said = "it " + "; and it ".join(step.sentence for step in self.steps)
        return said if self.steps else "no alteration that the suite knows explains half of it"

    @property
    def is_complete(self) -> bool:
        return self.outputs_equal == self.outputs_total

    @property
    def rank(self) -> tuple[int, int]:
        return self.probes_equal, self.outputs_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One kind of GEMM of a subject."""

    kind: str
    cases: int = 0
    outputs_equal: int = 0  # under the chip's own rules
    outputs_total: int = 0
    best: Explanation | None = None  # None: it follows the chip's rules, or it failed
    tried: tuple[Explanation, ...] = ()  # the best first; all alterations that explain every bit alone are among them
    left_out: str = ""  # how many probes the subject failed on, and how on the first: the rest is diagnosed
    error: str = ""  # what it failed with where no probe is left that tells anything; then nothing is diagnosed
    engine: str = ""

    @property
    def alternatives(self) -> tuple[Explanation, ...]:
        """What else explains every bit: the probes do not tell these apart."""
        return tuple(one for one in self.tried if one.is_complete and one != self.best)

    @property
    def is_nearly_explained(self) -> bool:
        """Nine of ten outputs that differ are explained."""
        if self.best is None or not self.best.alterations or self.best.is_complete:
            return False
        unexplained = self.best.outputs_total - self.best.outputs_equal
        return 10 * unexplained <= self.outputs_total - self.outputs_equal

    @property
    def is_right(self) -> bool:
        """It follows the chip's rules."""
        return not self.error and self.outputs_equal == self.outputs_total


Diagnoses = Mapping[str, tuple[Diagnosis, ...]]
"""Name of a subject -> what was found."""


def diagnose(
    subject: Subject,
    *,
    kinds: Iterable[Kind] = KINDS,
    progress: Progress | None = None,
    memory: Memory | None = None,
) -> tuple[Diagnosis, ...]:
    """One diagnosis for each kind of GEMM that the subject offers; of those that differ the rules that they follow.

    `memory` is shared by diagnoses of several subjects: the probes are the same.

    Exactness: an explanation that is complete gives every output of the probes of its kind, bit for bit.
    """
    memory, progress = memory or Memory(), progress or Silent()
    found: list[Diagnosis] = []
    for kind in kinds:
        given = observe_probes(subject, kind)
        if isinstance(given, NoOutput):
            if not given.is_refusal:
                found.append(Diagnosis(kind=kind.name, error=given.reason, engine=subject.engine))
            continue
        observed, left_out = given
        one = Search(observed, memory, progress, f"{subject.name}: {kind.name}").diagnosis(kind.name)
        if left_out and one.is_right:
            one = Diagnosis(kind=kind.name, error=f"no probe that is left differs; {left_out}")
        found.append(replace(one, left_out=left_out, engine=subject.engine))
    return tuple(found)


def diagnosed(
    result: Result, subjects: Sequence[Subject], progress: Progress | None = None
) -> tuple[Result, Diagnoses]:
    """By name the diagnoses of those of `subjects` whose GEMMs differ; after KeyboardInterrupt what was finished."""
    found: dict[str, tuple[Diagnosis, ...]] = {}
    stages = {} if result.is_interrupted else {one.name: one.stages for one in result.subjects}
    try:
        for subject in subjects:
            differs = {one.stage for one in stages.get(subject.name, ()) if one.status is Status.DIFFERENT}
            if differs.isdisjoint(("golden", "gemms", "live")):
                continue
            try:
                found[subject.name] = diagnose(subject, progress=progress)
            except Exception as error:  # the verification is finished, and must not be lost
                found[subject.name] = (Diagnosis(kind="all kinds", error=said_by(error, 200)),)
    except KeyboardInterrupt:
        result = replace(result, is_interrupted=True)
    return result, found


class Search:
    """The rules that explain the outputs of one kind of GEMM, looked for from the chip's own rules.

    Most hypotheses miss the first probe that they are put to: one that explains every bit is looked for in this way,
    and only where none does are shares counted.
    """

    def __init__(self, given: Sequence[Observation], memory: Memory, progress: Progress, name: str) -> None:
        self.memory, self.progress, self.name = memory, progress, name
        right = rules_of(HOPPER, given[0].case)  # of all probes: they are of one kind
        # Probes that differ come first, and of them the quick ones.
        equal = {one: one.outputs_equal(right, memory) == one.size for one in given}
        self.probes = sorted(given, key=lambda one: (equal[one], one.case.k))
        self.own = self._counted(Explanation(steps=(), rules=right))
        self.alterations = (*ALTERATIONS, *from_there_on(first_wrong(self.probes, right, memory)))

    def diagnosis(self, kind: str) -> Diagnosis:
        """What the probes of a kind tell."""
        tried = [] if self.own.is_complete else self._searched()
        ranked = sorted(tried, key=lambda one: one.outputs_equal, reverse=True)
        return Diagnosis(
            kind=kind,
            cases=len(self.probes),
            outputs_equal=self.own.outputs_equal,
            outputs_total=self.own.outputs_total,
            best=None if self.own.is_complete else self._best(ranked),
            tried=tuple(ranked[: max(_SHOWN, sum(one.is_complete for one in ranked))]),
        )

    def _best(self, ranked: Sequence[Explanation]) -> Explanation:
        """The first that is complete; otherwise each alteration must halve the outputs, or the probes, that are not
        explained: less is coincidence.
        """
        if ranked and ranked[0].is_complete:
            return ranked[0]
        best, totals = self.own, (len(self.probes), self.own.outputs_total)
        for count in (1, 2, 3):
            more = next((one for one in ranked if len(one.steps) == count), best)
            halved = zip(more.rank, best.rank, totals, strict=True)
            best = more if any(2 * (total - n) <= total - m for n, m, total in halved) else best
        high = 0.0 if best.steps else HIGH  # few outputs of a trait tell what little is left, and not what is wrong
        return replace(best, left=common_trait(self.probes, best.rules, self.memory, high))

    def _searched(self) -> list[Explanation]:
        # 1. All single alterations that explain every bit; from a row or column on only where no plainer one does.
        if complete := self._complete([self.own], "one alteration"):
            return [one for one in complete if one.steps[0] in ALTERATIONS] or complete
        # 2. A second alteration on the best, then a third.
        tried: list[Explanation] = []
        best = self.own
        for number, width in (("two", 4), ("three", 2)):
            counted = list(map(self._counted, self._more([best], "shares of outputs")))
            tried += [one for one in counted if one.rank != best.rank]
            better = sorted((one for one in counted if one.rank > best.rank), key=lambda one: one.rank, reverse=True)
            found = map(self._reduced, self._complete(better[:width], f"{number} alterations"))
            if alike := {frozenset(one.steps): one for one in found}:  # the plainer one needs no late alteration
                return [*sorted(alike.values(), key=lambda one: max(map(self.alterations.index, one.steps))), *tried]
            if not better:
                break
            best = better[0]
        return tried

    def _complete(self, bases: list[Explanation], title: str) -> list[Explanation]:
        """What explains every bit with one alteration more than a base has."""
        return [self._counted(one) for one in self._more(bases, title) if self._is_complete(one)]

    def _reduced(self, complete: Explanation) -> Explanation:
        """Without the steps that every bit is explained without."""
        for step in complete.steps:
            fewer = self._with(tuple(other for other in complete.steps if other is not step))
            if fewer.steps and self._is_complete(fewer):
                return self._reduced(self._counted(fewer))
        return complete

    def _more(self, bases: list[Explanation], title: str) -> Iterator[Explanation]:
        """Every base with every alteration that alters something, each set of rules once."""
        self.progress.begin(self.name, title, len(bases) * len(self.alterations))
        seen = {base.rules for base in bases}
        for base, alteration in product(bases, self.alterations):
            self.progress.advance()
            one = self._with((*base.steps, alteration))
            # A chip's accumulation stands alone: changed again it is no chip's.
            has_chip = any(step.is_of_chip for step in base.steps)
            is_odd = (base.steps and alteration.is_of_chip) or (has_chip and one.rules.model != base.rules.model)
            if one.rules not in seen and not is_odd:
                seen.add(one.rules)
                yield one

    def _with(self, steps: Steps) -> Explanation:
        rules = reduce(lambda rules, step: step.change(rules), steps, self.own.rules)
        return Explanation(steps=steps, rules=rules)

    def _is_complete(self, tried: Explanation) -> bool:
        return all(one.outputs_equal(tried.rules, self.memory) == one.size for one in self.probes)

    def _counted(self, tried: Explanation) -> Explanation:
        sizes = [one.size for one in self.probes]
        equal = [one.outputs_equal(tried.rules, self.memory) for one in self.probes]
        whole = sum(map(eq, equal, sizes))
        return replace(tried, outputs_equal=sum(equal), outputs_total=sum(sizes), probes_equal=whole)
