"""A converted layer against the oracle: every code, scale, output and gradient, bit for bit, eager and compiled.

The layer takes two steps, the second with the delayed scales that the first has left. Its operands are taken where the
operator of a GEMM runs, behind the compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import f8ref.numpy as reference
from f8emu.conformance.arrays import torch_arrays
from f8emu.conformance.compare import different
from f8emu.spec import TENSORS, DelayedState, GemmTrace, LinearTrace, Recipe
from f8emu.torch import Float8Linear, sync_float8_amax_and_scale_history
from f8emu.torch.gemm import emulation, hardware

Shape = tuple[int, int, int]
"""Of a layer: tokens M, out_features N, in_features K."""
SHAPES: tuple[Shape, ...] = ((1, 16, 32), (19, 32, 48), (21, 20, 37), (150, 144, 272), (256, 512, 384))
"""A single row; tails of tiles and of 128-blocks; sizes that are filled up; several tiles."""
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
STEPS = 2
PARTS = ("codes", "scales", "output", "grad_input", "grad_weight")


class Executed(NamedTuple):
    """The operands of one GEMM as its operator got them, as `[rows, summed dimension]`, filled up with zeros."""

    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray | None
    scale_b: np.ndarray | None


class Step(NamedTuple):
    """The tensors of one step, and the oracle's trace of it."""

    input: Tensor
    grad_output: Tensor
    trace: LinearTrace


@dataclass(slots=True)
class Counts:
    """Numbers compared and numbers that differ, by part."""

    compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    differing: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def add(self, part: str, observed: np.ndarray, expected: np.ndarray) -> None:
        """Compare as integers; only a NaN equals another NaN. Another dtype or shape differs everywhere."""
        self.compared[part] += expected.size
        same_kind = observed.dtype == expected.dtype and observed.shape == expected.shape
        self.differing[part] += int(different(observed, expected).sum()) if same_kind else expected.size


class LayerCase:
    """A layer, the tensors of its steps, and what the oracle makes of them: the same for every mode."""

    def __init__(self, recipe: Recipe, shape: Shape, weight_dtype: torch.dtype, device: torch.device) -> None:
        m, n, k = shape
        self.recipe, self.shape, self.device = recipe, shape, device
        self.to_numpy = torch_arrays("benchmarks.layers").store
        self.layer = Float8Linear(k, n, True, dtype=weight_dtype, recipe=recipe)
        with torch.no_grad():
            self.layer.weight.copy_(spread(1, n, k) / 8)
            self.layer.bias.copy_(spread(2, n))
        states = None
        if recipe.delayed is not None:
            states = {tensor: reference.initial_delayed_state(recipe.delayed) for tensor in TENSORS}
        self.steps: list[Step] = []
        for step in range(STEPS):
            x = spread(3 + 2 * step, m, k).bfloat16()
            grad_output = (spread(4 + 2 * step, m, n) / 64).bfloat16()
            arrays = [self.to_numpy(t.detach()) for t in (x, self.layer.weight, grad_output, self.layer.bias)]
            trace = reference.linear(recipe, *arrays, delayed_state=states)
            self.steps.append(Step(x.to(device), grad_output.to(device), trace))
            states = None if states is None else _updated(recipe, states, trace)
        self.layer.to(device)

    def check(self, mode: str, engine: str) -> Counts:
        """Both steps in one mode."""
        layer = Float8Linear.from_float(_plain(self.layer), recipe=self.recipe, engine=engine)
        layer.zero_grad()
        call = torch.compile(layer, fullgraph=True, dynamic=False) if mode == "compiled" else layer
        counts = Counts()
        for step in self.steps:
            x = step.input.clone().requires_grad_()
            with _recorded(self.to_numpy) as executed:
                output = call(x)
                output.backward(step.grad_output)
            sync_float8_amax_and_scale_history(layer)
            of_input, of_weight, grad_weight = step.trace.grad_input, step.trace.grad_weight, layer.weight.grad
            assert of_input is not None
            assert of_weight is not None
            assert x.grad is not None
            assert grad_weight is not None
            wanted_weight = of_weight.product.astype(self.to_numpy(grad_weight).dtype)
            counts.add("output", self.to_numpy(output.detach()), step.trace.result)
            counts.add("grad_input", self.to_numpy(x.grad), of_input.product)
            counts.add("grad_weight", self.to_numpy(grad_weight), wanted_weight)
            for gemm in (step.trace.output, of_input, of_weight):
                _compare_operands(counts, executed.pop(_signature(gemm.a.codes, gemm.b.codes)), gemm)
            assert not executed, f"GEMMs that the recipe has not: {list(executed)}"
            layer.zero_grad()
        return counts


