"""What a run found, for people and for programs: a table, a line for every mismatch, JSON.

rich draws the table and the progress bar; it is imported where it is used, because the suite runs without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from f8emu.conformance.breakdown.tables import breakdown_json
from f8emu.conformance.compare import Mismatch
from f8emu.conformance.diagnosis.report import Diagnoses, diagnosis_json
from f8emu.conformance.verify import Progress, Result, StageResult, Status, SubjectResult
from f8emu.environment import devices, versions

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1
"""Version of the JSON layout."""
_STYLES = {Status.EQUAL: "green", Status.DIFFERENT: "bold red", Status.EMPTY: "bold red", Status.NOT_OFFERED: "dim"}


def table(subject: SubjectResult) -> "Table":
    """One row a stage: what ran, what was equal, who judged, how long it took."""
    from rich.table import Table
    from rich.text import Text

    # Text, not str: rich would take the [jax] of a remedy for markup
    title = Text(f"{subject.name}   engine: {subject.engine}", style="bold")
    drawn = Table(title=title, title_justify="left")
    for name in ("stage", "cases equal", "outputs equal", "oracle", "seconds", "status"):
        drawn.add_column(name, justify="right" if name in ("cases equal", "outputs equal", "seconds") else "left")
    for stage in subject.stages:
        drawn.add_row(*map(Text, _row(stage)), style=_STYLES[stage.status])
    return drawn


def _row(stage: StageResult) -> tuple[str, ...]:
    if stage.status is Status.NOT_OFFERED:
        return stage.title, "-", "-", "-", "-", f"{stage.status.value}: {stage.reason}"
    status = stage.status.value + own_splits(stage)
    if stage.cases_not_offered:
        status += f"; {stage.cases_not_offered} not offered: {stage.reason}"
    if stage.first_differences:
        parts = (f"{part} ({count})" for part, count in stage.first_differences.items())
        status += f"; first in {', '.join(parts)}"
    return (
        stage.title,
        f"{stage.cases_equal}/{stage.cases_total}",
        f"{stage.outputs_equal}/{stage.outputs_total}",
        stage.oracle,
        f"{stage.seconds:.1f}",
        status,
    )


def own_splits(stage: StageResult) -> str:
    """`; 1 equal under an S of its own [CHAIN-3] (S = 5: 1)`; empty where there is none."""
    if not stage.own_splits:
        return ""
    cases = sum(tally.cases for tally in stage.own_splits.values())
    counts = ", ".join(f"S = {slices}: {tally.cases}" for slices, tally in stage.own_splits.items())
    return f"; {cases} equal under an S of its own [CHAIN-3] ({counts})"


def mismatch_lines(result: Result, errors: int) -> Iterator[str]:
    """One line a mismatch, `errors` of each subject at the most, and how many outputs differ in all."""
    for subject in result.subjects:
        found = [mismatch for stage in subject.stages for mismatch in stage.mismatches]
        if not found:
            continue
        wrong = sum(stage.outputs_differing for stage in subject.stages)
        cases = sum(stage.cases_differing for stage in subject.stages)
        yield f"{subject.name}: {cases} cases differ, {wrong} outputs; the first {min(errors, len(found))}:"
        for mismatch in found[:errors]:
            yield mismatch.line()


def verdict(result: Result) -> str:
    """The last line."""
    cases = sum(stage.cases_total for subject in result.subjects for stage in subject.stages)
    outputs = sum(stage.outputs_equal for subject in result.subjects for stage in subject.stages)
    if not result.has_difference and result.is_interrupted:
        return f"INTERRUPTED: equal so far, every bit of {outputs} outputs in {cases} cases"
    if result.is_equal:
        splits = [tally for subject in result.subjects for s in subject.stages for tally in s.own_splits.values()]
        own = f", and {sum(t.outputs for t in splits)} in {sum(t.cases for t in splits)} under an S of its own"
        cases -= sum(tally.cases for tally in splits)
        return f"equal: every bit of {outputs} outputs in {cases} cases{own if splits else ''}"
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
    errors: int = 20,
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
