"""f8ref.jax in every mode of JAX: the same bits eagerly, in an outer jit, under vmap, with x64 on, op by op."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8ref.jax as f8
from f8emu.spec import (
    BLOCKWISE,
    DELAYED,
    E4M3FN,
    E5M2,
    HOPPER,
    DelayedState,
    Granularity,
    OperandError,
    Recipe,
    ScaleRule,
    recipe_by_name,
)
from f8ref.jax import softfloat
from f8ref.jax.accumulate import float8_operand, float8_step, unpacked_float8

M, N, K = 16, 32, 160
RNG = np.random.default_rng(70)
X = jnp.asarray((RNG.standard_normal((M, K)) * 2.0 ** RNG.integers(-20, 10, (M, K))).astype(np.float32))
A = jnp.asarray(RNG.standard_normal((M, K)).astype("float8_e5m2"))
B = jnp.asarray(RNG.standard_normal((K, N)).astype("float8_e4m3fn"))
SCALE_A = jnp.asarray(RNG.uniform(0.5, 2, (M, 1)) * 1e-39, jnp.float32)
SCALE_B = jnp.asarray(RNG.uniform(0.5, 2, (1, N)), jnp.float32)
ROWWISE = Granularity.ROWWISE
BLOCKS = Granularity.BLOCKWISE_1X128

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cast": (functools.partial(f8.cast, format=E4M3FN), (X,)),
    "decode": (f8.decode, (A,)),
    "amax": (functools.partial(f8.amax, granularity=BLOCKS), (X,)),
    "scale_from_amax": (functools.partial(f8.scale_from_amax, format=E5M2, rule=ScaleRule(), margin=2), (X,)),
    "quantize": (functools.partial(f8.quantize, format=E4M3FN, granularity=ROWWISE), (X, SCALE_A)),
    "dequantize": (functools.partial(f8.dequantize, granularity=ROWWISE), (A, SCALE_A)),
    "scaled_mm": (
        functools.partial(f8.scaled_mm, granularity_a=ROWWISE, granularity_b=ROWWISE, out_dtype="float32"),
        (A, B, SCALE_A, SCALE_B),
    ),
    "mm": (f8.mm, (X.astype(jnp.bfloat16), X.T.astype(jnp.bfloat16))),
}


def leaves(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", CALLS)
def test_outer_jit_and_x64(name: str) -> None:
    call, operands = CALLS[name]
    eager = leaves(call(*operands))
    assert leaves(jax.jit(call)(*operands)) == eager
    with jax.enable_x64(True):
        assert leaves(call(*operands)) == eager
    # As constants, and with what comes before and after in the same program.
    assert leaves(jax.jit(lambda: jax.tree.map(lambda y: y.T.T, call(*(x.T.T for x in operands))))()) == eager


def test_vmap_is_a_loop() -> None:
    call = functools.partial(f8.scaled_mm, out_dtype="float32", use_fast_accum=True)
    a = jnp.stack([A, A[::-1], jnp.full_like(A, np.nan)])
    scales = jnp.asarray([1.0, 0.3, 2.0], jnp.float32)
    batched = jax.vmap(call, in_axes=(0, None, 0, None))(a, B, scales, scales[0])
    alone = [call(a_i, B, s_i, scales[0]) for a_i, s_i in zip(a, scales, strict=True)]
    assert leaves(batched) == leaves(jnp.stack(alone))
    inv_scale = jnp.asarray([[[1.0]], [[0.1]], [[1e-3]]], jnp.float32)
    quantized = jax.vmap(functools.partial(f8.quantize, format=E5M2), in_axes=(None, 0))(X, inv_scale)
    assert leaves(quantized) == leaves(jnp.stack([f8.quantize(X, s, E5M2) for s in inv_scale]))


def test_operands_that_a_trace_closes_over() -> None:
    one = jnp.ones((), jnp.float32)
    product = f8.scaled_mm(A, B, one, one, out_dtype="float32")

    def call(scale: jax.Array) -> jax.Array:
        return f8.scaled_mm(A, B, scale, one, out_dtype="float32")

    assert leaves(jax.jit(call)(one)) == leaves(product)
    assert leaves(jax.jit(lambda: call(one))()) == leaves(product)
    assert leaves(jax.vmap(call)(one[None])[0]) == leaves(product)
    assert leaves(jax.lax.fori_loop(0, 2, lambda i, x: call(one), jnp.zeros_like(product))) == leaves(product)


def test_operation_by_operation() -> None:
    """Without a compiled program around it: a step of the tensor core, and a product of floats."""
    a = float8_operand(unpacked_float8(jnp.asarray(np.asarray(A[:2, :32]).view(np.uint8), jnp.uint32), E5M2))
    b = float8_operand(unpacked_float8(jnp.asarray(np.asarray(B[:32, :3]).view(np.uint8), jnp.uint32), E4M3FN))
    total = jnp.asarray([[0.0, 0.75, -3.0], [1e-9, 7.0, -1e4]], jnp.float32)
    x, y = softfloat.bits(X[:2, :3]), softfloat.bits(jnp.broadcast_to(SCALE_A[:2], (2, 3)))
    calls: list[Callable[[], Any]] = [
        lambda: float8_step(HOPPER.float8, total, a, b),
        lambda: softfloat.multiply(x, y),
    ]
    compiled = [leaves(jax.jit(call)()) for call in calls]
    with jax.disable_jit():
        assert [leaves(call()) for call in calls] == compiled


def test_operands_of_numpy() -> None:
    call, operands = CALLS["scaled_mm"]
    assert leaves(call(*map(np.asarray, operands))) == leaves(call(*operands))


def layer(recipe: Recipe) -> tuple[dict[str, Any], dict[str, DelayedState] | None]:
    rng = np.random.default_rng(71)
    tensors = {"input": (32, 32), "weight": (32, 32), "grad_output": (32, 32), "bias": (32,)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape).astype("bfloat16")) for name, shape in tensors.items()}
    if recipe.delayed is None:
        return arrays, None
    states = {name: f8.initial_delayed_state(recipe.delayed) for name in ("input", "weight", "grad_output")}
    amax = jnp.asarray([3.0], jnp.float32)
    states["input"] = f8.update_delayed_state(states["input"], amax, E4M3FN, recipe.scale_rule, recipe.delayed)
    return arrays, states


@pytest.mark.parametrize("recipe", [DELAYED, BLOCKWISE], ids=lambda recipe: recipe.name)
def test_a_linear_in_jit(recipe: Recipe) -> None:
    arrays, states = layer(recipe)
    if recipe is BLOCKWISE:
        del arrays["grad_output"]
    eager = f8.linear(recipe, **arrays, delayed_state=states)
    jitted = jax.jit(functools.partial(f8.linear, recipe))(**arrays, delayed_state=states)
    assert jax.tree.structure(jitted) == jax.tree.structure(eager)
    assert leaves(jitted) == leaves(eager)


def test_a_delayed_state_is_a_tree_that_jit_takes_and_gives() -> None:
    assert DELAYED.delayed is not None
    update = functools.partial(f8.update_delayed_state, format=E5M2, rule=ScaleRule(), delayed=DELAYED.delayed)
    state = f8.initial_delayed_state(DELAYED.delayed)
    amax = jnp.asarray(2.0, jnp.float32)
    assert leaves(jax.jit(update)(state, amax)) == leaves(update(state, amax))
    with jax.enable_x64(True):
        assert leaves(update(state, amax)) == leaves(update(state, amax))


def test_refusals_of_linear() -> None:
    arrays, states = layer(DELAYED)
    recipe = recipe_by_name("tensorwise")
    with pytest.raises(OperandError, match=r"needs a delayed_state for .*grad_output"):
        f8.linear(DELAYED, **arrays, delayed_state=None)
    with pytest.raises(OperandError, match="for no tensor"):
        f8.linear(recipe, **arrays, delayed_state=states)
    with pytest.raises(OperandError, match=r"must be \[M, K\], \[N, K\], \[M, N\] and \[N\]"):
        f8.linear(recipe, arrays["input"], arrays["weight"][:, 1:])
    with pytest.raises(OperandError, match=r"linear: weight must be an array of .* got an array of float64"):
        f8.linear(recipe, arrays["input"], np.ones((32, 32)))  # pyright: ignore[reportArgumentType]
