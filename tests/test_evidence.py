"""The proofs from recordings: alterations of rules on a few GEMMs, and layers of an H200 emulated here.

Each alteration changes outputs and is undone. The layers have few rows and a long K, which cuBLAS cuts.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.proofs.evidence import ALTERATIONS, altered, changed
from benchmarks.proofs.recorded_layers import differences, layers
from f8emu.conformance import GoldenFile, shipped_golden
from f8emu.spec import RECIPES
from f8emu.split_k.plan import CHIP

CASES = (16, 29, 61, 73, 100, 125, 157, 170)
"""Tensorwise fast and promoted, 16 x 16 x 16, subnormals, split-K, 1x128 scales, bfloat16."""


@pytest.fixture(scope="module")
def few() -> GoldenFile:
    golden = shipped_golden()
    return replace(golden, cases=[golden.cases[i] for i in CASES])


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_rule_is_seen(name: str, few: GoldenFile) -> None:
    with altered(ALTERATIONS[name][1]):
        cases, outputs = changed(few)
    assert 0 < cases <= outputs
    assert changed(few) == (0, 0)


RECORDING = json.loads((Path(__file__).parents[1] / "benchmarks/results/recorded_layers-h200.json").read_text())


def test_all_layers_are_there() -> None:
    assert RECORDING["device"] == CHIP
    assert set(RECORDING["layers"]) == {layer.name for layer in layers()} and len(RECORDING["layers"]) == 160


@pytest.mark.parametrize("recipe", RECIPES)
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
