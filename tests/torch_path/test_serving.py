"""Trained, exported and served: the bits of a forward pass are the server's."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

import f8emu.jax
import f8ref.numpy as oracle
from f8emu.spec import BLOCKWISE_UE8M0, ROWWISE, TENSORS, Recipe, ScaleRule
from tests.torch_path.layers import draw, layer_of, passes

M, N, K = 144, 160, 272


def rowwise_of_own_rules() -> Recipe:
    """Rowwise, whose three tensors have three floors."""
    of_tensors = [replace(ROWWISE.output.a, scale_rule=ScaleRule(amax_floor=10.0**-n)) for n in (3, 2, 1)]
    x, w, g = of_tensors
    gemms = {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}
    return replace(ROWWISE, **{name: replace(ROWWISE.gemms[name], a=a, b=b) for name, (a, b) in gemms.items()})


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient, of which some blocks lie below every floor and some are zero."""
    found = [draw(*shape, seed=seed) for seed, shape in enumerate(((M, K), (N, K), (M, N)))]
    for x in found:
        x[:, :128] *= 2.0**-44
        x[:64] *= 2.0**-13
        x[:, 128:192] *= 2.0**-20
        x[128:] = 0
    return found[0], found[1], found[2]


@pytest.mark.parametrize("recipe", [BLOCKWISE_UE8M0, rowwise_of_own_rules()], ids=["blockwise", "rowwise"])
def test_every_tensor_has_its_own_rule(recipe: Recipe, to_numpy: Any, assert_same_bits: Any) -> None:
    """numpy, torch eager and compiled, and JAX: three products, of tensors whose floors decide."""
    # 1. The oracle's scales are those of the rule that each tensor's name says; no rule is another's.
    given = tensors()
    arrays = [to_numpy(x) for x in given]
    trace = oracle.linear(recipe, *arrays)
    assert trace.grad_input is not None and trace.grad_weight is not None
    floors = {name: recipe.rule_of(*(cast for _, _, cast in recipe.casts(name))).amax_floor for name in TENSORS}
    assert len(set(floors.values())) == 3
    for operand, name in ((trace.output.a, "input"), (trace.output.b, "weight"), (trace.grad_input.a, "grad_output")):
        largest = np.float64(448) / floors[name]
        assert (operand.inv_scale <= largest).all() and (operand.inv_scale > largest / 2).any()
    wanted = [part.product for part in (trace.output, trace.grad_input, trace.grad_weight)]
    # 2. The layers.
    layer = layer_of(recipe, N, K, torch.bfloat16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(given[1])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one in (layer, compiled):
        for found, right in zip(passes(one, given[0], given[2]), wanted, strict=True):
            assert_same_bits(found, right)
    x, w, g = arrays
    multiply = f8emu.jax.dot_general(recipe)
    output, pull = jax.vjp(jax.jit(lambda x, w: multiply(x, w, (((1,), (1,)), ((), ())))), x, w)
    for found, right in zip((output, *pull(g)), wanted, strict=True):
        assert_same_bits(found, right)
