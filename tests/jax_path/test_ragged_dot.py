"""`ragged_dot`: group by group the bits of a linear layer, in every manner of JAX, and what it refuses."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import f8emu.jax as f8
import f8emu.numpy
import f8ref.numpy as reference
from f8emu.spec import (
    BFLOAT16,
    HOPPER,
    ROWWISE,
    ROWWISE_WITH_GW_HP,
    TENSORWISE,
    F8Error,
    OperandError,
    Recipe,
    SpecError,
    UnsupportedError,
)
from f8emu.spec.gemm_call import layer_call
from f8emu.split_k.ask import split_of
from tests.jax_path.layers import assert_same_bits, draw, passes

SIZES = (0, 1, 15, 17, 40)
T, K, N = sum(SIZES) + 7, 40, 56
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""Machine code in the shortest time: every case of sizes is a program of its own."""


def operands(seed: int, rows: int = T, sizes: tuple[int, ...] = SIZES) -> tuple[np.ndarray, ...]:
    """lhs, rhs, grad_output and sizes, in an order of their own, of groups that differ in magnitude."""
    x, g = (draw(rows, columns, seed=seed + i) for i, columns in enumerate((K, N)))
    size = np.exp2(3 * np.arange(len(sizes), dtype=np.float32))[:, None, None]
    w = (draw(len(sizes), K, N, seed=seed + 2, dtype="float32") * size).astype(x.dtype)
    return x, w, g, np.random.default_rng(seed).permutation(np.array(sizes, np.int32))


def all_passes(recipe: Recipe, x: Any, w: Any, g: Any, sizes: Any) -> tuple[Any, Any, Any]:
    return passes(lambda x, w: f8.ragged_dot(x, w, sizes, recipe=recipe), x, w, g)


def assert_oracle(found: Any, recipe: Recipe, x: Any, w: Any, g: Any, sizes: Any, **options: Any) -> None:
    trace = reference.grouped_linear(recipe, x, w.swapaxes(1, 2), np.cumsum(sizes, dtype=np.int32), g, **options)
    assert trace.grad_weight is not None
    for observed, wanted in zip(found, (trace.result, trace.grad_input, trace.grad_weight.swapaxes(1, 2)), strict=True):
        assert_same_bits(observed, wanted)


@pytest.mark.parametrize("recipe", [ROWWISE, TENSORWISE, ROWWISE_WITH_GW_HP], ids=lambda recipe: recipe.name)
def test_bits(recipe: Recipe) -> None:
    """One program serves all sizes. It computes `jax.lax.ragged_dot` to the accuracy of float8."""
    step = f8.jit(functools.partial(all_passes, recipe), compiler_options=FAST)
    for seed in range(5):
        given = operands(10 * seed)
        assert_oracle(step(*given), recipe, *given)
    x, w, g, sizes = map(jnp.asarray, operands(0))
    in_float32 = (a.astype(jnp.float32) for a in (x, w, g))
    of_jax = passes(lambda x, w: jax.lax.ragged_dot(x, w, sizes), *in_float32)
    for observed, wanted in zip(step(x, w, g, sizes), of_jax, strict=True):
        error = np.linalg.norm(np.asarray(observed, np.float32) - wanted) / np.linalg.norm(wanted)
        assert error < 0.06


def test_eagerly_and_mapped() -> None:
    """A call alone; a vmap over layers, which are computed one after another; a scan that computes again."""
    recipe, layers = ROWWISE_WITH_GW_HP, [operands(seed, 20, (0, 1, 15)) for seed in (0, 10)]
    multiply: Callable[..., Any] = functools.partial(f8.ragged_dot, recipe=recipe)
    eager = [all_passes(recipe, *given) for given in layers]
    for found, given in zip(eager, layers, strict=True):
        assert_oracle(found, recipe, *given)
    x, w, g, sizes = (jnp.stack(of_layers) for of_layers in zip(*layers, strict=True))
    mapped = f8.jit(jax.vmap(multiply), compiler_options=FAST)(x, w, sizes)
    assert_same_bits(mapped, jnp.stack([output for output, *_ in eager]))

    def scanned(x: Any, w: Any, g: Any, sizes: Any) -> Any:
        def one(carry: Any, of_layer: Any) -> Any:
            x, w, g, sizes = of_layer
            return carry, passes(jax.checkpoint(lambda x, w: multiply(x, w, sizes)), x, w, g)

        return jax.lax.scan(one, 0, (x, w, g, sizes))[1]

    wanted = jax.eval_shape(jax.vmap(functools.partial(all_passes, recipe)), x, w, g, sizes)
    assert (
        [a.shape for a in wanted]
        == [g.shape, x.shape, w.shape]
        == [a.shape for a in jax.eval_shape(scanned, x, w, g, sizes)]
    )


def test_nonfinite_values_stay_in_their_groups() -> None:
    """Nor do they reach the rows of no group, whose values and gradients take no part."""
    step = f8.jit(functools.partial(all_passes, TENSORWISE), compiler_options=FAST)
    x, w, g, _ = operands(3)
    sizes = np.array(SIZES, np.int32)
    x[20], g[1], w[4, 0, 0] = np.nan, np.inf, np.inf
    x[-1], g[-2] = np.nan, np.inf
    found = step(x, w, g, sizes)
    assert_oracle(found, TENSORWISE, x, w, g, sizes)
    assert not any(np.asarray(a, np.float32)[sum(SIZES) :].any() for a in found[:2])
    # More rows than there are: what is there is the group's.
    assert_same_bits(step(x, w, g, 9 * sizes)[0], step(x, w, g, np.array([0, 9, 71, 0, 0], np.int32))[0])


