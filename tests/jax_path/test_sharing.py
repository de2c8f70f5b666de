"""Small eager casts share programs: the bits of a program of their own, and nothing compiled for another shape."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import f8emu.jax as f8
from f8emu.jax.fused import casts
from f8emu.jax.sharing import is_shared
from f8emu.spec import E4M3FN, E5M2, Granularity, ScaleRule

RULE = ScaleRule(power_of_two=True)
VECTORS, SQUARES = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128


def tensorwise(x: jax.Array) -> Any:
    scales = f8.scale_from_amax(f8.amax(x), E4M3FN)
    return casts.cast_pair(x, E4M3FN, scales.inv_scale, scales.inv_scale), f8.decode(f8.cast(x, E5M2))


def rowwise(x: jax.Array) -> Any:
    amaxes = casts.row_col_amax(x)
    inv_scales = (f8.scale_from_amax(amax, E4M3FN, RULE).inv_scale for amax in amaxes)
    codes, scales = casts.cast_rows(x, E5M2)
    return casts.cast_pair(x, E4M3FN, *inv_scales), f8.dequantize(codes, scales.scale, "rowwise")


def blockwise(x: jax.Array) -> Any:
    rows, cols = casts.cast_blocks(x, E4M3FN, RULE, VECTORS, SQUARES)
    assert rows is not None and cols is not None
    return rows, cols, f8.dequantize(rows[0], rows[1].scale, VECTORS)


def drawn(shape: tuple[int, int], dtype: Any) -> jax.Array:
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 5, (shape[0], 1)) + rng.integers(-9, 5, (1, shape[1])))
    x[0, :4] = 1e-40, -0.0, np.inf, np.nan
    return jax.device_put(x.astype(np.float32).astype(dtype), jax.devices()[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cast", [tensorwise, rowwise, blockwise])
def test_shared_programs_give_the_bits_of_own_ones(cast: Callable[[jax.Array], Any], dtype: Any) -> None:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        compiled.extend([str(facts.get("fun_name"))] if "backend_compile" in event else [])

    arrays = [drawn(shape, dtype) for shape in ((130, 270), (140, 300))]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        expected = [jax.jit(cast)(x) for x in arrays]
        assert [name for name in compiled if f"({cast.__name__})" in name], "a program for each shape"
        observed = [cast(arrays[0])]
        compiled.clear()
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # as around a backward pass
            observed.append(cast(arrays[1]))
        assert not [name for name in compiled if "(_" in name]  # is_eager asks for a zero, under every mesh
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    for x, y in zip(jax.tree.leaves(observed), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(np.asarray(x).view("u1"), np.asarray(y).view("u1"))


def test_what_is_not_shared() -> None:
    """What is traced, what is large, and what is empty."""
    small = jnp.ones((4, 8))
    assert is_shared(small) and is_shared(small, small)
    assert not is_shared(jnp.ones((1 << 9, (1 << 9) + 1))) and not is_shared(jnp.ones((0, 8)))
    seen: list[bool] = []
    jax.eval_shape(lambda x: seen.append(is_shared(x)), small)
    jax.eval_shape(partial(lambda x, y: seen.append(is_shared(x)), small), small)
    assert seen == [False, False]


def test_where_arrays_lie() -> None:
    """A sharding over one device may name every dimension; results lie where they would without sharing."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("a", "b", "c"))
    x = jax.device_put(drawn((32, 24), jnp.bfloat16).reshape(4, 8, 24), NamedSharding(mesh, P("a", "b", "c")))
    codes = f8.cast(x, E4M3FN)
    assert codes.sharding == x.sharding
    np.testing.assert_array_equal(
        np.asarray(codes).view("u1"), np.asarray(jax.jit(f8.cast, static_argnums=1)(x, E4M3FN)).view("u1")
    )
    free, scale = jnp.ones((4, 8)), jax.device_put(jnp.ones((1, 1)), jax.devices()[0])
    assert not is_shared(free, scale) and f8.quantize(free, scale, E4M3FN).committed
