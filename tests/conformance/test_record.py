"""`f8emu record`: everything up to the kernel call, with a launcher that stands in for the GPU.

And `f8emu record --plans`: S is found from bits alone, with a library that stands in for the GPU's.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
from f8emu.conformance.record.record import COLUMNS, emulated, record, record_plans
from f8emu.conformance.run.subject import load_subject
from f8emu.spec import FLOAT32, GoldenFileError, Granularity, MissingExtraError, SpecError, UnsupportedError
from f8emu.spec.gemm_call import GroupKind
from f8emu.split_k.gemm import PlannedGemm, Source, planned_gemm
from f8emu.split_k.plan import CHIP, LIBRARY, plan_from_json, shipped_plan

KERNELS = (("nvjet_sm90_qqtst_64x8_128x16_1x4_h_bz_TNT", (4, 1, 1)), ("second", (2, 1, 1)))


class FakeLauncher(CudaLauncher):
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
    """The first case of each name and mode (bias and kinds of groups apart), small; and the pair that is refused."""
    chosen: dict[tuple[object, ...], PlannedCase] = {}
    for case in planned:
        gemm = case.gemm
        refused = gemm.a.dtype.name == gemm.b.dtype.name == "float8_e5m2"
        if gemm.k <= 1040:
            chosen.setdefault((case.name, gemm.mode, gemm.group_kind, gemm.bias is None, refused), case)
    return list(chosen.values())


def test_the_plan_covers_what_it_should(planned: tuple[PlannedCase, ...]) -> None:
    assert [case.gemm.id for case in planned] == [f"{i:03d}" for i in range(len(planned))]
    gemms = [case.gemm for case in planned]
    assert {gemm.mode for gemm in gemms} == set(Mode) - {Mode.MX, Mode.GROUPED_MX}  # no GPU at hand has them
    tensorwise = {
        (g.a.dtype.name, g.b.dtype.name, g.use_fast_accum, g.out_dtype.name) for g in gemms if g.mode is Mode.TENSORWISE
    }
    outputs = ("bfloat16", "float32", "float16")
    assert tensorwise >= {(a.name, b.name, *x) for a, b in PAIRS for x in product((True, False), outputs)}
    assert ("float8_e5m2", "float8_e5m2", True, "bfloat16") in tensorwise, "refusals are tried"
    blockwise = [g for g in gemms if g.mode is Mode.BLOCKWISE]
    assert len({(g.granularity_a, g.granularity_b) for g in blockwise}) == 3
    assert {True, False} == {g.use_fast_accum for g in blockwise}, "refusals are tried"
    assert any("e5m2" in g.a.dtype.name for g in blockwise)
    names = Counter(case.name.removeprefix("rowwise-").removeprefix("tensorwise-") for case in planned)
    assert {gemm.group_kind for gemm in gemms} == {None, *GroupKind}
    assert {*DISTRIBUTIONS, "bias", "splitk", "layer", "special", "special-scales", "grouped", "bf16"} <= set(names)
    assert all(case.gemm.sample for case in planned if case.name == "layer")
    for gemm in gemms:  # every size is one that the library takes
        assert all(n % 16 == 0 for n in (*gemm.full_size[gemm.sample is None :], gemm.k)), gemm.id


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
        for name in ("a", "b", "scale_a", "scale_b", "bias", "offs", "mode", "out_dtype", "use_fast_accum", "sample"):
            before, after = getattr(case.gemm, name), getattr(back.gemm, name)
            if isinstance(before, np.ndarray):
                before, after = ((x.dtype, np.array(x, order="C").tobytes()) for x in (before, after))
            assert before == after, (case.name, name)
        pairs = {(gemm.granularity_a, gemm.granularity_b) for gemm in (case.gemm, back.gemm)}
        assert len(pairs) == 1
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


def test_what_cannot_be_written(few: list[PlannedCase], tmp_path: Path) -> None:
    class Refusing(FakeLauncher):
        def __call__(self, gemm: GemmCase) -> Launched | Refused:
            return Refused(reason="too old")

    with pytest.raises(GoldenFileError, match="refused all 2 cases, first: too old"):
        record(tmp_path / "new.safetensors", launcher=Refusing(), cases=few[:2])
    assert list(tmp_path.iterdir()) == []
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
    framework = torch_arrays("test")
    if framework.on_gpu:
        pytest.skip("written for tensors on the CPU")
    return framework


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
    if mode is Mode.ROWWISE and torch.__version__ < "2.13":
        pytest.skip(f"on a CPU, torch {torch.__version__} refuses rowwise scales; torch 2.13 takes them")
    gemms = [case.gemm for case in planned if case.gemm.sample is None and case.gemm.k == 512]
    gemms = [replace(gemm, out_dtype=FLOAT32, bias=None) for gemm in gemms if gemm.mode is mode]
    assert gemms
    for gemm in gemms:
        out = _Call.of(gemm, arrays)()
        assert (tuple(out.shape), out.dtype) == (gemm.output_shape, torch.float32)


# Plans


# Of each: what rounds most away, bfloat16 outputs and promotion, must still show S.
GEMMS = [
    planned_gemm(m=4, n=512, k=k, **kind)
    for k in (8192, 5760)
    for kind in (
        {"gemm": "tensorwise", "accumulation": "fast", "out_dtype": "bfloat16"},
        {"gemm": "tensorwise", "accumulation": "promoted", "out_dtype": "bfloat16"},
        {"gemm": "tensorwise", "accumulation": "fast", "a_dtype": "float8_e5m2", "out_dtype": "float16"},
        {"gemm": "rowwise", "accumulation": "promoted", "out_dtype": "float32"},
        {"gemm": "blockwise_1x128_1x128", "out_dtype": "float32"},
        {"gemm": "blockwise_1x128_128x128", "accumulation": "promoted", "out_dtype": "bfloat16"},
        {"gemm": "bfloat16", "layout": "nt", "out_dtype": "bfloat16"},
        {"gemm": "bfloat16", "layout": "tn", "out_dtype": "float32"},
    )
]


def slice_k(gemm: PlannedGemm, slices: int) -> int:
    """[CHAIN-3] K of a slice. Several S may share it and give the same bits; the predicted one is tried first."""
    multiple = 64 if gemm.gemm == "bfloat16" else 512 if "128x128" in gemm.gemm else 128
    return -(-gemm.k // (slices * multiple)) * multiple


class Library(CudaLauncher):
    """Cuts K as told, and says that it is the one of the shipped plan unless told otherwise."""

    def __init__(self, slices: Callable[[PlannedGemm], int], device: str = CHIP) -> None:
        self.slices = slices
        self.device = device

    def metadata(self) -> dict[str, str]:
        return {"device": self.device, "cublas": LIBRARY.removeprefix("cuBLAS "), "torch": "2.11.0"}

    def planned(self, gemm: PlannedGemm, a_K: np.ndarray, b_CK: np.ndarray) -> np.ndarray | Refused:
        if not self.slices(gemm):
            return Refused(reason="not today")
        assert a_K.shape == (gemm.k,) and b_CK.shape == (COLUMNS, gemm.k)
        return emulated(gemm, a_K, b_CK, self.slices(gemm))


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
def test_every_split_is_found_and_read_back(slices: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = record_plans(path, GEMMS, Library(lambda gemm: slices))
    plan = plan_from_json(path.read_text(), str(path))
    splits = [plan.split_k(gemm).split_k for gemm in GEMMS]
    assert all(slice_k(gemm, s) == slice_k(gemm, slices) for gemm, s in zip(GEMMS, splits, strict=True))
    assert {plan.split_k(gemm).source.value for gemm in GEMMS} == {"recorded"}
    predicted = [shipped_plan().predicted(gemm) for gemm in GEMMS]
    right = [
        split.source is Source.PREDICTED and slice_k(gemm, split.split_k) == slice_k(gemm, slices)
        for gemm, split in zip(GEMMS, predicted, strict=True)
    ]
    assert result.predicted_right == sum(right)
    assert result.found == len(GEMMS) and not result.not_found


def test_a_file_is_added_to_and_not_mixed_with_another_chip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    record_plans(path, GEMMS[:1], Library(lambda gemm: 2))
    record_plans(path, GEMMS[7:8], Library(lambda gemm: 3))
    plan = plan_from_json(path.read_text(), str(path))
    assert [plan.split_k(gemm).split_k for gemm in (GEMMS[0], GEMMS[7])] == [2, 3]
    assert plan.over(shipped_plan()).split_k(GEMMS[0]).split_k == 2  # over what is shipped
    with pytest.raises(SpecError, match=r"holds shapes of cuBLAS .* NVIDIA H200; this is .* on Another"):
        record_plans(path, GEMMS[:1], Library(lambda gemm: 2, "Another"))


def test_what_is_refused_or_not_explained_is_said(tmp_path: Path) -> None:
    class Wrong(Library):
        def planned(self, gemm: PlannedGemm, a_K: np.ndarray, b_CK: np.ndarray) -> np.ndarray | Refused:
            out = super().planned(gemm, a_K, b_CK)
            return out if isinstance(out, Refused) else np.nextafter(out, out.dtype.type(np.inf))

    result = record_plans(tmp_path / "a.json", GEMMS[:2], Library(lambda gemm: int(gemm.call.use_fast_accum)))
    assert list(result.not_found) == ["not today"] and result.found == 1
    result = record_plans(tmp_path / "b.json", GEMMS[7:8], Wrong(lambda gemm: 1))
    assert list(result.not_found) == ["no split-K gives these bits"] and "4 x 512 x 8192" in result.lines()[-1]
    with pytest.raises(SpecError, match="no directory"):
        record_plans(tmp_path / "missing" / "c.json", GEMMS[:1], Library(lambda gemm: 1))
