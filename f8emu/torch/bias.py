"""The bias of a layer: rounded to the dtype of the output, then added to it, as torchao does."""

from typing import Any

import torch
from torch import Tensor

from f8emu.torch.library import fake, operator


def add_bias(output: Tensor, bias: Tensor) -> Tensor:
    """`output + bias` in the dtype of `output`: a bias of another dtype is rounded first.

    Shapes:
        output [M, N], bias [N] -> [M, N].

    Exactness: that of `f8ref.numpy.linear`, eager and compiled.
    """
    if bias.dtype is output.dtype:
        return output + bias
    if torch.compiler.is_exporting():  # a forward pass alone
        return output + rounded(bias.detach(), output.dtype)
    return output + _Rounded.apply(bias, output.dtype)


@operator()
def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype.

    A custom operator: a compiler drops an ordinary rounding between two operations that it fuses.
    """
    return x.to(dtype)


@fake(rounded)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = bias.dtype
        return rounded(bias, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rounded(grads[0], ctx.dtype), None  # rounds the sum over rows, eager and compiled
