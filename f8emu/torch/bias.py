"""The bias of a layer: rounded to the dtype of the output, then added to it, as torchao does."""

from typing import Any

import torch
from torch import Tensor

from f8emu.torch.library import differentiable_once, fake, is_exporting, operator


def add_bias(output: Tensor, bias: Tensor) -> Tensor:
    """`output + bias` in the dtype of `output`: a bias of another dtype is rounded first.

    Its gradient is the sum of grad_output over rows as aten adds them, rounded to the dtype of `output`.

    Shapes:
        output [M, N], bias [N] -> [M, N].

    Exactness: the output is that of `f8ref.numpy.linear`, eager and compiled. The gradient has the same bits eager and
    compiled, where grad_output has the same strides: a compiler makes one contiguous that enters a graph. Where the sum
    rounds, they are those of the device's kernel, as nn.Linear's are.
    """
    if is_exporting():  # a forward pass alone
        return output + rounded(bias.detach(), output.dtype)
    return output + _Spread.apply(bias, output.shape[0], output.dtype)


@operator()
def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype.

    A custom operator: a compiler drops an ordinary rounding between two operations that it fuses.
    """
    return x.to(dtype, copy=True)


@fake(rounded)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@operator(tags=(torch.Tag.needs_exact_strides,))
def sum_of_rows(x: Tensor) -> Tensor:
    """`x` [M, N] summed to [N], as autograd sums the gradient of what was added to every row.

    A custom operator: a compiler would add in another order, which also depends on what it fuses. aten's order depends
    on strides, so these must be those of eager code.
    """
    return x.sum(0)


@fake(sum_of_rows)
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


class _Spread(torch.autograd.Function):
    """The bias, rounded, in each of so many rows. autograd alone would let a compiler sum the gradient in its order."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        ctx.dtype = bias.dtype
        return rounded(bias, dtype).expand(rows, -1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = sum_of_rows(grads[0])
        return total if total.dtype is ctx.dtype else rounded(total, ctx.dtype), None, None
