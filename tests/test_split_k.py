"""The proof that the plan of split K says what cuBLAS's heuristic says: what it asks, and how it counts."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.proofs.split_k import KINDS, OUTPUTS, compare
from f8emu.spec import H100, HOPPER, UnsupportedError
from f8emu.split_k import ask as cublaslt
from f8emu.split_k.ask import Question, question, split_k_at_hand
from f8emu.split_k.plan import PlannedGemm, Source, shipped_plan


def test_agreement_is_counted() -> None:
    """With a library that says what the rule says, and with one that always says one more."""
    plan = shipped_plan()
    agreeing = compare(plan, lambda gemm: plan.predicted(gemm).split_k, 5)
    differing = compare(plan, lambda gemm: plan.predicted(gemm).split_k + 1, 5)
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
        *((14, 14, 0), (14, 14, 14), (14, 14, 0))
    ]
    one = question(PlannedGemm(gemm="bfloat16", layout="tt", **{**kind, "m": 1}))
    assert one.layouts == ((64, 48, 64), (64, 1, 64), (48, 1, 48))  # a single row is no transposed operand
    assert one.attributes[1][1] == 0
    asked = question(PlannedGemm(gemm="tensorwise", accumulation="fast", **kind))
    assert asked.layouts == ((64, 48, 64), (64, 32, 64), (48, 32, 48)) and asked.workspace_bytes == 1 << 20


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cublasLt that says N as S, and has no answer if M is 24."""

    def split_k(asked: Question) -> int:
        (_, n, _), (_, m, _), _ = asked.layouts
        if m == 24:
            raise UnsupportedError("none")
        return n

    found = SimpleNamespace(split_k=split_k, path="/lib/libcublasLt.so.13")
    monkeypatch.setattr(cublaslt, "loaded_path", lambda: found.path)
    monkeypatch.setattr(cublaslt, "_library", lambda path: found)
    split_k_at_hand.cache_clear()
    return found


def test_the_library_of_the_gpu_at_hand_is_asked(library: SimpleNamespace) -> None:
    kind: dict[str, Any] = {"n": 512, "k": 8192, "accumulation": "fast", "out_dtype": "float32"}
    tensorwise = [PlannedGemm(m=m, gemm="tensorwise", **kind) for m in (8, 24)]
    assert [split_k_at_hand(gemm, HOPPER) for gemm in tensorwise] == [(512, Source.ASKED), (3, Source.PREDICTED)]
    rowwise = PlannedGemm(m=8, gemm="rowwise", **kind)
    assert split_k_at_hand(rowwise, HOPPER) == (1, Source.RECORDED)
    far = PlannedGemm(m=8, n=64, k=1 << 20, gemm="tensorwise", accumulation="fast", out_dtype="float32")
    assert split_k_at_hand(far, H100) == (64, Source.ASKED)  # which no plan knows
    unaligned = PlannedGemm(m=12, n=64, k=8192, gemm="bfloat16", layout="nt", out_dtype="float32")
    assert split_k_at_hand(unaligned, HOPPER) == (1, Source.UNKNOWN)
    library.path = None
    split_k_at_hand.cache_clear()
    assert split_k_at_hand(tensorwise[0], HOPPER) == (3, Source.RECORDED)


def test_attributes_are_as_long_as_the_library_s() -> None:
    """A wrong length is an error of the library, which no test without a GPU would see."""
    blocks = PlannedGemm(m=8, n=16, k=128, gemm="blockwise_1x128_128x128", out_dtype="float32")
    lengths = {name: cublaslt._BYTES[name] for name, _ in question(blocks).attributes}
    assert lengths == {3: 4, 4: 4, 17: 8, 18: 8, 25: 1, 31: 4, 32: 4}
