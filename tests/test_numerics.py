"""NUMERICS 6: what torch, XLA and ml_dtypes do on a CPU by themselves, where they agree with f8emu and where not."""

import ml_dtypes
import numpy as np
import pytest
import torch

import f8ref.numpy as f8

jax = pytest.importorskip("jax")
jnp = jax.numpy
X = np.array([*range(0, 1 << 32, 65521), *range(0, 1 << 32, 1 << 16)], np.uint32).view(np.float32)
"""Every 65521st float32, and every bfloat16."""
DIVISORS = np.random.default_rng(1).uniform(0.5, 1.5, 1 << 12).astype(np.float32)
MAX = np.float32(448)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_casts_of_clamped_numbers_agree(name: str) -> None:
    dtype = getattr(ml_dtypes, name)
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.clip(X[np.isfinite(X)], -limit, limit)
    codes = f8.cast(x, name).view(np.uint8)
    assert np.array_equal(codes, x.astype(dtype).view(np.uint8))
    assert np.array_equal(codes, torch.from_numpy(x).to(getattr(torch, name)).view(torch.uint8).numpy())
    assert np.array_equal(codes, np.asarray(jax.jit(lambda x: x.astype(dtype))(x)).view(np.uint8))


def test_torch_divides_a_number_by_the_reciprocal() -> None:
    quotient = (float(MAX) / torch.from_numpy(DIVISORS)).numpy()
    assert np.array_equal(quotient, MAX * (1 / DIVISORS))
    assert 0.1 < np.mean(quotient != MAX / DIVISORS) < 0.5


def test_xla_divides_by_a_number_with_its_reciprocal_and_misses_powers_of_two() -> None:
    x = jnp.asarray(DIVISORS)
    assert np.array_equal(np.asarray(x / np.float32(3.3)), DIVISORS * (1 / np.float32(3.3)))
    assert np.array_equal(np.asarray(MAX / x), MAX / DIVISORS)
    exponents = np.arange(-126, 128).astype(np.float32)
    assert np.count_nonzero(np.asarray(jnp.exp2(exponents)) != np.exp2(exponents)) > len(exponents) / 2
