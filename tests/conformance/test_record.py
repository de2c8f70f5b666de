"""`f8emu record`: everything up to the kernel call, with a launcher that stands in for the GPU."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f8emu.conformance.arrays import torch_arrays
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.golden import read_golden
from f8emu.conformance.record.cases import DISTRIBUTIONS, PAIRS, PlannedCase, plan
from f8emu.conformance.record.cuda import CudaLauncher, Launched, Refused, _Call, kernels_in_trace
from f8emu.conformance.record.record import record
from f8emu.conformance.run.subject import load_subject
from f8emu.spec import FLOAT32, GoldenFileError, Granularity, MissingExtraError, UnsupportedError

KERNELS = (("nvjet_sm90_qqtst_64x8_128x16_1x4_h_bz_TNT", (4, 1, 1)), ("second", (2, 1, 1)))


class FakeLauncher:
    """f8ref.numpy in the place of a GPU; refuses what Hopper's library refuses. Its outputs may be spoilt."""

    def __init__(self, spoil: Callable[[np.ndarray], object] = lambda out: None) -> None:
        self.subject, self.spoil = load_subject("f8ref.numpy"), spoil

    def metadata(self) -> dict[str, str]:
        return {"device": "fake", "torch": "0", "cuda": "0", "driver": "0"}

    def __call__(self, gemm: GemmCase) -> Launched | Refused:
        if gemm.a.dtype.name == gemm.b.dtype.name == "float8_e5m2":
            return Refused(reason="no E5M2 x E5M2")
        out = self.subject.gemm(gemm)
        self.spoil(out)
        return Launched(out=out, kernels=KERNELS)


@pytest.fixture(scope="module")
def planned() -> tuple[PlannedCase, ...]:
    return plan(1)


@pytest.fixture(scope="module")
def few(planned: tuple[PlannedCase, ...]) -> list[PlannedCase]:
    """The first case of each name and mode (bias apart), small ones only, and the pair that is refused."""
    chosen: dict[tuple[object, ...], PlannedCase] = {}
    for case in planned:
        gemm = case.gemm
        refused = gemm.a.dtype.name == gemm.b.dtype.name == "float8_e5m2"
        if gemm.k <= 1040:
            chosen.setdefault((case.name, gemm.mode, gemm.bias is None, refused), case)
    return list(chosen.values())


def test_the_plan_covers_what_it_should(planned: tuple[PlannedCase, ...]) -> None:
    assert [case.gemm.id for case in planned] == [f"{i:03d}" for i in range(len(planned))]
    gemms = [case.gemm for case in planned]
    assert {gemm.mode for gemm in gemms} == set(Mode)
    tensorwise = {
        (g.a.dtype.name, g.b.dtype.name, g.use_fast_accum, g.out_dtype.name) for g in gemms if g.mode is Mode.TENSORWISE
    }
    for a, b in PAIRS:
        for fast in (True, False):
            assert {(a.name, b.name, fast, out) for out in ("bfloat16", "float32", "float16")} <= tensorwise
    assert ("float8_e5m2", "float8_e5m2", True, "bfloat16") in tensorwise, "refusals are tried"
    kinds = {(g.granularity_a, g.granularity_b) for g in gemms if g.mode is Mode.BLOCKWISE}
    assert len(kinds) == 3
    assert any(g.use_fast_accum for g in gemms if g.mode is Mode.BLOCKWISE), "refusals are tried"
    assert any("e5m2" in g.a.dtype.name for g in gemms if g.mode is Mode.BLOCKWISE)
    names = Counter(case.name.removeprefix("rowwise-").removeprefix("tensorwise-") for case in planned)
    assert {*DISTRIBUTIONS, "bias", "splitk", "layer", "special", "special-scales", "grouped", "bf16"} <= set(names)
    assert all(case.gemm.sample for case in planned if case.name == "layer")


def test_every_size_is_one_that_the_library_takes(planned: tuple[PlannedCase, ...]) -> None:
    for case in planned:
        assert all(n % 16 == 0 for n in (case.gemm.k, case.gemm.b.shape[-2])) or case.gemm.sample, case.name
        if case.gemm.sample:
            assert case.gemm.sample.m % 16 == case.gemm.sample.n % 16 == 0


def test_the_seed_decides_the_operands(planned: tuple[PlannedCase, ...]) -> None:
    for other, is_same in ((plan(1), True), (plan(2), False)):
        first, second = planned[0].gemm, other[0].gemm
        assert (first.a.tobytes() == second.a.tobytes()) == is_same
    assert plan(2)[0].name != planned[0].name, "another seed begins with another distribution"


