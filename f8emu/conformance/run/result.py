"""The result of a run: for every stage of every subject how many cases are equal, and where the others differ."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.compare import (
    Mismatch,
    UlpHistogram,
    counted,
    different,
    distances,
    farthest,
    have_other_sign,
    merged_by_name,
    ulps_text,
)
from f8emu.shown import Shown

MAX_CELLS = 128
"""Rows and columns of a map; a larger output has cells of several outputs."""
# Outputs in a row of the map of a vector: with every code of 16 bits in order, a row is a high byte.
_FOLD = 256
# Cases of a stage of which the map is kept.
_WORST = 6
# Outputs of a GEMM that a diagnosis is put to.
_SAMPLE = 16
_K = TypeVar("_K")


class Progress(Protocol):
    """Told what runs."""

    def begin(self, subject: str, stage: str, cases: int) -> None:
        """A stage of so many cases begins."""

    def advance(self) -> None:
        """A case is done."""


class Silent(Progress):
    """Progress that nobody looks at."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DifferenceMap(Shown):
    """One output, cell by cell."""

    case: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the output."""
    cell: tuple[int, int]
    """Rows and columns of the output in one cell."""
    differing: np.ndarray
    """[R, C] integers: outputs of the cell that differ."""
    farthest: np.ndarray
    """[R, C] int64: their largest distance in ulps, signed as `distances` signs it."""
    apart: np.ndarray
    """[R, C] bool: a NaN or an infinity is on one side alone, or the signs of two numbers differ."""

    @property
    def share(self) -> float:
        return int(self.differing.sum()) / int(np.prod(self.shape))

    def summary(self) -> str:
        words = [f"{int(self.differing.sum()):,} of {int(np.prod(self.shape)):,} outputs differ"]
        places: list[str] = []
        for axis, name in enumerate(("rows", "columns")):
            hit = self.differing.any(axis=1 - axis)
            cells = f" of cells ({self.cell[axis]} each)" if self.cell[axis] > 1 else ""
            places.append(f"{hit.sum()} of {hit.size} {name}{cells}")
        words.append(f"in {' and '.join(places)}")
        finite = self.farthest[(self.differing > 0) & ~self.apart]
        if finite.size:
            words.append(f"by {ulps_text(finite.min(), finite.max())}")
        if self.apart.any():
            cells = counted(int(self.apart.sum()), "cell")
            words.append(f"{cells} with another sign, or a NaN or an infinity on one side only")
        return ", ".join(words)


def difference_map(case: str, part: str, observed: np.ndarray, expected: np.ndarray) -> DifferenceMap:
    """The map of two arrays of one dtype and shape, not empty."""
    wrong = _rows(different(observed, expected))
    distance, apart = distances(observed, expected)
    distance, apart = _rows(distance), _rows(apart | have_other_sign(np.asarray(observed), np.asarray(expected)))
    cell = (-(-wrong.shape[0] // MAX_CELLS), -(-wrong.shape[1] // MAX_CELLS))
    farthest = _cells(np.where(wrong & ~apart, distance, 0), cell)
    lowest, highest = farthest.min(axis=-1), farthest.max(axis=-1)
    return DifferenceMap(
        case=case,
        part=part,
        dtype=np.asarray(expected).dtype.name,
        shape=np.shape(expected),
        cell=cell,
        differing=np.asarray(np.count_nonzero(_cells(wrong, cell), axis=-1)),
        farthest=np.where(-lowest > highest, lowest, highest),
        apart=np.asarray(_cells(wrong & apart, cell).any(axis=-1)),
    )


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether rows and columns of a map are those of the output."""
    return len(shape) == 2 and min(shape) > 1


