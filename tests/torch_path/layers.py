"""Shared by tests of layers: tensors, layers, a forward and backward pass, and a count of its operators."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import f8emu.torch as f8
from f8emu.spec import Granularity, Recipe


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers, each of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def draw_codes(*shape: int, seed: int) -> Tensor:
    return f8.cast(draw(*shape, seed=seed, dtype=torch.float32), "float8_e4m3fn")


def gemm_operands(pair: tuple[Granularity, Granularity], m: int, n: int, k: int) -> tuple[Tensor, ...]:
    """a, b, scale_a and scale_b of a GEMM. Scales differ in magnitude too, so that none hides an index error."""
    sizes = pair[0].scale_shape(m, k), pair[1].scale_shape(n, k)
    scale_a, scale_b = (draw(*size, seed=seed, dtype=torch.float32).abs() for seed, size in enumerate(sizes, 3))
    return draw_codes(m, k, seed=1), draw_codes(n, k, seed=2).t(), scale_a, scale_b.t().contiguous()


COPIED = ("padded rows", "padded by 8", "misaligned", "every other row")
"""Layouts of codes that a GEMM has to copy, or may."""


def laid_out(codes: Tensor, layout: str) -> Tensor:
    """The codes [rows, K] in such a layout."""
    rows, k = codes.shape

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=codes.device).view(codes.dtype)

    places = {
        "padded rows": lambda: empty(rows, k + 16)[:, :k],
        "padded by 8": lambda: empty(rows, k + 8)[:, :k],
        "misaligned": lambda: empty(rows * k + 1)[1:].view(rows, k),
        "every other row": lambda: empty(2 * rows, k)[::2],
    }
    return places[layout]().copy_(codes)


def layer_of(recipe: Recipe, n: int, k: int, dtype: torch.dtype, *, bias: bool = True) -> f8.Float8Linear:
    layer = f8.Float8Linear(k, n, bias, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(draw(n, k, seed=1, dtype=torch.float32) / 8)
        if bias:
            layer.bias.copy_(draw(n, seed=2, dtype=torch.float32))
    return layer


def both_passes(call: Any, *inputs: Tensor, grad: Tensor, parameters: Iterable[Any] = ()) -> list[Any]:
    """The output of a call, and the gradients of its inputs, in memory of their own, and of parameters."""
    leaves, parameters = [x.detach().clone().requires_grad_() for x in inputs], list(parameters)
    for parameter in parameters:
        parameter.grad = None
    output = call(*leaves)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves), *(parameter.grad for parameter in parameters)]


def passes(layer: Any, x: Tensor, grad_output: Tensor) -> list[Tensor]:
    """output, grad_input, grad_weight."""
    return both_passes(layer, x, grad=grad_output, parameters=[layer.weight])


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
