"""The three GEMMs and six casts of a linear layer, as one autograd function.

    output      = cast(input)         @ cast(weight)^T        forward
    grad_input  = cast(grad_output)   @ cast(weight^T)^T      backward
    grad_weight = cast(grad_output^T) @ cast(input^T)^T       backward

Saved for the backward pass: the codes of `input^T` with their scale (or `input^T` in bfloat16, if the recipe keeps
`grad_weight` in high precision), the weight, and the amax for its second cast (or its scales, under delayed scaling).
Both casts of the input are made in the forward pass, both casts of `grad_output` in the backward pass, each pair from
one reading. The weight is cast before each of its two GEMMs: no float8 copy of it lives in between.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.recipe import Cast, Gemm, Recipe
from f8emu.spec.scaling import Granularity
from f8emu.spec.trace import Scales
from f8emu.torch.dtypes import CHIP
from f8emu.torch.fused.columns import transpose_codes
from f8emu.torch.fused.delayed import note_cast
from f8emu.torch.gemm import operators as gemm_operators
from f8emu.torch.gemm.checks import SIZE_MULTIPLE, VECTOR_MULTIPLE
from f8emu.torch.launch_sequence import repeatable
from f8emu.torch.layer.operands import (
    Delayed,
    DelayedStates,
    Operand,
    ScaleSource,
    cast_both,
    cast_delayed,
    cast_rows_first,
    find_source,
    format_name,
)
from f8emu.torch.layer.taps import Tap, show_gemm, show_tensor
from f8emu.torch.library import differentiable_once, is_exporting, is_known
from f8emu.torch.parallel.sharding import (
    Layout,
    Shards,
    cast_sharded,
    cast_sharded_weight,
    global_delayed,
    sum_products,
)
from f8emu.torch.scale import scale_of_rows
from f8emu.torch.torch_internals import Function, top_saved_tensors_hooks
from f8emu.torch.weights.coded_weight import CodedWeight, require_gathered


class Plan(NamedTuple):
    """The settings of a call, which do not depend on the values of its tensors."""

    recipe: Recipe
    engine: str
    keeps_input: bool
    """Whether `grad_weight` will be computed; if not, the input is cast only for `output` and nothing is saved."""
    recompute_casts: bool = False
    """Whether compiled code may repeat the cast of the input in the backward pass instead of saving its codes."""
    layout: Layout | None = None
    """How the matrices are sharded under tensor parallelism."""


class InputOperands(NamedTuple):
    """Both casts of a layer's input; layers with the same input and plan share them."""

    output: Operand
    grad_weight: Operand | None
    gathered: Tensor | None = None
    """The place in the autograd graph of an input that was gathered as float8."""


@repeatable
def cast_input(input: Tensor, plan: Plan, delayed: Delayed | None = None) -> InputOperands:
    """The operands of `output` and `grad_weight` that a layer casts from its input [M, K]."""
    recipe = plan.recipe
    cols = recipe.grad_weight.b if plan.keeps_input else None
    shards = None if plan.layout is None else plan.layout.input
    output, grad_weight = _cast_produced(input, recipe.output.a, cols, recipe, delayed, plan.recompute_casts, shards)
    assert output is not None, "it was requested"
    return InputOperands(output, grad_weight)


@repeatable
def cast_weight(weight: Tensor, recipe: Recipe, delayed: Delayed | None) -> tuple[Operand, ScaleSource]:
    """The operand of `output` that a layer casts from its weight, and the source of the scales of the other."""
    rows, cols = recipe.output.b, recipe.grad_input.b
    if delayed is None:
        return cast_rows_first(weight, rows, cols, recipe.scale_rule)
    w, _, source = cast_delayed(weight, rows, None, delayed, recipe.scale_rule)
    assert w is not None, "it was requested"
    return w, source


@repeatable
def cast_and_multiply(
    weight: Tensor, x: Operand, plan: Plan, delayed: Delayed | None, dtype: torch.dtype, tap: Tap | None
) -> tuple[Tensor, ScaleSource]:
    """`output` of dtype, by the operand of an input; and the source of the weight's other scales."""
    w, source = cast_weight(weight, plan.recipe, delayed)
    return _product(x, w, plan, dtype, tap), source