def _compare_operands(counts: Counts, executed: Executed, gemm: GemmTrace) -> None:
    for codes, scale, wanted in (
        (executed.a, executed.scale_a, gemm.a),
        (executed.b, executed.scale_b, gemm.b),
    ):
        filled = np.zeros(codes.shape, wanted.codes.dtype)
        rows, summed = wanted.codes.shape
        filled[:rows, :summed] = wanted.codes
        counts.add("codes", codes, filled)
        if wanted.scale is None:
            assert scale is None, "a high precision operand has no scale"
            continue
        assert scale is not None, "a float8 operand has one"
        # A tensorwise scale beside a rowwise one is repeated for every row; rows that were filled up are left out.
        size = wanted.scale.shape if wanted.scale.size > 1 else (min(rows, scale.shape[0]), 1)
        counts.add("scales", scale[: size[0]], np.broadcast_to(wanted.scale, size))


@contextmanager
def _recorded(to_numpy: Callable[[Tensor], np.ndarray]) -> Iterator[dict[Shape, Executed]]:
    """The GEMMs that run inside, by signature."""
    executed: dict[Shape, Executed] = {}

    def copied(x: Tensor) -> np.ndarray:
        # The scales of delayed scaling are buffers, which the update overwrites.
        return to_numpy(x.clone(memory_format=torch.contiguous_format))

    def recording(run: Callable[..., Tensor], is_scaled: bool) -> Callable[..., Tensor]:
        def call(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
            codes_a, codes_b = copied(a), copied(b.t())
            scale_a, scale_b = (copied(rest[0]), copied(rest[1].t())) if is_scaled else (None, None)
            signature = _signature(codes_a, codes_b)
            assert signature not in executed, "two GEMMs of one step have the same sizes"
            executed[signature] = Executed(codes_a, codes_b, scale_a, scale_b)
            return run(a, b, *rest, **options)

        return call

    with ExitStack() as stack:
        for module in (hardware, emulation):
            stack.enter_context(patch.object(module, "scaled_mm", recording(module.scaled_mm, True)))
            stack.enter_context(patch.object(module, "mm", recording(module.mm, False)))
        yield executed


def _signature(a: np.ndarray, b: np.ndarray) -> Shape:
    """What a GEMM is recognised by, whatever it was filled up to: rows of `a`, rows of `b`, summed dimension."""
    return -(-a.shape[0] // 4) * 4, -(-b.shape[0] // 16) * 16, -(-a.shape[1] // 16) * 16


def _updated(recipe: Recipe, states: dict[str, DelayedState], trace: LinearTrace) -> dict[str, DelayedState]:
    """The states of the next step."""
    assert recipe.delayed is not None
    assert trace.grad_input is not None
    updated: dict[str, DelayedState] = {}
    for tensor, of in zip(TENSORS, (trace.output.a, trace.output.b, trace.grad_input.a), strict=True):
        (format,) = {cast.format for _, _, cast in recipe.casts(tensor)}
        assert format is not None
        state = reference.update_delayed_state(states[tensor], of.amax, format, recipe.scale_rule, recipe.delayed)
        updated[tensor] = state
    return updated


def _plain(layer: Float8Linear) -> torch.nn.Linear:
    """The `nn.Linear` with the layer's parameters."""
    plain = torch.nn.Linear(layer.in_features, layer.out_features, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


def spread(seed: int, *shape: int) -> Tensor:
    """Float32 on the CPU, each element of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 6, shape, generator=generator))
