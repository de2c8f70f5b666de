"""What a run found, for people and for programs: a verdict, lines, what can be pasted, JSON.

rich draws the progress bar; it is imported where it is used, because the suite runs without it.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from f8emu.conformance.breakdown.tables import breakdown_json
from f8emu.conformance.compare import Mismatch
from f8emu.conformance.diagnosis.report import Diagnoses, diagnosis_json
from f8emu.conformance.run.result import Progress, Result, StageResult, Status, SubjectResult
from f8emu.conformance.run.subject import SUBJECTS
from f8emu.conformance.words import counted
from f8emu.environment import devices, versions
from f8emu.untrusted import printable

SCHEMA = 1
"""Version of the JSON layout."""


def subject_lines(subject: SubjectResult) -> Iterator[str]:
    """What ran: the stages that differ one by one, those that are equal in one sentence, and who judged."""
    yield f"{subject.name}   engine: {subject.engine}"
    equal = [_counts(stage) for stage in subject.stages if stage.status is Status.EQUAL]
    if equal:
        yield f"  equal: {'; '.join(equal)}"
    for stage in subject.stages:
        if stage.status in (Status.DIFFERENT, Status.EMPTY):
            parts = ", ".join(f"{part} ({count})" for part, count in stage.first_differences.items() if part)
            yield f"  {stage.status.value}: {_counts(stage)}{f'; first in {parts}' if parts else ''}"
    reasons: dict[str, list[str]] = {}
    judges: dict[str, list[str]] = {}
    for stage in subject.stages:
        if stage.reason:
            cases = f" ({stage.cases_not_offered} cases)" if stage.cases_total else ""
            reasons.setdefault(stage.reason, []).append(stage.title + cases)
        if stage.oracle:
            judges.setdefault(stage.oracle, []).append(stage.title)
    if reasons:
        found = (
            f"{', '.join(titles)}: {reason.removeprefix(subject.name).strip()}" for reason, titles in reasons.items()
        )
        yield f"  not offered: {'; '.join(found)}"
    yield from (f"  judge of {', '.join(titles)}: {judge}" for judge, titles in judges.items())


def _counts(stage: StageResult) -> str:
    is_whole = stage.cases_equal == stage.cases_total
    cases = f"{stage.cases_equal}/{stage.cases_total} cases" + ("" if is_whole else " equal")
    outputs = f"{stage.outputs_equal}/{stage.outputs_total} outputs"
    return f"{stage.title} {cases}, {outputs}, {stage.seconds:.1f} s{own_splits(stage)}"


def own_splits(stage: StageResult) -> str:
    """`, 1 equal under an S of its own [CHAIN-3] (S = 5: 1)`; empty where there is none."""
    if not stage.own_splits:
        return ""
    cases = sum(tally.cases for tally in stage.own_splits.values())
    counts = ", ".join(f"S = {slices}: {tally.cases}" for slices, tally in stage.own_splits.items())
    return f", {cases} equal under an S of its own [CHAIN-3] ({counts})"


def mismatch_lines(result: Result, errors: int) -> Iterator[str]:
    """One output of each case that differs, `errors` cases of each subject at the most, and how many there are."""
    for subject in result.subjects:
        found = [mismatch for stage in subject.stages for mismatch in stage.mismatches]
        if not found:
            continue
        wrong = sum(stage.outputs_differing for stage in subject.stages)
        cases = sum(stage.cases_differing for stage in subject.stages)
        shown = min(errors, len(found))
        of = "" if cases == 1 else " of each" if shown == cases else f" of each of the first {shown}" * (shown > 1)
        head = f"{subject.name}: {counted(cases, 'case differs', 'cases differ')}, {counted(wrong, 'output')}"
        yield head + ("" if not shown else ":" if wrong == 1 else f"; one{of}:")
        for mismatch in found[:errors]:
            yield mismatch.line()


def paste_lines(result: Result, asked: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What a reader pastes: for each subject that differs the command that runs one case again, and its program.

    `asked` are the words of the command that name a subject, and the options that its cases depend on.
    """
    for subject in result.subjects:
        examples = [stage.example for stage in subject.stages if stage.example is not None]
        found = [mismatch for stage in subject.stages for mismatch in stage.mismatches]
        one = min(examples, key=lambda example: len(example.snippet), default=found[0] if found else None)
        if one is None or subject.name not in asked:
            continue
        yield "To run one case again:"
        yield f"f8emu verify {shlex.join([*asked[subject.name], '--case', printable(one.case)])}"
        if one.snippet:
            yield f"Its output {list(one.index)} in plain torch, from a row of a and a column of b, 16 times."
            yield "A kernel whose bits depend on the place of an output may be right here."
            yield from one.snippet.splitlines()


