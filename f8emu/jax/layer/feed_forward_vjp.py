"""The fused feed-forward block, as one function with its own backward pass.

    gate, up    = x @ w1, x @ w3           grad_hidden        = grad_output @ w2^T
    hidden      = silu(gate) * up          grad_gate, grad_up = those of `fused.gated`
    output      = hidden @ w2              grad_x             = grad_gate @ w1^T + grad_up @ w3^T

The nine GEMMs are those of `matmul` for each layer. Where scales are known, under delayed scaling, `hidden`,
`grad_gate` and `grad_up` are cast while they are computed, and never written in bfloat16. Otherwise they are written
once, the gradients over `gate` and `up`, and their amaxes found meanwhile (`fused.computed`). x and the weights are
cast both ways at once. Kept for the backward pass are `gate`, `up`, and the codes of `hidden^T`, of `x^T` and of the
weights; with `recompute_casts` the weights themselves. Under dynamic scaling w1 and w3 share the casts of x; under
delayed scaling each has a scale of its own.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from f8emu.jax.compiling import is_eager
from f8emu.jax.fused import casts, computed, gated
from f8emu.jax.fused.computed import Function
from f8emu.jax.fused.computed_kernels import Product
from f8emu.jax.gemm.engine import Engine
from f8emu.jax.layer.matmul import (
    TWICE,
    Plan,
    cast_matrix,
    cotangent,
    gemm,
    mapped_with,
    scales_follow,
    taken,
)
from f8emu.jax.layer.operands import WHOLE, Operand, Side, float8_of, scales_in_use
from f8emu.jax.layer.sharding import vary_alike
from f8emu.jax.lowering import differentiable_no_more
from f8emu.jax.scale import scales_of
from f8emu.spec.formats import Format
from f8emu.spec.recipe import Cast, Gemm
from f8emu.spec.scaling import Granularity
from f8emu.spec.trace import DelayedState, Float8State, Scales


class Plans(NamedTuple):
    """The settings of the three layers, which share recipe and engine."""

    w1: Plan
    w2: Plan
    w3: Plan


class States(NamedTuple):
    """The states of the three layers, under delayed scaling."""

    w1: Float8State
    w2: Float8State
    w3: Float8State


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wants:
    """Which gradients are requested."""

    x: bool = False
    w1: bool = False
    w2: bool = False
    w3: bool = False
    states: tuple[bool, bool, bool] = (False, False, False)

    @property
    def gate(self) -> bool:
        """Whether that of gate is, or of up, as well."""
        return self.x or self.w1

    @property
    def up(self) -> bool:
        return self.x or self.w3

    @property
    def hidden(self) -> bool:
        return self.gate or self.up


class _Kept(NamedTuple):
    """What the backward pass needs; of what no gradient needs, None."""

    wants: _Wants
    inputs: tuple[Operand | None, Operand | None]
    """x for the gradients of w1 and of w3; under dynamic scaling the first is for both."""
    weights: tuple[Side, Side, Side]
    gate_up: tuple[Product, Product] | None
    hidden: Operand | None
    of_gradients: tuple[DelayedState | None, ...]
    amaxes: tuple[tuple[jax.Array | None, jax.Array | None], ...]
    """The amaxes of input and weight of each layer, under delayed scaling."""
    states: States | None
    """If their gradient is asked for."""


class _Computed(NamedTuple):
    """A matrix that was computed and cast."""

    rows: Operand | None
    cols: Operand | None
    amax: jax.Array
    """[], for the next update under delayed scaling; 0 without a cast."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_feed_forward(
    plans: Plans,
    x3: jax.Array,
    x1: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    w3: jax.Array,
    states: States | None,
) -> jax.Array:
    """The block on x [M, dim] with weights [dim, hidden], [hidden, dim] and [dim, hidden]; x is bfloat16.

    x is given once for each layer, the last first: JAX then adds their gradients, and what they are added to, in the
    order in which it adds those of layers.

    Exactness: every code, scale, product and gradient is that of three layers around `fused.gated.gated`.
    """
    return _forward(plans, x1, (w1, w2, w3), states, _Wants())[0]


