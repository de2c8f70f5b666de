"""One GEMM of a recipe on operands of any sizes, and the bias that is added to it.

This is the one place where torch's GEMMs are padded.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity
from f8emu.torch.dtypes import CHIP
from f8emu.torch.gemm import operators
from f8emu.torch.layer.operands import Operand
from f8emu.torch.library import differentiable_once, fake, is_exporting, is_known, operator
from f8emu.torch.torch_internals import Function


def gemm(
    a: Operand,
    b: Operand,
    spec: Gemm,
    dtype: torch.dtype,
    engine: str,
    chip: str = CHIP.name,
    *,
    split_k: int | None = None,
) -> Tensor:
    """`a @ b^T` as one GEMM of the recipe, of any sizes.

    K and N are zero-padded to the multiples that the tensor core takes; results are bit-identical, since a zero product
    takes no part in the accumulation [ACC-1], [ACC-2]. `split_k` as for `scaled_mm`.

    Shapes:
        a.codes [M, K], b.codes [N, K] -> [M, N] of dtype.
    """
    m, k = a.codes.shape
    n = b.codes.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=dtype, device=a.codes.device)
    # 1. Pad K and N, and M where scales of rows of 128 are read as vectors [EPI-5].
    granularity_a, granularity_b = spec.a.granularity, spec.b.granularity
    if Granularity.ROWWISE in (
        granularity_a,
        granularity_b,
    ):  # `scaled_gemm_granularities`, as Dynamo 2.11 can trace it
        granularity_a = granularity_b = Granularity.ROWWISE
    pad_k, pad_n = _to_multiple(k, CHIP.size_multiple), _to_multiple(n, CHIP.size_multiple)
    pad_m = _to_multiple(m, CHIP.vector_multiple) if granularity_a is Granularity.BLOCKWISE_1X128 else 0
    padded_a, padded_b = _padded(a.codes, pad_m, pad_k), _padded(b.codes, pad_n, pad_k)
    # 2. Multiply.
    if spec.a.format is None:
        product = operators.mm(padded_a, padded_b.t(), dtype, engine, split_k, chip)
    else:
        scale_a, scale_b = _padded_scale(a, granularity_a, pad_m), _padded_scale(b, granularity_b, pad_n)
        scales = scale_a, scale_b if granularity_b is Granularity.TENSORWISE else scale_b.t()
        names = granularity_a.value, granularity_b.value
        options = dtype, spec.use_fast_accum, engine, *names, split_k, chip
        product = operators.scaled_mm(padded_a, padded_b.t(), *scales, None, *options)
    # 3. Leave the padding out.
    return _first_of(product, m, n)


def _to_multiple(size: int, multiple: int) -> int:
    # What `size` lacks of a multiple; not `-size % multiple`: of this sum a compiler knows that it is one.
    return -(-size // multiple) * multiple - size


def _padded(codes: Tensor, rows: int, cols: int) -> Tensor:
    if is_known(rows + cols == 0):
        return codes
    if codes.dtype is torch.bfloat16:
        return pad(codes, (0, cols, 0, rows))
    return pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def _padded_scale(operand: Operand, granularity: Granularity, rows: int) -> Tensor:
    codes, scale = operand
    assert scale is not None, "a float8 operand has one"
    if granularity is Granularity.ROWWISE and scale.shape[0] != codes.shape[0]:  # a tensorwise one
        scale = scale.expand(codes.shape[0], 1).contiguous()
    has_own = granularity in (Granularity.ROWWISE, Granularity.BLOCKWISE_1X128)  # every row has one
    return pad(scale, (0, 0, 0, rows)) if has_own and not is_known(rows == 0) else scale


def _first_of(product: Tensor, m: int, n: int) -> Tensor:
    # A separate tensor, not a view of the first rows: compiled on CUDA (torch 2.11), a gradient that was such a view
    # came out as zeros.
    rows, columns = product.shape
    if is_known(rows == m) and is_known(columns == n):
        return product
    if is_known(rows >= m) and is_known(columns >= n):
        return product[:m, :n].clone(memory_format=torch.contiguous_format)
    # Of a symbolic M a slice would add the guard that the product is no shorter.
    chosen = (torch.arange(size, device=product.device) for size in (m, n))
    return product.index_select(0, next(chosen)).index_select(1, next(chosen))


def add_bias(output: Tensor, bias: Tensor) -> Tensor:
    """`output + bias` in the dtype of `output`: a bias of another dtype is rounded first, as torchao does.

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
    """`x` in another dtype."""
    # A custom operator: a compiler drops an ordinary rounding between two operations that it fuses.
    return x.to(dtype, copy=True)


@fake(rounded)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@operator(tags=(torch.Tag.needs_exact_strides,))
def sum_of_rows(x: Tensor) -> Tensor:
    """`x` [M, N] summed to [N], as autograd sums the gradient of what was added to every row."""
    # A custom operator: a compiler would add in another order, which also depends on what it fuses. aten's order
    # depends on strides, so these must be those of eager code.
    return x.sum(0)


@fake(sum_of_rows)
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


class _Spread(Function):
    """The bias, rounded, in each of so many rows. autograd alone would let a compiler sum the gradient in its order."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        ctx.dtype = bias.dtype
        return rounded(bias, dtype).expand(rows, -1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = sum_of_rows(grads[0])
        return total if total.dtype is ctx.dtype else rounded(total, ctx.dtype), None, None
