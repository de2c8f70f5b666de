"""f8ref.jax in every mode of JAX: the same bits eagerly, in an outer jit, under vmap, with x64 on, op by op."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8ref.jax as f8
from f8emu.spec import E4M3FN, E5M2, HOPPER, Granularity
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

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
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
    calls: list[Callable[[], Any]] = [lambda: float8_step(HOPPER.float8, total, a, b), lambda: softfloat.multiply(x, y)]
    compiled = [leaves(jax.jit(call)()) for call in calls]
    with jax.disable_jit():
        assert [leaves(call()) for call in calls] == compiled


def test_operands_of_numpy() -> None:
    call, operands = CALLS["scaled_mm"]
    assert leaves(call(*map(np.asarray, operands))) == leaves(call(*operands))
