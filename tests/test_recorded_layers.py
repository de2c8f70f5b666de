"""Layers whose bits were recorded on an H200, emulated here: few rows and a long K, which cuBLAS cuts."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.proofs.recorded_layers import differences, layers
from f8emu.spec import RECIPES
from f8emu.split_k.plan import CHIP

pytest.importorskip("jax")

RECORDING = json.loads((Path(__file__).parents[1] / "benchmarks/results/recorded_layers-h200.json").read_text())


def test_all_layers_are_there() -> None:
    assert RECORDING["device"] == CHIP
    assert set(RECORDING["layers"]) == {layer.name for layer in layers()} and len(RECORDING["layers"]) == 160


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_layers_have_the_bits_of_the_gpu(recipe: str) -> None:
    """Two of the four sizes; all of them: `python -m benchmarks.proofs.recorded_layers FILE`."""
    few = [layer for layer in layers([16], [(512, 1536), (14336, 256)]) if layer.recipe == recipe]
    assert len(few) == 2
    assert list(differences(RECORDING["layers"], few, torch.device("cpu"))) == []


def test_a_difference_is_told() -> None:
    layer = next(layers([1], [(512, 1536)]))
    wrong = {layer.name: [*RECORDING["layers"][layer.name][:2], "0" * 16]}
    assert list(differences(wrong, [layer], torch.device("cpu"))) == [f"{layer.name}: grad_weight"]
