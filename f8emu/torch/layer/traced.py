"""The layer as one operator of a graph, `f8emu::linear`: what torch.export and its like record of a call.

The operator is composite. Where a graph runs, autograd sees the layer's own functions inside of it, so that a traced
program trains; where a graph is decomposed, for inference, they leave the casts and the GEMM of `output`. Its arguments
can be written to a file: a process that imports `f8emu.torch` runs it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import RECIPES, Recipe
from f8emu.spec.serialize import recipe_from_json
from f8emu.torch.layer.casts import LayerPlan, cast_input
from f8emu.torch.layer.float8_layer import autocast_dtype
from f8emu.torch.layer.matmul import add_bias, float8_matmul
from f8emu.torch.library import constant_in_traces, operator
from f8emu.torch.torch_internals import Function


def recipe_text(recipe: Recipe) -> str:
    """The recipe as an argument of an operator: its name, or its JSON if it is none of the named ones."""
    # Traced but for the JSON: Dynamo 2.11 hands no dataclass to a function that it calls while it traces.
    return recipe.name if recipe.name in RECIPES and RECIPES[recipe.name] == recipe else _json_of(recipe)


@constant_in_traces
def _json_of(recipe: Recipe) -> str:
    return recipe.to_json()


@cache
def recipe_of_text(text: str) -> Recipe:
    """The recipe of which `recipe_text` gave `text`."""
    return RECIPES[text] if text in RECIPES else recipe_from_json(text)


@operator(opaque=False, differentiable=True)
def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, engine: str, recompute_casts: bool
) -> Tensor:
    """`Float8Linear` without a state: `input @ weight^T + bias`, with its gradients.

    Shapes:
        input [M, K], weight [N, K], bias [N] -> [M, N] in the dtype of input.
    """

    def run(chosen: Recipe) -> Tensor:
        x = input.to(autocast_dtype(input))
        plan = LayerPlan(chosen, engine, torch.is_grad_enabled() and weight.requires_grad, recompute_casts)
        product = float8_matmul(x, weight, cast_input(x, x, plan, None, None), plan, (None, None, None), None)
        return product if bias is None else add_bias(product, bias)

    return stateless(recipe, run, input, weight, bias)


def stateless(text: str, run: Callable[[Recipe], Tensor], *tensors: Tensor | None) -> Tensor:
    """`run(recipe)` of a program, whose gradients for `tensors` raise UnsupportedError where the recipe has a state."""
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedError(
            "f8emu.torch: ONNX has no operator for a float8 layer; convert the model back with "
            "dequantize_float8_training, then export it"
        )
    recipe = recipe_of_text(text)
    if recipe.delayed is None or not torch.is_grad_enabled():
        return run(recipe)
    with torch.no_grad():
        found = run(recipe)
    return ForwardOnly.apply(found, *tensors)


class ForwardOnly(Function):
    """The first argument, in which a gradient for the others raises UnsupportedError."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor | None) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "f8emu.torch: a program that was exported under torch.no_grad() has no state of delayed scaling, so it has "
            "no gradients either; train the model itself, or export it under another recipe"
        )
