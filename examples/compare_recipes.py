"""How much each recipe loses in one linear layer: SQNR against float64, in dB.

    python examples/compare_recipes.py

SQNR = 20 log10(|exact| / |exact - float8|), Frobenius norms: 6 dB more is half the error.
"""

import math

import torch
from torch import Tensor, nn

from f8emu import RECIPES, Recipe
from f8emu.torch import convert_to_float8_training

DIM = 256
"""Tokens, inputs and outputs: the emulation compiles once for each size."""
PRODUCTS = ("output", "grad_input", "grad_weight")


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(DIM, DIM)
    x[::32] *= 30  # a few tokens with large activations, as in trained models
    layer, grad_output = nn.Linear(DIM, DIM, bias=False), torch.randn(DIM, DIM) / DIM
    exact = products(layer.double(), x.double(), grad_output.double())
    bfloat16 = products(layer.bfloat16(), x.bfloat16(), grad_output.bfloat16())
    print(f"{'recipe':20}" + "".join(f"{name:>13}" for name in PRODUCTS))
    print(row("bfloat16", exact, bfloat16))
    for name, recipe in RECIPES.items():
        print(row(name, exact, float8_products(recipe, layer, x.bfloat16(), grad_output.bfloat16())))


def float8_products(recipe: Recipe, layer: nn.Linear, x: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
    """The three products of the layer, converted."""
    converted = nn.Sequential(nn.Linear(DIM, DIM, bias=False, dtype=x.dtype))
    converted[0].load_state_dict(layer.state_dict())
    convert_to_float8_training(converted, config=recipe)
    if recipe.delayed is not None:  # its scales are those of the pass before
        products(converted, x, grad_output)
    return products(converted, x, grad_output)


def products(layer: nn.Module, x: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
    """output, grad_input and grad_weight."""
    (weight,) = layer.parameters()
    x = x.detach().requires_grad_()
    output = layer(x)
    return (output.detach(), *torch.autograd.grad(output, (x, weight), grad_output))


def row(name: str, exact: tuple[Tensor, ...], observed: tuple[Tensor, ...]) -> str:
    pairs = zip(exact, observed, strict=True)
    return f"{name:20}" + "".join(f"{sqnr(e, o):10.1f} dB" for e, o in pairs)


def sqnr(exact: Tensor, observed: Tensor) -> float:
    return 20 * math.log10(exact.norm() / (exact - observed.double()).norm())


if __name__ == "__main__":
    main()