def _rows(array: np.ndarray) -> np.ndarray:
    # A matrix as it is; anything else in rows of 256, the last one padded with zeros.
    if is_matrix(array.shape):
        return array
    flat = array.ravel()
    width = min(_FOLD, flat.size)
    return np.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def _cells(array: np.ndarray, cell: tuple[int, int]) -> np.ndarray:
    # [R, C, outputs of a cell], padded with zeros.
    array = np.pad(array, ((0, -array.shape[0] % cell[0]), (0, -array.shape[1] % cell[1])))
    rows, columns = array.shape[0] // cell[0], array.shape[1] // cell[1]
    return array.reshape(rows, cell[0], columns, cell[1]).transpose(0, 2, 1, 3).reshape(rows, columns, -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WrongOutputs(Shown):
    """Some of the outputs of a GEMM that differ, from its first to its last, and the farthest one."""

    case: str
    part: str
    places: np.ndarray
    """[n, 2]: row and column of each."""
    observed: np.ndarray
    """[n] in the dtype of the output."""


def wrong_outputs(case: str, part: str, observed: np.ndarray, expected: np.ndarray) -> WrongOutputs:
    """A sample of the outputs that differ of two matrices that do."""
    places = np.argwhere(different(observed, expected))
    spread = places[np.linspace(0, len(places) - 1, _SAMPLE).astype(int)]
    places = np.unique([*spread, farthest(observed, expected)], axis=0)
    return WrongOutputs(case=case, part=part, places=places, observed=observed[tuple(places.T)])


class DifferingKind(NamedTuple):
    """The cases of one kind that differ in one way."""

    cases: int
    worst: Mismatch
    """Of the case with the largest share of outputs that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many there are, and how many of them differ."""

    cases: int = 0
    cases_differing: int = 0
    outputs: int = 0
    outputs_differing: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    @property
    def share_of_cases(self) -> float:
        return self.cases_differing / self.cases if self.cases else 0.0

    @property
    def share_of_outputs(self) -> float:
        return self.outputs_differing / self.outputs if self.outputs else 0.0


Tallies = Mapping[str, Mapping[str, Tally]]
"""Trait -> value -> tally, in the order in which they appear."""


class Status(Enum):
    """Outcome of a stage."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_OFFERED = "not offered"
    """Nothing ran, because the subject or the machine lacks the operation. Not a pass."""
    EMPTY = "empty"
    """Nothing ran, although something should have. A failure."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StageResult(Shown):
    """One stage of one subject, or some of its cases."""

    stage: str = ""
    title: str = ""
    oracle: str = ""
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
    kinds: Mapping[str, DifferingKind] = field(default_factory=dict[str, DifferingKind])
    """The kind of case, and how it differs -> all such cases."""
    wrong: list[WrongOutputs] = field(default_factory=list)
    """A sample of every GEMM that differs: what a diagnosis must explain."""
    example: Mismatch | None = None
    """The case with the shortest stand-alone program, among all that differ."""
    first_differences: dict[str, int] = field(default_factory=dict)
    """For cases with parts: the part that differed first, and how often."""
    tallies: Tallies = field(default_factory=dict)
    """How many cases and outputs have a trait, and how many of those differ."""
    ulps: Mapping[str, UlpHistogram] = field(default_factory=dict)
    """dtype -> how far off its outputs are that differ."""
    ulps_by_kind: Mapping[str, UlpHistogram] = field(default_factory=dict)
    """`rowwise promoted, bfloat16` -> the same, for each kind of case."""
    places: list[DifferenceMap] = field(default_factory=list)
    """The maps of the worst cases."""

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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SubjectResult(Shown):
    """All stages of one subject."""

    name: str
    engine: str
    stages: list[StageResult]

    @property
    def is_equal(self) -> bool:
        """Something ran, and nothing that ran differed."""
        statuses = {stage.status for stage in self.stages}
        return Status.EQUAL in statuses and not {Status.DIFFERENT, Status.EMPTY} & statuses


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(Shown):
    """The result of the whole run."""

    _page: ClassVar[str] = "f8emu.report.verify:result_page"
    golden: GoldenFile
    subjects: list[SubjectResult]
    is_interrupted: bool = False
    """The run was interrupted by Ctrl-C: only the stages that were finished are here."""

    @property
    def is_equal(self) -> bool:
        """Whether everything ran to its end and was equal."""
        return bool(self.subjects) and all(subject.is_equal for subject in self.subjects) and not self.is_interrupted

    @property
    def has_difference(self) -> bool:
        """Whether a stage differed, or ran no case although it should have."""
        statuses = {stage.status for subject in self.subjects for stage in subject.stages}
        return bool(statuses & {Status.DIFFERENT, Status.EMPTY})


def joined(results: Sequence[StageResult], errors: int) -> StageResult:
    """One stage of one subject, named as the first result, of which each result has a share of the cases."""
    first_differences = Counter[str]()
    for result in results:
        first_differences.update(result.first_differences)
    sums = ("cases_total", "cases_equal", "cases_not_offered", "outputs_total", "outputs_equal", "seconds")
    # Traits in the order in which they first appear: a report of shares reads as one of the whole.
    traits = dict.fromkeys(trait for result in results for trait in result.tallies)
    examples = [result.example for result in results if result.example is not None]
    places = sorted((place for result in results for place in result.places), key=lambda place: -place.share)
    return replace(
        results[0],
        **{name: sum(getattr(result, name) for result in results) for name in sums},
        own_splits=dict(sorted(_summed(result.own_splits for result in results).items())),
        reason=next((result.reason for result in results if result.reason), ""),
        mismatches=[mismatch for result in results for mismatch in result.mismatches][:errors],
        kinds=merged_kinds(result.kinds for result in results),
        wrong=[wrong for result in results for wrong in result.wrong],
        example=min(examples, key=lambda example: len(example.snippet), default=None),
        first_differences=dict(first_differences),
        tallies={trait: _summed(result.tallies.get(trait, {}) for result in results) for trait in traits},
        ulps=merged_by_name([result.ulps for result in results]),
        ulps_by_kind=merged_by_name([result.ulps_by_kind for result in results]),
        places=places[:_WORST],
    )


def merged_kinds(results: Iterable[Mapping[str, DifferingKind]]) -> dict[str, DifferingKind]:
    """The kinds of several results counted together, the one with the worst case first."""
    kinds: dict[str, DifferingKind] = {}
    for name, kind in (item for result in results for item in result.items()):
        known = kinds.get(name, DifferingKind(0, kind.worst))
        worst = max(known.worst, kind.worst, key=lambda mismatch: mismatch.share)
        kinds[name] = DifferingKind(known.cases + kind.cases, worst)
    return dict(sorted(kinds.items(), key=lambda item: -item[1].worst.share))


def _summed(tallies: Iterable[Mapping[_K, Tally]]) -> dict[_K, Tally]:
    sums: dict[_K, Tally] = {}
    for counts in tallies:
        for key, tally in counts.items():
            sums[key] = sums.get(key, Tally()) + tally
    return sums
