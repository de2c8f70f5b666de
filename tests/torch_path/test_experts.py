"""Grouped linear layers against the oracle and against layers of one group, and the fused experts against those."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import E4M3FN, RECIPES, Cast, OperandError, UnsupportedError
from tests.torch_path.layers import draw

SIZES = (0, 1, 15, 17, 40, 0)
BEYOND = 3  # rows behind the last group
DYNAMIC = ("rowwise", "rowwise_with_gw_hp", "tensorwise")


def groups_of(sizes: Sequence[int]) -> tuple[Tensor, int]:
    return torch.tensor(sizes).cumsum(0).to(torch.int32), sum(sizes) + BEYOND


def stack(groups: int, n: int, k: int, seed: int) -> Tensor:
    return draw(groups * n, k, seed=seed).view(groups, n, k) / k**0.5


def to_numpy(x: Tensor | None) -> Any:
    assert x is not None
    x = x.detach().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("recipe", DYNAMIC)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_linear_equals_the_oracle(recipe: str, dtype: torch.dtype, assert_same_bits: Any) -> None:
    offs, rows = groups_of(SIZES)
    for seed in range(5):
        x, w = leaves(draw(rows, 64, seed=seed).to(dtype), stack(len(SIZES), 96, 64, seed + 10).to(dtype))
        g = draw(rows, 96, seed=seed + 20).to(dtype)
        y = f8.grouped_linear(x, w, offs, recipe=recipe)
        y.backward(g)
        traced = reference.grouped_linear(RECIPES[recipe], *map(to_numpy, (x, w, offs, g)))
        for ours, theirs in ((y, traced.result), (x.grad, traced.grad_input), (w.grad, traced.grad_weight)):
            assert_same_bits(to_numpy(ours), np.asarray(theirs))


def beside(recipe: Any, x: Tensor, ups: Sequence[Tensor], down: Tensor, offs: Tensor) -> Tensor:
    """The experts, of layers that are not fused."""
    products = [f8.grouped_linear(x, w, offs, recipe=recipe) for w in ups]
    gate, up = products if len(products) == 2 else products[0].chunk(2, dim=1)
    return f8.grouped_linear(silu(gate) * up, down, offs, recipe=recipe)


@pytest.mark.parametrize("is_joint", [True, False], ids=["joint", "strict"])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_fused_experts_equal_their_layers(recipe: str, is_joint: bool, assert_same_bits: Any) -> None:
    offs, rows = groups_of(SIZES)
    first, second, down = (
        stack(len(SIZES), *size, seed) for size, seed in (((48, 64), 1), ((48, 64), 2), ((64, 48), 3))
    )
    weights = [down, torch.cat([first, second], dim=1)] if is_joint else [down, first, second]
    x, g = draw(rows, 64, seed=4), draw(rows, 64, seed=5)

    def fused(x: Tensor, down: Tensor, *ups: Tensor) -> Tensor:
        return f8.float8_experts(x, ups[0] if is_joint else ups, down, offs, recipe=recipe)

    expected = leaves(x, *weights)
    output = beside(recipe, expected[0], expected[2:], expected[1], offs)
    output.backward(g)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    for call in (fused, compiled):
        found = leaves(x, *weights)
        y = call(*found)
        y.backward(g)
        assert_same_bits(y, output)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours.grad, theirs.grad)


def test_frozen_weights_and_second_backward(assert_same_bits: Any) -> None:
    """Only what needs a gradient is computed; a graph that is kept gives the same gradients again."""
    offs, rows = groups_of(SIZES)
    x, up, down = draw(rows, 64, seed=1), stack(len(SIZES), 96, 64, 2), stack(len(SIZES), 64, 48, 3)
    whole = leaves(x, up, down)
    y = f8.float8_experts(whole[0], whole[1], whole[2], offs)
    y.sum().backward(retain_graph=True)
    first = [w.grad.clone() for w in whole if w.grad is not None]
    y.sum().backward()
    for w, once in zip(whole, first, strict=True):
        assert_same_bits(w.grad, once + once)
    for trained in range(3):
        some = [w.requires_grad_() if i == trained else w.detach() for i, w in enumerate((x, up, down))]
        some = [w.detach().clone().requires_grad_(i == trained) for i, w in enumerate(some)]
        f8.float8_experts(some[0], some[1], some[2], offs).sum().backward()
        assert_same_bits(some[trained].grad, first[trained])
        assert sum(w.grad is not None for w in some) == 1


def test_refusals() -> None:
    offs, rows = groups_of(SIZES)
    x, w = draw(rows, 64, seed=1), stack(len(SIZES), 96, 64, 2)
    with pytest.raises(UnsupportedError, match="choose rowwise or tensorwise"):
        f8.grouped_linear(x, w, offs, recipe="blockwise")
    with pytest.raises(UnsupportedError, match="use Float8Experts"):
        f8.grouped_linear(x, w, offs, recipe="delayed")
    with pytest.raises(OperandError, match=r"offs int32 \[G\]"):
        f8.grouped_linear(x, w, offs.long())
    with pytest.raises(OperandError, match="multiples of 16"):
        f8.grouped_linear(x, w[:, :90], offs)
    with pytest.raises(OperandError, match="one device"):
        f8.grouped_linear(x, w.to("meta"), offs)
    with pytest.raises(OperandError, match="down"):
        f8.float8_experts(x, w, w, offs)


def test_the_module() -> None:
    experts = f8.Float8Experts(4, 32, 48, dtype=torch.bfloat16)
    x, offs = draw(9, 32, seed=1), torch.tensor([3, 3, 4, 9], dtype=torch.int32)
    assert sorted(experts.state_dict()) == ["down_proj", "gate_up_proj"]
    expected = f8.float8_experts(x, experts.gate_up_proj, experts.down_proj, offs)
    assert torch.equal(experts(x, offs), expected)
    # Each group is a layer of its own, whatever the others hold.
    for e, (start, stop) in enumerate(pairwise([0, *offs.tolist()])):
        alone = f8.float8_experts(
            x[start:stop],
            experts.gate_up_proj[e : e + 1],
            experts.down_proj[e : e + 1],
            torch.tensor([stop - start]).int(),
        )
        assert torch.equal(alone, expected[start:stop])


def layers_of(experts: f8.Float8Experts, recipe: Any) -> list[tuple[Any, Any]]:
    """Each expert as two layers."""
    found: list[tuple[Any, Any]] = []
    for gate_up, down in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        pair = [
            f8.Float8Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, recipe=recipe) for w in (gate_up, down)
        ]
        for layer, value in zip(pair, (gate_up, down), strict=True):
            layer.weight.data.copy_(value)
        found.append((pair[0], pair[1]))
    return found


DELAYED_E4M3 = replace(
    RECIPES["delayed"],
    name="delayed_e4m3",
    grad_input=replace(RECIPES["delayed"].grad_input, a=Cast(format=E4M3FN)),
    grad_weight=replace(RECIPES["delayed"].grad_weight, a=Cast(format=E4M3FN)),
)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("recipe", [RECIPES["delayed"], DELAYED_E4M3], ids=lambda x: x.name)
def test_delayed_experts_equal_layers(recipe: Any, backend: str | None, assert_same_bits: Any) -> None:
    """Every expert has the outputs, gradients and states of layers of its own, called once a step each."""
    experts = f8.Float8Experts(4, 32, 48, recipe=recipe, dtype=torch.bfloat16)
    layers = layers_of(experts, recipe)
    run = experts if backend is None else torch.compile(experts, backend=backend, fullgraph=True)
    for step, sizes in enumerate([(5, 0, 17, 16), (1, 2, 33, 0), (0, 20, 9, 4), (8, 8, 8, 8)]):
        offs, rows = groups_of(sizes)
        x, g = draw(rows, 32, seed=step).requires_grad_(), draw(rows, 32, seed=step + 10) * 2.0**step
        y = run(x, offs)
        y.backward(g)
        alone = x.detach().clone().requires_grad_()
        parts = []
        for (first, second), (start, stop) in zip(layers, pairwise([0, *offs.tolist()]), strict=True):
            gate, up = first(alone[start:stop]).chunk(2, dim=1)
            parts.append(second(silu(gate) * up))
        together = torch.cat(parts)
        together.backward(g[: len(together)])
        assert_same_bits(y[: len(together)], together)
        assert_same_bits(x.grad, alone.grad)
        for weight, i in ((experts.gate_up_proj, 0), (experts.down_proj, 1)):
            assert weight.grad is not None
            for e, pair in enumerate(layers):
                assert_same_bits(weight.grad[e], pair[i].weight.grad)
                pair[i].weight.grad = None
            weight.grad = None
        own: list[Any] = list(experts.settings.states)
        for i, state in enumerate(own):
            stacked = state.delayed.state()
            for e, pair in enumerate(layers):
                for name, value in pair[i].delayed.state().items():
                    assert_same_bits(stacked[name][e].float(), value.float())
    # A state dict has the states; so has their own checkpoint.
    other = f8.Float8Experts(4, 32, 48, recipe=recipe, dtype=torch.bfloat16)
    other.load_state_dict(experts.state_dict())
    again = f8.Float8Experts(4, 32, 48, recipe=recipe, dtype=torch.bfloat16)
    f8.load_delayed_state_dict(again, f8.delayed_state_dict(experts))
    for name, value in f8.delayed_state_dict(experts).items():
        assert torch.equal(f8.delayed_state_dict(other)[name], value)
        assert torch.equal(f8.delayed_state_dict(again)[name], value)
    with pytest.warns(RuntimeWarning, match="scaling starts anew"):
        f8.Float8Experts(4, 32, 48, recipe=recipe).load_state_dict(dict(experts.state_dict()))  # without metadata


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_weights_cast_once_a_step(backend: str | None, assert_same_bits: Any) -> None:
    experts, (offs, rows) = f8.Float8Experts(4, 32, 48, dtype=torch.bfloat16), groups_of((5, 0, 17, 16))
    plain = copy.deepcopy(experts)
    run = experts if backend is None else torch.compile(experts, backend=backend, fullgraph=True)
    for step in range(2):
        experts.precompute_weights()
        for part in range(2):
            x = draw(rows, 32, seed=10 * step + part)
            outputs = [f(x.clone().requires_grad_(), offs) for f in (run, plain)]
            for output in outputs:
                output.sum().backward()
            assert_same_bits(*outputs)
        for ours, theirs in zip(experts.parameters(), plain.parameters(), strict=True):
            assert_same_bits(ours.grad, theirs.grad)
            with torch.no_grad():
                ours -= 0.1
                theirs -= 0.1
            ours.grad = theirs.grad = None
    with pytest.raises(UnsupportedError, match="call precompute_weights"):
        run(draw(rows, 32, seed=1), offs)


FAST = replace(
    RECIPES["rowwise"],
    name="fast",
    grad_input=replace(RECIPES["rowwise"].grad_input, use_fast_accum=True),
    grad_weight=replace(RECIPES["rowwise"].grad_weight, use_fast_accum=True),
)
TENSORWISE_E4M3 = replace(DELAYED_E4M3, name="tensorwise_e4m3", delayed=None)


def nasty(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of magnitudes far apart, and special values in some."""
    x = draw(rows, columns, seed=seed)
    x[::7] *= 2.0**-100
    x[3::11] = 0
    if rows > 40:
        x[37, 5], x[38, 6], x[39, 7] = float("inf"), float("nan"), 1e-40
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [RECIPES["rowwise"], FAST, TENSORWISE_E4M3], ids=lambda x: x.name)
def test_every_group_equals_a_layer_on_a_gpu(recipe: Any, assert_same_bits: Any) -> None:
    """Tensor cores: rowwise layers one by one; with one scale a group, whose layers may be split along K, the CPU."""
    sizes, device = (0, 1, 15, 17, 8192, 0), "cuda"
    offs, rows = groups_of(sizes)
    for seed in range(5):
        drawn = (nasty if seed % 2 else draw)(rows, 256, seed=seed), stack(len(sizes), 384, 256, seed + 10)
        x, w = leaves(*(t.to(device) for t in drawn))
        g = draw(rows, 384, seed=seed + 20)
        y = f8.grouped_linear(x, w, offs.to(device), recipe=recipe)
        y.backward(g.to(device))
        if recipe is TENSORWISE_E4M3:
            x1, w1 = leaves(*drawn)
            y1 = f8.grouped_linear(x1, w1, offs, recipe=recipe)
            y1.backward(g)
            for ours, theirs in ((y, y1), (x.grad, x1.grad), (w.grad, w1.grad)):
                assert_same_bits(ours, theirs)
            continue
        for e, (start, stop) in enumerate(pairwise([0, *offs.tolist()])):
            layer = f8.Float8Linear(256, 384, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe)
            layer.weight.data.copy_(drawn[1][e])
            (own,) = leaves(drawn[0][start:stop].to(device))
            output = layer(own)
            output.backward(g[start:stop].to(device))
            assert x.grad is not None and w.grad is not None
            parts = ((y[start:stop], output), (x.grad[start:stop], own.grad), (w.grad[e], layer.weight.grad))
            for ours, theirs in parts:
                assert_same_bits(ours, theirs)
        for beyond in (y[offs[-1] :], x.grad[offs[-1] :] if x.grad is not None else y):
            assert not beyond.any()


