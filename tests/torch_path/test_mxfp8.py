"""Experts under MXFP8: outputs and gradients against the oracle, every bit; groups of any size, eager and compiled.

Layers are cases of the suite (`f8emu.conformance.layers`).
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import f8emu.torch as f8
import f8ref.numpy as ref
from f8emu.interop import to_numpy
from f8emu.spec import MXFP8, MXFP8_FLOOR, OperandError, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:f8emu.torch. there is no split-K plan")
SIZES = ([33, 0, 64, 7], [0, 0, 0, 0], [32, 32, 0, 0], [5, 1, 1, 1])
K, N = 64, 96


def drawn(sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens of very different sizes with two behind the last group, weights, ends and a gradient."""
    torch.manual_seed(0)
    tokens = sum(sizes) + 2
    x = torch.randn(tokens, K) * torch.exp(2 * torch.randn(tokens, 1))
    weight, grad = torch.randn(len(sizes), N, K), torch.randn(tokens, N)
    return *(t.to(dtype) for t in (x, weight, grad)), torch.tensor(sizes).cumsum(0).to(torch.int32)


def trained(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    offs: Tensor,
    recipe: Recipe,
    call: Callable[..., Tensor] = f8.grouped_linear,
) -> tuple[Tensor, ...]:
    """Output and both gradients."""
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = call(x, weight, offs, recipe=recipe)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("recipe", [MXFP8, MXFP8_FLOOR], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_have_the_bits_of_the_oracle(recipe: Recipe, dtype: torch.dtype) -> None:
    """Blocks of grad_weight begin anew with each group; float32 products are a GEMM a group."""
    for sizes in SIZES:
        x, weight, grad, offs = drawn(sizes, dtype)
        trace = ref.grouped_linear(recipe, *(to_numpy(t) for t in (x, weight, offs, grad)))
        expected = trace.result, trace.grad_input, trace.grad_weight
        for result, right in zip(trained(x, weight, grad, offs, recipe), expected, strict=True):
            assert to_numpy(result).tobytes() == np.asarray(right).tobytes(), sizes


def test_compiled_experts_have_the_bits_of_eager_ones() -> None:
    x, weight, grad, offs = drawn(SIZES[0], torch.bfloat16)
    eager = trained(x, weight, grad, offs, MXFP8)
    compiled = trained(x, weight, grad, offs, MXFP8, torch.compile(f8.grouped_linear, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_a_feed_forward_block_of_experts() -> None:
    """Without fused casts: SiLU and product between three grouped layers; kept codes give the same bits."""
    x, _, _, offs = drawn(SIZES[0], torch.bfloat16)
    experts = f8.Float8Experts(4, K, N, recipe="mxfp8", dtype=torch.bfloat16)
    y = experts(x, offs)
    up = f8.grouped_linear(x, experts.gate_up_proj, offs, recipe="mxfp8")
    gate, up = up.chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    assert torch.equal(y, f8.grouped_linear(hidden, experts.down_proj, offs, recipe="mxfp8"))
    experts.precompute_weights()
    assert torch.equal(y, experts(x, offs))
    with pytest.raises(OperandError, match="multiples of 32"):
        f8.grouped_linear(x[:, :48], torch.randn(4, N, 48), offs, recipe="mxfp8")
