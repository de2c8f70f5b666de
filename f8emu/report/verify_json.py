"""What `f8emu verify` found, as plain data."""

from dataclasses import asdict
from typing import Any

from f8emu.conformance.compare import Mismatch
from f8emu.conformance.diagnosis.report import diagnosis_json
from f8emu.conformance.run.breakdown import Breakdown, breakdowns
from f8emu.conformance.run.result import Result, StageResult
from f8emu.environment import devices, versions
from f8emu.report.verify import Run

SCHEMA = 1
"""Version of the JSON layout."""
_STAGE = (
    "cases_total cases_equal cases_not_offered own_splits outputs_total outputs_equal seconds reason first_differences"
).split()
"""Fields of a stage that its JSON has as they are, or nearly."""


def to_json(result: Result, run: Run) -> dict[str, Any]:
    """The whole run as plain data."""
    golden = result.golden
    return {
        "schema": SCHEMA,
        "equal": result.is_equal,
        "interrupted": result.is_interrupted,
        "not_run": dict(run.not_run),
        "command": list(run.command),
        "seconds": round(run.seconds, 3),
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
                "stages": [_stage_json(stage, run.errors) for stage in subject.stages],
                "breakdowns": [_breakdown_json(breakdown) for breakdown in breakdowns(subject.stages)],
                "diagnosis": diagnosis_json(run.diagnoses.get(subject.name, ())),
            }
            for subject in result.subjects
        ],
    }


def _stage_json(stage: StageResult, errors: int) -> dict[str, Any]:
    found = {name: getattr(stage, name) for name in _STAGE}
    return {"stage": stage.stage, "status": stage.status.value, "oracle": stage.oracle} | {
        **found,
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
    """With the whole histograms."""
    return {
        "stages": list(breakdown.stages),
        "whole": asdict(breakdown.whole),
        "by": {
            trait: {value: asdict(tally) for value, tally in values.items()}
            for trait, values in breakdown.tallies.items()
        },
        "sentences": list(breakdown.sentences()),
        "ulps": {
            dtype: {"total": one.total, "lowest": one.lowest, "highest": one.highest, "histogram": one.labelled()}
            for dtype, one in breakdown.ulps.items()
        },
    }
