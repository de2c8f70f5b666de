"""Puts a cast or a quantizer to the suite: its stage of cases, and what it does instead."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.casts.contracts import ANYTHING, CastContract, QuantizerContract, Wanted
from f8emu.conformance.casts.diagnosis import CastDiagnosis
from f8emu.conformance.casts.subject import Function, loaded_function
from f8emu.conformance.kernels.child import Ask, begin
from f8emu.conformance.run.check import Case
from f8emu.conformance.run.result import Progress, Result, StageResult, SubjectResult
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import Subject
from f8emu.conformance.run.verify import stages_with, verify

_UNRECORDED = GoldenFile(path=Path(), sha256="", metadata={}, cases=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A result, and what was found beside it."""

    result: Result
    follows: str
    """The contract that it was judged by, in words."""
    diagnosis: CastDiagnosis | None = None
    """None where every bit is right, or nothing could be compared."""

    @classmethod
    def of_none(cls, name: str, kind: str, reason: str) -> "Verified":
        """The result for a function that cannot be called."""
        stage = StageResult(stage=kind, title=kind, reason=reason)
        subject = SubjectResult(name=name, engine="cannot be called", stages=[stage])
        return cls(result=Result(golden=_UNRECORDED, subjects=[subject]), follows="")


def verify_function(
    name: str,
    kind: str,
    wanted: Wanted = ANYTHING,
    *,
    arrays: str = "torch",
    timeout: float | None = None,
    here: bool = False,
    errors: int = 20,
    cases: Sequence[str] = (),
    diagnose: bool = True,
    progress: Progress | None = None,
) -> Verified:
    """Put the `kind`, a "cast" or a "quantize", of that name to its cases, or to `cases` of them, without a diagnosis.
    It runs in its own process, with a limit of `timeout` seconds for each call, or `here`.
    """
    function, ask = begin(loaded_function, name, kind, arrays, timeout=timeout, here=here)()
    return verify_called(function, ask, wanted, errors=errors, cases=cases, diagnose=diagnose, progress=progress)


def verify_called(
    function: Function,
    ask: Ask,
    wanted: Wanted = ANYTHING,
    *,
    errors: int = 20,
    cases: Sequence[str] = (),
    diagnose: bool = True,
    progress: Progress | None = None,
) -> Verified:
    """Put a function that can be asked to the cases of its kind, as `verify_function` does."""
    name, kind = function.name, function.kind
    start = time.perf_counter()
    contract = (CastContract if kind == "cast" else QuantizerContract)(function, ask, wanted)
    seconds = time.perf_counter() - start
    every = [
        Case(
            id=q.id,
            run=lambda subject, q=q: subject.verbs["ask"](q),
            describe=q.describe,
            traits={"dtype": q.x.dtype.name, "inputs": q.family},
        )
        for q in contract.questions
    ]
    subject = Subject(name=name, engine=function.engine, verbs={"ask": contract.answer})
    judge = Subject(name=contract.judged_by, engine=contract.judged_by, verbs={"ask": contract.expected})
    stage = Stage(
        name=kind,
        title="casts" if kind == "cast" else "quantized matrices",
        needs=("ask",),
        cases=lambda subject, golden: iter(every),
        judge=lambda name: judge,
    )
    stages = stages_with(cases, [stage], [subject], _UNRECORDED) if cases else [stage]
    result = verify([subject], only=stages, golden=_UNRECORDED, errors=errors, progress=progress)
    timed = [replace(x, stages=[replace(stage, seconds=seconds) for stage in x.stages]) for x in result.subjects]
    diagnosis = contract.diagnosis() if diagnose and result.has_difference and not cases else None
    if diagnosis is not None and diagnosis.is_complete and not diagnosis.alterations:  # what differs are errors
        diagnosis = None
    return Verified(result=replace(result, subjects=timed), follows=contract.follows, diagnosis=diagnosis)
