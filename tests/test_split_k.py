"""The proof that the plan of split K says what cuBLAS's heuristic says: what it asks, and how it counts."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.proofs.split_k import KINDS, OUTPUTS, compare
from f8emu.spec.plan import PlannedGemm, shipped_plan
from f8emu.torch.gemm import cublaslt
from f8emu.torch.gemm.cublaslt import question


def test_agreement_is_counted() -> None:
    """With a library that says what the rule says, and with one that always says one more."""
    plan = shipped_plan()
    agreeing = compare(lambda gemm: plan.predicted(gemm).split_k, 5)
    differing = compare(lambda gemm: plan.predicted(gemm).split_k + 1, 5)
    assert list(agreeing) == list(differing) == list(KINDS)
    assert {row["recorded"] for row in agreeing.values()} == {0, 2, 3, 449, 572, 640, 877}
    for row in agreeing.values():
        assert (row["random"], row["random right"], row["recorded right"]) == (5, 5, row["recorded"])
    for row in differing.values():
        assert (row["random"], row["random right"], row["recorded right"]) == (5, 0, 0)
        assert (row["random split"], row["recorded split"]) == (5, row["recorded"])


def test_torch_asks_for_columns() -> None:
    """cuBLAS's first operand is b [N, K], its matrices have rows, columns and leading dimension."""
    kind = {"m": 32, "n": 48, "k": 64, "out_dtype": "float32"}
    asked = question(PlannedGemm(gemm="bfloat16", layout="nt", **kind))
    assert asked.layouts == ((48, 64, 48), (32, 64, 32), (48, 32, 48)) and asked.workspace_bytes == 1 << 25
    assert [question(PlannedGemm(gemm="bfloat16", **{**kind, "out_dtype": out})).types for out in OUTPUTS] == [
        *((14, 14, 0), (14, 14, 14), (2, 2, 2))
    ]
    one = question(PlannedGemm(gemm="bfloat16", layout="tt", **{**kind, "m": 1}))
    assert one.layouts == ((64, 48, 64), (64, 1, 64), (48, 1, 48))  # a single row is no transposed operand
    assert one.attributes[1][1].value == 0
    asked = question(PlannedGemm(gemm="tensorwise", accumulation="fast", **kind))
    assert asked.layouts == ((64, 48, 64), (64, 32, 64), (48, 32, 48)) and asked.workspace_bytes == 1 << 20


def test_another_gpu_than_the_plan_s_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: dict[str, Any] = {"m": 8, "n": 512, "k": 8192, "accumulation": "fast", "out_dtype": "float32"}
    tensorwise, rowwise = (PlannedGemm(gemm=gemm, **kind) for gemm in ("tensorwise", "rowwise"))
    library = SimpleNamespace(split_k=lambda asked: asked.layouts[1][1])
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    for is_planned, found in ((True, 3), (False, 8)):
        monkeypatch.setattr(cublaslt, "_is_gpu_of_the_plan", lambda is_planned=is_planned: is_planned)
        assert [cublaslt.split_k_on_this_gpu(gemm) for gemm in (tensorwise, rowwise)] == [found, 1]
