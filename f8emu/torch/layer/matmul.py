"""One GEMM of a recipe on operands of any sizes, and the three of a linear layer as one autograd function.

    output      = cast(input)         @ cast(weight)^T        forward
    grad_input  = cast(grad_output)   @ cast(weight^T)^T      backward
    grad_weight = cast(grad_output^T) @ cast(input^T)^T       backward

Saved for the backward pass: the codes of `input^T` with their scale (or `input^T` in bfloat16, if the recipe keeps
`grad_weight` in high precision), the weight, and the amax or the scales of its second cast (`WeightSource`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import MX_BLOCK, Granularity
from f8emu.split_k.gemm import unsplit_rows
from f8emu.torch.casts.operand import Delayed, DelayedStates, Operand, rounded
from f8emu.torch.casts.sharded import sum_products
from f8emu.torch.casts.shared_input import checkpointed_region
from f8emu.torch.chip import CHIP
from f8emu.torch.gemm import operators
from f8emu.torch.layer.casts import (
    InputOperands,
    LayerPlan,
    WeightSource,
    cast_grad_output,
    cast_weight,
    cast_weight_again,
)
from f8emu.torch.layer.observers import Tap, show_gemm, show_tensor
from f8emu.torch.layer.split_backward import part_of_backward
from f8emu.torch.library import differentiable_once, fake, is_known, operator
from f8emu.torch.torch_internals import Function, compiles_backward

# Each row has scales of its own.
_OF_ROWS = (Granularity.ROWWISE, Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X32)


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
    takes no part in the accumulation [ACC-1], [ACC-2], and where it does [BF16-1], [MX-3], a short step has such zeros
    by itself. `split_k` as for `scaled_mm`.

    Shapes:
        a.codes [M, K], b.codes [N, K] -> [M, N] of dtype.
    """
    m, k = a.codes.shape
    n = b.codes.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros((m, n), dtype=dtype, device=a.codes.device)
    # 1. Pad K and N, and M where scales of rows of 128 are read as vectors [EPI-5].
    granularity_a, granularity_b = spec.scaled_gemm_granularities
    multiple_of_k = MX_BLOCK if granularity_a is Granularity.BLOCKWISE_1X32 else CHIP.size_multiple
    pad_k, pad_n = _to_multiple(k, multiple_of_k), _to_multiple(n, CHIP.size_multiple)
    pad_m, fewest = 0, 1 if spec.split_k else unsplit_rows(1, n + pad_n, k)
    if fewest > 1 and a.codes.is_cuda:  # rows of zeros, with which the library does not split K
        pad_m = max(fewest - m, 0)
    elif fewest > 1:
        split_k = 1
    if granularity_a is Granularity.BLOCKWISE_1X128:
        pad_m += _to_multiple(m + pad_m, CHIP.vector_multiple)
    padded_a, padded_b = a.codes, b.codes
    if not is_known(pad_m + pad_n + pad_k == 0):
        padded_a, padded_b = operators.padded(padded_a, pad_m, pad_k), operators.padded(padded_b, pad_n, pad_k)
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


def _padded_scale(operand: Operand, granularity: Granularity, rows: int) -> Tensor:
    codes, scale = operand
    assert scale is not None, "a float8 operand has one"
    if granularity is Granularity.ROWWISE and scale.shape[0] != codes.shape[0]:  # a tensorwise one
        scale = scale.expand(codes.shape[0], 1).contiguous()
    if granularity not in _OF_ROWS or is_known(rows == 0):
        return scale
    if granularity is Granularity.BLOCKWISE_1X32:
        return operators.padded_scales(scale, rows)
    return pad(scale, (0, 0, 0, rows))


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
    if not torch.is_grad_enabled():
        return output + rounded(bias, output.dtype)
    return output + _Spread.apply(bias, output.shape[0], output.dtype)


@operator(tags=(torch.Tag.needs_exact_strides,))
def sum_of_rows(x: Tensor) -> Tensor:
    """`x` [M, N] summed to [N], as autograd sums the gradient of what was added to every row."""
    # A custom operator: a compiler would add in another order, which also depends on what it fuses. aten's order
    # depends on strides, so these must be those of eager code. Under CUDA's autocast it would give a float32 sum.
    with torch.autocast(x.device.type, enabled=False):
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