@pytest.mark.gpu
@pytest.mark.parametrize("is_joint", [True, False], ids=["joint", "strict"])
@pytest.mark.parametrize("recipe", [FAST, TENSORWISE_E4M3], ids=lambda x: x.name)
def test_fused_experts_equal_their_layers_on_a_gpu(recipe: Any, is_joint: bool, assert_same_bits: Any) -> None:
    sizes, device = (0, 1, 15, 17, 2048, 130), "cuda"
    offs, rows = groups_of(sizes)
    for seed in range(5):
        first, second, down = (
            stack(len(sizes), *size, seed + i).to(device) for i, size in enumerate(((96, 128), (96, 128), (128, 96)))
        )
        weights = [down, torch.cat([first, second], dim=1)] if is_joint else [down, first, second]
        x, g = nasty(rows, 128, seed).to(device), draw(rows, 128, seed=seed + 9).to(device)

        def fused(x: Tensor, down: Tensor, offs: Tensor, *ups: Tensor) -> Tensor:
            return f8.float8_experts(x, ups[0] if is_joint else ups, down, offs, recipe=recipe)

        expected = leaves(x, *weights)
        output = beside(recipe, expected[0], expected[2:], expected[1], offs.to(device))
        output.backward(g)
        for call in (fused, torch.compile(fused, fullgraph=True)):
            found = leaves(x, *weights)
            y = call(*found[:2], offs.to(device), *found[2:])
            y.backward(g)
            assert_same_bits(y, output)
            for ours, theirs in zip(found, expected, strict=True):
                assert_same_bits(ours.grad, theirs.grad)
