"""What tests of layers share: tensors, and a forward and backward pass."""

from typing import Any

import torch
from torch import Tensor


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
