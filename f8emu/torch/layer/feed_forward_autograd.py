"""The fused feed-forward block of `Float8FeedForward`, as one autograd function.

Under a recipe whose scales need no amax of a whole tensor (delayed, blockwise), one kernel reads `gate` and `up` and
writes the codes of `hidden`. In the backward pass, one kernel reads `grad_hidden`, `gate` and `up` and writes the codes
of `grad_gate`, `grad_up` (each also transposed, if needed) and `hidden^T`. None of these three is written in bfloat16.
Saved for the backward pass: `gate`, `up` and the codes of `input^T`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.recipe import Cast, Recipe
from f8emu.spec.scaling import ScaleRule
from f8emu.spec.trace import Scales
from f8emu.torch.fused import silu as fused
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.gemm import gemm
from f8emu.torch.layer.matmul import Output
from f8emu.torch.layer.operands import Delayed, Operand, ScaleSource, cast_both, cast_delayed
from f8emu.torch.layer.taps import Tap, begin_call, observe_gated, show_gemm, show_tensor
from f8emu.torch.library import differentiable_once
from f8emu.torch.torch_internals import Function


class Layers(NamedTuple):
    """The block's layers."""

    w1: Float8Linear
    w2: Float8Linear
    w3: Float8Linear


class _Settings(NamedTuple):
    """What forward and backward need besides the tensors that autograd tracks."""

    recipe: Recipe
    engine: str
    dtype: torch.dtype
    of_gradients: tuple[Delayed | None, ...]
    """State of grad_output of w1, w2, w3. Not saved tensors: the backward pass updates their amaxes in place."""
    taps: tuple[Tap | None, ...]
    """The taps of w1, w2, w3."""


def float8_feed_forward(x1: Tensor, x3: Tensor, layers: Layers) -> Tensor:
    """The fused block on [M, dim]; `x1` and `x3` have the same values."""
    recipe, engine, dtype = layers.w1.recipe, layers.w1.engine, x1.dtype
    w1, w2, w3 = (layer.weight for layer in layers)
    of_inputs, of_weights, of_gradients = _states(layers, x1)
    keep1, _, keep3 = (torch.is_grad_enabled() and layer.weight.requires_grad for layer in layers)
    taps = tuple([begin_call(layer.tap, x1) for layer in layers])
    settings = _Settings(recipe, engine, dtype, of_gradients, taps)
    with torch.no_grad():
        # 1. gate and up. Under delayed scaling w1 and w3 scale the input separately; otherwise they share a cast.
        is_shared = recipe.delayed is None
        a1, kept1 = _cast_input(x1, recipe, keep1 or (is_shared and keep3), of_inputs[0])
        a3, kept3 = (a1, None) if is_shared else _cast_input(x1, recipe, keep3, of_inputs[2])
        gate, of_w1 = _product(a1, w1, of_weights[0], settings, taps[0])
        up, of_w3 = _product(a3, w3, of_weights[2], settings, taps[2])
        hidden, of_hidden = _cast_hidden(gate, up, recipe, of_inputs[1])
        b2, of_w2 = _cast_weight(w2, of_weights[1], recipe)
        _show_forward(taps, x1, (w1, w2, w3), gate, up)
    # 2. As in `float8_matmul`: everything is saved before the last product is computed.
    parts = (kept1, kept3, of_w1, of_w2, of_w3, of_hidden)
    flat = [tensor for pair in parts for tensor in ((None, None) if pair is None else pair)]
    place = _FeedForwardBackward.apply(x1, x3, w1, w2, w3, settings, gate, up, *flat)
    # 3. output.
    with torch.no_grad():
        product = gemm(hidden, b2, recipe.output, dtype, engine, recipe.chip)
        show_gemm(taps[1], "output", hidden, b2, product)
    return Output.apply(place, product)


