"""Runs the suite: subjects x stages -> a report. `f8emu verify` calls it; so can Python code and tests."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import Protocol, TypeVar

from f8emu.conformance.breakdown.breakdown import Tallies, Tally, tallied
from f8emu.conformance.breakdown.difference_map import DifferenceMap
from f8emu.conformance.breakdown.ulps import UlpHistogram, merged
from f8emu.conformance.cases.golden import GoldenFile, shipped_golden
from f8emu.conformance.compare import Mismatch
from f8emu.conformance.run.check import Case, Outcome, Parts, answer, run_case
from f8emu.conformance.run.own_split import are_excused
from f8emu.conformance.run.side_by_side import Workers, parts_of, run_parts
from f8emu.conformance.run.stages import STAGES, Stage
from f8emu.conformance.run.subject import SUBJECTS, NotOffered, Subject
from f8emu.spec import SpecError

_THREADS = 4
_WORST = 6
"""Cases of a stage of which the map is kept."""
_TOO_FEW = (
    "the chosen cases cannot tell split-K from promotion: they are right with slices of one promotion; "
    "run the whole stage, without --case"
)
"""The reason if every chosen case is neither equal nor different."""
_T = TypeVar("_T")
_R = TypeVar("_R")


class Status(Enum):
    """What became of a stage."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_OFFERED = "not offered"
    """Nothing ran, because the subject or the machine lacks the operation. Not a pass."""
    EMPTY = "empty"
    """Nothing ran, although something should have. A failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage of one subject."""

    stage: str
    title: str
    oracle: str
    cases_total: int = 0
    """The cases that ran; those that were not offered are counted separately."""
    cases_equal: int = 0
    cases_not_offered: int = 0
    own_splits: Mapping[int, Tally] = field(default_factory=dict[int, Tally])
    """S -> the cases that the subject ran under an S of its own: they count neither as equal nor as different."""
    outputs_total: int = 0
    outputs_equal: int = 0
    seconds: float = 0.0
    """The time of the subject alone, without its oracle."""
    reason: str = ""
    """Why the stage, or its first such case, was not offered."""
    mismatches: list[Mismatch] = field(default_factory=list)
    """One mismatch for each of the first cases that differ."""
    example: Mismatch | None = None
    """The case with the shortest stand-alone program, among all that differ."""
    first_differences: dict[str, int] = field(default_factory=dict)
    """For cases with parts: the part that differed first, and how often."""
    tallies: Tallies = field(default_factory=dict)
    """Trait -> value -> how many cases and outputs have it, and how many of those differ."""
    ulps: Mapping[str, UlpHistogram] = field(default_factory=dict)
    """dtype -> how far off its outputs are that differ."""
    places: list[DifferenceMap] = field(default_factory=list)
    """Where the bits differ, of the worst cases."""

    @property
    def cases_differing(self) -> int:
        return self.cases_total - self.cases_equal - sum(tally.cases for tally in self.own_splits.values())

    @property
    def outputs_differing(self) -> int:
        return self.outputs_total - self.outputs_equal - sum(tally.outputs for tally in self.own_splits.values())

    @property
    def status(self) -> Status:
        if self.cases_total == 0:
            return Status.NOT_OFFERED if self.reason else Status.EMPTY
        is_equal = self.cases_differing == self.outputs_differing == 0 < self.outputs_total
        return Status.EQUAL if is_equal else Status.DIFFERENT


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectResult:
    """All stages of one subject."""

    name: str
    engine: str
    stages: list[StageResult]

    @property
    def is_equal(self) -> bool:
        """Something ran, and nothing that ran differed."""
        statuses = [stage.status for stage in self.stages]
        return Status.EQUAL in statuses and not {Status.DIFFERENT, Status.EMPTY} & set(statuses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of the whole run."""

    golden: GoldenFile
    subjects: list[SubjectResult]
    is_interrupted: bool = False
    """The run was interrupted by Ctrl-C: only the stages that were finished are here."""

    @property
    def is_equal(self) -> bool:
        """Whether everything ran to its end and was equal."""
        is_all_equal = bool(self.subjects) and all(subject.is_equal for subject in self.subjects)
        return is_all_equal and not self.is_interrupted

    @property
    def has_difference(self) -> bool:
        """Whether a stage differed, or ran no case although it should have."""
        found = {stage.status for subject in self.subjects for stage in subject.stages}
        return bool(found & {Status.DIFFERENT, Status.EMPTY})


class Progress(Protocol):
    """Told what runs."""

    def begin(self, subject: str, stage: str, cases: int) -> None:
        """A stage of so many cases begins."""

    def advance(self) -> None:
        """A case is done."""


class _Silent:
    def begin(self, subject: str, stage: str, cases: int) -> None:
        pass

    def advance(self) -> None:
        pass


def stages_by_name(names: Sequence[str] = ()) -> list[Stage]:
    """The stages of those names, in the order in which they run; all of them for no name.

    Raises:
        SpecError: no such stage; the message lists the known ones.
    """
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise SpecError(f"verify: unknown stage {unknown[0]!r}; known stages are {', '.join(STAGES)}")
    return [stage for name, stage in STAGES.items() if not names or name in names]


def verify(
    subjects: Sequence[Subject],
    *,
    stages: Sequence[str] = (),
    only: Sequence[Stage] | None = None,
    golden: GoldenFile | None = None,
    errors: int = 20,
    progress: Progress | None = None,
    processes: int = 1,
    workers: Workers | None = None,
    keep: Callable[[str, StageResult], None] | None = None,
) -> Result:
    """Run the stages for every subject. Answers of an oracle are computed once and serve all subjects.

    `only` gives stages themselves, in place of the suite's. `errors` is how many mismatches each stage keeps; all are
    counted. `keep` is called with the name of the subject and every finished stage. KeyboardInterrupt ends the run, and
    the result has the stages that were finished. With several `processes` the subjects must be among `SUBJECTS`, which
    each process loads for itself; the cases and the order of the results stay the same. `workers` are such processes
    that run already; they are ended.

    Raises:
        SpecError: an unknown stage, or your own subject or stage in several processes.
        GoldenFileError: the shipped file cannot be read.
        WorkerEnded: one of several processes crashed.
    """
    chosen = stages_by_name(stages) if only is None else only
    golden = shipped_golden() if golden is None else golden
    own = [subject.name for subject in subjects if subject.name not in SUBJECTS]
    if processes > 1 and (own or only is not None):
        raise SpecError(
            f"verify: several processes run the suite's stages for {', '.join(SUBJECTS)}; got "
            f"{', '.join(own) or 'stages of your own'}; use 1 process (--jobs 1)"
        )
    progress = progress or _Silent()
    found: dict[tuple[str, str], StageResult] = {}
    is_interrupted = False

    def kept(subject: str, result: StageResult) -> None:
        found[subject, result.stage] = result
        if keep is not None:
            keep(subject, result)

    try:
        if processes > 1:
            parts = parts_of([stage.name for stage in chosen], [subject.name for subject in subjects], processes)
            shares: dict[tuple[str, str], list[StageResult]] = {}

            def shared(subject: str, result: StageResult) -> None:
                found = shares.setdefault((subject, result.stage), [])
                found.append(result)
                if len(found) == sum(subject in part.subjects and result.stage in part.stages for part in parts):
                    kept(subject, joined(found, errors) if len(found) > 1 else result)

            with workers or Workers(min(processes, len(parts))) as ready:
                run_parts(parts, golden, errors, progress, ready, shared)
        else:
            run = _Run(golden, errors, progress)
            for subject, stage in product(subjects, chosen):
                kept(subject.name, run.stage(stage, subject))
    except KeyboardInterrupt:
        is_interrupted = True
    results = [
        SubjectResult(
            name=subject.name,
            engine=subject.engine,
            stages=[found[subject.name, stage.name] for stage in chosen if (subject.name, stage.name) in found],
        )
        for subject in subjects
    ]
    if is_interrupted:
        results = [result for result in results if result.stages]
    return Result(golden=golden, subjects=results, is_interrupted=is_interrupted)


class _Run:
    """What the subjects of one run share: the recording, and what the oracles have answered."""

    def __init__(self, golden: GoldenFile, errors: int, progress: Progress) -> None:
        self.golden = golden
        self.errors = errors
        self.progress = progress
        self.known: dict[tuple[str, str, str, object], Parts | Exception] = {}
        self.judges: dict[str, Subject] = {}

    def stage(self, stage: Stage, subject: Subject) -> StageResult:
        oracle = f"recorded on {self.golden.device}"
        try:
            missing = [verb for verb in stage.needs if verb not in subject.verbs]
            if missing:
                raise NotOffered(f"{subject.name} has no {', '.join(missing)}")
            cases = list(stage.cases(subject, self.golden))
            judge = None if stage.judge is None else stage.judge(subject.name)
        except NotOffered as reason:
            return StageResult(stage=stage.name, title=stage.title, oracle="", reason=str(reason))
        if judge is not None:
            assert judge.name != subject.name, f"{subject.name} would judge itself"
            oracle = judge.engine
        assert len({case.id for case in cases}) == len(cases), f"{stage.name}: two cases of one name share an answer"
        answers = self._answers(stage, cases, judge, subject.name)
        self.progress.begin(subject.name, stage.title, len(cases))
        start = time.perf_counter()

        def run(index: int) -> Outcome:
            outcome = run_case(self._asked(stage, cases[index], subject), subject, answers[index])
            self.progress.advance()
            return outcome

        outcomes = _mapped(run, range(len(cases)), subject)
        splits = [outcome.own_split for outcome in outcomes if outcome.own_split]
        # An error, or an output of another shape, is a difference of its own, and says nothing of S.
        is_wrong = any(outcome.is_different and outcome.place is not None for outcome in outcomes)
        if splits and not is_wrong and are_excused(splits):
            outcomes = [outcome.excused() if outcome.own_split else outcome for outcome in outcomes]
        elif splits and not is_wrong and not stage.is_whole:
            return StageResult(stage=stage.name, title=stage.title, oracle="", reason=_TOO_FEW)
        elif splits:
            outcomes = [replace(outcome, own_split=None) for outcome in outcomes]
        return _result(stage, oracle, outcomes, time.perf_counter() - start, self.errors)

    def _asked(self, stage: Stage, case: Case, subject: Subject) -> Case:
        """The case; what the very same subject gave for it, as the judge of another one, is not computed again."""
        found = self.known.get((subject.name, stage.name, case.id, case.context))
        if self.judges.get(subject.name) is not subject or found is None or isinstance(found, Exception):
            return case
        return replace(case, run=lambda _: found)

    def _answers(self, stage: Stage, cases: list[Case], judge: Subject | None, subject: str) -> list[Parts | Exception]:
        """What is expected of each case; an answer that a judge gave for an earlier subject is reused."""

        def ask(case: Case) -> Parts | Exception:
            key = (judge.name if judge else "", stage.name, case.id, case.context)
            if key not in self.known:
                self.known[key] = answer(case, judge)
            self.progress.advance()
            return self.known[key]

        if judge is None:
            return [answer(case, None) for case in cases]
        self.judges[judge.name] = judge
        self.progress.begin(subject, f"{stage.title}, asking {judge.name}", len(cases))
        return _mapped(ask, cases, judge)


def _mapped(function: Callable[[_T], _R], items: Sequence[_T], subject: Subject) -> list[_R]:
    """`function` of each item, in order; in threads where the subject can, because a compiler uses one core."""
    threads = min(_THREADS, os.cpu_count() or 1) if subject.is_thread_safe else 1
    if threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _result(stage: Stage, oracle: str, outcomes: list[Outcome], seconds: float, errors: int) -> StageResult:
    ran = [outcome for outcome in outcomes if not outcome.not_offered]
    differences: dict[str, int] = {}
    for outcome in ran:
        if outcome.first_difference:
            differences[outcome.first_difference] = differences.get(outcome.first_difference, 0) + 1
    dtypes = dict.fromkeys(dtype for outcome in ran for dtype in outcome.ulps)
    found = [outcome.mismatch for outcome in ran if outcome.mismatch is not None]
    own_splits: dict[int, Tally] = {}
    for outcome in ran:
        if outcome.own_split:
            one = Tally(cases=1, outputs=outcome.outputs_total)
            slices = outcome.own_split.slices
            own_splits[slices] = own_splits.get(slices, Tally()) + one
    return StageResult(
        stage=stage.name,
        title=stage.title,
        oracle=oracle,
        cases_total=len(ran),
        cases_equal=sum(outcome.is_equal for outcome in ran),
        cases_not_offered=len(outcomes) - len(ran),
        own_splits=dict(sorted(own_splits.items())),
        outputs_total=sum(outcome.outputs_total for outcome in ran),
        outputs_equal=sum(outcome.outputs_equal for outcome in ran),
        seconds=seconds,
        reason=next((outcome.not_offered for outcome in outcomes if outcome.not_offered), ""),
        mismatches=found[:errors],
        example=_example(found),
        first_differences=differences,
        tallies=tallied(ran),
        ulps={dtype: merged(outcome.ulps[dtype] for outcome in ran if dtype in outcome.ulps) for dtype in dtypes},
        places=_worst(ran),
    )


def joined(results: Sequence[StageResult], errors: int) -> StageResult:
    """One stage of one subject of which several processes ran a share of the cases."""
    first_differences: dict[str, int] = {}
    own_splits: dict[int, Tally] = {}
    tallies: dict[str, dict[str, Tally]] = {}
    for result in results:
        for slices, tally in result.own_splits.items():
            own_splits[slices] = own_splits.get(slices, Tally()) + tally
        for part, count in result.first_differences.items():
            first_differences[part] = first_differences.get(part, 0) + count
        for trait, values in result.tallies.items():
            for value, tally in values.items():
                of_trait = tallies.setdefault(trait, {})
                of_trait[value] = of_trait.get(value, Tally()) + tally
    dtypes = dict.fromkeys(dtype for result in results for dtype in result.ulps)
    places = sorted((place for result in results for place in result.places), key=lambda place: -place.share)
    return replace(
        results[0],
        cases_total=sum(result.cases_total for result in results),
        cases_equal=sum(result.cases_equal for result in results),
        cases_not_offered=sum(result.cases_not_offered for result in results),
        own_splits=dict(sorted(own_splits.items())),
        outputs_total=sum(result.outputs_total for result in results),
        outputs_equal=sum(result.outputs_equal for result in results),
        seconds=sum(result.seconds for result in results),
        reason=next((result.reason for result in results if result.reason), ""),
        mismatches=[mismatch for result in results for mismatch in result.mismatches][:errors],
        example=_example([result.example for result in results if result.example is not None]),
        first_differences=first_differences,
        tallies=tallies,
        ulps={dtype: merged(result.ulps[dtype] for result in results if dtype in result.ulps) for dtype in dtypes},
        places=places[:_WORST],
    )


def _example(mismatches: Sequence[Mismatch]) -> Mismatch | None:
    return min((one for one in mismatches if one.snippet), key=lambda one: len(one.snippet), default=None)


def _worst(outcomes: Sequence[Outcome]) -> list[DifferenceMap]:
    """The maps with the largest shares; one of each dtype and first trait before a second, so that they tell more."""
    seen: dict[tuple[str, ...], int] = {}
    ranked: list[tuple[int, float, DifferenceMap]] = []
    found = [outcome for outcome in outcomes if outcome.place is not None]
    for outcome in sorted(found, key=lambda outcome: -outcome.place.share if outcome.place else 0.0):
        assert outcome.place is not None
        key = (outcome.place.dtype, *list(outcome.traits.values())[:1])
        seen[key] = seen.get(key, 0) + 1
        ranked.append((seen[key], -outcome.place.share, outcome.place))
    return [place for *_, place in sorted(ranked, key=lambda rank: rank[:2])[:_WORST]]
