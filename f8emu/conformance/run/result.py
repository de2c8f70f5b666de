"""What a run found: of every stage of every subject how many cases are equal, and where the others differ."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Protocol, TypeVar

from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.compare import Mismatch, UlpHistogram, merged
from f8emu.conformance.run.check import CaseResult, DifferenceMap

_WORST = 6
"""Cases of a stage of which the map is kept."""
_K = TypeVar("_K")


class Progress(Protocol):
    """Told what runs."""

    def begin(self, subject: str, stage: str, cases: int) -> None:
        """A stage of so many cases begins."""

    def advance(self) -> None:
        """A case is done."""


class Silent:
    """Progress that nobody looks at."""

    def begin(self, subject: str, stage: str, cases: int) -> None:
        pass

    def advance(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many there are, and how many of them differ."""

    cases: int = 0
    cases_differing: int = 0
    outputs: int = 0
    outputs_differing: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    @property
    def share_of_cases(self) -> float:
        return self.cases_differing / self.cases if self.cases else 0.0

    @property
    def share_of_outputs(self) -> float:
        return self.outputs_differing / self.outputs if self.outputs else 0.0


Tallies = Mapping[str, Mapping[str, Tally]]
"""Trait -> value -> tally, in the order in which they appear."""


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
    """How many cases and outputs have a trait, and how many of those differ."""
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


def stage_result(about: StageResult, outcomes: Sequence[CaseResult], errors: int) -> StageResult:
    """The cases of a stage counted; `about` says which stage it is, and how long it took."""
    found = joined([about, *(_of_case(about, outcome) for outcome in outcomes)], errors)
    return replace(found, places=_worst(outcomes))


def _of_case(about: StageResult, outcome: CaseResult) -> StageResult:
    """The result of a stage of this case alone."""
    if outcome.not_offered:
        return replace(about, seconds=0.0, cases_not_offered=1, reason=outcome.not_offered)
    total = outcome.outputs_total
    tally = Tally(
        cases=1,
        cases_differing=int(outcome.is_different),
        outputs=total,
        outputs_differing=total - outcome.outputs_equal if outcome.is_different else 0,
    )
    split, mismatch = outcome.own_split, outcome.mismatch
    return replace(
        about,
        seconds=0.0,
        cases_total=1,
        cases_equal=int(outcome.is_equal),
        own_splits={split.slices: Tally(cases=1, outputs=total)} if split else {},
        outputs_total=total,
        outputs_equal=outcome.outputs_equal,
        mismatches=[] if mismatch is None else [mismatch],
        example=mismatch if mismatch is not None and mismatch.snippet else None,
        first_differences={outcome.first_difference: 1} if outcome.first_difference else {},
        tallies={trait: {value: tally} for trait, value in outcome.traits.items()},
        ulps=outcome.ulps,
    )


def joined(results: Sequence[StageResult], errors: int) -> StageResult:
    """One stage of one subject, of which each result has a share of the cases."""
    first_differences = Counter[str]()
    for result in results:
        first_differences.update(result.first_differences)
    sums = ("cases_total", "cases_equal", "cases_not_offered", "outputs_total", "outputs_equal", "seconds")
    # Traits and dtypes in the order in which they first appear: a report of shares reads as one of the whole.
    traits = dict.fromkeys(trait for result in results for trait in result.tallies)
    dtypes = dict.fromkeys(dtype for result in results for dtype in result.ulps)
    examples = [result.example for result in results if result.example is not None]
    places = sorted((place for result in results for place in result.places), key=lambda place: -place.share)
    return replace(
        results[0],
        **{name: sum(getattr(result, name) for result in results) for name in sums},
        own_splits=dict(sorted(_summed(result.own_splits for result in results).items())),
        reason=next((result.reason for result in results if result.reason), ""),
        mismatches=[mismatch for result in results for mismatch in result.mismatches][:errors],
        example=min(examples, key=lambda example: len(example.snippet), default=None),
        first_differences=dict(first_differences),
        tallies={trait: _summed(result.tallies.get(trait, {}) for result in results) for trait in traits},
        ulps={dtype: merged(result.ulps[dtype] for result in results if dtype in result.ulps) for dtype in dtypes},
        places=places[:_WORST],
    )


def _summed(tallies: Iterable[Mapping[_K, Tally]]) -> dict[_K, Tally]:
    found: dict[_K, Tally] = {}
    for one in tallies:
        for key, tally in one.items():
            found[key] = found.get(key, Tally()) + tally
    return found


def _worst(outcomes: Sequence[CaseResult]) -> list[DifferenceMap]:
    """The maps with the largest shares; one of each dtype and first trait before a second, so that they tell more."""
    found = [(outcome.place, next(iter(outcome.traits.values()), "")) for outcome in outcomes if outcome.place]
    seen: dict[tuple[str, str], int] = {}
    ranked: list[tuple[int, float, DifferenceMap]] = []
    for place, trait in sorted(found, key=lambda one: -one[0].share):
        seen[place.dtype, trait] = seen.get((place.dtype, trait), 0) + 1
        ranked.append((seen[place.dtype, trait], -place.share, place))
    return [place for *_, place in sorted(ranked, key=lambda rank: rank[:2])[:_WORST]]
