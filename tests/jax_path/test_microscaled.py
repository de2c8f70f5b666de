"""MXFP8 in JAX: `f8emu.jax.scaled_mm`, and JAX's own dots with block scales under `f8emu.jax.emulate` [XLA-10]."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import f8emu.jax as f8
import f8ref.numpy
from f8emu.jax.gemm import emulation
from f8emu.spec import BLACKWELL_TCGEN05
from f8emu.spec.errors import UnsupportedError
from tests.jax_path.layers import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*no split-K plan")
E4, E5, F32, BF = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
M, N, K, BATCH = 18, 26, 96, 3
on_b200 = functools.partial(f8.emulate, chip="B200")
MX: dict[str, Any] = {"granularity_a": "blockwise_1x32", "granularity_b": "blockwise_1x32", "chip": BLACKWELL_TCGEN05}


def codes(seed: int, *shape: int, dtype: Any = E4) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.dtype(dtype))


def scales(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(110, 144, shape, np.uint8).view(np.dtype(jnp.float8_e8m0fnu))


def operands(dtypes: tuple[Any, Any] = (E4, E4)) -> Any:
    """As `jax.nn.scaled_matmul` takes them."""
    a, b = (codes(i, BATCH, rows, K, dtype=dtype) for i, (rows, dtype) in enumerate(zip((M, N), dtypes, strict=True)))
    return a, b, scales(2, BATCH, M, K // 32), scales(3, BATCH, N, K // 32)


def products(a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any = F32) -> np.ndarray:
    """f8ref.numpy's, one for each index of the batch."""
    parts = zip(*map(np.asarray, (a, b, scale_a, scale_b)), strict=True)
    out = jnp.dtype(out).name
    return np.stack([f8ref.numpy.scaled_mm(a, b.T, s, t.T, out_dtype=out, **MX) for a, b, s, t in parts])


OPERANDS: Any = operands()
A, B, SCALE_A, SCALE_B = OPERANDS
EXPECTED = products(*OPERANDS)


# jax.nn.scaled_matmul


@pytest.mark.parametrize("dtypes", [(E4, E4), (E5, E4), (E4, E5)], ids=str)
def test_scaled_matmul(dtypes: tuple[Any, Any]) -> None:
    arrays = operands(dtypes)
    for out in (F32, BF, jnp.float16):
        call = on_b200(functools.partial(jax.nn.scaled_matmul, preferred_element_type=out))
        assert_same_bits(jax.jit(call)(*arrays), products(*arrays, out=out))


def in_scan(*arrays: Any) -> Any:
    def step(carry: None, parts: Any) -> Any:
        return carry, jax.nn.scaled_matmul(*(x[None] for x in parts))[0]

    return lax.scan(step, None, arrays)[1]