def _forward(
    plans: Plans, x: jax.Array, weights: tuple[jax.Array, ...], states: States | None, wants: _Wants
) -> tuple[jax.Array, _Kept]:
    recipe = plans.w1.recipe
    of_inputs, of_weights, of_gradients = zip(*(states or [(None,) * 3] * 3), strict=True)
    # 1. x, for w1 and for w3.
    is_shared = recipe.delayed is None
    cast_x = functools.partial(_cast_x, plans.w1, x)
    x1, x1_kept, x1_amax = cast_x(wants.w1 or (is_shared and wants.w3), of_inputs[0])
    x3, x3_kept, x3_amax = (x1, None, None) if is_shared else cast_x(wants.w3, of_inputs[2])
    # 2. The weights.
    backward = (wants.x, wants.hidden, wants.x)
    cast_weights = map(_cast_weight, plans, weights, backward, of_weights)
    operands, weights_kept, weight_amaxes = zip(*cast_weights, strict=True)
    # 3. gate and up, hidden, output.
    gate = _product("output", recipe.output, plans.w1, x1, operands[0])
    up = _product("output", recipe.output, plans.w3, x3, operands[2])
    sides = recipe.output.a, recipe.grad_weight.b if wants.w2 else None
    (hidden,) = _cast_computed(plans.w2, gated.hidden_of, (gate, up), [sides], [of_inputs[1]])
    output = gemm("output", recipe.output, hidden.rows, operands[1], plans.w2.out_dtype, plans.w2)
    _show_forward(plans, x, weights, gate, up)
    return output, _Kept(
        wants=wants,
        inputs=(x1_kept, x3_kept),
        weights=weights_kept,
        gate_up=(gate, up) if wants.hidden else None,
        hidden=hidden.cols,
        of_gradients=of_gradients,
        amaxes=tuple(zip((x1_amax, hidden.amax, x3_amax), weight_amaxes, strict=True)),
        states=states if any(wants.states) else None,
    )


def _forward_rule(plans: Plans, x3: Any, x1: Any, w1: Any, w2: Any, w3: Any, states: Any) -> tuple[jax.Array, _Kept]:
    of_states = [any(leaf.perturbed for leaf in jax.tree.leaves(state)) for state in states or (None,) * 3]
    has_x = x1.perturbed or x3.perturbed
    wants = _Wants(has_x, w1.perturbed, w2.perturbed, w3.perturbed, (of_states[0], of_states[1], of_states[2]))
    values = x1.value, (w1.value, w2.value, w3.value), jax.tree.map(lambda leaf: leaf.value, states)
    x, weights, states = differentiable_no_more(values, f"{_call(plans)}: {TWICE}")
    if any(of_states):
        operands = x, *weights, *jax.tree.leaves(states)
        states = States(*(mapped_with(_call(plans), state, *operands) for state in states))
    return _forward(plans, x, weights, states, wants)


def _call(plans: Plans) -> str:
    return "feed_forward" if plans.w1.recipe.delayed is None else "delayed_feed_forward"


