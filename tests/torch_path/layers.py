"""What tests of layers share: tensors, a forward and backward pass, and models that update no scale by themselves."""

from typing import Any

import torch
from torch import Tensor, nn

import f8emu.torch as f8


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers, each of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def passes(layer: Any, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """output, grad_input, grad_weight."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(grad_output)
    assert x.grad is not None and layer.weight.grad is not None
    return output.detach(), x.grad, layer.weight.grad.clone()


class NoUpdates:
    """A group that leaves every update to explicit calls."""

    def __init__(self, ranks: Any) -> None:
        self.layers: dict[int, nn.Module] = {}
        self.ranks = ranks

    def add(self, layer: Any) -> None:
        layer.delayed.belong_to(0)  # nobody is told of its casts

    def begin_pass(self, is_cuda: bool) -> None:
        pass


def by_calls_alone(model: nn.Module, ranks: Any = None) -> nn.Module:
    """The model, which updates nothing by itself from now on."""
    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear) and layer.delayed is not None:
            layer.update_with(NoUpdates(ranks))  # type: ignore[arg-type]
    return model
