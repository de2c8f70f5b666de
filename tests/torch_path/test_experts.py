"""Grouped linear layers against the oracle and against layers of one group, and the fused experts against those."""

from collections.abc import Sequence
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
from f8emu.spec import RECIPES, OperandError, UnsupportedError
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


def beside(recipe: str, x: Tensor, ups: Sequence[Tensor], down: Tensor, offs: Tensor) -> Tensor:
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
    with pytest.raises(OperandError, match="one dtype"):
        f8.grouped_linear(x.float(), w, offs)
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