def float8_matmul(
    input: Tensor,
    weight: Tensor,
    plan: Plan,
    shared: InputOperands | None,
    delayed: DelayedStates | None,
    tap: Tap | None,
) -> Tensor:
    """`input @ weight^T` under a recipe, differentiable.

    Shapes:
        input [M, K], weight [N, K] -> [M, N] in the dtype of input.

    Exactness: every code, scale and product equals that of `f8ref.numpy.linear`, on Hopper and emulated.

    Args:
        input: in high precision.
        weight: in its own dtype.
        plan: recipe and engine.
        shared: the operands of `input`, if another layer has cast it already.
        delayed: the state of input, weight and grad_output under delayed scaling.
        tap: where observers watch.
    """
    recipe = plan.recipe
    of_input, of_weight, of_grad_output = (None, None, None) if delayed is None else delayed
    is_compiling = torch.compiler.is_compiling()
    is_exported = is_exporting()
    if is_exported:  # a forward pass alone; by detached tensors, since torch's decompositions lose modes of gradients
        input, weight = input.detach(), weight.detach()
    is_recomputed = not is_exported and (is_compiling or checkpointed_region() is not None)
    with nullcontext() if is_exported else torch.no_grad():
        if tap is not None:
            if plan.layout is None or plan.layout.input.gather is None:  # else the layer shows what it gathers
                show_tensor(tap.forward, "input", input, is_delayed=delayed is not None)
            show_tensor(tap.forward, "weight", weight, is_delayed=delayed is not None)
        # 1. The operands of `output`, and what the backward pass needs for `grad_weight` and `grad_input`.
        x = cast_input(input, plan, of_input) if shared is None else shared
        # 2. The product: it goes into the autograd function as an argument, and `Output` is not needed. Not where it is
        #    recomputed: there everything is saved first, since activation checkpointing stops once all is saved again,
        #    so that the region's last product is not recomputed. Nor is it computed inside of the autograd function,
        #    where torch 2.11 would save it in a compiled checkpointed region.
        gathered = w = product = None
        if isinstance(weight, CodedWeight):
            w, of_weight, source = weight.of_output(), None, ScaleSource()
            gathered = weight.of_grad_input()
        elif plan.layout is not None:
            rows, cols = recipe.output.b, recipe.grad_input.b
            w, source = cast_sharded_weight(weight, rows, cols, recipe.scale_rule, of_weight, plan.layout.weight)
        elif is_recomputed:
            w, source = cast_weight(weight, recipe, of_weight)
        else:
            product, source = cast_and_multiply(weight, x.output, plan, of_weight, input.dtype, tap)
        if w is not None and not is_recomputed:
            product = _product(x.output, w, plan, input.dtype, tap)
    if is_exported and product is not None:
        return product
    kept, kept_scale = (None, None) if x.grad_weight is None else x.grad_weight
    given = (None, None) if source.given is None else source.given
    saved = (kept, kept_scale, source.cols, *given, *((None, None) if gathered is None else gathered))
    output = Float8Backward.apply(input, weight, *saved, plan, of_weight, of_grad_output, product, tap)
    # 3. The product where it is recomputed.
    if product is None:
        assert w is not None, "there is an operand or its product"
        with torch.no_grad():
            product = _product(x.output, w, plan, input.dtype, tap)
        output = Output.apply(output, product)
    return output


