"""f8ref.jax GEMMs: rows, empty operands, memory of the compiled program; the same bits in every mode of JAX."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import f8ref.jax as f8
import f8ref.numpy
from f8emu.spec import BFLOAT16, E4M3FN, HOPPER, Granularity
from f8ref.jax import gemm, mm, scaled_grouped_mm, scaled_mm, softfloat
from f8ref.jax.chain import Chain
from tests.oracle.exactly import assert_same_bits

ONE = jnp.ones((1, 1), jnp.float32)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float8_e4m3fn") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def test_rows_are_put_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones overlap their neighbours."""
    m, n = 53, 96
    matrix = jnp.arange(m * n, dtype=jnp.uint32).reshape(m, n)
    for limit, count in ((1, 1), (400, 4), (2000, 18), (5100, 53)):
        monkeypatch.setattr(gemm, "LIMIT", limit)
        counts: list[int] = []

        def some_rows(m_0: gemm.Index, rows: int) -> jax.Array:
            counts.append(rows)  # noqa: B023
            return jax.lax.dynamic_slice_in_dim(matrix, m_0, rows, 0)

        assert_same_bits(jax.jit(functools.partial(gemm.by_rows, m, n, some_rows))(), np.asarray(matrix))
        assert counts == [count]


def test_gemms_by_rows_have_the_bits_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled by blocks, and of groups whose rows are computed together; the whole ones are those of f8ref.numpy."""
    rng = np.random.default_rng(63)
    a, b = (np.asarray(drawn(rng, shape)) for shape in ((37, 300), (300, 45)))
    scale_a, scale_b = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((37, 3), (3, 1)))
    pair: Any = {"granularity_a": Granularity.BLOCKWISE_1X128, "granularity_b": Granularity.BLOCKWISE_128X128}
    scales = np.ones(37, np.float32), np.ones((2, 45), np.float32), np.asarray([20, 33], np.int32)
    monkeypatch.setattr(gemm, "LIMIT", 400)
    blockwise = scaled_mm(a, b, scale_a, scale_b, **pair)  # pyright: ignore[reportArgumentType]
    assert_same_bits(blockwise, f8ref.numpy.scaled_mm(a, b, scale_a, scale_b, **pair))
    groups = np.stack([b, -b])
    grouped = scaled_grouped_mm(a, groups, *scales)  # pyright: ignore[reportArgumentType]
    of_groups = f8ref.numpy.scaled_grouped_mm(a[:33], groups, scales[0][:33], *scales[1:])
    assert_same_bits(grouped, np.concatenate([of_groups, np.zeros((4, 45), of_groups.dtype)]))


def test_extents_of_a_chain() -> None:
    chain = Chain(HOPPER.float8, E4M3FN, E4M3FN, 8192, 3)
    assert (chain.block_k, chain.blocks, chain.padded_k, chain.blocks_per_slice) == (128, 64, 8192, 22)
    short = Chain(HOPPER.bfloat16, BFLOAT16, BFLOAT16, 33, 2)
    assert (short.block_k, short.blocks, short.padded_k, short.blocks_per_slice) == (48, 1, 48, 1)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 5), (3, 0, 5), (3, 5, 0), (1, 1, 1)])
def test_small_and_empty(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(64)
    a, b = drawn(rng, (m, k)), drawn(rng, (k, n))
    bias = jnp.arange(n, dtype=jnp.float32) + 1
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32)  # exact, being at most one term
    assert np.array_equal(
        np.asarray(scaled_mm(a, b, ONE, -ONE, bias=bias, out_dtype="float32")), np.asarray(bias) - product
    )
    assert np.array_equal(np.asarray(mm(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), out_dtype="float32")), product)
    blocks = Granularity.BLOCKWISE_1X128
    scale_a = jnp.ones(blocks.scale_shape(m, k), jnp.float32)
    scale_b = jnp.ones(blocks.scale_shape(n, k)[::-1], jnp.float32)
    blockwise = scaled_mm(a, b, scale_a, scale_b, granularity_a=blocks, granularity_b=blocks, out_dtype="float32")
    assert np.array_equal(np.asarray(blockwise), product)


def test_memory_of_the_compiled_program() -> None:
    """The operands unpacked, the accumulators, and a few times those of a tile."""
    scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    for size, use_fast_accum in ((2048, False), (2048, True), (16384, False)):
        codes = jax.ShapeDtypeStruct((size, size), jnp.float8_e4m3fn)
        call = functools.partial(scaled_mm, use_fast_accum=use_fast_accum)
        memory = jax.jit(call).lower(codes, codes, scale, scale).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes <= 2 * 2 * size**2 + 4 * size**2 + 3 * 4 * min(size**2, gemm.LIMIT)


# ---- In every mode of JAX: eagerly, in an outer jit, under vmap, with x64 on, op by op

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
    unit = jnp.ones((), jnp.float32)
    product = f8.scaled_mm(A, B, unit, unit, out_dtype="float32")

    def call(scale: jax.Array) -> jax.Array:
        return f8.scaled_mm(A, B, scale, unit, out_dtype="float32")

    assert leaves(jax.jit(call)(unit)) == leaves(product)
    assert leaves(jax.jit(lambda: call(unit))()) == leaves(product)
    assert leaves(jax.vmap(call)(unit[None])[0]) == leaves(product)
    assert leaves(jax.lax.fori_loop(0, 2, lambda i, x: call(unit), jnp.zeros_like(product))) == leaves(product)


def test_operation_by_operation() -> None:
    """A product of floats without a compiled program around it."""
    x, y = softfloat.bits(X[:2, :3]), softfloat.bits(jnp.broadcast_to(SCALE_A[:2], (2, 3)))
    compiled = leaves(jax.jit(softfloat.multiply)(x, y))
    with jax.disable_jit():
        assert leaves(softfloat.multiply(x, y)) == compiled


def test_operands_of_numpy() -> None:
    call, operands = CALLS["scaled_mm"]
    assert leaves(call(*map(np.asarray, operands))) == leaves(call(*operands))
