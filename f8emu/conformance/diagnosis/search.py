"""What a kernel does instead: every alteration that the suite knows is tried on small telling GEMMs.

`diagnose` puts the probes of each kind of GEMM to a subject once, and then looks for the rules that give its bits:
single alterations first, all that explain every bit; where none does, a second and a third on top of the best.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from f8emu.conformance.diagnosis.alterations import Alteration, alterations, from_there_on
from f8emu.conformance.diagnosis.arguments import Memory
from f8emu.conformance.diagnosis.observations import NoOutput, Observation, common_trait, first_wrong, observe_probes
from f8emu.conformance.diagnosis.probes import KINDS, Kind
from f8emu.conformance.diagnosis.rules import Rules, rules_of
from f8emu.conformance.run.breakdown import HIGH, Contrast
from f8emu.conformance.run.result import Progress, Silent
from f8emu.conformance.run.subject import Subject
from f8emu.spec import HOPPER

_SECOND, _THIRD = 4, 2
"""How many of the best are tried with a second, and with a third alteration."""
_SHOWN = 5
Steps = tuple[Alteration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One hypothesis and how far it goes."""

    alterations: tuple[str, ...]
    sentence: str
    outputs_equal: int
    outputs_total: int
    left: Contrast | None = None
    """What the outputs have in common that it does not give; None where all are given, or nothing parts them."""

    @property
    def is_complete(self) -> bool:
        """Every bit is explained."""
        return self.outputs_equal == self.outputs_total

    @property
    def share(self) -> float:
        """The share of the outputs that it explains."""
        return self.outputs_equal / self.outputs_total


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One kind of GEMM of a subject."""

    kind: str
    cases: int = 0
    outputs_equal: int = 0
    """Under the chip's own rules."""
    outputs_total: int = 0
    best: Explanation | None = None
    """None: it follows the chip's rules, or it failed."""
    tried: tuple[Explanation, ...] = ()
    """The best first. All alterations are among them that explain every bit alone."""
    left_out: str = ""
    """How many probes the subject failed on, and how on the first: the rest is diagnosed."""
    error: str = ""
    """What the subject failed with where no probe is left that tells anything; then nothing is diagnosed."""
    engine: str = ""
    """What computed."""

    @property
    def alternatives(self) -> tuple[Explanation, ...]:
        """What else explains every bit: the probes do not tell these apart."""
        return tuple(one for one in self.tried if one.is_complete and one != self.best)

    @property
    def is_nearly_explained(self) -> bool:
        """Nine of ten outputs that differ are explained, and nine of ten of all."""
        if self.best is None or not self.best.alterations or self.best.is_complete:
            return False
        unexplained = self.best.outputs_total - self.best.outputs_equal
        return 10 * unexplained <= self.outputs_total - self.outputs_equal and self.best.share >= 0.9

    @property
    def is_right(self) -> bool:
        """It follows the chip's rules."""
        return not self.error and self.outputs_equal == self.outputs_total


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
    hints: dict[tuple[str, ...], Steps] = {}
    for kind in kinds:
        given = observe_probes(subject, kind)
        if isinstance(given, NoOutput):
            if not given.is_refusal:
                found.append(Diagnosis(kind=kind.name, error=given.reason, engine=subject.engine))
            continue
        # Where a kind has no explanation, the next ones are not searched for three faults at once; but what
        # explains one kind is tried on the next.
        search = Search(given.observations, memory, progress, f"{subject.name}: {kind.name}")
        is_thorough = all(one.best is None or one.best.is_complete for one in found)
        ranked = search.ranked(tuple(hints.values()), is_thorough)
        one = replace(search.diagnosis(kind.name, ranked), left_out=given.left_out)
        if one.left_out and one.is_right:
            one = Diagnosis(kind=kind.name, error=f"no probe that is left differs; {one.left_out}")
        found.append(replace(one, engine=subject.engine))
        hints |= {tuple(step.name for step in best.steps): best.steps for best in ranked[:1] if len(best.steps) > 1}
    return tuple(found)


class _Tried(NamedTuple):
    steps: Steps
    equal: tuple[int, ...]
    """Outputs of each probe."""

    @property
    def outputs_equal(self) -> int:
        return sum(self.equal)