def float8_matmul(
    input: Tensor, weight: Tensor, x: InputOperands, plan: LayerPlan, delayed: DelayedStates, tap: Tap | None
) -> Tensor:
    """`input @ weight^T` under a recipe, differentiable; of `input` only the place in the autograd graph counts.

    Shapes:
        input [M, K], weight [N, K] in its own dtype -> [M, N] in the dtype of input.

    Exactness: every code, scale and product equals that of `f8ref.numpy.linear`, on Hopper and emulated.
    """
    _, of_weight, of_grad_output = delayed
    is_saved = torch.is_grad_enabled()
    is_recomputed = is_saved and (torch.compiler.is_compiling() or checkpointed_region() is not None)
    # 1. The operand of the weight, and the product: it goes into the autograd function as an argument. Not where it is
    #    recomputed: there everything is saved first, since activation checkpointing stops once all is saved again, so
    #    that the region's last product is not recomputed. Nor is it computed inside of the autograd function, where
    #    torch 2.11 would save it in a compiled checkpointed region.
    with torch.no_grad():
        w, source = cast_weight(weight, plan, of_weight)
        product = None if is_recomputed else _product(x.output, w, plan, input.dtype, tap)
    if not is_saved:
        assert product is not None, "it is not recomputed"
        return product
    # 2. What the backward pass needs for `grad_weight` and `grad_input`.
    kept: Any = (None, None) if x.grad_weight is None else x.grad_weight
    output = Float8Backward.apply(input, weight, *kept, *source, plan, of_weight, of_grad_output, product, tap)
    # 3. The product where it is recomputed.
    if is_recomputed:
        with torch.no_grad():
            product = _product(x.output, w, plan, input.dtype, tap)
        output = Output.apply(output, product)
    return output


def multiply(name: str, a: Operand, b: Operand, plan: LayerPlan, dtype: torch.dtype, tap: Tap | None) -> Tensor:
    """The GEMM of that name of the recipe, which observers are shown."""
    product = gemm(a, b, getattr(plan.recipe, name), dtype, plan.engine, plan.recipe.chip)
    show_gemm(tap, name, a, b, product)
    return product


def _product(x: Operand, w: Operand, plan: LayerPlan, dtype: torch.dtype, tap: Tap | None) -> Tensor:
    product = multiply("output", x, w, plan, dtype, tap)
    return product if plan.shards is None else sum_products(product, plan.shards)


class Output(Function):
    """Puts a product into the autograd graph at `place`, the placeholder that `Float8Backward` returned for it."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, product: Tensor) -> Tensor:
        return product.detach()  # not a view, so it can be modified in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, None)


class Float8Backward(Function):
    """`grad_input` and `grad_weight` of a product; returns a placeholder if the product is computed later."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        kept: Tensor | None,
        kept_scale: Tensor | None,
        w_amax: Tensor | None,
        w_inv_scale: Tensor | None,
        w_scale: Tensor | None,
        w_codes: Tensor | None,
        plan: LayerPlan,
        of_weight: Delayed | None,
        of_grad_output: Delayed | None,
        product: Tensor | None,
        tap: Tap | None,
    ) -> Tensor:
        saved_weight = weight if w_codes is None else None
        # Amaxes are written in the backward pass, so they are not saved tensors, but where a compiler takes the pass
        # along: there torch (2.13 to 2.15) loses all others. Nor is the id of the call: a checkpoint that runs the
        # forward pass again would save another.
        states: tuple[Any, ...] = of_weight, of_grad_output
        of_states: list[Tensor] = []
        if torch.compiler.is_compiling() and compiles_backward():
            of_states = [x for state in states if state is not None for x in state[:2]]
            states = tuple([state and state[2:] for state in states])
        ctx.save_for_backward(kept, kept_scale, saved_weight, w_amax, w_inv_scale, w_scale, w_codes, *of_states)
        ctx.plan, ctx.dtype, ctx.states = plan, input.dtype, states
        ctx.weight_dtype, ctx.tap = weight.dtype, tap
        if product is not None:
            return product.detach()  # not a view, so it can be modified in place
        m = input.shape[0] if plan.shards is None else plan.shards.output_rows(input.shape[0])
        return input.new_empty(1, 1).expand(m, weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_output,), (kept, kept_scale, weight, *source) = grads, ctx.saved_tensors
        (of_weight, of_grad_output), source, of_states = ctx.states, source[:4], source[4:]
        if of_states:
            of_weight = of_weight and Delayed(*of_states[:2], *of_weight)
            of_grad_output = of_grad_output and Delayed(*of_states[-2:], *of_grad_output)
        plan, tap, dtype = ctx.plan, ctx.tap, ctx.dtype
        # 1. Both operands of grad_output.
        show_tensor(tap, "grad_output", grad_output, is_delayed=True)
        (for_input, for_weight, *_), states = part_of_backward(ctx, grads, (of_weight, of_grad_output))
        g, g_transposed = cast_grad_output(grad_output, plan, states[1], for_input, for_weight and kept is not None)
        d_input = d_weight = None
        # 2. grad_input.
        if g is not None:
            w = cast_weight_again(weight, WeightSource(*source), plan, states[0], grad_output)
            d_input = multiply("grad_input", g, w, plan, dtype, tap)
            g = w = None  # frees their memory for the other product
        # 3. grad_weight.
        if g_transposed is not None and kept is not None:
            d_weight = multiply("grad_weight", g_transposed, Operand(kept, kept_scale), plan, dtype, tap)
            d_weight = d_weight.to(ctx.weight_dtype)
        return d_input, d_weight, *(None,) * 11
