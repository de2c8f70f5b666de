"""The search for the rules that give a kernel's bits: single alterations first, then pairs and triples of the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from f8emu.conformance.breakdown.contrast import HIGH, Contrast
from f8emu.conformance.diagnosis.asked import Asked
from f8emu.conformance.diagnosis.hypotheses import Alteration, alterations, from_there_on
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.remainder import first_wrong, what_is_left
from f8emu.conformance.diagnosis.rules import Rules, rules_of
from f8emu.conformance.run.result import Progress
from f8emu.spec import Chip

_SECOND, _THIRD = 4, 2
"""How many of the best are tried with a second, and with a third alteration."""
_TRIED = 5


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
    cases: int
    outputs_equal: int
    """Under the chip's own rules."""
    outputs_total: int
    best: Explanation | None
    """None: it follows the chip's rules, or it failed."""
    tried: tuple[Explanation, ...]
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


def failed(kind: str, error: str) -> Diagnosis:
    """Nothing is known but this."""
    return Diagnosis(kind=kind, cases=0, outputs_equal=0, outputs_total=0, best=None, tried=(), error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    steps: tuple[Alteration, ...]
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

    def __init__(
        self,
        asked: Sequence[Asked],
        chip: Chip,
        memory: Memory,
        progress: Progress | None,
        name: str,
        hints: tuple[tuple[Alteration, ...], ...],
    ) -> None:
        self.memory, self.progress, self.name = memory, progress, name
        self.hints = hints
        self.is_thorough = True
        self.found: list[tuple[Alteration, ...]] = []
        self.total = sum(one.size for one in asked)
        right = [rules_of(chip, one.case) for one in asked]
        self.right = tuple(dict.fromkeys(right))  # few: most probes are of one kind
        self.asked = [(one, self.right.index(rules)) for one, rules in zip(asked, right, strict=True)]
        own = self._counted(())
        order = sorted(range(len(asked)), key=lambda i: (own.equal[i] == asked[i].size, asked[i].case.k))
        self.asked = [self.asked[i] for i in order]  # those that differ first, and of them the quick ones
        self.own = _Tried(steps=(), equal=tuple(own.equal[i] for i in order))
        self.alterations = alterations()

    def run(self, kind: str) -> Diagnosis:
        """What the probes of a kind tell."""
        tried = [] if self.own.outputs_equal == self.total else self._searched()
        ranked = sorted(tried, key=lambda one: one.outputs_equal, reverse=True)
        self.found = [one.steps for one in ranked[:1]]
        complete = sum(one.outputs_equal == self.total for one in ranked)
        explained = tuple(_explanation(one, self.total) for one in ranked[: max(_TRIED, complete)])
        return Diagnosis(
            kind=kind,
            cases=len(self.asked),
            outputs_equal=self.own.outputs_equal,
            outputs_total=self.total,
            best=self._best(ranked),
            tried=explained,
        )

    def _best(self, ranked: list[_Tried]) -> Explanation | None:
        """The first that is complete; otherwise each alteration must halve the outputs, or the probes, that are not
        explained: less is coincidence.
        """
        if self.own.outputs_equal == self.total:
            return None
        if ranked and ranked[0].outputs_equal == self.total:
            return _explanation(ranked[0], self.total)
        best = self.own
        for count in (1, 2, 3):
            more = next((one for one in ranked if len(one.steps) == count), None)
            if more is not None and any(
                2 * n <= m for n, m in zip(self._missed(more), self._missed(best), strict=True)
            ):
                best = more
        found = _explanation(best, self.total) if best.steps else _unexplained(best, self.total)
        high = 0.0 if best.steps else HIGH  # few outputs of a trait tell what little is left, and not what is wrong
        return replace(found, left=what_is_left(self._ruled(best.steps), self.memory, high))

    def _missed(self, tried: _Tried) -> tuple[int, int]:
        """Outputs and probes that are not explained."""
        probes = sum(equal < one.size for (one, _), equal in zip(self.asked, tried.equal, strict=True))
        return self.total - tried.outputs_equal, probes

    def _searched(self) -> list[_Tried]:
        complete = list(self._complete([self.own], "one alteration"))
        if not complete:
            self.alterations = tuple(from_there_on(first_wrong(self._ruled(()), self.memory)))
            complete = list(self._complete([self.own], "from a row or column on"))
            self.alterations = (*alterations(), *self.alterations)
        if complete:
            return complete
        hinted = [self._counted(steps) for steps in self.hints]
        explained = [one for one in hinted if one.outputs_equal == self.total]
        explained = explained or list(islice(self._complete(hinted, "beside what explains another kind"), 1))
        if explained:
            return [self._reduced(explained[0])]
        counted = self._counted_level(self.own, "one alteration, counted")
        singles = self._better(counted, self.own)
        complete = sorted(self._complete(singles[:_SECOND], "two alterations"), key=self._plainness)
        if complete or not self.is_thorough:
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
                return self._reduced(replace(complete, steps=fewer))
        return complete

    def _is_complete(self, rules: tuple[Rules, ...]) -> bool:
        return all(self._equal(one, rules[kind]) == one.size for one, kind in self.asked)

    def _better(self, tried: list[_Tried], base: _Tried) -> list[_Tried]:
        """The attempts that explain more than a base does, the best first."""
        sizes = [one.size for one, _ in self.asked]
        better = [one for one in tried if _rank(one, sizes) > _rank(base, sizes)]
        return sorted(better, key=lambda one: _rank(one, sizes), reverse=True)

    def _complete(self, bases: list[_Tried], title: str) -> Iterator[_Tried]:
        """The attempts that explain every bit with one alteration more than a base has."""
        for steps, rules in self._more(bases, title):
            if self._is_complete(rules):
                yield _Tried(steps=steps, equal=tuple(one.size for one, _ in self.asked))

    def _counted_level(self, base: _Tried, title: str) -> list[_Tried]:
        """With one alteration more than a base has, those that give more outputs of a probe that the base misses."""
        missed = [(*asked, equal) for asked, equal in zip(self.asked, base.equal, strict=True) if equal < asked[0].size]
        return [
            self._counted(steps)
            for steps, rules in self._more([base], title)
            if any(self._equal(one, rules[kind]) > equal for one, kind, equal in missed)
        ]

    def _more(self, bases: list[_Tried], title: str) -> Iterator[tuple[tuple[Alteration, ...], tuple[Rules, ...]]]:
        """Every base with every alteration that alters something, each set of rules once."""
        if self.progress is not None:
            self.progress.begin(self.name, title, len(bases) * len(self.alterations))
        seen = {self._rules(base.steps) for base in bases}
        for base in bases:
            base_rules = self._rules(base.steps)
            for alteration in self.alterations:
                if self.progress is not None:
                    self.progress.advance()
                if base.steps and alteration.is_of_chip:
                    continue
                steps = (*base.steps, alteration)
                rules = self._rules(steps)
                is_odd = any(step.is_of_chip for step in base.steps) and not _has_same_model(rules, base_rules)
                if rules not in seen and not is_odd:
                    seen.add(rules)
                    yield steps, rules

    def _plainness(self, tried: _Tried) -> int:
        """The rank of a complete explanation: the plainer one needs no late alteration."""
        return max(self.alterations.index(step) for step in tried.steps)

    def _ruled(self, steps: tuple[Alteration, ...]) -> list[tuple[Asked, Rules]]:
        """Every probe with its rules, altered."""
        rules = self._rules(steps)
        return [(one, rules[kind]) for one, kind in self.asked]

    def _rules(self, steps: tuple[Alteration, ...]) -> tuple[Rules, ...]:
        """The rules of `self.right`, altered."""
        found = self.right
        for alteration in steps:
            found = tuple(map(alteration.change, found))
        return found

    def _counted(self, steps: tuple[Alteration, ...]) -> _Tried:
        rules = self._rules(steps)
        return _Tried(steps=steps, equal=tuple(self._equal(one, rules[kind]) for one, kind in self.asked))

    def _equal(self, one: Asked, rules: Rules) -> int:
        return one.outputs_equal(rules, self.memory)


def _has_same_model(rules: tuple[Rules, ...], others: tuple[Rules, ...]) -> bool:
    """What adds is the same: a chip's accumulation that is changed again is no chip's."""
    return all(one.model == other.model for one, other in zip(rules, others, strict=True))


def _rank(tried: _Tried, sizes: list[int]) -> tuple[int, int]:
    """Whole probes count first: each stands for one concern."""
    return sum(e == s for e, s in zip(tried.equal, sizes, strict=True)), tried.outputs_equal


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
        sentence="no alteration that the suite knows explains half of it",
        outputs_equal=sum(own.equal),
        outputs_total=total,
    )
