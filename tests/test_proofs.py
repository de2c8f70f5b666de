"""The proofs: alterations of rules, layers of an H200 emulated here, and what cuBLAS is asked for split K.

Each alteration changes outputs and is undone. The layers have few rows and a long K, which cuBLAS cuts.
"""

import ast
import json
import random
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import f8ref.numpy as reference
from benchmarks.proofs import mma_sim, mutants
from benchmarks.proofs.evidence import ALTERATIONS, altered, changed, recordings
from benchmarks.proofs.recorded_layers import differences, layers
from benchmarks.proofs.split_k import KINDS, OUTPUTS, compare
from f8emu.conformance.cases.golden import GoldenCase
from f8emu.conformance.compare import different
from f8emu.spec import BFLOAT16, CHIPS, E5M2FNUZ, FLOAT16, FLOAT32, H100, HOPPER, UnsupportedError
from f8emu.split_k import ask as cublaslt
from f8emu.split_k.ask import Query, query_of, split_k_at_hand
from f8emu.split_k.gemm import Source, planned_gemm
from f8emu.split_k.plan import CHIP, shipped_plan

CASES = ((1, 13, 16, 29, 61, 73, 100, 125, 140, 151, 157, 170), range(18), (2, 32, 36))
"""Of the shipped file: bias, the rounding of a bias, tensorwise fast and promoted, 16 x 16 x 16, subnormals, split-K,
1x128 scales, NaN, overflow, bfloat16. Of the epilogues all. Of the groups on an H100: rows and K."""


@pytest.fixture(scope="module")
def few() -> list[GoldenCase]:
    return [golden.cases[i] for golden, chosen in zip(recordings(), CASES, strict=False) for i in chosen]


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_rule_is_seen(name: str, few: list[GoldenCase]) -> None:
    with altered(ALTERATIONS[name][1]):
        cases, outputs = changed(few)
    assert 0 < cases <= outputs


def test_no_alteration_is_left_behind(few: list[GoldenCase]) -> None:
    assert changed(few) == (0, 0)


def test_every_rule_of_a_gemm_is_altered() -> None:
    numerics = (Path(__file__).parents[1] / "reference" / "NUMERICS.md").read_text()
    rules = re.findall(r"^\[((?:OP|ACC|CHAIN|EPI|SPEC|BF16)-\d)\]", numerics, re.MULTILINE)
    assert {rule for text, _ in ALTERATIONS.values() for rule in text.split(", ")} == set(rules)
    assert len(rules) == 19


RECORDING = json.loads((Path(__file__).parents[1] / "benchmarks/results/recorded_layers-h200.json").read_text())


def test_all_layers_are_there() -> None:
    assert RECORDING["device"] == CHIP
    assert set(RECORDING["layers"]) == {layer.name for layer in layers()} and len(RECORDING["layers"]) == 192


@pytest.mark.parametrize("recipe", {layer.recipe: None for layer in layers()})
def test_emulated_layers_have_the_bits_of_the_gpu(recipe: str) -> None:
    """Two of the four sizes; all of them: `python -m benchmarks.proofs.recorded_layers FILE`."""
    pytest.importorskip("jax")
    few = [layer for layer in layers([16], [(512, 1536), (14336, 256)]) if layer.recipe == recipe]
    assert len(few) == 2
    assert list(differences(RECORDING["layers"], few, torch.device("cpu"))) == []


def test_a_difference_is_told() -> None:
    pytest.importorskip("jax")
    layer = layers([1], [(512, 1536)])[0]
    wrong = {layer.name: [*RECORDING["layers"][layer.name][:2], "0" * 16]}
    assert list(differences(wrong, [layer], torch.device("cpu"))) == [f"{layer.name}: grad_weight"]


