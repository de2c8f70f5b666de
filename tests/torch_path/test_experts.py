"""Grouped linear layers against the oracle and against layers of one group, and the fused experts against those."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import (
    E4M3FN,
    RECIPES,
    ROWWISE,
    ROWWISE_FAST,
    Cast,
    OperandError,
    RecipeName,
    UnsupportedError,
    recipe_by_name,
)
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits, to_numpy
from tests.torch_path.layers import both_passes, draw, passes

SIZES = (0, 1, 15, 17, 40, 0)
BEYOND = 3  # rows behind the last group
DYNAMIC = ("rowwise", "rowwise_with_gw_hp", "tensorwise")


def groups_of(sizes: Sequence[int]) -> tuple[Tensor, int]:
    return torch.tensor(sizes).cumsum(0).to(torch.int32), sum(sizes) + BEYOND


def stack(groups: int, n: int, k: int, seed: int) -> Tensor:
    return draw(groups * n, k, seed=seed).view(groups, n, k) / k**0.5


def grouped(recipe: Any, device: str, *tensors: Tensor) -> list[Any]:
    x, w, offs, g = (t.to(device) for t in tensors)
    return both_passes(lambda x, w: f8.grouped_linear(x, w, offs, recipe=recipe), x, w, grad=g)


@pytest.mark.parametrize("recipe", DYNAMIC)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_linear_equals_the_oracle(recipe: RecipeName, dtype: torch.dtype) -> None:
    offs, rows = groups_of(SIZES)
    for seed in range(5):
        x, w = draw(rows, 64, seed=seed).to(dtype), stack(len(SIZES), 96, 64, seed + 10).to(dtype)
        g = draw(rows, 96, seed=seed + 20).to(dtype)
        found = grouped(recipe, "cpu", x, w, offs, g)
        traced = reference.grouped_linear(RECIPES[recipe], *map(to_numpy, (x, w, offs, g)))
        assert_all_same_bits(found, (traced.result, traced.grad_input, traced.grad_weight))


def compare_fused(recipe: Any, is_joint: bool, x: Tensor, weights: list[Tensor], offs: Tensor, **compiler: Any) -> None:
    """The fused experts, eager and compiled, beside layers that are not fused. `weights`: up, gate and down."""
    first, second, down = weights
    weights = [down, torch.cat([first, second], dim=1)] if is_joint else [down, first, second]
    grad = draw(*x.shape, seed=5).to(x.device)

    def fused(x: Tensor, down: Tensor, *ups: Tensor) -> Tensor:
        return f8.float8_experts(x, ups[0] if is_joint else ups, down, offs, recipe=recipe)

    def beside(x: Tensor, down: Tensor, *ups: Tensor) -> Tensor:
        products = [f8.grouped_linear(x, w, offs, recipe=recipe) for w in ups]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=1)
        return f8.grouped_linear(silu(gate) * up, down, offs, recipe=recipe)

    expected = both_passes(beside, x, *weights, grad=grad)
    for call in (fused, torch.compile(fused, fullgraph=True, **compiler)):
        assert_all_same_bits(both_passes(call, x, *weights, grad=grad), expected)


@pytest.mark.parametrize("is_joint", [True, False], ids=["joint", "strict"])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_fused_experts_equal_their_layers(recipe: str, is_joint: bool) -> None:
    offs, rows = groups_of(SIZES)
    weights = [stack(len(SIZES), *size, i + 1) for i, size in enumerate(((48, 64), (48, 64), (64, 48)))]
    compare_fused(recipe, is_joint, draw(rows, 64, seed=4), weights, offs, backend="aot_eager")


def test_frozen_weights_and_second_backward() -> None:
    """Only what needs a gradient is computed; a graph that is kept gives the same gradients again."""
    offs, rows = groups_of(SIZES)
    tensors = draw(rows, 64, seed=1), stack(len(SIZES), 96, 64, 2), stack(len(SIZES), 64, 48, 3)
    x, up, down = (t.clone().requires_grad_() for t in tensors)
    y = f8.float8_experts(x, up, down, offs)
    y.sum().backward(retain_graph=True)
    first: list[Any] = [t.grad for t in (x, up, down)]
    first = [grad.clone() for grad in first]
    y.sum().backward()
    assert_all_same_bits([t.grad for t in (x, up, down)], [once + once for once in first])
    for trained in range(3):
        some = [t.clone().requires_grad_(i == trained) for i, t in enumerate(tensors)]
        f8.float8_experts(some[0], some[1], some[2], offs).sum().backward()
        assert_all_same_bits([t.grad for t in some], [g if i == trained else None for i, g in enumerate(first)])


def test_refusals() -> None:
    offs, rows = groups_of(SIZES)
    x, w = draw(rows, 64, seed=1), stack(len(SIZES), 96, 64, 2)
    for arguments, recipe, error, message in (
        ((x, w, offs), "blockwise", UnsupportedError, "choose rowwise$"),
        ((x, w, offs), "delayed", UnsupportedError, "use Float8Experts"),
        ((x, w, offs.long()), "rowwise", OperandError, r"offs int32 \[G\]"),
        ((x, w[:, :90], offs), "rowwise", OperandError, "multiples of 16"),
        ((x, w.to("meta"), offs), "rowwise", OperandError, "one device"),
    ):
        with pytest.raises(error, match=message):
            f8.grouped_linear(*arguments, recipe=recipe_by_name(recipe))
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


def layers_of(experts: f8.Float8Experts, recipe: Any) -> list[list[Any]]:
    """Each expert as two layers."""
    found: list[list[Any]] = []
    for weights in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        found.append([f8.Float8Linear(*w.T.shape, bias=False, dtype=w.dtype, recipe=recipe) for w in weights])
        for layer, weight in zip(found[-1], weights, strict=True):
            layer.weight.data.copy_(weight)
    return found


DELAYED_E4M3 = replace(
    RECIPES["delayed"],
    name="delayed_e4m3",
    grad_input=replace(RECIPES["delayed"].grad_input, a=Cast(format=E4M3FN)),
    grad_weight=replace(RECIPES["delayed"].grad_weight, a=Cast(format=E4M3FN)),
)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [(RECIPES["delayed"], None), (RECIPES["delayed"], "aot_eager"), (DELAYED_E4M3, None)],
    ids=lambda x: getattr(x, "name", x),
)
def test_delayed_experts_equal_layers(recipe: Any, backend: str | None) -> None:
    """Every expert has the outputs, gradients and states of layers of its own, called once a step each."""
    experts = f8.Float8Experts(4, 32, 48, recipe=recipe, dtype=torch.bfloat16)
    layers = layers_of(experts, recipe)
    run = experts if backend is None else torch.compile(experts, backend=backend, fullgraph=True)
    for step, sizes in enumerate([(5, 0, 17, 16), (1, 2, 33, 0), (0, 20, 9, 4), (8, 8, 8, 8)]):
        offs, rows = groups_of(sizes)
        ends = offs.tolist()
        x, g = draw(rows, 32, seed=step), draw(rows, 32, seed=step + 10) * 2.0**step

        def apart(x: Tensor, ends: list[int] = ends) -> Tensor:
            parts = []
            for (first, second), (start, stop) in zip(layers, pairwise([0, *ends]), strict=True):
                gate, up = first(x[start:stop]).chunk(2, dim=1)
                parts.append(second(silu(gate) * up))
            return torch.cat(parts)

        found = both_passes(partial(run, offs=offs), x, grad=g, parameters=experts.parameters())
        weights = [layer.weight for pair in layers for layer in pair]
        alone, grad_input, *grads = both_passes(apart, x, grad=g[: ends[-1]], parameters=weights)
        found[0] = found[0][: ends[-1]]
        assert_all_same_bits(found, (alone, grad_input, torch.stack(grads[::2]), torch.stack(grads[1::2])))
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
def test_weights_cast_once_a_step(backend: str | None) -> None:
    experts, (offs, rows) = f8.Float8Experts(4, 32, 48, dtype=torch.bfloat16), groups_of((5, 0, 17, 16))
    plain = copy.deepcopy(experts)
    run = experts if backend is None else torch.compile(experts, backend=backend, fullgraph=True)
    for step in range(2):
        experts.precompute_weights()
        for part in range(2):
            x, grad = draw(rows, 32, seed=10 * step + part), torch.ones(rows, 32).bfloat16()
            ours = both_passes(partial(run, offs=offs), x, grad=grad, parameters=experts.parameters())
            assert_all_same_bits(
                ours, both_passes(partial(plain, offs=offs), x, grad=grad, parameters=plain.parameters())
            )
        with torch.no_grad():
            for parameter in (*experts.parameters(), *plain.parameters()):
                parameter -= 0.1
    with pytest.raises(UnsupportedError, match="call precompute_weights"):
        run(draw(rows, 32, seed=1), offs)


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
@pytest.mark.parametrize("recipe", [ROWWISE, ROWWISE_FAST, TENSORWISE_E4M3], ids=lambda x: x.name)
def test_every_group_equals_a_layer_on_a_gpu(recipe: Any) -> None:
    """Tensor cores: rowwise layers one by one; with one scale a group, whose layers may be split along K, the CPU."""
    sizes, device = (0, 1, 15, 17, 8192, 0), "cuda"
    offs, rows = groups_of(sizes)
    for seed in range(5):
        x, w = (nasty if seed % 2 else draw)(rows, 256, seed=seed), stack(len(sizes), 384, 256, seed + 10)
        g = draw(rows, 384, seed=seed + 20)
        found = grouped(recipe, device, x, w, offs, g)
        if recipe is TENSORWISE_E4M3:
            assert_all_same_bits(found, grouped(recipe, "cpu", x, w, offs, g))
            continue
        y, grad_input, grad_weight = found
        for e, (start, stop) in enumerate(pairwise([0, *offs.tolist()])):
            layer = f8.Float8Linear(256, 384, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe)
            layer.weight.data.copy_(w[e])
            alone = passes(layer, x[start:stop].to(device), g[start:stop].to(device))
            assert_all_same_bits((y[start:stop], grad_input[start:stop], grad_weight[e]), alone)
        assert not y[offs[-1] :].any() and not grad_input[offs[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("is_joint", [True, False], ids=["joint", "strict"])
@pytest.mark.parametrize("recipe", [ROWWISE_FAST, TENSORWISE_E4M3], ids=lambda x: x.name)
def test_fused_experts_equal_their_layers_on_a_gpu(recipe: Any, is_joint: bool) -> None:
    sizes, device = (0, 1, 15, 17, 2048, 130), "cuda"
    offs, rows = groups_of(sizes)
    for seed in range(5):
        shapes = enumerate(((96, 128), (96, 128), (128, 96)))
        weights = [stack(len(sizes), *size, seed + i).to(device) for i, size in shapes]
        compare_fused(recipe, is_joint, nasty(rows, 128, seed).to(device), weights, offs.to(device))
