"""Traced programs have the bits of the layers: exported and compiled ones serve every batch, and all of them train."""

import functools
import io
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import f8emu.torch as f8
from f8emu.spec import DELAYED, RECIPES, ROWWISE, Recipe, RecipeName
from f8emu.spec.errors import UnsupportedError
from tests.torch_path.bits import assert_all_same_bits
from tests.torch_path.layers import both_passes, draw

pytestmark = [
    # Dynamo itself instantiates every autograd function that it traces.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # torch 2.11 itself, once a process, where it loads a program.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

SIZES = ((1, 1), (3, 5), (3, 43))
"""Leading dimensions: a row, which torch likes to take for a constant; an odd number; more than a block of 128."""


def converted(recipe: RecipeName | Recipe, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    """Two layers, the second with sizes that are padded."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(144, 160), nn.ReLU(), nn.Linear(160, 40)).to(dtype)
    f8.convert_to_float8_training(model, config=recipe, pad=True)
    return model


def stepped(recipe: RecipeName, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """`converted`, after a pass: delayed scaling has scales that are not those of the next input."""
    model = converted(recipe, dtype)
    model(draw(16, 144, seed=1)).sum().backward()
    return model


@pytest.mark.parametrize(
    ("recipe", "strict", "trained"),
    [
        *((recipe, True, recipe != "delayed") for recipe in RECIPES),
        ("blockwise", False, False),
        ("delayed", False, False),
    ],
)
def test_exported_programs_serve_every_size(recipe: RecipeName, strict: bool, trained: bool) -> None:
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
    recorded = [program(inputs[0]) for program in programs[:3]]
    assert all(torch.equal(output, expected) for output in recorded), "with gradients recorded"
    if recipe == "delayed":
        with pytest.raises(UnsupportedError, match="no state of delayed scaling"):
            recorded[0].sum().backward()
    with pytest.raises(UnsupportedError, match="before it is decomposed"):
        programs[3](inputs[0])


Traced = Callable[[Tensor], Tensor]


def exported(model: nn.Module, x: Tensor, *, strict: bool = False) -> Traced:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,), strict=strict), file)
    file.seek(0)
    return torch.export.load(file).module()


def captured(model: nn.Module, x: Tensor) -> Any:
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    return dynamo_graph_capture_for_export(model)(x)


def joint(model: nn.Module, x: Tensor) -> Traced:
    """One graph with the backward pass, as AutoParallel and torchtitan's compiler toolkit trace it."""
    from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors

    with ExitStack() as stack:
        run = aot_compile_joint_with_descriptors(aot_export_joint_with_descriptors(stack, model, (x,)))
    return lambda x: tree_leaves(run(*model.parameters(), x))[0]


def staged(model: nn.Module, x: Tensor) -> Traced:
    from torch.distributed.pipelining import SplitPoint, pipeline

    pipe: Any = pipeline(model, mb_args=(x,), split_spec={"2": SplitPoint.BEGINNING})
    first, second = map(pipe.get_stage_module, range(2))
    return nn.Sequential(first, second)


TRACERS: dict[str, Callable[[nn.Module, Tensor], Traced]] = {
    "export": exported,
    "strict export": lambda model, x: exported(model, x, strict=True),
    "pipeline": staged,
    "captured": captured,
    "joint": joint,
    "Dynamo": lambda model, x: torch._dynamo.export(model)(x).graph_module,
    "symbolic": lambda model, x: torch.fx.symbolic_trace(model),
}
KEEPS_STATE = ("symbolic",)


@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_programs_train(tracer: str) -> None:
    """Ten steps with the bits of the eager layers; under delayed scaling one error, of the trace."""
    for recipe in RECIPES.values() if tracer == "export" else (ROWWISE, DELAYED):
        model, x = converted(recipe, torch.bfloat16), draw(16, 144, seed=2).bfloat16()
        if recipe == DELAYED and tracer not in KEEPS_STATE:
            with pytest.raises(Exception) as caught:
                TRACERS[tracer](model, x)
            assert "delayed scaling has a state" in str(caught.value) + str(caught.value.__cause__)
            continue
        found = stepped_losses(TRACERS[tracer](model, x), model, x)
        model = converted(recipe, torch.bfloat16)
        assert found == stepped_losses(model, model, x), recipe


class Experts(nn.Module):
    def __init__(self, recipe: RecipeName) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.experts = nn.Linear(64, 64), f8.Float8Experts(3, 64, 32, recipe=recipe)
        self.weight = nn.Parameter(draw(3, 16, 64, seed=1, dtype=torch.float32) / 256)

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([4, 4, 12], dtype=torch.int32)
        return f8.grouped_linear(self.experts(self.before(x), offs), self.weight, offs, recipe="rowwise")


def test_traced_experts_train() -> None:
    for dtype, strict in ((torch.float32, True), (torch.bfloat16, False)):
        x = draw(16, 64, seed=2, dtype=dtype)
        losses: list[list[float]] = []
        for trace in (lambda model, x: model, functools.partial(exported, strict=strict)):
            model = Experts("rowwise").to(dtype)
            losses.append(stepped_losses(trace(model, x), model, x, steps=3))
        assert losses[0] == losses[1]
    with pytest.raises(UnsupportedError, match="delayed scaling has a state"):
        exported(Experts("delayed").bfloat16(), x.bfloat16())


def test_onnx_has_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)  # torch.onnx.export needs onnxscript
    with pytest.raises(UnsupportedError, match=r"ONNX has no operator.*dequantize_float8_training"):
        exported(converted("rowwise"), draw(16, 144, seed=2))


def stepped_losses(forward: Any, model: nn.Module, x: Tensor, steps: int = 10) -> list[float]:
    """The losses of so many steps of SGD, and the norms of the parameters after them."""
    holder = forward if isinstance(forward, nn.Module) else model
    params, losses = {id(p): p for p in holder.parameters()}, list[float]()
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    for _ in range(steps):
        loss = forward(x).float().square().mean()
        loss.backward()
        assert all(p.grad is not None for p in params.values()), "a parameter gets no gradient"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *sorted(p.detach().double().norm().item() for p in params.values())]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])  # whose casts and GEMMs look most at sizes
def test_compiled_layers_of_symbolic_sizes_are_compiled_once(recipe: RecipeName) -> None:
    compiled, eager = converted(recipe), converted(recipe)
    counted = CompileCounterWithBackend("aot_eager")
    forward: Any = torch.compile(compiled, backend=counted, fullgraph=True)

    def dynamic(x: Tensor) -> Tensor:
        for dim in range(2):
            torch._dynamo.mark_dynamic(x, dim)
        return forward(x)

    for i, sizes in enumerate(((2, 4), (3, 5), (3, 43), (50, 41))):
        x, grad = draw(*sizes, 144, seed=i), draw(*sizes, 40, seed=-i)
        found = both_passes(dynamic, x, grad=grad, parameters=compiled.parameters())
        assert_all_same_bits(found, both_passes(eager, x, grad=grad, parameters=eager.parameters()))
    assert counted.frame_count <= 3, "delayed scaling is another program once its scales are set"
