"""Runs stages for subjects in this process."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.run.check import Case, CaseResult, Parts, answer, are_excused, run_case
from f8emu.conformance.run.result import Progress, StageResult, stage_result
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import NotOffered, Subject

_THREADS = 4
_TOO_FEW = (
    "the chosen cases cannot tell split-K from promotion: they are right with slices of one promotion; "
    "run the whole stage, without --case"
)
"""The reason if every chosen case is neither equal nor different."""
_T = TypeVar("_T")
_R = TypeVar("_R")


class Runner:
    """What the subjects of one run share: the recording, and what the oracles have answered."""

    def __init__(self, golden: GoldenFile, errors: int, progress: Progress) -> None:
        self.golden = golden
        self.errors = errors
        self.progress = progress
        self.known: dict[tuple[str, str, str, object], Parts | Exception] = {}

    def stage(self, stage: Stage, subject: Subject) -> StageResult:
        """The result of one stage of one subject."""
        # 1. The cases of the subject, and who judges them.
        about = StageResult(stage=stage.name, title=stage.title, oracle=f"recorded on {self.golden.device}")
        try:
            missing = [verb for verb in stage.needs if verb not in subject.verbs]
            if missing:
                raise NotOffered(f"{subject.name} has no {', '.join(missing)}")
            cases = list(stage.cases(subject, self.golden))
            judge = None if stage.judge is None else stage.judge(subject.name)
        except NotOffered as reason:
            return replace(about, oracle="", reason=str(reason))
        if judge is not None:
            assert judge.name != subject.name, f"{subject.name} would judge itself"
            about = replace(about, oracle=judge.engine)
        assert len({case.id for case in cases}) == len(cases), f"{stage.name}: two cases of one name share an answer"
        # 2. What is expected, then what the subject gives; its time alone is counted.
        answers = self._answers(stage, cases, judge, subject.name)
        self.progress.begin(subject.name, stage.title, len(cases))
        start = time.perf_counter()

        def run(index: int) -> CaseResult:
            outcome = run_case(cases[index], subject, answers[index])
            self.progress.advance()
            return outcome

        outcomes = _mapped(run, range(len(cases)), subject)
        # 3. [CHAIN-3] Whether the S that a subject picked itself explain all that differs.
        splits = [outcome.own_split for outcome in outcomes if outcome.own_split]
        # An error, or an output of another shape, is a difference of its own, and says nothing of S.
        is_wrong = any(outcome.is_different and outcome.place is not None for outcome in outcomes)
        if splits and not is_wrong and are_excused(splits):
            outcomes = [outcome.excused() if outcome.own_split else outcome for outcome in outcomes]
        elif splits and not is_wrong and not stage.is_whole:
            return replace(about, oracle="", reason=_TOO_FEW)
        elif splits:
            outcomes = [replace(outcome, own_split=None) for outcome in outcomes]
        return stage_result(replace(about, seconds=time.perf_counter() - start), outcomes, self.errors)

    def _answers(self, stage: Stage, cases: list[Case], judge: Subject | None, subject: str) -> list[Parts | Exception]:
        """What is expected of each case; an answer that a judge gave for an earlier subject is reused."""
        if judge is None:
            return [answer(case, None) for case in cases]

        def expected(case: Case) -> Parts | Exception:
            key = (judge.name, stage.name, case.id, case.context)
            if key not in self.known:
                self.known[key] = answer(case, judge)
            self.progress.advance()
            return self.known[key]

        self.progress.begin(subject, f"{stage.title}, asking {judge.name}", len(cases))
        return _mapped(expected, cases, judge)


def _mapped(function: Callable[[_T], _R], items: Sequence[_T], subject: Subject) -> list[_R]:
    """`function` of each item, in order; in threads where the subject can, because a compiler uses one core."""
    threads = min(_THREADS, os.cpu_count() or 1) if subject.is_thread_safe else 1
    if threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
