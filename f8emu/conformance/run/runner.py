"""Runs stages for subjects in this process; before that the first call of your own kernel: whether it can be called."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from f8emu.conformance.arrays import FRAMEWORKS
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.compare import said_by, shape_fault
from f8emu.conformance.kernels.faults import KernelFault
from f8emu.conformance.kernels.imported import REMEDY
from f8emu.conformance.run import subject as subjects
from f8emu.conformance.run.check import Case, Outcome, Parts, answer, are_excused, run_case
from f8emu.conformance.run.result import Progress, StageResult, joined
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import F8Error, SpecError

_THREADS = 4
# The reason if every chosen case is neither equal nor different.
_TOO_FEW = (
    "the chosen cases cannot tell split-K from promotion: they are right with slices of one promotion; "
    "run the whole stage, without --case"
)


class Runner:
    """State that the subjects of one run share: the recording, and the oracles' answers."""

    def __init__(self, golden: GoldenFile, errors: int, progress: Progress) -> None:
        self.golden = golden
        self.errors = errors
        self.progress = progress
        self.known: dict[tuple[str, str, str, object], Parts | Exception] = {}

    def stage(self, stage: Stage, subject: Subject) -> StageResult:
        # 1. The cases of the subject, and who judges them.
        about = StageResult(stage=stage.name, title=stage.title)
        try:
            missing = [verb for verb in stage.needs if verb not in subject.offers]
            if missing:
                raise NotOffered(f"{subject.name} has no {', '.join(missing)}")
            cases = list(stage.cases(subject, self.golden))
            judge = None if stage.judge is None else stage.judge(subject.name)
        except NotOffered as reason:
            return replace(about, reason=str(reason))
        assert judge is None or judge.name != subject.name, f"{subject.name} would judge itself"
        assert len({case.id for case in cases}) == len(cases), f"{stage.name}: two cases of one name share an answer"
        # 2. What the subject gives, while what is expected of later cases is computed; its time alone is counted.
        seconds, met = list[float](), set[str]()

        def run(case: Case, expected: "Future[Parts | Exception]") -> Outcome:
            answers = expected.result()
            start = time.perf_counter()
            outcome = Outcome(StageResult()) if case.one_of in met else run_case(case, subject, answers)
            seconds.append(time.perf_counter() - start)
            if case.one_of and outcome.result.cases_total:
                met.add(case.one_of)
            self.progress.advance()
            return outcome

        self.progress.begin(subject.name, stage.title, len(cases))
        # A compiler's frames may not fit the stack of a thread, and a layer is trained alone in its process anyway.
        running = 1 if subject.train is not None and not stage.needs else _threads(subject)
        judging = ThreadPoolExecutor(_threads(judge))
        try:
            expected = [judging.submit(self._answer, stage, case, judge) for case in cases]
            if running == 1:
                outcomes = list(map(run, cases, expected))
            else:
                with ThreadPoolExecutor(running) as pool:
                    outcomes = list(pool.map(run, cases, expected))
        finally:
            judging.shutdown(cancel_futures=True)
        # 3. [CHAIN-3] Whether the S that a subject picked itself explain all that differs. An error, or an output of
        # another shape, is a difference of its own, and says nothing of S.
        splits = [outcome.own_split for outcome in outcomes if outcome.own_split]
        is_wrong = any(outcome.result.places and not outcome.own_split for outcome in outcomes)
        results = [outcome.result for outcome in outcomes]
        if splits and not is_wrong:
            if are_excused(splits):
                results = [outcome.excused() for outcome in outcomes]
            elif not stage.is_whole:
                return replace(about, reason=_TOO_FEW)
        oracle = f"recorded on {self.golden.device}" if judge is None else judge.engine
        return joined([replace(about, oracle=oracle, seconds=sum(seconds) / running), *results], self.errors)

    def _answer(self, stage: Stage, case: Case, judge: Subject | None) -> Parts | Exception:
        # An answer that a judge gave for an earlier subject is reused.
        if judge is None:
            return answer(case, None)
        key = (judge.name, stage.name, case.id, case.context)
        if key not in self.known:
            self.known[key] = answer(case, judge)
        return self.known[key]


