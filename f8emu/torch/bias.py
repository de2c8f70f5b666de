"""The bias of a layer: rounded to the dtype of the output, then added to it, as torchao does."""

from typing import Any

import torch
from torch import Tensor


def add_bias(output: Tensor, bias: Tensor) -> Tensor:
    """`output + bias` in the dtype of `output`: a bias of another dtype is rounded first.

    Shapes:
        output [M, N], bias [N] -> [M, N].

    Exactness: that of `f8ref.numpy.linear`, eager and compiled.
    """
    return output + (bias if bias.dtype is output.dtype else _Rounded.apply(bias, output.dtype))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = bias.dtype
        return _round(bias, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].to(ctx.dtype), None


@torch.library.custom_op("f8emu::round", mutates_args=())
def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    # An operator of its own: a compiler leaves out an ordinary rounding between two operations that it fuses.
    return x.to(dtype)


@_round.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
