"""The fused feed-forward block of `Float8FeedForward`, as one autograd function, for delayed scaling.

One kernel reads `gate` and `up` and writes the codes of `hidden`. In the backward pass, one kernel reads `grad_hidden`,
`gate` and `up` and writes the codes of `grad_gate`, `grad_up` (each also transposed, if needed) and `hidden^T`. None of
these three is written in bfloat16. Saved for the backward pass: `gate`, `up` and the codes of `input^T`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.recipe import Cast, Recipe
from f8emu.spec.trace import Scales
from f8emu.torch.fused import silu as fused
from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.layer.gemm import gemm
from f8emu.torch.layer.matmul import Output
from f8emu.torch.layer.observers import Tap
from f8emu.torch.layer.operands import (
    Delayed,
    Operand,
    ScaleSource,
    cast_both,
    cast_delayed,
    format_name,
)
from f8emu.torch.layer.taps import begin_call, observe_gated, show_gemm, show_tensor
from f8emu.torch.library import differentiable_once
from f8emu.torch.torch_internals import Function


class Layers(NamedTuple):
    """The block's layers."""

    w1: Float8Linear
    w2: Float8Linear
    w3: Float8Linear


class _Settings(NamedTuple):
    """What forward and backward need besides the tensors that autograd tracks; of three, those of w1, w2 and w3."""

    recipe: Recipe
    engine: str
    dtype: torch.dtype
    of_gradients: tuple[Delayed, ...]
    """The states of grad_output. Not saved tensors: the backward pass updates their amaxes in place."""
    taps: tuple[Tap | None, ...]


def float8_feed_forward(x1: Tensor, x3: Tensor, layers: Layers) -> Tensor:
    """The fused block on [M, dim]; `x1` and `x3` have the same values."""
    recipe = layers.w1.recipe
    of_inputs, of_weights, of_gradients = _states(layers, x1)
    taps = tuple([begin_call(layer.tap, x1) for layer in layers])
    settings = _Settings(recipe, layers.w1.engine, x1.dtype, of_gradients, taps)
    weights = [layer.weight for layer in layers]
    with torch.no_grad():
        # 1. gate and up: each layer scales the input separately.
        gate, kept1, of_w1 = _product(x1, weights[0], of_inputs[0], of_weights[0], settings, 0)
        up, kept3, of_w3 = _product(x3, weights[2], of_inputs[2], of_weights[2], settings, 2)
        # 2. The operands of output.
        hidden, of_hidden = _cast_hidden(gate, up, recipe, of_inputs[1])
        b2, _, of_w2 = _cast(weights[1], recipe.output.b, None, of_weights[1], recipe)
        _show_forward(taps, x1, weights, gate, up)
    # 3. As in `float8_matmul`: everything is saved before the last product is computed.
    parts = (kept1 or (None, None), kept3 or (None, None), of_w1, of_w2, of_w3, of_hidden)
    flat = [tensor for pair in parts for tensor in pair]
    place = _FeedForwardBackward.apply(x1, x3, *weights, settings, gate, up, *flat)
    with torch.no_grad():
        product = _gemm("output", hidden, b2, settings, 1)
    return Output.apply(place, product)


class _FeedForwardBackward(Function):
    """The gradients of the block. Its forward returns a placeholder; the output is computed outside."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x3: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, settings: _Settings, *kept: Tensor | None
    ) -> Tensor:
        """Save what the backward pass needs."""
        ctx.save_for_backward(w1, w2, w3, *kept)
        ctx.settings = settings
        return x1.new_empty(1, 1).expand(x1.shape[0], w2.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Cast grad_output, compute grad_hidden; cast the gradients of gate and up, compute the other products."""
        w1, w2, w3, gate, up, *flat = ctx.saved_tensors
        kept1, kept3, of_w1, of_w2, of_w3, of_hidden = tuple(zip(flat[::2], flat[1::2], strict=True))
        settings: _Settings = ctx.settings
        recipe = settings.recipe
        wants1, wants3, wants_w1, wants_w2, wants_w3 = ctx.needs_input_grad[:5]
        # 1. grad_hidden, and the operands of all other products.
        cols = recipe.grad_weight.a if wants_w2 else None
        g, g_transposed, _ = _cast(grads[0], recipe.grad_input.a, cols, settings.of_gradients[1], recipe)
        grad_hidden = _grad_input(g, w2, of_w2, settings, 1)
        wanted = (wants1 or wants3, wants_w1, wants_w3, wants_w2)
        g1, g1_transposed, g3, g3_transposed, hidden = _cast_gradients(
            grad_hidden, gate, up, wanted, Scales(*of_hidden), settings
        )
        _show_backward(settings.taps, grads[0], grad_hidden, gate, up)
        g = grad_hidden = gate = up = None  # frees their memory for the products
        # 2. The products.
        d_x1 = _grad_input(g1, w1, of_w1, settings, 0) if wants1 else None
        d_x3 = _grad_input(g3, w3, of_w3, settings, 2) if wants3 else None
        d_w1 = _grad_weight(g1_transposed, kept1, w1, settings, 0) if wants_w1 else None
        d_w2 = _grad_weight(g_transposed, hidden, w2, settings, 1) if wants_w2 else None
        d_w3 = _grad_weight(g3_transposed, kept3, w3, settings, 2) if wants_w3 else None
        return d_x1, d_x3, d_w1, d_w2, d_w3, *(None,) * (3 + len(flat))