WAYS: dict[str, Callable[..., Any]] = {
    "eager": on_b200(jax.nn.scaled_matmul),
    "of a jit": on_b200(jax.jit(jax.nn.scaled_matmul)),
    "of a scan": on_b200(in_scan),
    "of a vmap": on_b200(lambda *x: jax.vmap(jax.nn.scaled_matmul)(*(y[:, None] for y in x))[:, 0]),
    "in a vmap": lambda *x: jax.vmap(on_b200(jax.nn.scaled_matmul))(*(y[:, None] for y in x))[:, 0],
    "of one": on_b200(
        lambda *x: jnp.concatenate([jax.nn.scaled_matmul(*(y[i : i + 1] for y in x)) for i in range(BATCH)])
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_wherever_it_stands(way: str) -> None:
    assert_same_bits(WAYS[way](*OPERANDS), EXPECTED)


# jax.lax.scaled_dot


def dot(a: Any, b: Any, scale_a: Any, scale_b: Any, **options: Any) -> jax.Array:
    return lax.scaled_dot(a, b, lhs_scale=scale_a, rhs_scale=scale_b, preferred_element_type=F32, **options)


def test_scaled_dot() -> None:
    transposed = A, B.swapaxes(1, 2), SCALE_A, SCALE_B.swapaxes(1, 2)
    assert_same_bits(jax.jit(on_b200(dot))(*transposed), EXPECTED)
    assert_same_bits(on_b200(dot)(*(x[0] for x in transposed)), EXPECTED[0])
    assert_same_bits(on_b200(jax.vmap(dot))(*transposed), EXPECTED)
    # Other dimensions: a [K, BATCH, M], b [N, K, BATCH]; and two free ones, of which XLA makes one.
    numbers = {"dimension_numbers": (((0,), (1,)), ((1,), (2,)))}
    moved = [x.transpose(2, 0, 1) for x in (A, SCALE_A)], [x.transpose(1, 2, 0) for x in (B, SCALE_B)]
    arrays = moved[0][0], moved[1][0], moved[0][1], moved[1][1]
    assert_same_bits(on_b200(functools.partial(dot, **numbers))(*arrays), EXPECTED)
    numbers = {"dimension_numbers": (((2,), (1,)), ((), ()))}
    folded = [x[:, : K if x is B else None] for x in (A, B[0].T[None], SCALE_A, SCALE_B[0].T[None])]
    every = on_b200(functools.partial(dot, **numbers))(*folded)
    shared = [np.broadcast_to(x[:1], (BATCH, *x.shape[1:])) for x in (B, SCALE_B)]
    assert_same_bits(every[:, :, 0], products(A, shared[0], SCALE_A, shared[1]))


def test_scales_of_more_than_one_block_and_none() -> None:
    a, b = codes(5, M, 128), codes(6, 128, N)
    scale_a = scales(7, M, 2)
    ones = np.full((1, 4, N), 127, np.uint8).view(scale_a.dtype)
    expected = products(a[None], b.T[None], scale_a.repeat(2, axis=1)[None], ones.swapaxes(1, 2))[0]
    assert_same_bits(on_b200(dot)(a, b, scale_a, None), expected)


# jax.nn.scaled_dot_general

CONFIGS = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3


def quantized(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """[BATCH, rows, K] as JAX casts it: RCEIL of the quotient, then a division and a clip."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / np.float32(448)))
    values = np.clip(blocks / np.exp2(exponents)[..., None].astype(np.float32), -448, 448)
    of_scales = (exponents + 127).astype(np.uint8).view(SCALE_A.dtype)
    return values.reshape(x.shape).astype(np.dtype(E4)), of_scales


@pytest.mark.parametrize("dtype", [F32, BF], ids=["float32", "bfloat16"])
def test_scaled_dot_general_and_its_gradients(dtype: Any) -> None:
    rng = np.random.default_rng(9)
    x, w = (jnp.asarray(rng.standard_normal(s) * 3, dtype) for s in ((BATCH, 64, K), (BATCH, 32, K)))
    g = jnp.asarray(rng.standard_normal((BATCH, 64, 32)), F32)
    call = functools.partial(jax.nn.scaled_dot_general, dimension_numbers=(((2,), (2,)), ((0,), (0,))), configs=CONFIGS)

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        output, pull = jax.vjp(call, x, w)
        return output, *pull(g)

    output, grad_x, grad_w = jax.jit(on_b200(step))(x, w, g)

    def product(left: jax.Array, right: jax.Array) -> np.ndarray:
        (a, scale_a), (b, scale_b) = quantized(left), quantized(right)
        return products(a, b, scale_a, scale_b)

    def turned(y: jax.Array) -> jax.Array:
        return y.swapaxes(1, 2)

    assert_same_bits(output, product(x, w))
    assert_same_bits(grad_x, product(g, turned(w)))  # JAX leaves them in float32
    assert_same_bits(grad_w, product(turned(g), turned(x)))


# What is none, and what is refused


def test_what_xla_dequantizes_stays_as_it_is() -> None:
    transposed = A, B.swapaxes(1, 2), SCALE_A, SCALE_B.swapaxes(1, 2)
    as_jax_does = np.asarray(jax.jit(dot)(*transposed))
    assert (as_jax_does != EXPECTED).any()
    np.testing.assert_array_equal(jax.jit(f8.emulate(dot))(*transposed), as_jax_does)  # on Hopper
    rows = f8.explain(dot)(*transposed).dots
    assert not rows[0].is_float8 and "chip='B200'" in rows[0].notes[0]
    for others in (
        (A.astype(E5), B.swapaxes(1, 2).astype(E5), *transposed[2:]),
        (A, B.swapaxes(1, 2), scales(2, BATCH, M, 6), scales(3, BATCH, 6, N)),
        tuple(x[None] for x in transposed),  # two dimensions of the batch
    ):
        np.testing.assert_array_equal(jax.jit(on_b200(dot))(*others), jax.jit(dot)(*others))


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"chip='B200'; got block scales: XLA dequantizes on Hopper"):
        f8.emulate(jax.nn.scaled_matmul)(*OPERANDS)
    with pytest.raises(UnsupportedError, match="got operands in float8_e5m2 and float8_e5m2"):
        on_b200(jax.nn.scaled_matmul)(A.astype(E5), B.astype(E5), SCALE_A, SCALE_B)
    with pytest.raises(UnsupportedError, match="got blocks of 48 and 48: XLA dequantizes all but those of 32"):
        on_b200(jax.nn.scaled_matmul)(A, B, SCALE_A[..., :2], SCALE_B[..., :2])
    matrices: Any = A[0], B[0].T, SCALE_A[0], SCALE_B[0].T
    with pytest.raises(UnsupportedError, match=r"jax.nn.scaled_matmul on such a GPU, or engine='emulated'"):
        f8.scaled_mm(*matrices, chip="B200", engine="hardware")
    with pytest.raises(UnsupportedError, match="B200"):
        f8.scaled_mm(*matrices)


# f8emu.jax.scaled_mm, by the engine and by f8ref.jax


@pytest.mark.parametrize("is_native", [True, False])
def test_scaled_mm(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(emulation, "_is_registered", lambda: False)
    call = functools.partial(f8.scaled_mm, chip="B200", out_dtype="float32")
    arrays: Any = A, B.swapaxes(1, 2), SCALE_A, SCALE_B.swapaxes(1, 2)
    jax.clear_caches()
    assert_same_bits(call(*(x[0] for x in arrays)), EXPECTED[0])
    assert_same_bits(jax.jit(jax.vmap(call))(*arrays), EXPECTED)
    ends = np.array([4, 4, 11], np.int32)
    groups: Any = A[0], arrays[1], SCALE_A[0], arrays[3], ends
    expected = f8ref.numpy.scaled_grouped_mm(*groups, chip=BLACKWELL_TCGEN05)
    assert_same_bits(jax.jit(functools.partial(f8.scaled_grouped_mm, chip="B200"))(*groups), expected)


def test_an_exported_program_needs_no_engine() -> None:
    arrays = [jnp.asarray(x) for x in (A[0], B[0].T, SCALE_A[0], SCALE_B[0].T)]
    exported = export.export(jax.jit(functools.partial(f8.scaled_mm, chip="B200", out_dtype="float32")))(*arrays)
    assert "f8emu_gemm" not in exported.mlir_module()
    assert_same_bits(exported.call(*arrays), EXPECTED[0])
