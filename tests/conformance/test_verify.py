"""The runner: who judges whom, what is not offered, what raises, and that nothing is no pass."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from f8emu.cli.frame import guarded
from f8emu.conformance import Status, Subject, load_subject, shipped_golden, verify
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.layers.layer import LayerCase, LayerMode
from f8emu.conformance.layers.trace import planned_slices
from f8emu.conformance.run import stages
from f8emu.conformance.run.check import Case
from f8emu.conformance.run.oracle import gemm_oracle, value_oracle
from f8emu.conformance.run.processes import parts_of, processes_for
from f8emu.conformance.run.result import Silent, StageResult, Tally, joined
from f8emu.conformance.run.stages import StageName
from f8emu.conformance.run.subject import SUBJECTS, NotOffered, without_split_k
from f8emu.native import library
from f8emu.spec import E4M3FN, FLOAT32, TENSORWISE, SpecError
from f8emu.split_k import ask
from f8emu.split_k.gemm import Source, Split
from f8emu.verdict import Exit
from tests.conformance.command import few_recorded, raising


@pytest.fixture(scope="module")
def golden() -> GoldenFile:
    shipped = shipped_golden()
    return replace(shipped, cases=shipped.cases[:4] + shipped.cases[168:169])


@pytest.fixture(scope="module")
def numpy_subject() -> Subject:
    return load_subject("f8ref.numpy")


def renamed(subject: Subject, **verbs: Any) -> Subject:
    """f8ref.numpy as somebody else's work, so that f8ref.numpy itself judges it."""
    return replace(subject, name="renamed", verbs={**subject.verbs, **verbs})


def test_no_subject_judges_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SUBJECTS:
        assert value_oracle(name).name != name
        assert gemm_oracle(name).name != name
    assert value_oracle("f8ref.numpy").name == "f8ref.exact"
    assert gemm_oracle("f8ref.numpy").name == "f8emu.native"
    assert gemm_oracle("f8ref.numpy:scaled_mm").name == "f8emu.native", "the same code under another name"
    assert gemm_oracle("torch").name == value_oracle("f8ref.jax").name == "f8ref.numpy"
    pytest.importorskip("jax")
    gemm_oracle.cache_clear()
    with monkeypatch.context() as without:
        without.setattr(library, "library", lambda: None)
        assert gemm_oracle("f8ref.numpy").name == "f8ref.jax"
    gemm_oracle.cache_clear()


def test_an_exception_fails_its_case_and_the_next_one_runs(numpy_subject: Subject, golden: GoldenFile) -> None:
    subject = renamed(numpy_subject, scaled_grouped_mm=raising(MemoryError("no room")))
    result = verify([subject], stages=["golden"], golden=golden)
    stage = result.subjects[0].stages[0]
    assert not result.is_equal
    assert (stage.status, stage.cases_equal, stage.cases_total) == (Status.DIFFERENT, 4, 5)
    assert stage.outputs_total - stage.outputs_equal == 112 * 64
    assert "raised MemoryError: no room" in stage.mismatches[0].line()


def test_not_offered_is_counted_beside(numpy_subject: Subject, golden: GoldenFile) -> None:
    verbs = {name: verb for name, verb in numpy_subject.verbs.items() if name == "scaled_mm"}
    subject = replace(numpy_subject, name="scaled_mm alone", verbs=verbs)
    result = verify([subject], stages=["formats", "golden"], golden=golden)
    formats, recorded = result.subjects[0].stages
    assert formats.status is Status.NOT_OFFERED and "has no decode, cast" in formats.reason
    assert (recorded.status, recorded.cases_total, recorded.cases_not_offered) == (Status.EQUAL, 4, 1)
    assert result.is_equal


def test_nothing_that_ran_is_no_pass(numpy_subject: Subject, golden: GoldenFile) -> None:
    nothing = replace(numpy_subject, name="nothing", verbs={})
    result = verify([nothing], golden=golden)
    assert {stage.status for stage in result.subjects[0].stages} == {Status.NOT_OFFERED}
    assert not result.is_equal
    assert not verify([], golden=golden).is_equal
    refusing = replace(numpy_subject, name="refusing", verbs={"scaled_mm": raising(NotOffered("not today"))})
    stage = verify([refusing], stages=["golden"], golden=golden).subjects[0].stages[0]
    assert (stage.status, stage.cases_not_offered) == (Status.NOT_OFFERED, 5)


