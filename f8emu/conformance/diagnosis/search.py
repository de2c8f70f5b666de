"""Search for what a wrong kernel does: every alteration that the suite knows is tried on small telling GEMMs.

`diagnose` puts the probes of each kind of GEMM to a subject once, and then looks for the rules that give its bits:
single alterations first, all that explain every bit; where none does, what explains another kind of the same kernel,
then a second and a third on top of the best few. Two alterations of one part of the rules exclude each other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import eq

from f8emu.conformance.compare import said_by
from f8emu.conformance.diagnosis.alterations import ALTERATIONS, Alteration, claims, from_there_on, rule_of_mxfp8
from f8emu.conformance.diagnosis.compute import Memory
from f8emu.conformance.diagnosis.coverage import Coverage, WrongGemm, covered, wrong_gemms
from f8emu.conformance.diagnosis.observations import (
    NoOutput,
    Observation,
    common_trait,
    first_wrong,
    is_random,
    observe_probes,
)
from f8emu.conformance.diagnosis.probes import GROUPED, KINDS, LONG_K, MX_KINDS, GemmKind
from f8emu.conformance.diagnosis.rules import Rules, rules_of
from f8emu.conformance.run.breakdown import HIGH, Contrast
from f8emu.conformance.run.result import Progress, Result, Silent, Status
from f8emu.conformance.run.subject import Subject

_SHOWN = 5
_BEAM, _LAST, _ALIKE = 8, 2, 2
"""How many first steps are gone on with, how many of three, and how many of them may alter the same parts."""
Steps = tuple[Alteration, ...]


def in_words(clauses: Sequence[str]) -> str:
    """`it a`, `it a, and b`, `it a, b, and c`."""
    return f"it {', '.join([*clauses[:-1], f'and {clauses[-1]}'] if len(clauses) > 1 else clauses)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One hypothesis and how far it goes."""

    steps: Steps
    rules: Rules
    right: Rules  # the chip's
    outputs_equal: int = 0
    outputs_total: int = 0
    probes_equal: int = 0  # whole ones: each stands for one concern
    left: Contrast | None = None  # what the outputs have in common that it does not give

    @property
    def alterations(self) -> tuple[str, ...]:
        return tuple(step.name for step in self.steps)

    @property
    def sentence(self) -> str:
        """The steps in words, each with its formula, the chip's beside an order of scales; says so without steps."""
        details: dict[str, list[str]] = {}
        for step in self.steps:
            is_order = self.right_scales and step.detail == self.rules.scales.value
            is_mx, right, rule = self.right.mode.is_microscaled, "", ""
            if is_order:
                right = f"a {'Blackwell' if is_mx else 'Hopper'} GPU: {self.right_scales}"
            elif is_mx and "[" not in step.detail and (broken := rule_of_mxfp8(claims(step, self.right))):
                rule = f"[{broken}]"
            details.setdefault(step.sentence, []).extend((step.detail, right, rule))
        clauses = [
            f"{clause} ({'; '.join(filter(None, formulas))})" if any(formulas) else clause
            for clause, formulas in details.items()
        ]
        return in_words(clauses) if clauses else "no alteration that the suite knows gives half of what differs"

    @property
    def right_scales(self) -> str:
        """The chip's order of the scales with the id of its rule; empty where this explanation has the same order."""
        return "" if self.rules.scales is self.right.scales else self.right.scales_and_id

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
    is_random: bool = False  # the same GEMM, asked again, has other bits: no rules are looked for
    engine: str = ""
    coverage: Coverage | None = None  # of the best one, where GEMMs of the suite differ

    @property
    def alternatives(self) -> tuple[Explanation, ...]:
        """Other explanations of every bit in as many steps: the probes do not tell these apart."""
        steps = () if self.best is None else self.best.steps
        return tuple(
            other
            for other in self.tried
            if other.is_complete and other.steps != steps and len(other.steps) <= len(steps)
        )

    @property
    def is_explained(self) -> bool:
        """The best explanation gives every output of the probes, and of the larger GEMMs that were looked at."""
        is_complete = self.best is not None and self.best.is_complete
        return is_complete and (self.coverage is None or not self.coverage.cases_left)

    @property
    def is_nearly_explained(self) -> bool:
        """Nine of ten outputs that differ are explained."""
        if self.best is None or not self.best.alterations or self.best.is_complete:
            return False
        unexplained = self.best.outputs_total - self.best.outputs_equal
        return 10 * unexplained <= self.outputs_total - self.outputs_equal

    def beyond_probes(self, gemms: Sequence[WrongGemm]) -> "Diagnosis":
        """The same with the explanation that gives most GEMMs of the suite, of those that the probes do not part."""
        if self.best is None or not self.best.is_complete or not gemms:
            return self
        equal = [self.best, *self.alternatives]
        coverages = [covered(gemms, explanation.rules) for explanation in equal]
        coverage, best = min(zip(coverages, equal, strict=True), key=lambda pair: pair[0].cases_left)
        refuted = [other for its, other in zip(coverages, equal, strict=True) if its.cases_left > coverage.cases_left]
        tried = tuple(explanation for explanation in self.tried if explanation not in refuted)
        return replace(self, best=best, coverage=coverage, tried=tried)

    @property
    def is_right(self) -> bool:
        return not self.error and not self.is_random and self.outputs_equal == self.outputs_total


