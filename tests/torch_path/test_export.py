"""Symbolic sizes: exported programs and compiled layers serve every batch, in every recipe, with eager code's bits."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import f8emu.torch as f8
from f8emu.spec import RECIPES
from tests.torch_path.layers import draw

# Dynamo itself instantiates every autograd function that it traces.
pytestmark = [pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")]

SIZES = ((1, 1), (3, 5), (3, 43))
"""Leading dimensions: a row, which torch likes to take for a constant; an odd number; more than a block of 128."""


def converted(recipe: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    """Two layers, the second with sizes that are padded."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(144, 160), nn.ReLU(), nn.Linear(160, 40)).to(dtype)
    f8.convert_to_float8_training(model, config=recipe, pad=True)
    return model


def stepped(recipe: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """`converted`, after a pass: delayed scaling has scales that are not those of the next input."""
    model = converted(recipe, dtype)
    model(draw(16, 144, seed=1)).sum().backward()
    return model


@pytest.mark.parametrize(
    ("recipe", "strict", "trained"),
    [*((recipe, True, True) for recipe in RECIPES), ("blockwise", False, False), ("delayed", False, True)],
)
def test_exported_programs_serve_every_size(recipe: str, strict: bool, trained: bool) -> None:
    model = stepped(recipe)  # float32 biases of bfloat16 products
    dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if trained else {0: Dim("batch"), 1: Dim("tokens")}
    with torch.set_grad_enabled(trained):
        exported = torch.export.export(model, (draw(2, 4, 144, seed=2),), dynamic_shapes=(dims,), strict=strict)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        programs = [exported.module(), torch.export.load(file).module(), torch.export.unflatten(exported)]
    inputs = [draw(*sizes, 144, seed=3 + i) for i, sizes in enumerate(SIZES)]
    with torch.no_grad():
        programs.append(exported.run_decompositions().module())
        for x in inputs:
            expected = model(x)
            assert all(torch.equal(program(x), expected) for program in programs), x.shape
        expected = model(inputs[0])
    recorded = programs[:3] if trained else []
    assert all(torch.equal(program(inputs[0]), expected) for program in recorded), "with gradients recorded"


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])  # whose casts and GEMMs look most at sizes
def test_compiled_layers_of_symbolic_sizes_are_compiled_once(recipe: str) -> None:
    compiled, eager = converted(recipe), converted(recipe)
    counted = CompileCounterWithBackend("aot_eager")
    forward: Any = torch.compile(compiled, backend=counted, fullgraph=True)

    def passes(call: Any, model: nn.Sequential, x: Tensor, grad: Tensor) -> list[Tensor]:
        model.zero_grad()
        output = call(x)
        output.backward(grad)
        assert x.grad is not None
        found = [output.detach(), x.grad, *(layer.weight.grad for layer in (model[0], model[2]))]
        return found

    for i, sizes in enumerate(((2, 4), (3, 5), (3, 43), (50, 41))):
        x, grad = draw(*sizes, 144, seed=i), draw(*sizes, 40, seed=-i)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for dim in range(2):
            torch._dynamo.mark_dynamic(leaves[0], dim)
        found, expected = passes(forward, compiled, leaves[0], grad), passes(eager, eager, leaves[1], grad)
        assert all(map(torch.equal, found, expected)), sizes
    assert counted.frame_count <= 3, "delayed scaling is another program once its scales are set"