def _states(layers: Layers, input: Tensor) -> tuple[tuple[Delayed, ...], ...]:
    """The states of the three layers' inputs, of their weights, and of their grad_outputs."""
    w1, w2, w3 = layers
    # A gradient flows back through w2 wherever one flows back through w1.
    found: Any = [layer.delayed_states(input, source.weight) for layer, source in ((w1, w1), (w2, w1), (w3, w3))]
    return tuple(tuple(of[i] for of in found) for i in range(3))


def _product(
    x: Tensor, weight: Tensor, of_input: Delayed, of_weight: Delayed, settings: _Settings, layer: int
) -> tuple[Tensor, Operand | None, Scales]:
    """`output` of w1 or w3, the operand of their grad_weight, and the scales of the weight."""
    recipe = settings.recipe
    a, kept, _ = _cast(x, recipe.output.a, recipe.grad_weight.b if weight.requires_grad else None, of_input, recipe)
    b, _, used = _cast(weight, recipe.output.b, None, of_weight, recipe)
    return _gemm("output", a, b, settings, layer), kept, used


def _cast(
    x: Tensor, rows: Cast, cols: Cast | None, state: Delayed, recipe: Recipe
) -> tuple[Operand, Operand | None, Scales]:
    """Both operands of a matrix, and the scales that were used."""
    row, col, source = cast_delayed(x, rows, cols, state, recipe.scale_rule)
    assert row is not None and source.given is not None, "rows were requested"
    return row, col, source.given


def _cast_hidden(gate: Tensor, up: Tensor, recipe: Recipe, state: Delayed) -> tuple[Operand, Scales]:
    """The operand of w2's `output`, and the scales that were used."""
    settings = (state.amax, recipe.scale_rule.power_of_two, recipe.scale_rule.amax_floor, state.margin)
    fmt = format_name(recipe.output.a)
    codes, inv_scale, scale = fused.hidden_delayed(gate, up, fmt, state.inv_scale, *settings)
    return Operand(codes, scale), Scales(inv_scale, scale)


def _cast_gradients(
    grad_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    wanted: tuple[bool, bool, bool, bool],
    of_hidden: Scales,
    settings: _Settings,
) -> list[Operand]:
    """Operands: grad_gate, grad_gate^T, grad_up, grad_up^T, hidden^T; those not `wanted` hold nothing of use."""
    recipe, (of_gate, _, of_up) = settings.recipe, settings.of_gradients
    fmts, rule = (format_name(recipe.grad_weight.a), format_name(recipe.grad_weight.b)), recipe.scale_rule
    inv_scales = (of_gate.inv_scale, of_up.inv_scale, of_hidden.inv_scale)
    of_rule = (rule.power_of_two, rule.amax_floor, of_gate.margin)
    *codes, gate_scale, up_scale = fused.gradients_delayed(
        grad_hidden, gate, up, *fmts, *inv_scales, *wanted, of_gate.amax, of_up.amax, *of_rule
    )
    return list(map(Operand, codes, (gate_scale, gate_scale, up_scale, up_scale, of_hidden.scale)))


def _grad_input(a: Operand, weight: Tensor, scales: tuple[Tensor, Tensor], settings: _Settings, layer: int) -> Tensor:
    """`grad_input` of one layer."""
    recipe = settings.recipe
    _, b = cast_both(weight, None, recipe.grad_input.b, ScaleSource(given=Scales(*scales)), recipe.scale_rule)
    assert b is not None, "it was requested"
    return _gemm("grad_input", a, b, settings, layer)


def _grad_weight(a: Operand | None, b: Any, weight: Tensor, settings: _Settings, layer: int) -> Tensor:
    """`grad_weight` of one layer, in the dtype of its weight."""
    assert a is not None, "it was requested"
    return _gemm("grad_weight", a, Operand(*b), settings, layer).to(weight.dtype)


def _gemm(name: str, a: Operand, b: Operand, settings: _Settings, layer: int) -> Tensor:
    """One GEMM of one layer."""
    recipe = settings.recipe
    product = gemm(a, b, getattr(recipe, name), settings.dtype, settings.engine, recipe.chip)
    show_gemm(settings.taps[layer], name, a, b, product)
    return product


def _show_forward(taps: tuple[Tap | None, ...], x: Tensor, weights: list[Tensor], gate: Tensor, up: Tensor) -> None:
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
    for tap, name in ((of_w1, "grad_gate"), (of_w3, "grad_up")):
        if tap is not None:
            observe_gated(tap.backward, name, gate, up, grad_hidden, tap.call)