def test_round_trip(few: list[PlannedCase], tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    result = record(path, seed=1, verify=True, launcher=FakeLauncher(), cases=few)
    golden = read_golden(path)
    assert {"device", "torch", "cuda", "seed", "driver", "f8emu", "refused"} <= set(golden.metadata)
    assert golden.metadata["seed"] == "1"
    kept = [case for case in few if "e5m2" not in case.gemm.b.dtype.name or "e5m2" not in case.gemm.a.dtype.name]
    assert len(kept) < len(few)
    assert result.cases == len(golden.cases) == len(kept)
    for case, back in zip(kept, golden.cases, strict=True):
        assert (back.name, back.gemm.id, back.kernels) == (case.name, case.gemm.id, KERNELS)
        for role in ("a", "b", "scale_a", "scale_b", "bias", "offs"):
            before, after = getattr(case.gemm, role), getattr(back.gemm, role)
            assert (before is None) == (after is None)
            if before is not None:
                assert before.dtype == after.dtype
                assert np.array(before, order="C").tobytes() == np.array(after, order="C").tobytes(), (case.name, role)
        for option in ("mode", "granularity_a", "granularity_b", "out_dtype", "use_fast_accum", "sample"):
            assert getattr(case.gemm, option) == getattr(back.gemm, option)
    assert not result.has_difference
    text = "\n".join(result.lines())
    assert f"f8ref.numpy equals {len(kept)} of {len(kept)} cases" in text and "no E5M2 x E5M2" in text
    refused = json.loads(golden.metadata["refused"])
    assert refused and all(entry["reason"] == "no E5M2 x E5M2" for entry in refused)
    assert {"id", "name", "mode", "gemm", "reason"} == set(refused[0])


def test_inputs_are_stored_once(planned: tuple[PlannedCase, ...], tmp_path: Path) -> None:
    cases = [case for case in planned[:16] if case.gemm.a is planned[0].gemm.a]
    assert len(cases) > 4
    path = tmp_path / "new.safetensors"
    assert "not verified" in "\n".join(record(path, launcher=FakeLauncher(), cases=cases).lines())
    inputs = cases[0].gemm.a.nbytes + cases[0].gemm.b.nbytes
    outputs = sum(case.out.nbytes for case in read_golden(path).cases)
    assert path.stat().st_size < 1.5 * inputs + outputs


def test_verify_finds_a_wrong_bit(few: list[PlannedCase], tmp_path: Path) -> None:
    def one_bit(out: np.ndarray) -> None:
        out.view(f"u{out.dtype.itemsize}")[3, 1] ^= 1

    result = record(tmp_path / "new.safetensors", verify=True, launcher=FakeLauncher(one_bit), cases=few[:3])
    assert result.has_difference
    assert result.verified is not None and result.verified.cases_equal == 0
    assert result.verified.outputs_equal == result.outputs - 3
    assert any("expected: 0x" in line for line in result.lines())


def test_a_file_with_nothing_in_it_is_not_written(few: list[PlannedCase], tmp_path: Path) -> None:
    class Refusing(FakeLauncher):
        def __call__(self, gemm: GemmCase) -> Launched | Refused:
            return Refused(reason="too old")

    with pytest.raises(GoldenFileError, match="refused all 2 cases, first: too old"):
        record(tmp_path / "new.safetensors", launcher=Refusing(), cases=few[:2])
    assert list(tmp_path.iterdir()) == []


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(GoldenFileError, match="make it first"):
        record(tmp_path / "missing" / "new.safetensors", launcher=FakeLauncher(), cases=[])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no CUDA device.*f8emu verify"):
        record(tmp_path / "new.safetensors")


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"f8emu\[torch\]"):
        CudaLauncher()


def test_kernels_in_trace() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "late", "ts": 9.5, "args": {"grid": [2, 3, 1], "block": [384, 1, 1]}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 1, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "early", "ts": 2, "args": {"grid": [4, 1, 1]}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    assert kernels_in_trace({"traceEvents": events}) == (("early", (4, 1, 1)), ("late", (2, 3, 1)))


@pytest.fixture
def arrays() -> Any:
    found = torch_arrays("test")
    if found.on_gpu:
        pytest.skip("written for tensors on the CPU")
    return found


def test_layouts_of_the_call(planned: tuple[PlannedCase, ...], arrays: Any) -> None:
    """A row-major, B column-major, block scales with strides (1, rows) also where a dimension is 1 [EPI-5]."""
    seen: set[tuple[Granularity, Granularity]] = set()
    for case in planned:
        gemm = case.gemm
        if gemm.sample is not None or gemm.k > 1040:
            continue
        call = _Call.of(gemm, arrays)
        assert call.a.is_contiguous()
        assert call.b.stride()[-2:] == (1, gemm.k)
        if gemm.mode is Mode.BLOCKWISE:
            seen.add((gemm.granularity_a, gemm.granularity_b))
            for scale in call.scales or ():
                assert scale.stride() == (1, scale.shape[0])
    assert len(seen) == 3


@pytest.mark.parametrize("mode", [Mode.TENSORWISE, Mode.ROWWISE], ids=lambda mode: mode.value)
def test_the_call_runs_on_the_cpu_too(mode: Mode, planned: tuple[PlannedCase, ...], arrays: Any) -> None:
    """torch's own CPU op takes the same arguments: shapes and dtypes are right, though its bits are its own."""
    gemms = [case.gemm for case in planned if case.gemm.sample is None and case.gemm.k == 512]
    gemms = [replace(gemm, out_dtype=FLOAT32, bias=None) for gemm in gemms if gemm.mode is mode]
    assert gemms
    for gemm in gemms:
        try:
            out = _Call.of(gemm, arrays)()
        except RuntimeError as error:
            refusal = "_scaled_mm only supports per-tensor scaling for CPU backend"
            if mode is Mode.ROWWISE and torch.__version__ < "2.13" and refusal in str(error):
                pytest.skip(f"on a CPU, torch {torch.__version__} refuses rowwise scales; torch 2.13 takes them")
            raise
        assert (tuple(out.shape), out.dtype) == (gemm.output_shape, torch.float32)