def test_a_stage_without_cases_is_a_failure(
    numpy_subject: Subject, golden: GoldenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
        return iter(())

    monkeypatch.setitem(stages.STAGES, "gemms", replace(stages.STAGES["gemms"], cases=none))
    result = verify([renamed(numpy_subject)], stages=["golden", "gemms"], golden=golden)
    assert [stage.status for stage in result.subjects[0].stages] == [Status.EQUAL, Status.EMPTY]
    assert not result.is_equal


def test_sampled_gemm_inside_its_full_size() -> None:
    """What a subject on hardware does: the whole GEMM, of which the sample is taken."""
    case = next(case for case in shipped_golden().cases if case.name == "layer" and case.gemm.mode.value == "rowwise")
    assert case.gemm.sample is not None
    small = replace(
        case.gemm, a=case.gemm.a[:, :64], b=case.gemm.b[:, :64], sample=replace(case.gemm.sample, m=8192, n=4096)
    )
    reference = load_subject("f8ref.numpy")
    seen: list[tuple[int, ...]] = []

    def scaled_mm(a: np.ndarray, b: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, **options: Any) -> np.ndarray:
        seen.append((*a.shape, *b.shape, *scale_a.shape, *scale_b.shape))
        assert "split_k" not in options
        assert small.sample is not None
        rows, cols = list(small.sample.rows), list(small.sample.cols)
        out = np.zeros((a.shape[0], b.shape[1]), options["out_dtype"].name)
        part = reference.verbs["scaled_mm"](a[rows], b[:, cols], scale_a[rows], scale_b[:, cols], **options)
        out[np.ix_(rows, cols)] = part
        return out

    verbs = without_split_k({"scaled_mm": scaled_mm})
    hardware = replace(reference, name="hardware", verbs=verbs, runs_full_size=True, chooses_split_k=True)
    assert np.array_equal(hardware.gemm(replace(small, split_k=3)), reference.gemm(small))
    assert seen == [(8192, 64, 64, 4096, 8192, 1, 1, 4096)]

    padding = replace(reference, name="padding", takes_any_size=False)
    assert np.array_equal(padding.gemm(small), reference.gemm(small))


@pytest.mark.parametrize(("name", "mode"), [("f8emu.native", LayerMode.TRACE), ("torch", LayerMode.EAGER)])
def test_layers_are_cut_as_the_library_of_the_subject_cuts_them(
    monkeypatch: pytest.MonkeyPatch, golden: GoldenFile, name: str, mode: LayerMode
) -> None:
    """The judge is told how, and shares no answer with a subject whose library cuts otherwise."""
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    subject = load_subject(name)
    kind: dict[str, Any] = {"dtype": FLOAT32, "weight_dtype": FLOAT32, "with_bias": False}
    case = LayerCase(recipe=TENSORWISE, mode=mode, shape=(8, 16, 6144), **kind)
    assert planned_slices(case, 1) == {"output": 2}
    monkeypatch.setattr(stages, "layer_cases", lambda full_size: [case])
    monkeypatch.setattr(ask, "split_k_at_hand", lambda gemm: Split(1, Source.ASKED))
    uncut = replace(subject, name="uncut", asks_library=True)
    result = verify([subject, uncut], stages=["layers"], golden=golden)
    by_plan, otherwise = (judged.stages[0] for judged in result.subjects)
    assert (by_plan.cases_total, by_plan.status) == (1, Status.EQUAL)
    # a verb is told S as its judge is; the emulation of a layer that trains follows the plan
    assert otherwise.first_differences == ({} if mode is LayerMode.TRACE else {"output.product": 1})


def test_what_stands_beside_a_sample_is_not_zero() -> None:
    case = next(case for case in shipped_golden().cases if case.name == "layer").gemm
    padded, sample = case.padded(16)
    assert padded.output_shape == (32, 32) == (sample.m, sample.n)
    assert np.count_nonzero(padded.a[24:].view(np.uint8)) > 0.9 * padded.a[24:].size
    assert case.padded(8)[0] is case


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_every_subject_takes_and_gives_numpy(name: str) -> None:
    pytest.importorskip({"f8ref.jax": "jax", "f8emu.jax": "jax"}.get(name, "torch" if name == "torch" else "numpy"))
    if name == "f8emu.native" and library.unavailable():
        pytest.skip(str(library.unavailable()))
    subject = load_subject(name)
    assert name.partition(":")[0].rpartition(".")[2] in subject.engine
    if name == "f8ref.jax" or name.startswith("f8emu.native"):  # they give no casts
        one = np.ones((1, 1), "bfloat16")
        assert subject.verbs["mm"](one, one, out_dtype="float32", split_k=1).tolist() == [[1]]
        return
    x = np.array([[1.0, -0.0, np.nan, 500.0]], np.float32)
    codes = subject.verbs["cast"](x, E4M3FN)
    assert codes.dtype.name == "float8_e4m3fn" and codes.tolist()[0][0] == 1.0
    assert codes.view(np.uint8).tolist() == [[0x38, 0x80, 0x7F, 0x7E]]


def test_processes_ask_the_same(tmp_path: Path) -> None:
    """Workers give what one process gives, in its order."""
    few = few_recorded(tmp_path / "few.safetensors", 0, 1)
    subjects = [load_subject("f8ref.numpy")]
    chosen: list[StageName] = ["golden", "live"]
    one, *others = (verify(subjects, stages=chosen, golden=few, processes=n).subjects[0].stages for n in (1, 2, 3))
    for several in others:
        assert [replace(stage, seconds=0) for stage in several] == [replace(stage, seconds=0) for stage in one]
        assert several[0].status is Status.EQUAL and several[0].cases_total == 2
    with pytest.raises(SpecError, match="renamed; use 1 process"):
        verify([renamed(subjects[0])], processes=2, golden=few)


@pytest.mark.parametrize("processes", [2, 3, 16])
def test_processes_share_every_stage(processes: int, golden: GoldenFile, numpy_subject: Subject) -> None:
    """No case twice, none lost; what takes long, compiled layers of full size, is dealt out evenly."""
    parts = parts_of(list(stages.STAGES), ["torch", "f8ref.numpy"], processes)
    assert all(part.subjects == ("torch", "f8ref.numpy") for part in parts)
    assert parts[0].stage == "layers", "the longest first"
    # as on a GPU, where layers train at full size
    subject = replace(numpy_subject, train=lambda case: {}, runs_full_size=True)
    for name, stage in stages.STAGES.items():
        if name == "live":  # its inputs take a second to draw
            stage = replace(stage, cases=lambda *_: (Case(id=f"live {i}", run=lambda _: {}) for i in range(96)))
        shares = [part for part in parts if part.stage == name]
        dealt = [
            [case.id for case in stages.share_of(stage, part.share, part.shares).cases(subject, golden)]
            for part in shares
        ]
        assert len(dealt) == shares[0].shares
        assert sorted(chain.from_iterable(dealt)) == sorted(case.id for case in stage.cases(subject, golden))
        if name == "layers":
            compiled = [sum(case.endswith("compiled") for case in share) for share in dealt]
            assert len(dealt) > 4 * processes and max(map(len, dealt)) - min(map(len, dealt)) <= 1
            assert max(compiled) - min(compiled) <= 3 and max(compiled) <= 2 + sum(compiled) // len(dealt)


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch, numpy_subject: Subject) -> None:
    on_cpu, on_gpu = (replace(numpy_subject, name="torch", is_thread_safe=flag) for flag in (True, False))

    class Cuda:
        is_available = staticmethod(lambda: True)
        mem_get_info = staticmethod(lambda: (free, 80 << 30))

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda))
    table = (
        (16, 78, on_gpu, False, 16),
        (16, 30, on_gpu, False, 7),  # 4 GiB each
        (16, 8, on_gpu, True, 1),
        (64, 139, on_gpu, True, 16),
        (2, 78, on_gpu, True, 1),
        (2, 78, on_cpu, True, 2),
        (2, 78, on_cpu, False, 1),
        (16, 78, on_cpu, False, 1),
        (1, 78, on_cpu, True, 1),
        (16, 78, renamed(on_gpu), False, 1),  # workers load subjects by name
    )
    for cores, gigabytes, subject, is_whole, expected in table:
        free = gigabytes << 30
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert processes_for([subject, numpy_subject], is_whole) == expected, (cores, gigabytes, is_whole)