class _FeedForwardBackward(Function):
    """The gradients of the block. Its forward returns a placeholder; the output is computed outside."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x3: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, settings: _Settings, *kept: Tensor | None
    ) -> Tensor:
        """Save what the backward pass needs."""
        ctx.save_for_backward(w1, w2, w3, *kept)
        ctx.settings, ctx.arguments = settings, 6 + len(kept)
        return x1.new_empty(1, 1).expand(x1.shape[0], w2.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Cast grad_output, compute grad_hidden; cast the gradients of gate and up, compute the other products."""
        w1, w2, w3, gate, up, *flat = ctx.saved_tensors
        pairs = [
            None if second is None else (first, second) for first, second in zip(flat[::2], flat[1::2], strict=True)
        ]
        kept1, kept3, of_w1, of_w2, of_w3, of_hidden = pairs
        settings: _Settings = ctx.settings
        recipe, rule = settings.recipe, settings.recipe.scale_rule
        wants1, wants3, wants_w1, wants_w2, wants_w3 = ctx.needs_input_grad[:5]
        # 1. grad_hidden, and the operands of all other products.
        state = settings.of_gradients[1]
        casts = (recipe.grad_input.a, recipe.grad_weight.a if wants_w2 else None)
        g, g_transposed, _ = _cast(grads[0], *casts, state, rule)
        assert g is not None, "it was requested"
        taps = settings.taps
        grad_hidden = _grad_input(g, w2, of_w2, settings, taps[1])
        wanted = (wants1 or wants3, wants_w1, wants_w3, wants_w2)
        g1, g1_transposed, g3, g3_transposed, hidden = _cast_gradients(
            grad_hidden, gate, up, wanted, None if of_hidden is None else Scales(*of_hidden), settings
        )
        _show_backward(taps, grads[0], grad_hidden, gate, up)
        g = grad_hidden = gate = up = None  # frees their memory for the products
        # 2. The products.
        d_x1 = _grad_input(g1, w1, of_w1, settings, taps[0]) if wants1 else None
        d_x3 = _grad_input(g3, w3, of_w3, settings, taps[2]) if wants3 else None
        d_w1 = _grad_weight(g1_transposed, kept1, w1, settings, taps[0]) if wants_w1 else None
        d_w2 = _grad_weight(g_transposed, hidden, w2, settings, taps[1]) if wants_w2 else None
        kept3 = kept1 if kept3 is None else kept3
        d_w3 = _grad_weight(g3_transposed, kept3, w3, settings, taps[2]) if wants_w3 else None
        return d_x1, d_x3, d_w1, d_w2, d_w3, *(None,) * (ctx.arguments - 5)


def _cast_input(x: Tensor, recipe: Recipe, keep: bool, state: Delayed | None) -> tuple[Operand, Operand | None]:
    """The operand of `output` and, with `keep`, that of `grad_weight`."""
    cols = recipe.grad_weight.b if keep else None
    rows, kept, _ = _cast(x, recipe.output.a, cols, state, recipe.scale_rule)
    assert rows is not None, "it was requested"
    return rows, kept


def _cast(
    x: Tensor, rows: Cast | None, cols: Cast | None, state: Delayed | None, rule: ScaleRule
) -> tuple[Operand | None, Operand | None, Scales | None]:
    """Both operands of a matrix, and under delayed scaling the scales that were used."""
    if state is None:
        return *cast_both(x, rows, cols, ScaleSource(), rule), None  # block scales, which the cast itself finds
    row, col, source = cast_delayed(x, rows, cols, state, rule)
    return row, col, source.given


def _cast_hidden(gate: Tensor, up: Tensor, recipe: Recipe, state: Delayed | None) -> tuple[Operand, Scales | None]:
    """The operand of w2's `output`, and under delayed scaling the scales that were used."""
    fmt, rule = _format(recipe.output.a), recipe.scale_rule
    if state is None:
        return Operand(*fused.hidden_blocks(gate, up, fmt, rule.power_of_two, rule.amax_floor)), None
    settings = (state.amax, rule.power_of_two, rule.amax_floor, state.margin)
    codes, inv_scale, scale = fused.hidden_delayed(gate, up, fmt, state.inv_scale, *settings)
    return Operand(codes, scale), Scales(inv_scale, scale)


def _cast_gradients(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    wanted: tuple[bool, bool, bool, bool],
    of_hidden: Scales | None,
    settings: _Settings,
) -> tuple[Operand, Operand, Operand, Operand, Operand]:
    """Operands: grad_gate, grad_gate^T, grad_up, grad_up^T, hidden^T; those not `wanted` hold nothing of use."""
    recipe, (of_gate, _, of_up) = settings.recipe, settings.of_gradients
    fmt, rule = _format(recipe.grad_weight.a), recipe.scale_rule
    if of_hidden is None or of_gate is None or of_up is None:
        flat = fused.gradients_blocks(grad_hidden, gate, up, fmt, *wanted, rule.power_of_two, rule.amax_floor)
        codes, scales = flat[::2], flat[1::2]
    else:
        inv_scales = (of_gate.inv_scale, of_up.inv_scale, of_hidden.inv_scale)
        fmts, amaxes = (fmt, _format(recipe.grad_weight.b)), (of_gate.amax, of_up.amax)
        settings_of_rule = (rule.power_of_two, rule.amax_floor, of_gate.margin)
        *codes, gate_scale, up_scale = fused.gradients_delayed(
            grad_hidden, gate, up, *fmts, *inv_scales, *wanted, *amaxes, *settings_of_rule
        )
        scales = [gate_scale, gate_scale, up_scale, up_scale, of_hidden.scale]
    first, second, third, fourth, fifth = map(Operand, codes, scales)
    return first, second, third, fourth, fifth


