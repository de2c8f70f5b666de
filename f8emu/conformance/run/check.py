"""One case put to one subject: run, compared, and its outcome. Nothing a subject raises is swallowed."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from f8emu.conformance.compare import (
    NOT_COMPARED,
    Mismatch,
    UlpHistogram,
    different,
    distances,
    merged,
    mismatches,
    said_by,
    shape_fault,
    ulp_histogram,
)
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import MissingExtraError

MAX_CELLS = 128
"""Rows and columns of a map; a larger output has cells of several outputs."""
_FOLD = 256
"""Outputs in a row of the map of a vector: with every code of 16 bits in order, a row is a high byte."""

Parts = Mapping[str, np.ndarray]
"""Name -> array, in the order in which they are computed; a case with one output calls it ""."""
DescribePart = Callable[[str, tuple[int, ...]], str]
"""(part, index of an output) -> the inputs that lead to it."""
Traits = Mapping[str, str]
"""Trait -> value: `accumulation` -> `promoted`. What a breakdown counts differences by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DifferenceMap:
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
    """[R, C] bool: a NaN or an infinity is on one side alone."""

    @property
    def outputs(self) -> int:
        return int(np.prod(self.shape))

    @property
    def outputs_differing(self) -> int:
        return int(self.differing.sum())

    @property
    def share(self) -> float:
        return self.outputs_differing / self.outputs

    def summary(self) -> str:
        """What the picture shows, in words."""
        rows, columns = ((self.differing.sum(axis=axis) > 0) for axis in (1, 0))
        words = [
            f"{self.outputs_differing:,} of {self.outputs:,} outputs differ",
            f"in {rows.sum()} of {rows.size} rows{self._of_cells(0)} and "
            f"{columns.sum()} of {columns.size} columns{self._of_cells(1)}",
        ]
        finite = self.farthest[(self.differing > 0) & ~self.apart]
        if finite.size:
            words.append(f"by {finite.min():+,} to {finite.max():+,} ulps")
        if self.apart.any():
            words.append(f"{int(self.apart.sum())} cells with a NaN or an infinity on one side only")
        return ", ".join(words)

    def _of_cells(self, axis: int) -> str:
        return f" of cells ({self.cell[axis]} each)" if self.cell[axis] > 1 else ""