def verdict(result: Result) -> str:
    """The first line."""
    cases = sum(stage.cases_total for subject in result.subjects for stage in subject.stages)
    outputs = sum(stage.outputs_equal for subject in result.subjects for stage in subject.stages)
    if not result.has_difference and result.is_interrupted and not outputs:
        return "INTERRUPTED, nothing was compared"
    if not result.has_difference and result.is_interrupted:
        return f"INTERRUPTED: equal so far, every bit of {outputs} outputs in {cases} cases"
    if result.is_equal:
        splits = [tally for subject in result.subjects for s in subject.stages for tally in s.own_splits.values()]
        own = f"{sum(t.outputs for t in splits)} in {sum(t.cases for t in splits)} under an S of its own"
        cases -= sum(tally.cases for tally in splits)
        equal = [f"every bit of {outputs} outputs in {cases} cases"] if cases else []
        skipped = sum(s.cases_not_offered for one in result.subjects if one.name not in SUBJECTS for s in one.stages)
        return f"equal: {', and '.join(equal + [own] * bool(splits))}" + (
            f"; {skipped} cases not offered" if skipped else ""
        )
    failed = []
    for subject in result.subjects:
        stages = [s.stage for s in subject.stages if s.status in (Status.DIFFERENT, Status.EMPTY)]
        if not subject.is_equal:
            failed.append(f"{subject.name} ({', '.join(stages) or 'nothing ran'})")
    found = "NOT EQUAL" if result.has_difference else "NOT VERIFIED"
    return f"{'INTERRUPTED, ' if result.is_interrupted else ''}{found}: {'; '.join(failed)}"


def to_json(
    result: Result,
    *,
    command: Sequence[str],
    seconds: float,
    errors: int = 8,
    not_run: Mapping[str, str] | None = None,
    diagnoses: Diagnoses | None = None,
) -> dict[str, Any]:
    """The whole run as plain data; `not_run` names subjects that could not be loaded, and why."""
    golden = result.golden
    return {
        "schema": SCHEMA,
        "equal": result.is_equal,
        "interrupted": result.is_interrupted,
        "not_run": dict(not_run or {}),
        "command": list(command),
        "seconds": round(seconds, 3),
        "versions": versions(),
        "devices": devices(),
        "golden": {
            "file": golden.path.name,
            "sha256": golden.sha256,
            "cases": len(golden.cases),
            "metadata": golden.metadata,
        },
        "subjects": [
            {
                "name": subject.name,
                "engine": subject.engine,
                "equal": subject.is_equal,
                "stages": [_stage_json(stage, errors) for stage in subject.stages],
                "breakdowns": breakdown_json(subject),
                "diagnosis": diagnosis_json((diagnoses or {}).get(subject.name, ())),
            }
            for subject in result.subjects
        ],
    }


def _stage_json(stage: StageResult, errors: int) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "status": stage.status.value,
        "oracle": stage.oracle,
        "cases_total": stage.cases_total,
        "cases_equal": stage.cases_equal,
        "cases_not_offered": stage.cases_not_offered,
        "own_splits": {str(slices): tally.cases for slices, tally in stage.own_splits.items()},
        "outputs_total": stage.outputs_total,
        "outputs_equal": stage.outputs_equal,
        "seconds": round(stage.seconds, 3),
        "reason": stage.reason,
        "first_differences": stage.first_differences,
        "mismatches": [_mismatch_json(mismatch) for mismatch in stage.mismatches[:errors]],
        "example": None if stage.example is None else _mismatch_json(stage.example),
    }


def _mismatch_json(mismatch: Mismatch) -> dict[str, Any]:
    return {
        "case": mismatch.case,
        "part": mismatch.part,
        "index": list(mismatch.index),
        "inputs": mismatch.inputs,
        "observed": mismatch.observed,
        "expected": mismatch.expected,
        "error": mismatch.error,
        "outputs": mismatch.outputs,
        "differing": mismatch.differing,
        "torch": mismatch.snippet,
    }


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _RichProgress(bar)


class _RichProgress:
    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.task: Any = None

    def begin(self, subject: str, stage: str, cases: int) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(f"{subject}: {stage}", total=cases)

    def advance(self) -> None:
        self.bar.advance(self.task)