def _product(
    a: Operand, weight: Tensor, state: Delayed | None, settings: _Settings, tap: Tap | None
) -> tuple[Tensor, Scales | None]:
    """`output` of one layer, and under delayed scaling the scales of its weight."""
    b, used = _cast_weight(weight, state, settings.recipe)
    product = gemm(a, b, settings.recipe.output, settings.dtype, settings.engine, settings.recipe.chip)
    show_gemm(tap, "output", a, b, product)
    return product, used


def _cast_weight(weight: Tensor, state: Delayed | None, recipe: Recipe) -> tuple[Operand, Scales | None]:
    """The operand of `output`, and under delayed scaling the scales that were used."""
    b, _, used = _cast(weight, recipe.output.b, None, state, recipe.scale_rule)
    assert b is not None, "it was requested"
    return b, used


def _grad_input(
    a: Operand, weight: Tensor, scales: tuple[Tensor, Tensor] | None, settings: _Settings, tap: Tap | None
) -> Tensor:
    """`grad_input` of one layer."""
    recipe = settings.recipe
    source = ScaleSource(given=None if scales is None else Scales(*scales))
    _, b = cast_both(weight, None, recipe.grad_input.b, source, recipe.scale_rule)
    assert b is not None, "it was requested"
    product = gemm(a, b, recipe.grad_input, settings.dtype, settings.engine, recipe.chip)
    show_gemm(tap, "grad_input", a, b, product)
    return product


def _grad_weight(a: Operand | None, b: Any, weight: Tensor, settings: _Settings, tap: Tap | None) -> Tensor:
    """`grad_weight` of one layer, in the dtype of its weight."""
    assert a is not None and b is not None, "they were requested"
    kept = Operand(*b)
    product = gemm(a, kept, settings.recipe.grad_weight, settings.dtype, settings.engine, settings.recipe.chip)
    show_gemm(tap, "grad_weight", a, kept, product)
    return product.to(weight.dtype)


def _show_forward(
    taps: tuple[Tap | None, ...], x: Tensor, weights: tuple[Tensor, ...], gate: Tensor, up: Tensor
) -> None:
    """Show the inputs and weights of the three layers."""
    for i, tap in enumerate(taps):
        if tap is None:
            continue
        if i == 1:
            observe_gated(tap.forward, "hidden", gate, up, None, tap.call)
        else:
            show_tensor(tap, "input", x, is_delayed=True)
        show_tensor(tap, "weight", weights[i], is_delayed=True)


def _show_backward(
    taps: tuple[Tap | None, ...], grad_output: Tensor, grad_hidden: Tensor, gate: Tensor, up: Tensor
) -> None:
    """Show grad_output of the three layers."""
    of_w1, of_w2, of_w3 = taps
    show_tensor(of_w2, "grad_output", grad_output, is_delayed=True)
    if of_w1 is not None:
        observe_gated(of_w1.backward, "grad_gate", gate, up, grad_hidden, of_w1.call)
    if of_w3 is not None:
        observe_gated(of_w3.backward, "grad_up", gate, up, grad_hidden, of_w3.call)


def _states(layers: Layers, input: Tensor) -> tuple[tuple[Delayed | None, ...], ...]:
    """Three tuples over w1, w2, w3: the states of their inputs, of their weights, of their grad_output."""
    w1, w2, w3 = layers
    # A gradient flows back through w2 wherever one flows back through w1.
    found = [layer.delayed_states(input, source.weight) for layer, source in ((w1, w1), (w2, w1), (w3, w3))]
    found = [states or (None, None, None) for states in found]
    return tuple(tuple(of[i] for of in found) for i in range(3))


def _format(cast: Cast) -> str:
    assert cast.format is not None, "it is float8"
    return cast.format.name