def _backward_rule(plans: Plans, kept: _Kept, grad_output: Any) -> tuple[Any, ...]:
    if isinstance(grad_output, SymbolicZero):
        return (None,) * 6
    grad_output = differentiable_no_more(grad_output, f"{_call(plans)}: {TWICE}")
    recipe, rule, wants = plans.w1.recipe, plans.w1.recipe.scale_rule, kept.wants
    d_x1 = d_x3 = d_w1 = d_w2 = d_w3 = d_states = None
    of_gate = of_up = _Computed(None, None, jnp.zeros((), jnp.float32))
    # 1. Through w2.
    # Through the states of w1 and w3 hidden has a gradient too: a layer would cast grad_output for it.
    rows = recipe.grad_input.a if wants.hidden or wants.states[0] or wants.states[2] else None
    cols = recipe.grad_weight.a if wants.w2 else None
    if plans.w2.tap is not None:
        plans.w2.tap.tensor("grad_output", grad_output)
    g, g_transposed, g_amax = cast_matrix(plans.w2, grad_output, rows, cols, kept.of_gradients[1], WHOLE, False)
    if wants.w2:
        d_w2 = _grad_weight(plans.w2, g_transposed, kept.hidden)
    if wants.hidden:
        assert kept.gate_up is not None, "they were kept for it"
        w2 = taken(kept.weights[1], recipe.grad_input.b, rule, True, after=grad_output)
        grad_hidden = _product("grad_input", recipe.grad_input, plans.w2, g, w2)
        # 2. grad_gate and grad_up.
        rows = recipe.grad_input.a if wants.x else None
        sides = [(rows, recipe.grad_weight.a if is_wanted else None) for is_wanted in (wants.w1, wants.w3)]
        operands = (grad_hidden, *kept.gate_up)
        of_gate, of_up = _cast_computed(plans.w1, gated.gradients_of, operands, sides, kept.of_gradients[::2])
        _show_backward(plans, operands, (wants.gate, wants.up))
        # 3. Through w1 and w3.
        if wants.x:
            assert of_gate.rows is not None and of_up.rows is not None, "they were cast for it"
            after = of_gate.rows.codes, of_up.rows.codes
            w1, w3 = (taken(kept.weights[i], recipe.grad_input.b, rule, True, after=after) for i in (0, 2))
            d_x1, d_x3 = _grad_input(plans.w1, of_gate.rows, w1), _grad_input(plans.w3, of_up.rows, w3)
        x1, x3 = kept.inputs
        d_w1 = _grad_weight(plans.w1, of_gate.cols, x1) if wants.w1 else None
        d_w3 = _grad_weight(plans.w3, of_up.cols, x1 if recipe.delayed is None else x3) if wants.w3 else None
    # 4. The amaxes, as the gradient of the states.
    if kept.states is not None:
        amaxes = (of_gate.amax, g_amax, of_up.amax)
        of_layers = zip(plans, kept.amaxes, amaxes, kept.states, strict=True)
        d_states = States(*(cotangent(plan, (*both, amax), state) for plan, both, amax, state in of_layers))
    return d_x3, d_x1, d_w1, d_w2, d_w3, d_states


float8_feed_forward.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _show_forward(plans: Plans, x: jax.Array, weights: tuple[jax.Array, ...], gate: Product, up: Product) -> None:
    for plan, weight in zip(plans, weights, strict=True):
        if plan.tap is not None:
            is_last = plan is plans.w2
            plan.tap.tensor("input", computed.values_of(gated.hidden_of, (gate, up))[0] if is_last else x)
            plan.tap.tensor("weight", weight.T)


def _show_backward(plans: Plans, operands: tuple[Product, ...], wanted: tuple[bool, bool]) -> None:
    taps = [plan.tap if is_wanted else None for plan, is_wanted in zip((plans.w1, plans.w3), wanted, strict=True)]
    if any(tap is not None for tap in taps):
        for tap, grad_output in zip(taps, computed.values_of(gated.gradients_of, operands), strict=True):
            if tap is not None:
                tap.tensor("grad_output", grad_output)


def _cast_x(plan: Plan, x: jax.Array, is_kept: bool, state: DelayedState | None) -> tuple[Any, ...]:
    """The operand of x for `output`, that for `grad_weight` if `is_kept`, and the amax."""
    cols = plan.recipe.grad_weight.b if is_kept else None
    return cast_matrix(plan, x, plan.recipe.output.a, cols, state, WHOLE, False)


def _cast_weight(plan: Plan, weight: jax.Array, is_kept: bool, state: DelayedState | None) -> tuple[Any, ...]:
    """The operand of a weight for `output`, that for `grad_input` if `is_kept`, and the amax."""
    cols = plan.recipe.grad_input.b if is_kept else None
    return cast_matrix(plan, weight, plan.recipe.output.b, cols, state, WHOLE, True, defers_cols=plan.recompute_casts)