def _product(x: Operand, w: Operand, plan: Plan, dtype: torch.dtype, tap: Tap | None) -> Tensor:
    """`output`, summed over ranks where the layout says so; to be called without recording gradients."""
    product = gemm(x, w, plan.recipe.output, dtype, plan.engine, plan.recipe.chip)
    if tap is not None:
        show_gemm(tap.forward, "output", x, w, product)
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
        gathered: Tensor | None,
        gathered_scale: Tensor | None,
        plan: Plan,
        of_weight: Delayed | None,
        of_grad_output: Delayed | None,
        product: Tensor | None,
        tap: Tap | None,
    ) -> Tensor:
        """Save what the backward pass needs."""
        own = weight if gathered is None else None
        ctx.save_for_backward(kept, kept_scale, own, w_amax, w_inv_scale, w_scale, gathered, gathered_scale)
        # Amaxes are written in the backward pass, so they are not saved tensors.
        ctx.plan, ctx.dtype, ctx.of_weight, ctx.of_grad_output = plan, input.dtype, of_weight, of_grad_output
        ctx.weight_dtype, ctx.tap = weight.dtype, tap
        if product is not None:
            return product.detach()  # not a view, so it can be modified in place
        m = input.shape[0] if plan.layout is None else plan.layout.output_rows(input.shape[0])
        return input.new_empty(1, 1).expand(m, weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Cast grad_output and weight, multiply twice."""
        (grad_output,) = grads
        saved, settings = ctx.saved_tensors, (ctx.dtype, ctx.needs_input_grad[0], ctx.tap)
        d_input, d_weight = gradients(grad_output, saved, ctx.plan, ctx.of_weight, ctx.of_grad_output, *settings)
        return d_input, None if d_weight is None else d_weight.to(ctx.weight_dtype), *(None,) * 12


@repeatable
def gradients(
    grad_output: Tensor,
    saved: tuple[Tensor | None, ...],
    plan: Plan,
    of_weight: Delayed | None,
    of_grad_output: Delayed | None,
    dtype: torch.dtype,
    wants_input: bool,
    tap: Tap | None,
) -> tuple[Tensor | None, Tensor | None]:
    """`grad_input` and `grad_weight` of dtype, from what `Float8Backward` saved; None where not wanted."""
    kept, kept_scale, weight, w_amax, w_inv_scale, w_scale, gathered, gathered_scale = saved
    recipe, engine = plan.recipe, plan.engine
    if tap is not None:
        show_tensor(tap.backward, "grad_output", grad_output, is_delayed=True)
    wants_weight = kept is not None
    rows = recipe.grad_input.a if wants_input else None
    cols = recipe.grad_weight.a if wants_weight else None
    shards = None if plan.layout is None else plan.layout.grad_output
    delayed = None if recipe.delayed_scaling_of("grad_output") is None else of_grad_output
    if of_grad_output is not None and (delayed is None or format_name(rows, cols) is None):
        note_cast(of_grad_output.amax, of_grad_output.inv_scale)  # no cast of the gradient does
    g, g_transposed = _cast_produced(grad_output, rows, cols, recipe, delayed, shards=shards)
    d_input = d_weight = None
    if g is not None:
        cols = recipe.grad_input.b
        if gathered is not None:
            require_gathered(gathered)
            w = Operand(transpose_codes(gathered, grad_output), gathered_scale)
        elif of_weight is not None and w_scale is None:  # its first cast
            assert weight is not None, "it was saved"
            if plan.layout is not None:
                of_weight = global_delayed(weight, cols, recipe.scale_rule, of_weight, plan.layout.weight)
            _, w, _ = cast_delayed(weight, None, cols, of_weight, recipe.scale_rule)
        else:
            assert weight is not None, "it was saved"
            given = None if w_inv_scale is None or w_scale is None else Scales(w_inv_scale, w_scale)
            _, w = cast_both(weight, None, cols, ScaleSource(cols=w_amax, given=given), recipe.scale_rule)
        assert w is not None, "it was requested"
        d_input = gemm(g, w, recipe.grad_input, dtype, engine, recipe.chip)
        if tap is not None:
            show_gemm(tap.backward, "grad_input", g, w, d_input)
        g = w = None  # frees their memory for the other product
    if g_transposed is not None:
        assert kept is not None, "the input's operand was saved"
        kept_operand = Operand(kept, kept_scale)
        d_weight = gemm(g_transposed, kept_operand, recipe.grad_weight, dtype, engine, recipe.chip)
        if tap is not None:
            show_gemm(tap.backward, "grad_weight", g_transposed, kept_operand, d_weight)
    return d_input, d_weight


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
    pad_k, pad_n = _to_multiple(k, SIZE_MULTIPLE), _to_multiple(n, SIZE_MULTIPLE)
    if spec.a.format is None:
        padded_a, padded_b = _padded(a.codes, 0, pad_k), _padded(b.codes, pad_n, pad_k)
        product = gemm_operators.mm(padded_a, padded_b.t(), dtype, engine, split_k, chip)
        return _first_of(product, m, n)
    granularity_a, granularity_b = _granularities(spec)
    pad_m = _to_multiple(m, VECTOR_MULTIPLE) if granularity_a is Granularity.BLOCKWISE_1X128 else 0
    padded_a, padded_b = _padded(a.codes, pad_m, pad_k), _padded(b.codes, pad_n, pad_k)
    product = gemm_operators.scaled_mm(
        padded_a,
        padded_b.t(),
        _padded_scale(a, granularity_a, pad_m),
        _padded_scale(b, granularity_b, pad_n).t() if granularity_b is not Granularity.TENSORWISE else b.scale,
        None,
        dtype,
        spec.use_fast_accum,
        engine,
        granularity_a.value,
        granularity_b.value,
        split_k,
        chip,
    )
    return _first_of(product, m, n)


def _cast_produced(
    x: Tensor,
    rows: Cast | None,
    cols: Cast | None,
    recipe: Recipe,
    delayed: Delayed | None,
    recompute: bool = False,
    shards: Shards | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Both casts of an activation or a gradient."""
    rule = recipe.scale_rule
    if shards is not None:
        return cast_sharded(x, rows, cols, rule, delayed, shards, recompute=recompute)
    if delayed is not None:
        row_operand, col_operand, _ = cast_delayed(x, rows, cols, delayed, rule)
        return row_operand, col_operand
    is_single = cols is None or cols.format is None
    if is_single and rows is not None and rows.format is not None and rows.granularity is Granularity.ROWWISE:
        operand, _ = cast_rows_first(x, rows, cols, rule)
        _, transposed = cast_both(x, None, cols, ScaleSource(), rule)
        return operand, transposed
    source = find_source(x, rows, cols, tiled=rule.power_of_two)
    return cast_both(x, rows, cols, source, rule, recompute=recompute)


def _granularities(spec: Gemm) -> tuple[Granularity, Granularity]:
    """`Gemm.scaled_gemm_granularities`, written so that Dynamo 2.11 can trace it."""
    a, b = spec.a.granularity, spec.b.granularity
    if Granularity.ROWWISE in (a, b):
        return Granularity.ROWWISE, Granularity.ROWWISE
    return a, b


def _to_multiple(size: int, multiple: int) -> int:
    """What `size` lacks of a multiple; not `-size % multiple`: of this sum a compiler knows that it is one."""
    return -(-size // multiple) * multiple - size


def _padded(codes: Tensor, rows: int, cols: int) -> Tensor:
    """The codes, zero-padded by `rows` rows and `cols` columns."""
    if is_known(rows + cols == 0):
        return codes
    if codes.dtype is torch.bfloat16:
        return pad(codes, (0, cols, 0, rows))
    return pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def _padded_scale(operand: Operand, granularity: Granularity, rows: int) -> Tensor:
    """The operand's scale at the GEMM's granularity, zero-padded by `rows` rows if every row has its own scale."""
    assert operand.scale is not None, "a float8 operand has a scale"
    scale = scale_of_rows(operand.scale, operand.codes, granularity)
    has_own = granularity in (Granularity.ROWWISE, Granularity.BLOCKWISE_1X128)
    return pad(scale, (0, 0, 0, rows)) if has_own and not is_known(rows == 0) else scale


def _first_of(product: Tensor, m: int, n: int) -> Tensor:
    """The product without its padding, as a separate tensor.

    Not a view of the first rows: compiled on CUDA (torch 2.11), a gradient that was such a view came out as zeros.
    """
    rows, columns = product.shape
    if is_known(rows == m) and is_known(columns == n):
        return product
    if is_known(rows >= m) and is_known(columns >= n):
        return product[:m, :n].clone(memory_format=torch.contiguous_format)
    # Of a symbolic M a slice would add the guard that the product is no shorter.
    chosen = (torch.arange(size, device=product.device) for size in (m, n))
    return product.index_select(0, next(chosen)).index_select(1, next(chosen))


def checkpointed_region() -> Any:
    """The activation checkpoint that this call is in, or None.

    A checkpointed region is recomputed as a whole, so it must not share casts with code outside of it.
    """
    hooks = top_saved_tensors_hooks(True)
    return None if hooks is None else hooks[0]
