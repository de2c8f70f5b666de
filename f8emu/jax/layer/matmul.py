"""The three GEMMs and six casts of a linear layer, as one function with its own backward pass.

    output      = cast(input)         @ cast(weight)^T        forward
    grad_input  = cast(grad_output)   @ cast(weight^T)^T      backward
    grad_weight = cast(grad_output^T) @ cast(input^T)^T       backward

Input and gradient are cast once for both of their GEMMs. Kept for the backward pass are the codes of `input^T`, a byte
an element, or its bfloat16 values if the recipe keeps `grad_weight` in high precision, and the weight itself, which is
a parameter and there anyway: it is cast for `grad_input` when its time has come, under the scales that were found in
the forward pass. So is the input of a layer that widens it (`keeps_input`). What no gradient needs is neither cast nor
kept.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from f8emu.jax.compiling import differentiable_no_more, refuse_mapped_alone, reverse_mode
from f8emu.jax.gemm.call import EngineCall
from f8emu.jax.gemm.engine import multiply
from f8emu.jax.layer.operands import Deferred, Operand, Side, cast_matrix
from f8emu.jax.layer.sharding import Axes, Divided, as_gradient, gathered, scattered_sum, varying
from f8emu.spec import recipe as recipes
from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.chips import CHIPS
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import E4M3FN, Format
from f8emu.spec.gemm import LAYER_LAYOUTS
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.names import EngineName
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import DelayedState, Float8State, Granularity, ScaleRule

TWICE = (
    "f8emu.jax: a float8 layer is differentiable once; got a second derivative; codes are constants to JAX, which "
    "would make it 0; use jax.lax.dot_general where second derivatives are needed, or jax.lax.stop_gradient around "
    "what an inner gradient is taken of"
)
_MAPPED = (
    "delayed_dot_general: a state serves one call per step; got operands that jax.vmap maps and a state that it does "
    "not, so that JAX would add the amaxes of its entries; put the mapped axis into the rows of the input instead, or "
    "give every entry a state: shared_delayed_state(state, size), mapped too"
)

_LEFT_OUT = (
    "delayed_dot_general: a gradient is taken through a layer whose state it leaves out, so that the amaxes of the "
    "step are lost and no scale is ever updated; got gradients of input or weight alone; take that of the state too "
    "(jax.grad: argnums; flax nnx: wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient)); linen: of all "
    "variables), or settle it (linear_delayed_settled) to keep its scales"
)


class Tap(Protocol):
    """An observer of what a layer casts and multiplies, called back by the program that the layer is traced into."""

    def tensor(self, tensor: str, value: jax.Array) -> None:
        """A matrix before its casts: input [M, K], weight [N, K] or grad_output [M, N]."""

    def gemm(self, gemm: str, a: Operand, b: Operand, product: jax.Array, layer: "LayerCall") -> None:
        """A GEMM: operands [rows, summed dimension], product [rows of a, rows of b]."""


class LayerCall(NamedTuple):
    """The settings of a call, which do not depend on the values of its arrays; most are those of its layer."""

    recipe: Recipe
    engine: EngineName
    out_dtype: Format
    input_dtype: Format
    """The format of `input` and of the products of the backward pass."""
    weight_dtype: Format
    is_input_transposed: bool
    """Whether `input` is given as [K, M]."""
    is_weight_transposed: bool
    """Whether `weight` is given as [K, N]."""
    sharded_k: str
    """The way to multiply where XLA divides both operands of a GEMM along K (`gemm.call`)."""
    divided: Divided = Divided()
    """The mesh axes along which the matrices are divided in `jax.shard_map`."""
    tap: Tap | None = None
    split_k: tuple[tuple[str, int], ...] = ()
    """The number of slices of K of some GEMMs, by name, where they are emulated."""


class Kept(NamedTuple):
    """The arrays that the backward pass needs."""

    input: Side
    weight: Side
    grad_output: DelayedState | None
    amaxes: tuple[jax.Array | None, jax.Array | None] | None
    """The amaxes of input and weight; None if no gradient of the state is needed."""
    state: Float8State | None
    """If its gradient is asked for: along which axes of `jax.shard_map` it varies, so does that."""


def float8_matmul(layer: LayerCall, input: jax.Array, weight: jax.Array, state: Float8State | None) -> jax.Array:
    """`input @ weight^T` under a recipe.

    Shapes:
        input [M, K], or [K, M] if the layer says so, weight [N, K] or [K, N] -> [M, N] in `layer.out_dtype`.

    Exactness: every code, scale and product equals that of `f8ref.numpy.linear`, on Hopper and emulated.
    """
    return reverse_mode(_matmul(layer, reverse_mode(input), reverse_mode(weight), state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(layer: LayerCall, input: jax.Array, weight: jax.Array, state: Float8State | None) -> jax.Array:
    return _forward(layer, input, weight, state, (False, False, False))[0]


def _forward(
    layer: LayerCall, input: jax.Array, weight: jax.Array, state: Float8State | None, wanted: tuple[bool, bool, bool]
) -> tuple[jax.Array, Kept]:
    """The output, and what the gradients of input, weight and state need."""
    recipe = layer.recipe
    wants_input, wants_weight, wants_state = wanted
    of_input, of_weight, of_grad_output = (None, None, None) if state is None else state
    # 1. Both operands of input and of weight.
    x_plan = recipe.cast_plans.input.wanted(rows=True, cols=wants_weight)
    w_plan = recipe.cast_plans.weight.wanted(rows=True, cols=wants_input)
    axes, x_is_t, w_is_t = layer.divided, layer.is_input_transposed, layer.is_weight_transposed
    if recipe.cast_weight_from is recipes.CastFrom.BFLOAT16:  # XLA may drop a conversion there and back
        weight = lax.reduce_precision(weight.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
    if layer.tap is not None:
        layer.tap.tensor("input", input.T if x_is_t else input)
        layer.tap.tensor("weight", weight.T if w_is_t else weight)
    of_x = {"is_transposed": x_is_t, "keeps_cols": True, "defers_cols": keeps_input(layer, input, weight)}
    of_w = {"is_transposed": w_is_t, "keeps_cols": True, "defers_cols": True}
    x, x_kept, x_amax = cast_matrix(input, x_plan, of_input, axes.input, **of_x)
    w, w_kept, w_amax = cast_matrix(weight, w_plan, of_weight, axes.weight, **of_w)
    # 2. The product.
    w = _gathered(w, recipe.output.b.granularity, (axes.gathered_n, axes.gathered_k))
    output = _product("output", recipe.output, x, w, layer.out_dtype, layer)
    amaxes = (x_amax, w_amax) if wants_state else None
    return output, Kept(x_kept, w_kept, of_grad_output, amaxes, state if wants_state else None)


def _forward_rule(layer: LayerCall, input: Any, weight: Any, state: Any) -> tuple[jax.Array, Kept]:
    wanted = (input.perturbed, weight.perturbed, any(leaf.perturbed for leaf in jax.tree.leaves(state)))
    values = input.value, weight.value, jax.tree.map(lambda leaf: leaf.value, state)
    x, w, s = differentiable_no_more(values, TWICE)
    if wanted[2]:
        s = _mapped_with(s, x, w)
    elif any(wanted) and any(t is not None and t.initialized is not None for t in state or ()):
        raise UnsupportedError(_LEFT_OUT)
    return _forward(layer, x, w, s, wanted)


def _backward_rule(layer: LayerCall, kept: Kept, grad_output: Any) -> tuple[Any, Any, Any]:
    recipe = layer.recipe
    if isinstance(grad_output, SymbolicZero):
        return None, None, None
    grad_output = differentiable_no_more(grad_output, TWICE)
    if layer.tap is not None:
        layer.tap.tensor("grad_output", grad_output)
    # 1. Both operands of grad_output.
    axes, plans = layer.divided, recipe.cast_plans
    g_plan = plans.grad_output.wanted(rows=kept.weight is not None, cols=kept.input is not None)
    g, g_transposed, amax = cast_matrix(grad_output, g_plan, kept.grad_output, axes.grad_output)
    # 2. The products, in the layouts of input and weight.
    d_input = d_weight = d_state = None
    input_is_t, weight_is_t = layer.is_input_transposed, layer.is_weight_transposed
    if g is not None:
        w = _taken(kept.weight, plans.weight.cols, weight_is_t, after=grad_output)
        w = _gathered(w, recipe.grad_input.b.granularity, (axes.gathered_k, axes.gathered_n))
        d_input = _product("grad_input", recipe.grad_input, g, w, layer.input_dtype, layer, input_is_t)
    if g_transposed is not None:
        x = _taken(kept.input, plans.input.cols, input_is_t, after=grad_output)
        d_weight = _product("grad_weight", recipe.grad_weight, g_transposed, x, layer.input_dtype, layer, weight_is_t)
        n, k = axes.gathered_n, axes.gathered_k
        d_weight = scattered_sum(d_weight, (k, n) if weight_is_t else (n, k)).astype(layer.weight_dtype.name)
    # 3. The amaxes, as the gradient of the state.
    if kept.amaxes is not None:
        assert kept.state is not None, "it is kept with the amaxes"
        d_state = _cotangent(layer, (*kept.amaxes, amax), kept.state)
    return d_input, d_weight, d_state


_matmul.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _mapped_with(state: Float8State, *operands: jax.Array) -> Float8State:
    def checked(of_tensor: DelayedState) -> DelayedState:
        inv_scale = refuse_mapped_alone(of_tensor.inv_scale, *operands, refusal=_MAPPED)
        return of_tensor._replace(inv_scale=inv_scale)

    return Float8State(*(of_tensor if of_tensor is None else checked(of_tensor) for of_tensor in state))


def keeps_input(layer: LayerCall, input: jax.Array, weight: jax.Array) -> bool:
    """Whether the input itself is kept, and cast again: where it takes less memory than codes of grad_output.

    A block's memory is at its peak when such a layer's grad_output comes. XLA then has room for an array of the input's
    size, where a gradient of that size will be, and lays codes, which are smaller, beside it. A cast by blocks is left
    as it is: it finds scales and codes of both operands in one pass.
    """
    has_amax = layer.recipe.cast_plans.input.cols.by_amax[1] is not None
    rows = input.shape[1 if layer.is_input_transposed else 0]
    features = weight.shape[1 if layer.is_weight_transposed else 0]
    return input.nbytes < rows * features and has_amax


def _product(
    name: str, spec: recipes.Gemm, a: Side, b: Side, out_dtype: Format, layer: LayerCall, transposed: bool = False
) -> jax.Array:
    """`a @ b^T` as one GEMM of the recipe, or its transpose."""
    assert isinstance(a, Operand) and isinstance(b, Operand), "they were cast for it"
    sizes = a.codes.shape[0], b.codes.shape[0], a.codes.shape[1]
    gemm = replace(layer_call(spec, sizes, out_dtype, CHIPS[layer.recipe.chip]), call="dot_general")
    scales: tuple[jax.Array, ...] = ()
    if gemm.granularities is not None:
        scales = _scale(a, gemm.granularities[0]), _scale(b, gemm.granularities[1]).T
    call = EngineCall(
        gemm,
        layer.engine,
        is_transposed=transposed,
        layout=LAYER_LAYOUTS[name],
        sharded_k=layer.sharded_k,
        powers_of_two=_has_safe_powers_of_two(layer.recipe, spec),
        emulated_split_k=dict(layer.split_k).get(name),
    )
    product = multiply(call, (a.codes, b.codes.T, *scales))
    if layer.tap is not None:
        layer.tap.gemm(name, a, b, product.T if transposed else product, layer)
    return product


def _scale(operand: Operand, granularity: Granularity) -> jax.Array:
    # Paired with a rowwise operand, a tensorwise scale is repeated for every row.
    assert operand.scale is not None, "a float8 operand has a scale"
    if granularity is Granularity.ROWWISE:
        return jnp.broadcast_to(operand.scale, (operand.codes.shape[0], 1))
    return operand.scale


def _has_safe_powers_of_two(recipe: Recipe, spec: recipes.Gemm) -> bool:
    """Whether a product may be rounded before it is scaled: what `hardware.form_of` asks for."""
    rules = {recipe.rule_of(cast) for cast in (spec.a, spec.b)}
    is_usual = rules == {ScaleRule(power_of_two=True)} and recipe.delayed is None
    return is_usual and spec.a.format == spec.b.format == E4M3FN


def _taken(side: Side, plan: CastPlan, is_transposed: bool, after: Any) -> Side:
    """The operand of the transpose of a matrix that was kept; `is_transposed`: the matrix was given so."""
    if not isinstance(side, Deferred):
        return side
    return side.operand(plan.turned(), 0, after) if is_transposed else side.operand(plan, 1, after)


def _gathered(operand: Side, granularity: Granularity, axes: tuple[Axes, Axes]) -> Side:
    if not isinstance(operand, Operand) or not any(axes):
        return operand
    codes, scale = gathered(operand.codes, axes), operand.scale
    if scale is not None:
        rows, k = granularity.block
        scale = gathered(scale, (axes[0] if rows else (), axes[1] if k else ()))
    return Operand(codes, scale)


def _cotangent(layer: LayerCall, amaxes: tuple[jax.Array | None, ...], state: Float8State) -> Float8State:
    # The encoding is that of `layer.delayed`.
    delayed = layer.recipe.delayed
    assert delayed is not None, "only such a recipe has a state"

    def of_tensor(amax: jax.Array | None, of_state: DelayedState | None) -> DelayedState | None:
        if amax is None:
            return None
        assert of_state is not None, "the amax is of a cast with a state"
        amax = as_gradient(amax, varying(of_state.amax_history), layer.divided)
        uses, zero = (as_gradient(jnp.full((), n, jnp.float32), varying(of_state.inv_scale)) for n in (1, 0))
        history = jnp.concatenate([amax.reshape(1), jnp.zeros(delayed.history_length - 1, jnp.float32)])
        initialized = None if of_state.initialized is None else zero
        return DelayedState(amax_history=history, inv_scale=uses, initialized=initialized)

    return Float8State(*map(of_tensor, amaxes, state))