def test_only_a_bfloat16_product_keeps_k_whole() -> None:
    """The grouped kernels have no other product: float32 ones are split by the plan, in numpy as in JAX."""
    x, w = draw(16, 8192, seed=1).astype(np.float32), draw(2, 8192, 64, seed=2).astype(np.float32)
    outputs = [np.asarray(f8.ragged_dot(x, w, np.array([8, 8], np.int32), recipe=TENSORWISE))]
    outputs += [f8emu.numpy.grouped_linear(TENSORWISE, x, w.swapaxes(1, 2), np.array([8, 16], np.int32)).result]
    whole = reference.grouped_linear(TENSORWISE, x, w.swapaxes(1, 2), np.array([8, 16], np.int32)).result
    assert outputs[0].tobytes() == outputs[1].tobytes() != whole.tobytes()


def test_split_k_is_that_of_the_group() -> None:
    """[CHAIN-3] Of a GEMM with an E5M2 operand, by the size of its group; no other is split."""
    k, n, sizes = 16, 6144, np.array([2, 9], np.int32)
    x, w, g = draw(12, k, seed=1), draw(2, k, n, seed=2), draw(12, n, seed=3)

    def split_k(m: int) -> dict[str, int]:
        sizes = {"grad_input": (m, k, n), "grad_weight": (n, k, m)}
        gemms = {name: layer_call(TENSORWISE.gemms[name], size, BFLOAT16, HOPPER) for name, size in sizes.items()}
        return {name: split_of(None, gemm).split_k for name, gemm in gemms.items()}

    slices = [split_k(size) for size in sizes.tolist()]
    assert max(s["grad_input"] for s in slices) > 1
    found = f8.jit(functools.partial(all_passes, TENSORWISE), compiler_options=FAST)(x, w, g, sizes)
    assert_oracle(found, TENSORWISE, x, w, g, sizes, split_k=slices)


def test_in_shard_map_and_on_explicit_meshes() -> None:
    """Experts divided among devices; types that say along which axes arrays vary, or how they are sharded."""
    x, w, g, sizes = map(jnp.asarray, operands(5))
    spec = PartitionSpec("expert")
    step: Callable[..., Any] = functools.partial(all_passes, ROWWISE)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec(), spec, spec, spec), "out_specs": (spec, PartitionSpec(), spec)}
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(jax.shard_map(lambda *a: step(*a), mesh=mesh, **specs), x, w, g, sizes)
    assert [a.shape for a in shapes] == [g.shape, x.shape, w.shape]
    with jax.set_mesh(jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Explicit,))):
        sharded = jax.sharding.reshard(x, spec)
        multiply: Callable[..., Any] = functools.partial(f8.ragged_dot, out_sharding=spec)
        product = jax.eval_shape(multiply, sharded, w, sizes)
        assert jax.typeof(product).sharding.spec[0] == "expert"
        with pytest.raises(UnsupportedError, match="pass out_sharding"):
            f8.ragged_dot(sharded, w, sizes)


def test_signature_is_that_of_jax() -> None:
    own = [(p.name, p.kind, p.default) for p in inspect.signature(f8.ragged_dot).parameters.values()]
    jax_own = [(p.name, p.kind, p.default) for p in inspect.signature(jax.lax.ragged_dot).parameters.values()]
    assert own[: len(jax_own)] == jax_own and [name for name, *_ in own[len(jax_own) :]] == ["recipe", "engine"]


X, W = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((2, 8, 3), jnp.bfloat16)


def dot(x: Any = X, w: Any = W, sizes: Any = (1, 2), **options: Any) -> jax.Array:
    return f8.ragged_dot(x, w, jnp.asarray(sizes), **options)


WRONG: list[tuple[type[F8Error], str, Callable[[], Any]]] = [
    (OperandError, r"got \[8, 4\], \[2, 8, 3\] and \[2\]", lambda: dot(X.T)),
    (OperandError, r"got \[4, 8\], \[8, 3\] and \[2\]", lambda: dot(w=W[0])),
    (OperandError, r"got \[4, 8\], \[2, 8, 3\] and \[3\]", lambda: dot(sizes=(1, 2, 3))),
    (OperandError, r"group_sizes \[E\], integers; got .*float", lambda: dot(sizes=(1.0, 2.0))),
    (OperandError, "rhs must be .*got int32", lambda: dot(w=W.astype(jnp.int32))),
    (OperandError, "engine must be one of", lambda: dot(engine="fast")),
    (UnsupportedError, "recipe 'delayed' with delayed scales", lambda: dot(recipe="delayed")),
    (UnsupportedError, "recipe 'blockwise' with block scales", lambda: dot(recipe="blockwise")),
    (UnsupportedError, "'mxfp8' with block scales; use another, or dot_general", lambda: dot(recipe="mxfp8")),
    (SpecError, "unknown recipe", lambda: dot(recipe="no")),
    (UnsupportedError, "precision must be None", lambda: dot(precision="highest")),
    (UnsupportedError, "got a group_offset", lambda: dot(group_offset=jnp.zeros(1, jnp.int32))),
    (
        UnsupportedError,
        "differentiable once",
        lambda: jax.make_jaxpr(jax.grad(lambda x: jax.grad(lambda x: dot(x).sum())(x).sum()))(X.astype(jnp.float32)),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[message for _, message, _ in WRONG])
def test_refused(error: type[F8Error], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def test_empty_extents() -> None:
    found = passes(lambda x, w: dot(x, w, (0, 0)), X[:0], W, jnp.ones((0, 3), X.dtype))
    assert [a.shape for a in found] == [(0, 3), (0, 8), W.shape] and not found[2].any()
