"""`f8emu record --plans`: S is found from bits alone, with a library that stands in for the GPU's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from f8emu.conformance.record.cuda import Refused
from f8emu.conformance.record.plans import COLUMNS, emulated, record_plans
from f8emu.spec import SpecError
from f8emu.split_k.plan import CHIP, LIBRARY, PlannedGemm, Source, plan_from_json, shipped_plan

# Of each: what rounds most away, bfloat16 outputs and promotion, must still show S.
GEMMS = [
    PlannedGemm(m=4, n=512, k=k, **kind)
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


class Library:
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
    found = [plan.split_k(gemm).split_k for gemm in GEMMS]
    assert all(slice_k(gemm, s) == slice_k(gemm, slices) for gemm, s in zip(GEMMS, found, strict=True))
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

    result = record_plans(tmp_path / "a.json", GEMMS[:2], Library(lambda gemm: int(gemm.accumulation == "fast")))
    assert list(result.not_found) == ["not today"] and result.found == 1
    result = record_plans(tmp_path / "b.json", GEMMS[7:8], Wrong(lambda gemm: 1))
    assert list(result.not_found) == ["no split-K gives these bits"] and "4 x 512 x 8192" in result.lines()[-1]
    with pytest.raises(SpecError, match="no directory"):
        record_plans(tmp_path / "missing" / "c.json", GEMMS[:1], Library(lambda gemm: 1))