class Search:
    """Single alterations, then on the best of them a second, then a third.

    Most hypotheses miss the first probe that they are put to: one that explains every bit is looked for in this way,
    and only where none does are shares counted.
    """

    def __init__(self, given: Sequence[Observation], memory: Memory, progress: Progress, name: str) -> None:
        self.memory, self.progress, self.name = memory, progress, name
        self.alterations = alterations()
        # 1. The chip's rules of each probe.
        right = [rules_of(HOPPER, one.case) for one in given]
        self.right = tuple(dict.fromkeys(right))  # few: most probes are of one kind
        self.probes = [(one, self.right.index(rules)) for one, rules in zip(given, right, strict=True)]
        # 2. Most hypotheses fail on the first probes: those that differ first, and of them the quick ones.
        equal = self._counted(()).equal
        order = sorted(range(len(given)), key=lambda i: (equal[i] == given[i].size, given[i].case.k))
        self.probes = [self.probes[i] for i in order]
        self.sizes = [one.size for one, _ in self.probes]
        self.total = sum(self.sizes)
        self.own = _Tried((), tuple(equal[i] for i in order))

    def diagnosis(self, kind: str, ranked: Sequence[_Tried]) -> Diagnosis:
        """What the probes of a kind tell."""
        complete = sum(one.outputs_equal == self.total for one in ranked)
        return Diagnosis(
            kind=kind,
            cases=len(self.probes),
            outputs_equal=self.own.outputs_equal,
            outputs_total=self.total,
            best=self._best(ranked),
            tried=tuple(map(self._explanation, ranked[: max(_SHOWN, complete)])),
        )

    def _best(self, ranked: Sequence[_Tried]) -> Explanation | None:
        """The first that is complete; otherwise each alteration must halve the outputs, or the probes, that are not
        explained: less is coincidence.
        """
        if self.own.outputs_equal == self.total:
            return None
        if ranked and ranked[0].outputs_equal == self.total:
            return self._explanation(ranked[0])
        best = self.own
        for count in (1, 2, 3):
            more = next((one for one in ranked if len(one.steps) == count), None)
            if more is not None:
                halved = (2 * n <= m for n, m in zip(self._missed(more), self._missed(best), strict=True))
                best = more if any(halved) else best
        high = 0.0 if best.steps else HIGH  # few outputs of a trait tell what little is left, and not what is wrong
        left = common_trait(self._ruled(best.steps), self.memory, high)
        return replace(self._explanation(best), left=left)

    def _explanation(self, tried: _Tried) -> Explanation:
        sentence = "it " + "; and it ".join(step.sentence for step in tried.steps)
        return Explanation(
            alterations=tuple(step.name for step in tried.steps),
            sentence=sentence if tried.steps else "no alteration that the suite knows explains half of it",
            outputs_equal=tried.outputs_equal,
            outputs_total=self.total,
        )

    def _missed(self, tried: _Tried) -> tuple[int, int]:
        """Outputs and probes that are not explained."""
        probes = sum(equal < size for equal, size in zip(tried.equal, self.sizes, strict=True))
        return self.total - tried.outputs_equal, probes

    def ranked(self, hints: Sequence[Steps], is_thorough: bool) -> list[_Tried]:
        """What was tried, the best first; nothing if the chip's rules give every bit."""
        tried = [] if self.own.outputs_equal == self.total else self._searched(hints, is_thorough)
        return sorted(tried, key=lambda one: one.outputs_equal, reverse=True)

    def _searched(self, hints: Sequence[Steps], is_thorough: bool) -> list[_Tried]:
        # 1. All single alterations that explain every bit.
        complete = list(self._complete([self.own], "one alteration"))
        if not complete:  # a row or column that is wrong tells its own alterations
            self.alterations = tuple(from_there_on(first_wrong(self._ruled(()), self.memory)))
            complete = list(self._complete([self.own], "from a row or column on"))
            self.alterations = (*alterations(), *self.alterations)
        if complete:
            return complete
        # 2. What explains another kind, and one more.
        hinted = [self._counted(steps) for steps in hints]
        explained = [one for one in hinted if one.outputs_equal == self.total]
        explained = explained or list(islice(self._complete(hinted, "beside what explains another kind"), 1))
        if explained:
            return [self._reduced(explained[0])]
        # 3. The best with a second, and with a third.
        counted = self._counted_level(self.own, "one alteration, counted")
        singles = self._better(counted, self.own)
        complete = sorted(  # the plainer one needs no late alteration
            self._complete(singles[:_SECOND], "two alterations"),
            key=lambda one: max(map(self.alterations.index, one.steps)),
        )
        if complete or not is_thorough:
            return [*complete, *hinted, *counted]
        pairs: list[_Tried] = []
        if singles:
            pairs = self._better(self._counted_level(singles[0], "two alterations, counted"), singles[0])
            complete = list(islice(self._complete(pairs[:_THIRD], "three alterations"), 1))
        return [*map(self._reduced, complete), *hinted, *counted, *pairs]

    def _reduced(self, complete: _Tried) -> _Tried:
        """Without the steps that every bit is explained without."""
        for step in complete.steps:
            fewer = tuple(other for other in complete.steps if other is not step)
            if fewer and self._is_complete(self._rules(fewer)):
                return self._reduced(complete._replace(steps=fewer))
        return complete

    def _is_complete(self, rules: tuple[Rules, ...]) -> bool:
        return all(one.outputs_equal(rules[i], self.memory) == one.size for one, i in self.probes)

    def _better(self, tried: list[_Tried], base: _Tried) -> list[_Tried]:
        """The attempts that explain more than a base does, the best first."""
        better = [one for one in tried if self._rank(one) > self._rank(base)]
        return sorted(better, key=self._rank, reverse=True)

    def _rank(self, tried: _Tried) -> tuple[int, int]:
        """Whole probes count first: each stands for one concern."""
        return sum(e == s for e, s in zip(tried.equal, self.sizes, strict=True)), tried.outputs_equal

    def _complete(self, bases: list[_Tried], title: str) -> Iterator[_Tried]:
        """The attempts that explain every bit with one alteration more than a base has."""
        for steps, rules in self._more(bases, title):
            if self._is_complete(rules):
                yield _Tried(steps, tuple(self.sizes))

    def _counted_level(self, base: _Tried, title: str) -> list[_Tried]:
        """With one alteration more than a base has, those that give more outputs of a probe that the base misses."""
        missed = [
            (*probe, equal) for probe, equal in zip(self.probes, base.equal, strict=True) if equal < probe[0].size
        ]
        return [
            self._counted(steps)
            for steps, rules in self._more([base], title)
            if any(one.outputs_equal(rules[i], self.memory) > equal for one, i, equal in missed)
        ]

    def _more(self, bases: list[_Tried], title: str) -> Iterator[tuple[Steps, tuple[Rules, ...]]]:
        """Every base with every alteration that alters something, each set of rules once."""
        self.progress.begin(self.name, title, len(bases) * len(self.alterations))
        seen = {self._rules(base.steps) for base in bases}
        for base in bases:
            models = [rules.model for rules in self._rules(base.steps)]
            has_chip = any(step.is_of_chip for step in base.steps)
            for alteration in self.alterations:
                self.progress.advance()
                if base.steps and alteration.is_of_chip:
                    continue
                steps = (*base.steps, alteration)
                rules = self._rules(steps)
                # A chip's accumulation that is changed again is no chip's.
                is_odd = has_chip and [one.model for one in rules] != models
                if rules not in seen and not is_odd:
                    seen.add(rules)
                    yield steps, rules

    def _ruled(self, steps: Steps) -> list[tuple[Observation, Rules]]:
        """Every probe with its rules, altered."""
        rules = self._rules(steps)
        return [(one, rules[i]) for one, i in self.probes]

    def _rules(self, steps: Steps) -> tuple[Rules, ...]:
        """The rules of `self.right`, altered."""
        found = self.right
        for alteration in steps:
            found = tuple(map(alteration.change, found))
        return found

    def _counted(self, steps: Steps) -> _Tried:
        return _Tried(steps, tuple(one.outputs_equal(rules, self.memory) for one, rules in self._ruled(steps)))