def test_shares_of_a_stage_are_joined(numpy_subject: Subject) -> None:
    """Half of the cases of a wrong kernel, and the others: together what one run of all tells."""

    def scaled_mm(a: np.ndarray, *rest: Any, **options: Any) -> np.ndarray:
        out = numpy_subject.verbs["scaled_mm"](a, *rest, **options)
        return np.nextafter(out, np.zeros_like(out)) if options["use_fast_accum"] else out

    def run(cases: slice) -> StageResult:
        stage = stages.STAGES["golden"]
        part = replace(stage, cases=lambda s, g: iter(list(stage.cases(s, g))[:24][cases]))
        return verify([renamed(numpy_subject, scaled_mm=scaled_mm)], only=[part]).subjects[0].stages[0]

    whole, shares = run(slice(None)), joined([run(slice(12)), run(slice(12, None))], errors=20)
    assert 0 < whole.cases_equal < whole.cases_total == 24
    unordered: dict[str, Any] = {"seconds": 0.0, "mismatches": [], "places": [], "wrong": []}
    assert replace(shares, **unordered) == replace(whole, **unordered)
    assert [wrong.case for wrong in shares.wrong] == [wrong.case for wrong in whole.wrong] != []
    assert shares.mismatches[:20] == whole.mismatches and shares.places[0].share == whole.places[0].share