def _product(name: str, spec: Gemm, plan: Plan, a: Operand | None, b: Operand | None) -> Product:
    """A product that `fused.computed` reads.

    Where cuBLASLt rounds it before it is scaled, by powers of two (`hardware.Form.BFLOAT16`), the scales are left to
    what reads it: XLA cannot fuse them into a kernel.
    """
    assert a is not None and b is not None, "they were cast for it"
    is_rounded_first = scales_follow(plan.recipe, spec) and plan.engine != Engine.EMULATED.value
    if not is_rounded_first or plan.tap is not None or is_eager((a.codes, b.codes)):
        return Product(gemm(name, spec, a, b, plan.out_dtype, plan))
    assert a.scale is not None and b.scale is not None, "scales of rows"

    def scaled(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> jax.Array:
        return gemm(name, spec, Operand(a, scale_a), Operand(b, scale_b), plan.out_dtype, plan)

    def now(*operands: jax.Array) -> Product:
        ones_a, ones_b = map(_ones_like, operands[2:])
        return Product(scaled(*operands), ones_a, ones_b.T)

    def later(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> Product:
        product = scaled(a, b, _ones_like(scale_a), _ones_like(scale_b))
        return Product(lax.optimization_barrier(product), scale_a, scale_b.T)

    return lax.platform_dependent(a.codes, b.codes, a.scale, b.scale, cuda=later, default=now)


def _ones_like(scale: jax.Array) -> jax.Array:
    """Ones that vary along the axes of `jax.shard_map` as `scale` does."""
    return vary_alike(jnp.ones_like(scale), scale)[0]


def _grad_input(plan: Plan, grad_output: Operand | None, weight: Operand | None) -> jax.Array:
    return gemm("grad_input", plan.recipe.grad_input, grad_output, weight, plan.input_dtype, plan)


def _grad_weight(plan: Plan, grad_output: Operand | None, x: Operand | None) -> jax.Array:
    """[K, N], in the dtype of the weight."""
    product = gemm("grad_weight", plan.recipe.grad_weight, grad_output, x, plan.input_dtype, plan, True)
    return product.astype(plan.weight_dtype.name)


def _cast_computed(
    plan: Plan,
    function: Function,
    xs: tuple[Product, ...],
    sides: Sequence[tuple[Cast | None, Cast | None]],
    states: Sequence[DelayedState | None],
) -> list[_Computed]:
    """The matrices that `function` computes, under the casts in `sides`: of a matrix, and of its transpose."""
    cast = next(cast for pair in sides for cast in pair if cast is not None)
    format = float8_of(cast)
    assert format is not None, "the block is fused only if all casts are float8"
    if all(state is not None and state.initialized is None for state in states):
        return _cast_by_given(function, xs, sides, [scales_in_use(state, None) for state in states], format)
    # 1. Amaxes. Two matrices are the gradients, and what they are computed from is not needed any more.
    is_rowwise = cast.granularity is Granularity.ROWWISE
    found = computed.with_amaxes(function, *xs, of_rows=is_rowwise, in_place=len(sides) == 2)
    delayed, rule = plan.recipe.delayed, plan.recipe.scale_rule
    margin = 0 if delayed is None else delayed.margin
    results: list[_Computed] = []
    for (x, *amaxes), wanted, state in zip(found, sides, states, strict=True):
        # 2. Scales.
        rows = cols = scales_in_use(state, scales_of(amaxes[0], format, rule, margin))
        if is_rowwise:
            cols = scales_of(amaxes[1], format, rule)
        # 3. Codes.
        inv_scales = (None if side is None else s.inv_scale for s, side in zip((rows, cols), wanted, strict=True))
        codes = casts.cast_pair(x, format, *inv_scales)
        results.append(_computed(codes, (rows.scale, cols.scale), amaxes[0]))
    return results


def _cast_by_given(
    function: Function,
    xs: tuple[Product, ...],
    sides: Sequence[tuple[Cast | None, Cast | None]],
    scales: Sequence[Scales],
    format: Format,
) -> list[_Computed]:
    """`_cast_computed` by scales of earlier steps, which are those of whole tensors."""
    wanted = [(rows is not None, cols is not None) for rows, cols in sides]
    inv_scales = [of_matrix.inv_scale for of_matrix in scales]
    found = computed.cast_pairs(function, format, inv_scales, wanted, *xs)
    return [_computed(codes, (s.scale, s.scale), amax) for (*codes, amax), s in zip(found, scales, strict=True)]


def _computed(codes: Sequence[jax.Array | None], scales: tuple[jax.Array, jax.Array], amax: jax.Array) -> _Computed:
    rows, cols = (None if x is None else Operand(x, scale) for x, scale in zip(codes, scales, strict=True))
    is_cast = rows is not None or cols is not None
    return _Computed(rows, cols, amax.reshape(-1)[0] if is_cast else jnp.zeros((), jnp.float32))
