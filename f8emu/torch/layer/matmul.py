"""The three GEMMs of a linear layer as one autograd function.

    output      = cast(input)         @ cast(weight)^T        forward
    grad_input  = cast(grad_output)   @ cast(weight^T)^T      backward
    grad_weight = cast(grad_output^T) @ cast(input^T)^T       backward

Saved for the backward pass: the codes of `input^T` with their scale (or `input^T` in bfloat16, if the recipe keeps
`grad_weight` in high precision), the weight, and the amax or the scales of its second cast (`WeightSource`).
"""

from typing import Any

import torch
from torch import Tensor

from f8emu.torch.layer.casts import (
    InputOperands,
    LayerPlan,
    WeightSource,
    cast_grad_output,
    cast_weight,
    cast_weight_again,
    checkpointed_region,
)
from f8emu.torch.layer.gemm import gemm
from f8emu.torch.layer.observers import Tap, show_gemm, show_tensor
from f8emu.torch.layer.operands import Delayed, DelayedStates, Operand
from f8emu.torch.library import differentiable_once, is_exporting, no_gradients
from f8emu.torch.parallel.sharding import sum_products
from f8emu.torch.torch_internals import Function


def float8_matmul(
    input: Tensor, weight: Tensor, x: InputOperands, plan: LayerPlan, delayed: DelayedStates, tap: Tap | None
) -> Tensor:
    """`input @ weight^T` under a recipe, differentiable; of `input` only the place in the autograd graph counts.

    Shapes:
        input [M, K], weight [N, K] in its own dtype -> [M, N] in the dtype of input.

    Exactness: every code, scale and product equals that of `f8ref.numpy.linear`, on Hopper and emulated.
    """
    _, of_weight, of_grad_output = delayed
    is_exported = is_exporting()
    is_recomputed = not is_exported and (torch.compiler.is_compiling() or checkpointed_region() is not None)
    # 1. The operand of the weight, and the product: it goes into the autograd function as an argument. Not where it is
    #    recomputed: there everything is saved first, since activation checkpointing stops once all is saved again, so
    #    that the region's last product is not recomputed. Nor is it computed inside of the autograd function, where
    #    torch 2.11 would save it in a compiled checkpointed region.
    with no_gradients():
        w, source = cast_weight(weight.detach() if is_exported else weight, plan, of_weight)
        product = None if is_recomputed else _product(x.output, w, plan, input.dtype, tap)
    if is_exported:  # a forward pass alone
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


def _product(x: Operand, w: Operand, plan: LayerPlan, dtype: torch.dtype, tap: Tap | None) -> Tensor:
    product = gemm(x, w, plan.recipe.output, dtype, plan.engine, plan.recipe.chip)
    if tap is not None:
        show_gemm(tap, "output", x, w, product)
    return product if plan.layout is None else sum_products(product, plan.layout)


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
        own = weight if w_codes is None else None
        ctx.save_for_backward(kept, kept_scale, own, w_amax, w_inv_scale, w_scale, w_codes)
        # Amaxes are written in the backward pass, so they are not saved tensors. Nor is the id of the call: a
        # checkpoint that runs the forward pass again would save another.
        ctx.plan, ctx.dtype, ctx.of_weight, ctx.of_grad_output = plan, input.dtype, of_weight, of_grad_output
        ctx.weight_dtype, ctx.tap = weight.dtype, tap
        if product is not None:
            return product.detach()  # not a view, so it can be modified in place
        m = input.shape[0] if plan.layout is None else plan.layout.output_rows(input.shape[0])
        return input.new_empty(1, 1).expand(m, weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_output,), (kept, kept_scale, weight, *source) = grads, ctx.saved_tensors
        plan, tap, dtype = ctx.plan, ctx.tap, ctx.dtype
        recipe, engine, chip = plan.recipe, plan.engine, plan.recipe.chip
        # 1. Both operands of grad_output.
        show_tensor(tap, "grad_output", grad_output, is_delayed=True)
        wanted = ctx.needs_input_grad[0], kept is not None
        g, g_transposed = cast_grad_output(grad_output, plan, ctx.of_grad_output, *wanted)
        d_input = d_weight = None
        # 2. grad_input.
        if g is not None:
            w = cast_weight_again(weight, WeightSource(*source), plan, ctx.of_weight, grad_output)
            d_input = gemm(g, w, recipe.grad_input, dtype, engine, chip)
            show_gemm(tap, "grad_input", g, w, d_input)
            g = w = None  # frees their memory for the other product
        # 3. grad_weight.
        if g_transposed is not None:
            x = Operand(kept, kept_scale)
            d_weight = gemm(g_transposed, x, recipe.grad_weight, dtype, engine, chip)
            show_gemm(tap, "grad_weight", g_transposed, x, d_weight)
            d_weight = d_weight.to(ctx.weight_dtype)
        return d_input, d_weight, *(None,) * 11
