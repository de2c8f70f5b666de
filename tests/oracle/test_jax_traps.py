"""f8ref.jax and XLA's traps (NUMERICS 6), one by one: numpy's IEEE float32 is the witness.

Everything runs inside an outer jit that takes one operand and closes over the others, so that they are constants with
which XLA may simplify what it can.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, Format
from f8ref.jax import scaled_mm
from f8ref.jax.scaled_mm import finish

F32 = npt.NDArray[np.float32]
M, K, N = 24, 64, 48


def compiled(f: Callable[..., jax.Array], x: npt.NDArray[Any], *constants: object) -> F32:
    """`f` of an argument and constants, inside jit."""
    return np.asarray(jax.jit(lambda x: f(x, *map(jnp.asarray, constants)))(x))


def same(x: F32, y: F32) -> bool:
    return np.array_equal(np.asarray(x, np.float32).view(np.uint32), np.asarray(y, np.float32).view(np.uint32))


Operands = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]


@pytest.fixture(scope="module")
def operands() -> Operands:
    rng = np.random.default_rng(50)
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    return a.astype("float8_e4m3fn"), b.astype("float8_e4m3fn")


@pytest.fixture(scope="module")
def acc(operands: Operands) -> F32:
    """The accumulators, which are outputs under scales of one."""
    unit = np.ones((1, 1), np.float32)
    return compiled(lambda a, b: scaled_mm(a, b, jnp.asarray(unit), jnp.asarray(unit), out_dtype="float32"), *operands)


def rowwise(acc: F32, scale_a: F32, scale_b: F32, bias: F32 | None = None, out_dtype: Format = FLOAT32) -> F32:
    """The epilogue of a rowwise GEMM on its accumulators, with constant scales and bias."""
    bits = np.ascontiguousarray(acc).view(np.uint32)
    addend = None if bias is None else jnp.asarray(bias)
    return compiled(lambda x, s, t: finish(x, (s, t), addend, out_dtype), bits, scale_b, scale_a)


def test_flushed_subnormals_in_scales_products_and_outputs(acc: F32) -> None:
    rng = np.random.default_rng(51)
    scale_a = (rng.uniform(1, 2, (M, 1)) * 1e-39).astype(np.float32)  # subnormal
    scale_b = (rng.uniform(1, 2, (1, N)) * 0.01).astype(np.float32)
    expected = (acc * scale_b) * scale_a
    assert np.mean((expected != 0) & (np.abs(expected) < np.finfo(np.float32).tiny)) > 0.9
    assert same(rowwise(acc, scale_a, scale_b), expected)
    # A subnormal intermediate that the second factor brings back.
    large = np.full((M, 1), 1e30, np.float32)
    small = (rng.uniform(1, 2, (1, N)) * 1e-40).astype(np.float32)
    assert same(rowwise(acc, large, small), (acc * small) * large)


def test_flushed_subnormal_bias(acc: F32) -> None:
    bias = np.linspace(-3e-39, 3e-39, N).astype(np.float32)
    scale_a, scale_b = np.full((M, 1), 1e-38, np.float32), np.full((1, N), 0.1, np.float32)
    assert same(rowwise(acc, scale_a, scale_b, bias), (acc * scale_b) * scale_a + bias)


def test_contraction_of_scale_and_bias(acc: F32) -> None:
    rng = np.random.default_rng(52)
    scale_a = rng.uniform(0.5, 2, (M, 1)).astype(np.float32)
    scale_b = rng.uniform(0.5, 2, (1, N)).astype(np.float32)
    bias = rng.standard_normal(N).astype(np.float32)
    product = acc * scale_b
    fused = (product.astype(np.float64) * scale_a.astype(np.float64) + bias).astype(np.float32)
    expected = product * scale_a + bias
    assert np.mean(fused != expected) > 0.05  # what an FMA would give is another result
    assert same(rowwise(acc, scale_a, scale_b, bias), expected)


def test_reassociation_of_constant_scales(operands: Operands, acc: F32) -> None:
    x, y = np.float32(1.1), np.float32(0.7)
    tensorwise, one_by_one = acc * (x * y), (acc * y) * x
    assert np.mean(tensorwise != one_by_one) > 0.1

    def call(a: jax.Array, b: jax.Array) -> jax.Array:
        return scaled_mm(a, b, jnp.asarray(x).reshape(1), jnp.asarray(y), out_dtype="float32")

    assert same(compiled(call, *operands), tensorwise)
    assert same(rowwise(acc, np.full((M, 1), x), np.full((1, N), y)), one_by_one)


@pytest.mark.parametrize("out_dtype", [BFLOAT16, FLOAT16], ids=str)
def test_one_rounding_to_a_subnormal_or_infinite_output(acc: F32, out_dtype: Format) -> None:
    for factor in (1e-6, 1e-39, 1e4, 1e37):
        scale_a, scale_b = np.full((M, 1), factor, np.float32), np.ones((1, N), np.float32)
        with np.errstate(all="ignore"):
            expected = (acc * scale_b * scale_a).astype(out_dtype.name)
        observed = rowwise(acc, scale_a, scale_b, out_dtype=out_dtype)
        assert np.array_equal(observed.view(np.uint16), expected.view(np.uint16))
