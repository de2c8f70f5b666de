"""The proof that the plan of split K says what cuBLAS's heuristic says: what it asks, and how it counts."""

from benchmarks.proofs.split_k import KINDS, OUTPUTS, compare
from f8emu.spec.plan import PlannedGemm, shipped_plan
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
    asked = question(PlannedGemm(gemm="tensorwise", accumulation="fast", **kind))
    assert asked.layouts == ((64, 48, 64), (64, 32, 64), (48, 32, 48)) and asked.workspace_bytes == 1 << 20