def difference_map(case: str, part: str, observed: np.ndarray, expected: np.ndarray) -> DifferenceMap:
    """The map of two arrays of one dtype and shape, not empty."""
    wrong = _rows(different(observed, expected))
    distance, apart = (_rows(array) for array in distances(observed, expected))
    cell = (-(-wrong.shape[0] // MAX_CELLS), -(-wrong.shape[1] // MAX_CELLS))
    farthest = _cells(np.where(wrong, distance, 0), cell)
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


def _rows(array: np.ndarray) -> np.ndarray:
    """A matrix as it is; anything else in rows of 256, the last one padded with zeros."""
    if is_matrix(array.shape):
        return array
    flat = array.ravel()
    width = min(_FOLD, flat.size)
    return np.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether rows and columns of a map are those of the output."""
    return len(shape) == 2 and min(shape) > 1


def _cells(array: np.ndarray, cell: tuple[int, int]) -> np.ndarray:
    """[R, C, outputs of a cell], padded with zeros."""
    array = np.pad(array, ((0, -array.shape[0] % cell[0]), (0, -array.shape[1] % cell[1])))
    split = array.reshape(array.shape[0] // cell[0], cell[0], array.shape[1] // cell[1], cell[1])
    return split.transpose(0, 2, 1, 3).reshape(split.shape[0], split.shape[2], -1)


class Split(NamedTuple):
    """The S that explains an output."""

    slices: int
    is_long: bool
    """Whether its slices are longer than a promotion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question that is put to a subject and to its judge."""

    id: str
    run: Callable[[Subject], Parts]
    recorded: Parts | None = None
    """The answer, if it was recorded on hardware; None leaves it to the judge."""
    describe: DescribePart | None = None
    snippet: Callable[[Mismatch], str] | None = None
    """A program that computes one output of it, of a case that is a GEMM."""
    traits: Traits = field(default_factory=dict)
    own_split: Callable[[Parts, Parts], Split | None] | None = None
    """(given, expected) -> the S that explains what differs, of a subject that picks it; None where there is none."""
    context: Hashable = None
    """What the answer depends on besides the question; cases of one id and context share an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What became of a case."""

    case: str
    is_equal: bool = False
    own_split: Split | None = None
    """The S that the subject picked, where another one was expected, and under which every bit is right."""
    outputs_total: int = 0
    outputs_equal: int = 0
    not_offered: str = ""
    """Why the subject cannot run this case; such a case counts neither as equal nor as different."""
    first_difference: str = ""
    """The first part that differs."""
    mismatch: Mismatch | None = None
    """The first output that differs, or what happened."""
    traits: Traits = field(default_factory=dict)
    ulps: Mapping[str, UlpHistogram] = field(default_factory=dict)
    """dtype -> how far off its outputs are that differ, of all parts; empty of a case that is equal."""
    place: DifferenceMap | None = None
    """Where the first part that differs does so."""

    @property
    def is_different(self) -> bool:
        return not self.is_equal and self.own_split is None

    def excused(self) -> "CaseResult":
        """The outcome under the subject's own S: counted neither as equal nor as different."""
        return replace(self, outputs_equal=0, first_difference="", mismatch=None, ulps={}, place=None)


def answer(case: Case, judge: Subject | None) -> Parts | Exception:
    """What is expected: the recording, or what the judge gives. An exception in the judge is kept, not raised."""
    if case.recorded is not None:
        return case.recorded
    assert judge is not None, "a case without a recording has a judge"
    try:
        return case.run(judge)
    except Exception as error:  # reported as a failed case by run_case
        return error


def run_case(case: Case, subject: Subject, answers: Parts | Exception) -> CaseResult:
    """The outcome of a case. An exception in the subject or in the judge is a failed case that names the error."""
    # 1. What the subject gives.
    if isinstance(answers, Exception):  # a judge that fails is no reason to call anything equal
        return _failed(case, {}, f"the oracle raised {said_by(answers)}")
    try:
        given = case.run(subject)
    except (NotOffered, MissingExtraError) as reason:  # torch without JAX casts, and emulates no GEMM
        return CaseResult(case=case.id, not_offered=str(reason), traits=case.traits)
    except Exception as error:  # a subject may raise anything; it is reported, and the next case runs
        return _failed(case, answers, f"raised {said_by(error)}")

    # 2. Every part is counted; the first that differs is explained, for what follows it follows from it.
    total = sum(array.size for array in answers.values())
    wrong, first = 0, ""
    found: Mismatch | None = None
    place: DifferenceMap | None = None
    ulps: dict[str, UlpHistogram] = {}
    for part, expected in answers.items():
        array = given.get(part)
        fault = shape_fault(array, expected)
        if fault or array is None:
            histogram = UlpHistogram(apart={NOT_COMPARED: expected.size})
        else:
            histogram = ulp_histogram(array, expected)
        wrong += histogram.total
        _add(ulps, expected, histogram)
        if found is not None or not (fault or histogram.total):
            continue
        # 3. The first output that differs, in words, and the map of its part.
        first = part
        if fault or array is None:
            found = Mismatch(case=case.id, part=part, error=fault)
        else:
            describe = None if case.describe is None else partial(case.describe, part)
            found = next(mismatches(case.id, part, array, expected, describe))
            found = replace(found, outputs=expected.size, differing=histogram.total)
            found = replace(found, snippet=case.snippet(found) if case.snippet else "")
            place = difference_map(case.id, part, array, expected)
    # 4. [CHAIN-3] The S under which all of it would be right.
    return CaseResult(
        case=case.id,
        is_equal=found is None,
        own_split=case.own_split(given, answers) if case.own_split and place is not None else None,
        outputs_total=total,
        outputs_equal=total - wrong,
        first_difference=first,
        mismatch=found,
        traits=case.traits,
        ulps=ulps,
        place=place,
    )


def _failed(case: Case, answers: Parts, error: str) -> CaseResult:
    ulps: dict[str, UlpHistogram] = {}
    for expected in answers.values():
        _add(ulps, expected, UlpHistogram(apart={NOT_COMPARED: expected.size}))
    return CaseResult(
        case=case.id,
        outputs_total=sum(array.size for array in answers.values()),
        mismatch=Mismatch(case=case.id, error=error),
        traits=case.traits,
        ulps=ulps,
    )


def _add(ulps: dict[str, UlpHistogram], expected: np.ndarray, found: UlpHistogram) -> None:
    name = expected.dtype.name
    if found.total:
        ulps[name] = merged((ulps[name], found)) if name in ulps else found


def are_excused(splits: Iterable[Split]) -> bool:
    """Whether the S of a stage, in which nothing else differs, are those of a library."""
    splits = set(splits)
    return {split.slices for split in splits} == {split.slices for split in splits if split.is_long}
