"""The fused casts: plain JAX against the oracle, kernels against plain JAX, and which of them a program has."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import f8ref.numpy as reference
from f8emu.jax import compiling, kernels
from f8emu.jax import fused as casts
from f8emu.jax.kernels import Launch
from f8emu.spec import E4M3FN, E4M3FNUZ, E5M2, Granularity, ScaleRule, Scales
from tests.oracle import exactly

VECTORS, SQUARES = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
POWERS = ScaleRule(power_of_two=True)
SMALL = Launch(rows=16, cols=32, warps=4, interpret=True)
TRITON = "@__gpu$xla.gpu.triton"


def assert_same_bits(observed: Any, expected: Any) -> None:
    """Trees of arrays, equal as integers, in dtype and in shape."""
    jax.tree.map(exactly.assert_same_bits, observed, expected)


def drawn(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Rows and columns of other magnitudes; NaN, infinities, zeros and subnormals in the first rows and columns."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 5, (shape[0], 1)) + rng.integers(-9, 5, (1, shape[1])))
    x[-1] = 0
    for i, value in enumerate([np.nan, -np.nan, np.inf, -np.inf, 3e38, -0.0, 1e-40, -0.0]):
        x[i % 2 * min(3, shape[0] - 1), (7 * i) % shape[1]] = value
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


def inv_scales(rows: int, seed: int) -> jax.Array:
    return jnp.asarray(np.exp2(np.random.default_rng(seed).uniform(-4, 8, (rows, 1))), jnp.float32)


def ones(rows: int) -> jax.Array:
    return jnp.ones((rows, 1), jnp.float32)


GIVEN: dict[str, tuple[str | None, str | None]] = {
    "both": ("one", "one"),
    "rows": ("one", None),
    "vectors": ("rows", "cols"),
    "vector-and-one": ("rows", "one"),
}
"""The inv_scales of x and of its transpose."""


@pytest.mark.parametrize(
    ("shape", "dtype", "format", "kinds"),
    [((48, 64), ml_dtypes.bfloat16, E5M2, ("both", "vectors")), ((37, 75), "f4", E4M3FN, GIVEN)],
)
def test_kernels_under_given_scales_equal_plain(shape, dtype, format, kinds) -> None:
    """On a CPU the casts are plain JAX."""
    x, how = jnp.asarray(drawn(shape, dtype)), {"format": format, "launch": SMALL}
    scales = {None: None, "one": inv_scales(1, 1), "rows": inv_scales(shape[0], 2), "cols": inv_scales(shape[1], 3)}
    for kind in kinds:
        factors = [scales[name] for name in GIVEN[kind]]
        assert_same_bits(kernels.cast_pair(x, *factors, **how), casts.cast_pair(x, format, *factors))
    for sides in ({"rows": True, "cols": True}, {"rows": False, "cols": True}):
        observed = kernels.cast_pair_amax(x, scales["one"], **sides, **how)
        assert_same_bits(observed, casts.cast_pair_amax(x, format, scales["one"], **sides))
    assert_same_bits(kernels.row_col_amax(x, launch=SMALL), casts.row_col_amax(x))


@pytest.mark.parametrize("rule", [ScaleRule(amax_floor=0.5), POWERS], ids=str)
@pytest.mark.parametrize(("shape", "dtype", "format"), [((8, 64), "f2", E4M3FN), ((5, 75), ml_dtypes.bfloat16, E5M2)])
def test_kernel_of_rows_equals_plain(shape, dtype, format, rule) -> None:
    x, launch = jnp.asarray(drawn(shape, dtype)), Launch(rows=1, cols=128, warps=4, interpret=True)
    observed = kernels.cast_rows(x, format=format, rule=rule, launch=launch)
    assert_same_bits(observed, casts.cast_rows(x, format, rule))


@pytest.mark.parametrize(
    ("rows", "cols", "shape", "format", "rule"),
    [
        (VECTORS, VECTORS, (130, 140), E4M3FN, ScaleRule()),
        (SQUARES, SQUARES, (130, 140), E5M2, ScaleRule()),
        (VECTORS, SQUARES, (130, 70), E4M3FN, POWERS),
        (SQUARES, VECTORS, (130, 70), E4M3FN, POWERS),
        (None, VECTORS, (129, 257), E4M3FN, ScaleRule()),
        (SQUARES, None, (129, 257), E4M3FN, ScaleRule()),
    ],
    ids=str,
)
def test_kernel_of_blocks_equals_plain(rows, cols, shape, format, rule) -> None:
    x = jnp.asarray(drawn(shape, ml_dtypes.bfloat16))
    settings = {"format": format, "rule": rule, "row_granularity": rows, "col_granularity": cols}
    assert_same_bits(
        kernels.cast_blocks(x, **settings, launch=replace(kernels.CAST_BLOCKS, interpret=True)),
        casts.cast_blocks(x, **settings),
    )


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize(
    ("shape", "dtype", "format", "rule"),
    [
        ((257, 129), ml_dtypes.bfloat16, E4M3FN, ScaleRule()),
        ((1, 300), "f4", E5M2, POWERS),
        ((300, 1), "f2", E4M3FNUZ, ScaleRule()),
    ],
    ids=str,
)
def test_casts_equal_the_oracle(shape, dtype, format, rule, granularity) -> None:
    """Of x and of its transpose, in one call, for every granularity."""
    x = drawn(shape, dtype)

    def expected(x: np.ndarray) -> tuple[Any, Scales]:
        scales = Scales(*reference.scale_from_amax(reference.amax(x, granularity), format, rule))
        return reference.quantize(x, scales.inv_scale, format, granularity), scales

    rows, cols = expected(x), expected(np.ascontiguousarray(x.T))
    x = jnp.asarray(x)
    if granularity.is_blockwise:
        assert_same_bits(casts.cast_blocks(x, format, rule, granularity, granularity), (rows, cols))
        return
    factors = jnp.asarray(rows[1].inv_scale), jnp.asarray(cols[1].inv_scale)
    assert_same_bits(casts.cast_pair(x, format, *factors), (rows[0], cols[0]))
    amaxes = reference.amax(x, granularity), reference.amax(x.T, granularity)
    if granularity is Granularity.ROWWISE:
        assert_same_bits(casts.cast_rows(x, format, rule), rows)
        assert_same_bits((casts.row_amax(x), *casts.row_col_amax(x)), (amaxes[0], *amaxes))
    else:
        assert_same_bits(casts.cast_pair_amax(x, format, factors[0]), (rows[0], cols[0], amaxes[0]))
        assert_same_bits(casts.tensor_amax(x), amaxes[0])


CASTS: dict[str, Callable[[jax.Array], Any]] = {
    "cast_pair": lambda x: casts.cast_pair(x, E4M3FN, ones(1), ones(x.shape[1])),
    "cast_pair_amax": lambda x: casts.cast_pair_amax(x, E5M2, ones(1)),
    "row_col_amax": casts.row_col_amax,
    "cast_rows": lambda x: casts.cast_rows(x, E4M3FN),
    "cast_blocks": lambda x: casts.cast_blocks(x, E4M3FN, ScaleRule(), VECTORS, VECTORS),
    "cast_squares": lambda x: casts.cast_blocks(x, E5M2, POWERS, SQUARES, SQUARES),
}


def lowered(function: Callable[..., Any], *args: Any, platforms: tuple[str, ...] = ("cuda",)) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("name", CASTS)
def test_a_program_for_a_gpu_has_one_kernel_and_one_for_a_cpu_none(name) -> None:
    x = jax.ShapeDtypeStruct((256, 384), jnp.bfloat16)
    assert lowered(CASTS[name], x).count(TRITON) == 1
    assert lowered(CASTS[name], x, platforms=("cpu",)).count("custom_call") == 0
    with jax.enable_x64(True):
        assert lowered(CASTS[name], jax.ShapeDtypeStruct((131, 77), jnp.float32)).count(TRITON) == 1


@pytest.mark.parametrize("name", CASTS)
def test_what_kernels_do_not_take_is_plain(name, monkeypatch) -> None:
    """A matrix whose offsets need 64 bits, an empty one, one that XLA partitions, a GPU without float8."""
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    sharding = NamedSharding(mesh, P("data", "model"))
    matrix = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    most = kernels.MOST_ELEMENTS
    assert lowered(CASTS[name], matrix((1 << 12, most >> 12))).count(TRITON) == (name != "cast_rows")  # a row too long
    assert lowered(CASTS[name], matrix((1 << 12, (most >> 12) + 1))).count(TRITON) == 0
    assert lowered(CASTS[name], matrix((0, 64))).count(TRITON) == 0
    assert lowered(CASTS[name], matrix((256, 256), sharding=sharding)).count(TRITON) == 0
    without = SimpleNamespace(platform="gpu", compute_capability="8.0")
    monkeypatch.setattr(compiling, "cuda_devices", lambda: (without,))
    assert lowered(CASTS[name], matrix((256, 256))).count(TRITON) == 0


def test_shard_map_runs_the_kernel_on_each_part() -> None:
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "model")))
    specs = {"in_specs": P("data", "model"), "out_specs": (P("data", "model"), P("model", "data"))}

    def cast(x: jax.Array) -> Any:
        return casts.cast_pair(x, E4M3FN, ones(1), ones(1))

    assert lowered(jax.shard_map(cast, mesh=mesh, **specs), x).count(TRITON) == 1
    rows = {"in_specs": P("data", None), "out_specs": (P("data", None), P(None, "data")), "axis_names": {"data"}}
    assert lowered(jax.shard_map(cast, mesh=mesh, **rows), x).count(TRITON) == 0  # "model" is left to XLA


def test_casts_under_vmap_equal_casts_of_each() -> None:
    x = jnp.stack([jnp.asarray(drawn((40, 50), np.float32)) * i for i in (1, 3, 5)])
    inv_scale = inv_scales(3, 4)[:, :, None]

    def cast(x: jax.Array, inv_scale: jax.Array) -> Any:
        return casts.cast_pair(x, E4M3FN, inv_scale, inv_scale), casts.cast_rows(x, E5M2)

    each = [cast(*args) for args in zip(x, inv_scale, strict=True)]
    assert_same_bits(jax.vmap(cast)(x, inv_scale), jax.tree.map(lambda *parts: np.stack(parts), *each))
    assert lowered(jax.vmap(cast), x, inv_scale).count(TRITON) == 2


def test_identical_casts_are_done_once() -> None:
    """As of the input of two layers: XLA finds the same operations, and on a GPU the same call of one function."""
    x, unit = jnp.ones((256, 384), jnp.bfloat16), ones(1)

    def first(x: jax.Array, s: jax.Array) -> Any:
        with jax.named_scope("w1"):
            return casts.cast_pair(x, E4M3FN, s, s)

    def second(x: jax.Array, s: jax.Array) -> Any:
        with jax.named_scope("w3"):
            return casts.cast_pair(x, E4M3FN, s, s)

    def conversions(function: Callable[..., Any]) -> int:
        added = jax.jit(lambda x, s: [codes.astype(jnp.float32) for codes in function(x, s)])
        return str(added.lower(x, unit).compile().as_text()).count(" convert(")

    def sums(x: jax.Array, s: jax.Array) -> Any:
        return [(a.astype(jnp.float32) + b.astype(jnp.float32)) for a, b in zip(first(x, s), second(x, s), strict=True)]

    assert conversions(sums) == conversions(first)
    assert lowered(sums, x, unit).count(TRITON) == 1