Diagnoses = Mapping[str, tuple[Diagnosis, ...]]
"""Name of a subject -> what was found."""


def diagnose(
    subject: Subject,
    *,
    kinds: Iterable[GemmKind] = (*KINDS, *GROUPED),
    progress: Progress | None = None,
    memory: Memory | None = None,
) -> tuple[Diagnosis, ...]:
    """One diagnosis for each kind of GEMM that the subject offers; of those that differ the rules that they follow.

    `memory` is shared by diagnoses of several subjects: the probes are the same.

    Exactness: an explanation that is complete gives every output of the probes of its kind, bit for bit.
    """
    memory, progress = memory or Memory(), progress or Silent()
    diagnoses: list[Diagnosis] = []
    for kind in kinds:
        answer = observe_probes(subject, kind)
        if isinstance(answer, NoOutput):
            if not answer.is_refusal:
                diagnoses.append(Diagnosis(kind=kind.name, error=answer.reason, engine=subject.engine))
            continue
        observed, left_out = answer
        siblings = [explanation.steps for other in diagnoses for explanation in other.tried if explanation.is_complete]
        search = Search(observed, memory, progress, f"{subject.name}: {kind.name}", list(dict.fromkeys(siblings)))
        if not search.own.is_complete and is_random(subject, search.longest):
            diagnoses.append(Diagnosis(kind=kind.name, is_random=True, engine=subject.engine))
            continue
        diagnosis = search.diagnosis(kind.name)
        if left_out and diagnosis.is_right:
            diagnosis = Diagnosis(kind=kind.name, error=f"no probe that is left differs; {left_out}")
        diagnoses.append(replace(diagnosis, left_out=left_out, engine=subject.engine))
    return tuple(_agreeing(diagnoses))


