"""What tests of layers share: tensors, layers, a forward and backward pass, and what it is made of."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import f8emu.torch as f8
from f8emu.spec import Recipe


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers, each of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def layer_of(recipe: Recipe, n: int, k: int, dtype: torch.dtype, *, bias: bool = True) -> f8.Float8Linear:
    layer = f8.Float8Linear(k, n, bias, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(draw(n, k, seed=1, dtype=torch.float32) / 8)
        if bias:
            layer.bias.copy_(draw(n, seed=2, dtype=torch.float32))
    return layer


def passes(layer: Any, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """output, grad_input, grad_weight."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(grad_output)
    assert x.grad is not None and layer.weight.grad is not None
    return output.detach(), x.grad, layer.weight.grad.clone()


class OpCounter(TorchDispatchMode):
    """Counts the casts by name, and the GEMMs and amaxes as dispatch modes see them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))

    def casts(self) -> int:
        return sum(count for name, count in self.counts.items() if name.startswith("f8emu.cast"))

    def gemms(self) -> int:
        return self.counts.get("aten.mm.default", 0)

    def amaxes(self) -> int:
        return sum(self.counts.get(name, 0) for name in ("aten.max.default", "f8emu.row_amax.default"))
