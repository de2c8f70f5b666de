"""One case put to one subject: run, compared, and counted. Nothing a subject raises is swallowed."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.compare import (
    NOT_COMPARED,
    Mismatch,
    UlpHistogram,
    farthest,
    merged_by_name,
    mismatch_at,
    said_by,
    shape_fault,
    ulp_histogram,
)
from f8emu.conformance.run.result import (
    DifferenceMap,
    DifferingKind,
    StageResult,
    Tally,
    WrongOutputs,
    difference_map,
    wrong_outputs,
)
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import MissingExtraError

Parts = Mapping[str, np.ndarray]
"""Name -> array, in the order in which they are computed; a case with one output calls it ""."""
DescribePart = Callable[[str, tuple[int, ...]], str]
"""(part, index of an output) -> the inputs that lead to it."""
Traits = Mapping[str, str]
"""Trait -> value: `accumulation` -> `promoted`. What a breakdown counts differences by."""


class Slicing(NamedTuple):
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
    """A program that computes one output of a case that is a GEMM."""
    traits: Traits = field(default_factory=dict)
    kind: str = ""
    """The kind of case, by which those that differ are grouped; by default the value of its first trait."""
    gemms: Mapping[str, GemmCase] = field(default_factory=dict[str, GemmCase])
    """Part -> the GEMM that gives it, where parts are outputs of GEMMs."""
    own_split: Callable[[Parts, Parts], Slicing | None] | None = None
    """(given, expected) -> the S that explains what differs, of a subject that picks it; None where there is none."""
    one_of: str = ""
    """A group of cases, of which the first that is not refused runs, and no other."""
    context: Hashable = None
    """Facts that the answer depends on besides the question; cases of one id and context share an answer."""


class Outcome(NamedTuple):
    """Result of one case."""

    result: StageResult
    """The result of a stage of this case alone."""
    own_split: Slicing | None = None
    """The S that the subject picked, where another one was expected, and under which every bit is right."""

    def excused(self) -> StageResult:
        """The result under the subject's own S: counted neither as equal nor as different."""
        if self.own_split is None:
            return self.result
        tally = Tally(cases=1, outputs=self.result.outputs_total)
        return StageResult(
            cases_total=1,
            outputs_total=tally.outputs,
            own_splits={self.own_split.slices: tally},
            tallies={trait: dict.fromkeys(values, tally) for trait, values in self.result.tallies.items()},
        )


def answer(case: Case, judge: Subject | None) -> Parts | Exception:
    """The expected parts: the recording, or the judge's. An exception in the judge is kept, not raised."""
    if case.recorded is not None:
        return case.recorded
    assert judge is not None, "a case without a recording has a judge"
    try:
        return case.run(judge)
    except Exception as error:  # reported as a failed case by run_case
        return error


def run_case(case: Case, subject: Subject, answers: Parts | Exception) -> Outcome:
    """The outcome of a case. An exception in the subject or in the judge is a failed case that names the error."""
    if isinstance(answers, Exception):  # a judge that fails is no reason to call anything equal
        return _compared(case, {}, {}, f"the oracle raised {said_by(answers)}")
    try:
        parts = case.run(subject)
    except (NotOffered, MissingExtraError) as reason:  # torch without JAX casts, and emulates no GEMM
        return Outcome(StageResult(cases_not_offered=1, reason=str(reason)))
    except Exception as error:  # a subject may raise anything; it is reported, and the next case runs
        return _compared(case, answers, {}, f"raised {said_by(error)}")
    return _compared(case, answers, parts)


def _compared(case: Case, answers: Parts, parts: Parts, error: str = "") -> Outcome:
    mismatch = Mismatch(case=case.id, error=error) if error else None
    first, places, samples = "", list[DifferenceMap](), list[WrongOutputs]()
    manner = error.partition(":")[0]
    wrong, ulps = 0, dict[str, UlpHistogram]()
    # 1. Every part is counted; the first that differs is explained, for what follows it follows from it.
    for part, expected in answers.items():
        observed = parts.get(part)
        fault = error or shape_fault(observed, expected)
        if fault or observed is None:
            histogram = UlpHistogram(apart={NOT_COMPARED: expected.size})
        else:
            histogram = ulp_histogram(observed, expected)
        wrong += histogram.total
        if histogram.total:
            ulps = merged_by_name([ulps, {expected.dtype.name: histogram}])
        if mismatch is not None or not (fault or histogram.total):
            continue
        # 2. The output that is farthest off, in words, and the map of its part.
        first = part
        if fault or observed is None:
            mismatch, manner = Mismatch(case=case.id, part=part, error=fault), "wrong dtype or shape"
        else:
            describe = None if case.describe is None else partial(case.describe, part)
            index = farthest(observed, expected)
            mismatch = mismatch_at(index, case.id, part, observed, expected, describe)
            mismatch = replace(mismatch, outputs=expected.size, differing=histogram.total)
            mismatch = replace(mismatch, snippet=case.snippet(mismatch) if case.snippet else "")
            places, manner = [difference_map(case.id, part, observed, expected)], histogram.manner
            samples = [wrong_outputs(case.id, part, observed, expected)] if part in case.gemms else []
    kind = case.kind or next(iter(case.traits.values()), "")
    # 3. [CHAIN-3] The S under which all of it would be right.
    own_split = case.own_split(parts, answers) if case.own_split and places else None
    total, differs = sum(array.size for array in answers.values()), int(mismatch is not None)
    tally = Tally(cases=1, cases_differing=differs, outputs=total, outputs_differing=wrong)
    result = StageResult(
        cases_total=1,
        cases_equal=1 - differs,
        outputs_total=total,
        outputs_equal=total - wrong,
        mismatches=[] if mismatch is None else [mismatch],
        kinds={} if mismatch is None else {f"{kind}, {manner}": DifferingKind(1, mismatch)},
        wrong=samples,
        example=mismatch if mismatch is not None and mismatch.snippet else None,
        first_differences={first: 1} if first else {},
        tallies={trait: {value: tally} for trait, value in case.traits.items()},
        ulps=ulps,
        ulps_by_kind={", ".join(filter(None, (kind, dtype))): histogram for dtype, histogram in ulps.items()},
        places=places,
    )
    return Outcome(result, own_split)


def are_excused(splits: Iterable[Slicing]) -> bool:
    """Whether the S of a stage, in which nothing else differs, are those of a library."""
    splits = set(splits)
    return {split.slices for split in splits} == {split.slices for split in splits if split.is_long}