def _agreeing(diagnoses: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """Chooses among equal explanations of a kind the one whose steps explain the most kinds."""
    complete = [[explanation for explanation in diagnosis.tried if explanation.is_complete] for diagnosis in diagnoses]
    kinds = Counter[Alteration]()
    for explanations in complete:
        kinds.update({step for explanation in explanations for step in explanation.steps})

    def shared(explanation: Explanation) -> float:
        return sum(kinds[step] for step in explanation.steps) / len(explanation.steps)

    for diagnosis, explanations in zip(diagnoses, complete, strict=True):
        yield replace(diagnosis, best=max(explanations, key=shared)) if explanations else diagnosis


def diagnosed(
    result: Result, subjects: Sequence[Subject], progress: Progress | None = None
) -> tuple[Result, Diagnoses]:
    """Diagnoses by name of the `subjects` whose GEMMs differ; after KeyboardInterrupt those that were finished."""
    diagnoses: dict[str, tuple[Diagnosis, ...]] = {}
    stages = {} if result.is_interrupted else {judged.name: judged.stages for judged in result.subjects}
    try:
        for subject in subjects:
            differs = {stage.stage for stage in stages.get(subject.name, ()) if stage.status is Status.DIFFERENT}
            if differs.isdisjoint(("golden", "gemms", "live")):
                continue
            try:
                is_mx = subject.kernel is not None and subject.kernel.is_microscaled
                kinds = diagnose(subject, kinds=MX_KINDS if is_mx else (*KINDS, *GROUPED), progress=progress)
                gemms = wrong_gemms(subject, [stage for stage in stages[subject.name] if stage.wrong], result.golden)
                diagnoses[subject.name] = tuple(kind.beyond_probes(gemms.get(kind.kind, ())) for kind in kinds)
            except Exception as error:  # the verification is finished, and must not be lost
                diagnoses[subject.name] = (Diagnosis(kind="all kinds", error=said_by(error, 200)),)
    except KeyboardInterrupt:
        result = replace(result, is_interrupted=True)
    return result, diagnoses


class Search:
    """The rules that explain the outputs of one kind of GEMM, looked for from the chip's own rules.

    Most hypotheses miss the first probe that they are put to: one that explains every bit is looked for in this way,
    and only where none does are shares counted. `siblings` are steps that explained other kinds of the same kernel.
    """

    def __init__(
        self,
        observed: Sequence[Observation],
        memory: Memory,
        progress: Progress,
        name: str,
        siblings: Sequence[Steps] = (),
    ) -> None:
        self.memory = memory
        self.progress = progress
        self.name = name
        right = rules_of(observed[0].case.chip, observed[0].case)  # of all probes: they are of one kind
        # Probes that differ come first, and of them the quick ones.
        equal = {probe: probe.outputs_equal(right, memory) == probe.size for probe in observed}
        self.probes = sorted(observed, key=lambda probe: (equal[probe], probe.case.k))
        self.longest = max(observed, key=lambda probe: (not equal[probe], probe.case.k))  # of those that differ
        self.own = self._counted(Explanation(steps=(), rules=right, right=right))
        self.alterations = (*ALTERATIONS, *from_there_on(first_wrong(self.probes, right, memory)))
        self.claims = {probe: claimed for probe in self.alterations if (claimed := claims(probe, right))}
        self.siblings = siblings

    def diagnosis(self, kind: str) -> Diagnosis:
        tried = [] if self.own.is_complete else self._searched()
        ranked = sorted(tried, key=lambda explanation: explanation.outputs_equal, reverse=True)
        return Diagnosis(
            kind=kind,
            cases=len(self.probes),
            outputs_equal=self.own.outputs_equal,
            outputs_total=self.own.outputs_total,
            best=None if self.own.is_complete else self._best(ranked),
            tried=tuple(ranked[: max(_SHOWN, sum(explanation.is_complete for explanation in ranked))]),
        )

    def _best(self, ranked: Sequence[Explanation]) -> Explanation:
        """The first that is complete; otherwise each alteration must halve the outputs, or the probes, that are not
        explained: less is coincidence.
        """
        if ranked and ranked[0].is_complete:
            return ranked[0]
        best, totals = self.own, (len(self.probes), self.own.outputs_total)
        for count in (1, 2, 3):
            more = next((explanation for explanation in ranked if len(explanation.steps) == count), best)
            halved = zip(more.rank, best.rank, totals, strict=True)
            best = more if any(2 * (total - n) <= total - m for n, m, total in halved) else best
        high = 0.0 if best.steps else HIGH  # few outputs of a trait tell what little is left, and not what is wrong
        return replace(best, left=common_trait(self.probes, best.rules, self.memory, high))

    def _searched(self) -> list[Explanation]:
        # 1. All single alterations that explain every bit; from a row or column on only where no plainer one does.
        if complete := self._complete([self.own], "one alteration"):
            return [explanation for explanation in complete if explanation.steps[0] in ALTERATIONS] or complete
        # 2. What explains a sibling, and this kind with it.
        siblings = [explanation for steps in self.siblings if (explanation := self._with(steps)) is not None]
        if alike := self._plain(filter(self._is_complete, siblings)):
            return alike
        # 3. The best first steps, each with every second one; then the best pairs, each with every third.
        tried = self._better([self.own], list(self.claims), "shares of outputs")
        seconds = [explanation.steps[0] for explanation in tried if explanation.probes_equal > self.own.probes_equal]
        bases = [*map(self._counted, siblings), *self._beam(tried)]
        for number, width in (("two", _BEAM), ("three", _BEAM), ("four", _LAST)):
            bases = bases[:width]
            if alike := self._plain(self._complete(bases, f"{number} alterations")):
                return [*alike, *tried]
            better = self._better(bases, seconds, f"shares of {number}")
            tried += better
            bases = self._beam(better)
        return tried

    def _beam(self, tried: Sequence[Explanation]) -> list[Explanation]:
        """The best of those that explain more than the chip's rules, at most a few that alter the same parts."""
        kept, alike = list[Explanation](), Counter[frozenset[str]]()
        for explanation in sorted(tried, key=lambda explanation: explanation.rank, reverse=True):
            parts = frozenset(part for step in explanation.steps for part in self.claims[step])
            alike[parts] += 1
            if explanation.rank > self.own.rank and alike[parts] <= _ALIKE and len(kept) < _BEAM:
                kept.append(explanation)
        return kept

    def _complete(self, bases: Sequence[Explanation], title: str) -> list[Explanation]:
        """Explanations of every bit with one alteration more than a base has."""
        self.progress.begin(self.name, title, len(bases) * len(self.claims))
        complete: list[Explanation] = []
        for base in bases:
            # Another alteration must explain what the base does not: most fail there at once.
            missed = self._missed(base)
            probes = [*missed, *(probe for probe in self.probes if probe not in missed)]
            complete += [tried for tried in self._more(base, list(self.claims)) if self._is_complete(tried, probes)]
        return list(map(self._counted, complete))

    def _better(self, bases: Sequence[Explanation], alterations: Sequence[Alteration], title: str) -> list[Explanation]:
        """Explanations with one alteration more than a base, of more outputs that the base misses."""
        self.progress.begin(self.name, title, len(bases) * len(alterations))
        better: list[Explanation] = []
        for base in bases:
            missed = self._missed(base)
            missed = {
                probe: count for probe, count in missed.items() if probe.case.k < LONG_K
            } or missed  # the quick ones
            for tried in self._more(base, alterations):
                equal = [probe.outputs_equal(tried.rules, self.memory) for probe in missed]
                if sum(equal) > sum(missed.values()) or any(n == x.size for n, x in zip(equal, missed, strict=True)):
                    better.append(self._counted(tried))
        return list({tried.rules: tried for tried in better}.values())

    def _missed(self, base: Explanation) -> dict[Observation, int]:
        """The probes that a base does not explain, and how many outputs of each it does."""
        equal = {probe: probe.outputs_equal(base.rules, self.memory) for probe in self.probes}
        return {probe: count for probe, count in equal.items() if count < probe.size}

    def _plain(self, complete: Iterable[Explanation]) -> list[Explanation]:
        """Each without the steps that every bit is explained without; the plainer ones, with few early steps, first."""
        alike = {frozenset(explanation.steps): explanation for explanation in map(self._reduced, complete)}

        def rank(explanation: Explanation) -> tuple[int, int]:
            return len(explanation.steps), max(map(self.alterations.index, explanation.steps))

        return sorted(map(self._counted, alike.values()), key=rank)

    def _reduced(self, complete: Explanation) -> Explanation:
        for step in complete.steps:
            fewer = self._with(tuple(other for other in complete.steps if other is not step))
            if fewer is not None and fewer.steps and self._is_complete(fewer):
                return self._reduced(fewer)
        return complete

    def _more(self, base: Explanation, alterations: Sequence[Alteration]) -> Iterator[Explanation]:
        """A base with each alteration that alters something else, each set of rules once."""
        seen = {base.rules}
        for alteration in alterations:
            self.progress.advance()
            extended = self._with((*base.steps, alteration))
            if extended is not None and extended.rules not in seen:
                seen.add(extended.rules)
                yield extended

    def _with(self, steps: Steps) -> Explanation | None:
        """The chip's rules after these steps, as far as they mean something; None where two exclude each other."""
        steps = tuple(sorted({step for step in steps if step in self.claims}, key=self.alterations.index))
        claimed = [item for step in steps for item in self.claims[step].items()]
        if any(dict(claimed)[part] != value for part, value in claimed):
            return None
        # Promotion comes last: other accumulations have none of their own.
        in_order = sorted(steps, key=lambda step: "promote_k" in self.claims[step])
        rules = reduce(lambda rules, step: step.change(rules), in_order, self.own.rules)
        parts = rules.parts() if len(steps) > 1 else {}
        if any(parts[part] != value for part, value in claimed if parts):
            return None
        return Explanation(steps=steps, rules=rules, right=self.own.rules)

    def _is_complete(self, tried: Explanation, probes: Sequence[Observation] = ()) -> bool:
        return all(probe.outputs_equal(tried.rules, self.memory) == probe.size for probe in probes or self.probes)

    def _counted(self, tried: Explanation) -> Explanation:
        sizes = [probe.size for probe in self.probes]
        equal = [probe.outputs_equal(tried.rules, self.memory) for probe in self.probes]
        whole = sum(map(eq, equal, sizes))
        return replace(tried, outputs_equal=sum(equal), outputs_total=sum(sizes), probes_equal=whole)
