"""What `f8emu verify` found, in one line and as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from f8emu.conformance.compare import Mismatch
from f8emu.conformance.diagnosis.search import Diagnoses
from f8emu.conformance.run.breakdown import Breakdown, breakdowns
from f8emu.conformance.run.result import Result, StageResult, Status
from f8emu.conformance.run.subject import SUBJECTS
from f8emu.environment import devices, versions
from f8emu.report.diagnosis import diagnosis_json

SCHEMA = 1
"""Version of the JSON layout."""
_STAGE = ("cases_total cases_equal cases_not_offered outputs_total outputs_equal reason first_differences").split()
"""Fields of a stage that its JSON has as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run of the command, beside its result."""

    command: Sequence[str]
    seconds: float
    errors: int = 8
    """The most cases of each subject of which an output is shown."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Subjects that could not be loaded, and why."""
    diagnoses: Diagnoses = field(default_factory=dict)
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Subject -> the words of the command that name it, and the options that its cases depend on."""


def verdict(result: Result) -> str:
    """The first line."""
    stages = [stage for subject in result.subjects for stage in subject.stages]
    cases = sum(stage.cases_total for stage in stages)
    outputs = sum(stage.outputs_equal for stage in stages)
    if not result.has_difference and result.is_interrupted:
        if not outputs:
            return "INTERRUPTED, nothing was compared"
        return f"INTERRUPTED: equal so far, every bit of {outputs} outputs in {cases} cases"
    # Cases under an S of their own are equal, but are not the chip's: they are counted apart.
    if result.is_equal:
        splits = [tally for stage in stages for tally in stage.own_splits.values()]
        own = f"{sum(t.outputs for t in splits)} in {sum(t.cases for t in splits)} under an S of its own"
        cases -= sum(tally.cases for tally in splits)
        equal = [f"every bit of {outputs} outputs in {cases} cases"] if cases else []
        skipped = sum(s.cases_not_offered for one in result.subjects if one.name not in SUBJECTS for s in one.stages)
        return f"equal: {', and '.join(equal + [own] * bool(splits))}" + (
            f"; {skipped} cases not offered" if skipped else ""
        )
    # Else the subjects and stages to blame; a subject of which nothing ran proves nothing.
    failed = []
    for subject in result.subjects:
        wrong = [s.stage for s in subject.stages if s.status in (Status.DIFFERENT, Status.EMPTY)]
        if not subject.is_equal:
            failed.append(f"{subject.name} ({', '.join(wrong) or 'nothing ran'})")
    found = "NOT EQUAL" if result.has_difference else "NOT VERIFIED"
    return f"{'INTERRUPTED, ' if result.is_interrupted else ''}{found}: {'; '.join(failed)}"


def to_json(result: Result, run: Run) -> dict[str, Any]:
    """The whole run as plain data."""
    golden = result.golden
    source = {"file": golden.path.name, "sha256": golden.sha256, "cases": len(golden.cases)}
    return {
        "schema": SCHEMA,
        "equal": result.is_equal,
        "interrupted": result.is_interrupted,
        "not_run": dict(run.not_run),
        "command": list(run.command),
        "seconds": round(run.seconds, 3),
        "versions": versions(),
        "devices": devices(),
        "golden": {**source, "metadata": golden.metadata},
        "subjects": [
            {
                "name": subject.name,
                "engine": subject.engine,
                "equal": subject.is_equal,
                "stages": [_stage_json(stage, run.errors) for stage in subject.stages],
                "breakdowns": [_breakdown_json(breakdown) for breakdown in breakdowns(subject.stages)],
                "diagnosis": diagnosis_json(run.diagnoses.get(subject.name, ())),
            }
            for subject in result.subjects
        ],
    }


def _stage_json(stage: StageResult, errors: int) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "status": stage.status.value,
        "oracle": stage.oracle,
        **{name: getattr(stage, name) for name in _STAGE},
        "own_splits": {str(slices): tally.cases for slices, tally in stage.own_splits.items()},
        "seconds": round(stage.seconds, 3),
        "mismatches": [_mismatch_json(mismatch) for mismatch in stage.mismatches[:errors]],
        "example": None if stage.example is None else _mismatch_json(stage.example),
    }


def _mismatch_json(mismatch: Mismatch) -> dict[str, Any]:
    found = asdict(mismatch)
    program = found.pop("snippet")
    return {**found, "index": list(mismatch.index), "torch": program}


def _breakdown_json(breakdown: Breakdown) -> dict[str, Any]:
    by = {trait: {value: asdict(t) for value, t in values.items()} for trait, values in breakdown.tallies.items()}
    ulps = {
        dtype: {"total": one.total, "lowest": one.lowest, "highest": one.highest, "histogram": one.labelled()}
        for dtype, one in breakdown.ulps.items()
    }
    whole, sentences = asdict(breakdown.whole), list(breakdown.sentences())
    return {"stages": list(breakdown.stages), "whole": whole, "by": by, "sentences": sentences, "ulps": ulps}