# The split of K


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
    asked = query_of(planned_gemm(gemm="bfloat16", layout="nt", **kind))
    assert asked.layouts == ((48, 64, 48), (32, 64, 32), (48, 32, 48)) and asked.workspace_bytes == 1 << 25
    assert [query_of(planned_gemm(gemm="bfloat16", **{**kind, "out_dtype": out})).types for out in OUTPUTS] == [
        *((14, 14, 0), (14, 14, 14), (14, 14, 0))
    ]
    one = query_of(planned_gemm(gemm="bfloat16", layout="tt", **{**kind, "m": 1}))
    assert one.layouts == ((64, 48, 64), (64, 1, 64), (48, 1, 48))  # a single row is no transposed operand
    assert one.attributes[1][1] == 0
    asked = query_of(planned_gemm(gemm="tensorwise", accumulation="fast", **kind))
    assert asked.layouts == ((64, 48, 64), (64, 32, 64), (48, 32, 48)) and asked.workspace_bytes == 1 << 20


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cublasLt that says N as S, and has no answer if M is 24."""

    def split_k(asked: Query) -> int:
        (_, n, _), (_, m, _), _ = asked.layouts
        if m == 24:
            raise UnsupportedError("none")
        return n

    stub = SimpleNamespace(split_k=split_k, path="/lib/libcublasLt.so.13")
    monkeypatch.setattr(cublaslt, "loaded_path", lambda: stub.path)
    monkeypatch.setattr(cublaslt, "_library", lambda path: stub)
    split_k_at_hand.cache_clear()
    return stub


def test_the_library_of_the_gpu_at_hand_is_asked(library: SimpleNamespace) -> None:
    kind: dict[str, Any] = {"n": 512, "k": 8192, "accumulation": "fast", "out_dtype": "float32"}
    tensorwise = [planned_gemm(m=m, gemm="tensorwise", **kind) for m in (8, 24)]
    assert [split_k_at_hand(gemm) for gemm in tensorwise] == [(512, Source.ASKED), (3, Source.PREDICTED)]
    rowwise = planned_gemm(m=8, gemm="rowwise", **kind)
    assert split_k_at_hand(rowwise) == (1, Source.RECORDED)
    far = planned_gemm(m=8, n=64, k=1 << 20, gemm="tensorwise", accumulation="fast", out_dtype="float32")
    assert split_k_at_hand(far) == (64, Source.ASKED)  # which no plan knows
    unaligned = planned_gemm(m=12, n=64, k=8192, gemm="bfloat16", layout="nt", out_dtype="float32")
    assert split_k_at_hand(unaligned) == (1, Source.UNKNOWN)
    library.path = None
    split_k_at_hand.cache_clear()
    assert split_k_at_hand(tensorwise[0]) == (3, Source.RECORDED)


def test_attributes_are_as_long_as_the_library_s() -> None:
    """A wrong length is an error of the library, which no test without a GPU would see."""
    blocks = planned_gemm(m=8, n=16, k=128, gemm="blockwise_1x128_128x128", out_dtype="float32")
    lengths = {name: cublaslt._BYTES[name] for name, _ in query_of(blocks).attributes}
    assert lengths == {3: 4, 4: 4, 17: 8, 18: 8, 25: 1, 31: 4, 32: 4}


# Mutants


def test_a_mutant_changes_one_line_that_still_parses() -> None:
    for place in random.Random(0).sample(mutants.all_places(), 40):
        before, after = (mutants.ROOT / place.mutant.path).read_text(), place.source(mutants.ROOT)
        different = [lines for lines in zip(before.split("\n"), after.split("\n"), strict=True) if lines[0] != lines[1]]
        assert len(different) == 1 and ast.dump(ast.parse(before)) != ast.dump(ast.parse(after)), place


def test_the_quickest_tests_within_the_budget_are_chosen() -> None:
    tests = [(0.1, f"a[{i}]") for i in range(9)] + [(0.2, "b"), (9.0, "c"), (30.0, "d")]
    assert mutants.chosen(tests, 10.0) == ["a[0]", "a[1]", "a[2]", "b", "c"]
    assert mutants.chosen(tests[-1:], 10.0) == ["d"]


# Single instructions beside MMA-Sim


@pytest.fixture(scope="module")
def instructions() -> list[mma_sim.Compared]:
    return list(mma_sim.instructions())


def test_instructions_have_the_bits_of_mma_sim(instructions: list[mma_sim.Compared]) -> None:
    counts = [mma_sim.compare(of, 480, seed) for seed, of in enumerate(instructions)]
    assert [of for of, count in zip(instructions, counts, strict=True) if count["differ"]] == []
    assert sum(count["outputs"] + count["left_out"] for count in counts) == 480 * len(instructions)
    compared = {(of.chip.name, of.formats, of.out, "block_scale" in of.name) for of in instructions}
    known = {
        (chip.name, pair, instruction.out, instruction.is_microscaled)
        for chip in CHIPS.values()
        for instruction in chip.instructions
        for pair in instruction.format_pairs
        if chip is not H100  # which multiplies as Hopper
    }
    assert compared == known | {("Hopper", pair, FLOAT16, False) for pair in product(HOPPER.operand_formats, repeat=2)}


def test_every_scale_byte_is_drawn(instructions: list[mma_sim.Compared]) -> None:
    of = next(of for of in instructions if "block_scale" in of.name)
    assert [len(np.unique(scale.view(np.uint8))) for scale in mma_sim.draw(of, 24000, 0)[3:]] == [256, 256]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(("tcgen05.mma.block_scale", {"zero_exponent": zero}) for zero in (None, -132, -134)),
        *(("tcgen05.mma.block_scale", {"aligned_fraction_bits": bits}) for bits in (24, 26)),
        ("wgmma", {"result_fraction_bits": 12}),
        ("v_mfma", {"aligned_fraction_bits": 23}),
    ],
)
def test_an_altered_profile_differs_from_mma_sim(
    name: str, fields: dict[str, Any], instructions: list[mma_sim.Compared]
) -> None:
    differ = 0
    for of in (of for of in instructions if of.name == name and of.out == FLOAT32 and BFLOAT16 not in of.formats):
        altered_ones = (replace(i, model=replace(i.model, **fields)) for i in of.chip.instructions)
        chip = replace(of.chip, instructions=tuple(altered_ones))
        differ += mma_sim.compare(replace(of, chip=chip), 6000, 0)["differ"]
    assert differ > 0


@pytest.mark.parametrize(
    ("chip", "zero"),
    [
        *(("Hopper", zero) for zero in (None, -132, -134)),
        *(("Ada", zero) for zero in (None, -131, -133)),
        *(("CDNA3", zero) for zero in (None, -127)),
    ],
)
def test_another_exponent_of_a_bfloat16_zero_differs_from_mma_sim(
    chip: str, zero: int | None, instructions: list[mma_sim.Compared]
) -> None:
    """[BF16-1], [CHIP-5], [CHIP-6]"""
    of = next(of for of in instructions if of.chip.name == chip and BFLOAT16 in of.formats)
    right = of.chip.instruction("test", of.formats, FLOAT32)
    altered = replace(of.chip, instructions=(replace(right, model=replace(right.model, zero_exponent=zero)),))
    assert mma_sim.compare(replace(of, chip=altered), 24000, 0)["differ"] > 0


def test_a_scale_of_a_neighbour_differs_from_mma_sim(
    instructions: list[mma_sim.Compared], monkeypatch: pytest.MonkeyPatch
) -> None:
    mma = reference.mma
    monkeypatch.setattr(reference, "mma", lambda a, b, c, s, t, **more: mma(a, b, c, np.roll(s, 1, axis=0), t, **more))
    of = next(of for of in instructions if "block_scale" in of.name)
    assert mma_sim.compare(of, 400, 0)["differ"] > 100


def test_what_is_left_out_differs(instructions: list[mma_sim.Compared]) -> None:
    """And nothing else: cases of CDNA3."""
    few = [of for of in instructions if of.chip.name == "CDNA3" and {*of.formats} <= {BFLOAT16, E5M2FNUZ}]
    assert len(few) == 2
    for of in few:
        cases = mma_sim.draw(of, 24000, 0)
        with np.errstate(all="ignore"):
            theirs = of.theirs(cases)
            theirs = np.where(theirs == 0, np.abs(theirs), theirs)
            is_different = different(reference.mma(*cases, chip=of.chip, out_dtype=of.out), theirs)
            is_out = mma_sim.left_out(of, cases)
        assert 0 < (is_different & is_out).sum() == is_different.sum() and not is_out.all()


def test_the_recorded_comparison() -> None:
    record = json.loads((Path(__file__).parents[1] / "benchmarks/results/mma_sim-cpu.json").read_text())
    assert record["outputs"] >= 500_000 and record["differ"] == 0
    pins = (Path(__file__).parents[1] / "constraints/stacks.txt").read_text().split("\n")
    assert f"mmasim=={record['versions']['mmasim']}" in pins
