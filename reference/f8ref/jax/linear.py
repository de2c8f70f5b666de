"""A whole linear layer under a recipe, forward and backward: every amax, scale, code and product."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from f8emu.spec import (
    BFLOAT16,
    CHIPS,
    OPERANDS,
    TRANSPOSED,
    Cast,
    Chip,
    DelayedState,
    Format,
    Gemm,
    GemmTrace,
    Granularity,
    LinearTrace,
    OperandError,
    OperandTrace,
    Overflow,
    Recipe,
)
from f8ref.jax import softfloat
from f8ref.jax.cast import quantize
from f8ref.jax.codec import codes, float32_bits, high_precision_format, round_to_code, typed
from f8ref.jax.scale import amax, reciprocal, scale_from_amax
from f8ref.jax.scaled_mm import mm, scaled_mm


def linear(
    recipe: Recipe,
    input: jax.Array,
    weight: jax.Array,
    grad_output: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    split_k: Mapping[str, int] | None = None,
    chip: Chip | None = None,
) -> LinearTrace:
    """Forward, and with `grad_output` backward, of `input @ weight^T + bias` as the recipe's kernels compute it.

    Every product has the dtype of `input`. A cast is of the tensor's own values, float32 as they are beside a bfloat16
    input too. A high precision GEMM rounds its operands to bfloat16. Under delayed scaling a cast uses the state's
    inv_scale, and before the first update the one that its own amax would give; the state is not updated here.
    `split_k` gives the slices of K of a GEMM by its name [CHAIN-3], static; other GEMMs are not split.
    `chip` is a profile in place of the recipe's.

    Shapes: input [M, K], weight [N, K], grad_output [M, N], bias [N]; float32, bfloat16 or float16.
    Exactness: bit-exact to the parts, `scaled_mm` and `mm`. Traceable with the recipe static.

    Raises:
        OperandError: a tensor with a wrong dtype or shape, or delayed states that are missing or not needed.
    """
    tensors = {"input": input, "weight": weight}
    if grad_output is not None:
        tensors["grad_output"] = grad_output
    dtype = _require_tensors(tensors, bias)
    tensors = {name: jnp.asarray(x) for name, x in tensors.items()}
    states = _require_states(recipe, tensors, delayed_state)

    def gemm(name: str) -> GemmTrace:
        return _gemm(
            name,
            recipe,
            tensors,
            states,
            dtype,
            (split_k or {}).get(name, 1),
            CHIPS[recipe.chip] if chip is None else chip,
        )

    output = gemm("output")
    result = output.product if bias is None else _add_bias(output.product, jnp.asarray(bias), dtype)
    if grad_output is None:
        return LinearTrace(output=output, grad_input=None, grad_weight=None, result=result)
    return LinearTrace(output=output, grad_input=gemm("grad_input"), grad_weight=gemm("grad_weight"), result=result)


def _gemm(
    name: str,
    recipe: Recipe,
    tensors: Mapping[str, jax.Array],
    states: Mapping[str, DelayedState],
    dtype: Format,
    split_k: int,
    chip: Chip,
) -> GemmTrace:
    gemm = recipe.gemms[name]
    a, b = (
        _operand(recipe, source, cast, tensors[source].T if transposed else tensors[source], states.get(source))
        for source, cast, transposed in zip(OPERANDS[name], (gemm.a, gemm.b), TRANSPOSED[name], strict=True)
    )
    return GemmTrace(a=a, b=b, product=_product(gemm, a, b, dtype, split_k, chip))


def _operand(recipe: Recipe, tensor: str, cast: Cast, x: jax.Array, state: DelayedState | None) -> OperandTrace:
    """One operand, made of `tensor` and seen as [rows, summed dimension]."""
    if cast.format is None:
        return OperandTrace(amax=None, inv_scale=None, scale=None, codes=_rounded_to(BFLOAT16, x))
    own = amax(x, cast.granularity)
    delayed = recipe.delayed_scaling_of(tensor)
    margin = 0 if delayed is None else delayed.margin
    inv_scale, scale = scale_from_amax(own, cast.format, recipe.scale_rule, margin=margin)
    if delayed is not None and state is not None:
        earlier = jnp.reshape(state.inv_scale, (1, 1))
        inv_scale = jnp.where(jnp.reshape(state.initialized, (1, 1)), earlier, inv_scale)
        scale = reciprocal(inv_scale)
    return OperandTrace(
        amax=own, inv_scale=inv_scale, scale=scale, codes=quantize(x, inv_scale, cast.format, cast.granularity)
    )


def _product(gemm: Gemm, a: OperandTrace, b: OperandTrace, dtype: Format, split_k: int, chip: Chip) -> jax.Array:
    if gemm.is_high_precision:
        return mm(a.codes, b.codes.T, out_dtype=dtype, split_k=split_k, chip=chip)
    granularity_a, granularity_b = gemm.scaled_gemm_granularities
    scale_a, scale_b = a.scale, b.scale
    if granularity_a is Granularity.ROWWISE:  # one scale beside rowwise ones is repeated
        scale_a = jnp.broadcast_to(scale_a, (a.codes.shape[0], 1))
        scale_b = jnp.broadcast_to(scale_b, (b.codes.shape[0], 1))
    return scaled_mm(
        a.codes,
        b.codes.T,
        scale_a,
        scale_b.T,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=dtype,
        use_fast_accum=gemm.use_fast_accum,
        split_k=split_k,
        chip=chip,
    )


def _rounded_to(format: Format, x: jax.Array) -> jax.Array:
    return _rounded(x, high_precision_format(x, "linear", "x"), format)


@functools.partial(jax.jit, static_argnames=("source", "format"))
def _rounded(x: jax.Array, source: Format, format: Format) -> jax.Array:
    return typed(round_to_code(float32_bits(codes(x, source), source), format, Overflow.NONFINITE), format)


def _add_bias(product: jax.Array, bias: jax.Array, dtype: Format) -> jax.Array:
    """`product + bias` in the product's dtype: the bias is rounded to it, and the float32 sum again."""
    return _sum(product, _rounded_to(dtype, bias)[None, :], dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _sum(x: jax.Array, y: jax.Array, dtype: Format) -> jax.Array:
    total = softfloat.add(float32_bits(codes(x, dtype), dtype), float32_bits(codes(y, dtype), dtype))
    return typed(round_to_code(total, dtype, Overflow.NONFINITE), dtype)


def _require_tensors(tensors: Mapping[str, jax.Array], bias: jax.Array | None) -> Format:
    """The format of `input`, which is that of the products."""
    for name, x in tensors.items():
        high_precision_format(x, "linear", name)
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if bias is not None:
        high_precision_format(bias, "linear", "bias")
        shapes["bias"] = tuple(bias.shape)
    input, weight = shapes["input"], shapes["weight"]
    fits = len(input) == len(weight) == 2 and input[1] == weight[1]
    if fits:
        fits = shapes.get("grad_output", (input[0], weight[0])) == (input[0], weight[0])
        fits = fits and shapes.get("bias", (weight[0],)) == (weight[0],)
    if not fits:
        raise OperandError(
            "linear: input, weight, grad_output and bias must be [M, K], [N, K], [M, N] and [N]; "
            f"got {shapes}. Flatten leading dimensions into M first"
        )
    return high_precision_format(tensors["input"], "linear", "input")


def _require_states(
    recipe: Recipe, tensors: Mapping[str, jax.Array], delayed_state: Mapping[str, DelayedState] | None
) -> Mapping[str, DelayedState]:
    given = {} if delayed_state is None else delayed_state
    needed = {tensor for tensor in tensors if recipe.delayed_scaling_of(tensor) is not None}
    if not needed <= set(given) or (given and not needed):
        raise OperandError(
            f"linear: recipe {recipe.name!r} needs a delayed_state for {sorted(needed) or 'no tensor'}; "
            f"got one for {sorted(given) or 'none'}. initial_delayed_state(recipe.delayed) makes the first of each"
        )
    return given