def test_own_splits_of_shares_are_joined() -> None:
    """In any order; and a share that differs excuses nothing of the others away."""
    equal = StageResult(cases_total=2, cases_equal=2, outputs_total=18, outputs_equal=18)
    excused, other = (
        StageResult(cases_total=1, outputs_total=9, own_splits={s: Tally(cases=1, outputs=9)}) for s in (5, 2)
    )
    wrong = StageResult(cases_total=1, outputs_total=9, outputs_equal=8)
    for shares in permutations((equal, excused, other, excused)):
        whole = joined(shares, errors=8)
        assert list(whole.own_splits.items()) == [(2, Tally(cases=1, outputs=9)), (5, Tally(cases=2, outputs=18))]
        assert (whole.status, whole.cases_differing, whole.outputs_differing) == (Status.EQUAL, 0, 0)
    for shares in permutations((equal, excused, wrong)):
        whole = joined(shares, errors=8)
        assert (whole.status, whole.cases_differing, whole.outputs_differing) == (Status.DIFFERENT, 1, 1)


class AfterOne(Silent):
    """Does something when a part of a run is done."""

    def __init__(self, advance: Callable[[], object]) -> None:
        self.advance = advance  # type: ignore[method-assign]


def test_ctrl_c_keeps_what_processes_finished(tmp_path: Path) -> None:
    few, stopped = few_recorded(tmp_path / "few.safetensors", 0, 1), AfterOne(raising(KeyboardInterrupt()))
    subjects = [load_subject("f8ref.numpy")]
    chosen: list[StageName] = ["formats", "scales"]
    result = verify(subjects, stages=chosen, golden=few, processes=2, progress=stopped)
    assert result.is_interrupted and not result.is_equal
    assert [stage.stage in chosen for stage in result.subjects[0].stages] == [True]


def test_a_worker_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linux ends what takes too much memory. The third part has no worker left."""
    few, start = few_recorded(tmp_path / "few.safetensors", 0, 1), subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **rest: started.append(start(*args, **rest)) or started[-1])
    gone = AfterOne(lambda: [process.kill() for process in started])

    def run() -> int:
        names = ("golden", "live", "layers")
        verify([load_subject("f8ref.numpy")], stages=names, golden=few, processes=2, progress=gone)
        return 0

    assert guarded(run) == Exit.UNVERIFIED
    error = capsys.readouterr().err
    assert error.startswith("verify: a worker process ended while it ran") and error.count("\n") == 1
    assert len(started) == 2