def _threads(subject: Subject | None) -> int:
    # Several threads if the subject allows it: a compiler uses one core.
    return min(_THREADS, os.cpu_count() or 1) if subject is not None and subject.is_thread_safe else 1


# The first call


# Products in a GEMM that is called first.
_LARGEST = 1 << 20
# Kinds of GEMM, each of which fails, before the kernel is given up.
_TRIES = 6
# GEMMs for this kernel alone of which kinds are taken.
_OWN = 24
_First = tuple[GemmCase, np.ndarray | Exception]


def begin_subject_and_call(name: str, *, arrays: str, timeout: float | None, here: bool) -> Callable[[], Subject]:
    """`begin_subject`; the call also makes the first call of your own kernel, a GEMM of each kind until one has an
    output.
    """
    begin = partial(subjects.begin_subject, name, timeout=timeout, here=here)
    wait = begin(arrays=arrays)
    is_own = name not in subjects.SUBJECTS and ":" in name
    return partial(_called_first, wait, begin, arrays) if is_own else wait


def _called_first(wait: Callable[[], Subject], begin: Callable[..., Callable[[], Subject]], arrays: str) -> Subject:
    gemm_cases()  # drawn while the kernel is imported
    subject = wait()
    first, failed = _called(subject)
    if not failed:
        return replace(subject, first_call=first)
    remedy = REMEDY
    if "active driver" in failed[0]:
        remedy = "Triton has no GPU here; its interpreter needs none: TRITON_INTERPRET=1 f8emu ..."
    for works in FRAMEWORKS:
        with suppress(F8Error):  # not installed, or not for this kernel
            if works != arrays and (other := begin(arrays=works)()).engine != subject.engine and not _called(other)[1]:
                remedy = f"it works with arrays of {works}: add --arrays {works}"
                break
    raise SpecError(
        f"f8emu verify {subject.name}: expected an output from a first call ({subject.engine}); each of {len(failed)} "
        f"kinds of GEMM failed, the first: {failed[0]}; {remedy}"
    )


def _called(subject: Subject) -> tuple[_First | None, list[str]]:
    # The first call, if one was offered, and how each kind failed if none has an output: a fault is no failure.
    first: _First | None = None
    failed: list[str] = []
    for gemm in _kinds(subject):
        try:
            output = np.array(subject.gemm(gemm))  # its own memory: a later call may change the kernel's
            first = first or (gemm, output)
            fault = shape_fault(output, np.empty(gemm.output_shape, dtype_of(gemm.out_dtype)))
        except NotOffered:
            continue
        except Exception as raised:  # of the kernel, which may raise anything
            first = first or (gemm, raised)
            # A kernel at fault can be called: the suite reports the fault itself.
            fault = "" if isinstance(raised, KernelFault) else said_by(raised)
        if not fault:
            return first, []
        failed.append(fault)
        if len(failed) == _TRIES:
            break
    return first, failed


def _kinds(subject: Subject) -> Iterator[GemmCase]:
    # One small GEMM of each kind, with ordinary numbers, in the form that the subject accepts.
    seen: set[object] = set()
    for gemm in chain(gemm_cases(), islice(subject.more_gemms(), _OWN)):
        if not subject.takes(gemm) or gemm.a.size * gemm.output_shape[1] > _LARGEST:
            continue
        question = subject.question(gemm)
        granularities = question.granularity_a, question.granularity_b
        options = question.out_dtype, question.use_fast_accum, question.bias is None
        kind = question.mode, granularities, question.a.dtype, question.b.dtype, options
        if kind not in seen and gemm.distribution in ("", "normal"):
            seen.add(kind)
            yield question
