"""Casts of f8emu.jax against the oracle, and against what XLA would make of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as reference
from f8emu.jax.cast import cast, decode, dequantize, quantize
from f8emu.jax.scale import amax, scale_from_amax
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E8M0FNU,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    Format,
    Granularity,
    OperandError,
    Overflow,
    SpecError,
    UnsupportedError,
)
from f8ref.numpy.cast import convert

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, -np.nan]
SUBNORMAL_SCALES = [1e-45, 3e-42, -1e-39, 1.1e-38]
HUGE_SCALES = [2.0**63, 2.0**64, 2.0**100, -(2.0**126), 3.4e38]


def dtype_of(format: Format) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, format.name, format.name))


def every_code(format: Format) -> np.ndarray:
    return np.arange(1 << format.bits, dtype=f"uint{format.bits}").view(dtype_of(format))


def assert_same_bits(observed, expected) -> None:
    """Equal as integers, in dtype and in shape."""
    observed, expected = np.asarray(observed), np.asarray(expected)
    assert observed.dtype == expected.dtype
    assert observed.shape == expected.shape
    integer = np.dtype(f"uint{8 * observed.dtype.itemsize}")
    np.testing.assert_array_equal(observed.view(integer), expected.view(integer))


def boundaries(format: Format) -> np.ndarray:
    """Float32 at and one unit beside each value of the format and each middle between two."""
    values = reference.decode(np.arange(format.max_code + 1, dtype=np.uint8).view(dtype_of(format)))
    ends = [format.max + 2.0**i for i in range(16)]
    middles = np.concatenate([values, (values[1:] + values[:-1]) / 2, np.array(ends + SPECIAL, np.float32)])
    bits = middles.view(np.uint32)
    near = np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1]).view(np.float32)
    return np.concatenate([near, -near, np.random.default_rng(1).integers(0, 2**32, 1 << 16, np.uint32).view("f4")])


@pytest.mark.parametrize("overflow", Overflow, ids=lambda o: o.value)
@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_cast_equals_the_oracle(format, overflow) -> None:
    """All 16-bit inputs, and float32 around each boundary."""
    for x in (every_code(BFLOAT16), every_code(FLOAT16), boundaries(format)):
        assert_same_bits(cast(jnp.asarray(x), format, overflow=overflow), reference.cast(x, format, overflow=overflow))


@pytest.mark.parametrize("format", [*FLOAT8, E8M0FNU, BFLOAT16, FLOAT16], ids=str)
def test_every_code_decodes_as_the_oracle(format) -> None:
    codes = every_code(format)
    assert_same_bits(decode(jnp.asarray(codes)), reference.decode(codes))


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_products_equal_the_oracle_though_xla_flushes_subnormals(format) -> None:
    """Subnormal values under huge inv_scales, and huge values under subnormal ones: their codes are not zero."""
    rng = np.random.default_rng(2)
    odd = np.array(SPECIAL + SUBNORMAL_SCALES + HUGE_SCALES, np.float32)
    any_ = rng.integers(0, 2**32, 64 - odd.size, np.uint32).view(np.float32)
    inv_scale = np.concatenate([odd, any_])[:, None]
    values = np.concatenate([odd, boundaries(format)[::9], rng.integers(0, 1 << 24, 4096, np.uint32).view("f4")])
    for x in (values, every_code(BFLOAT16)[::5], every_code(FLOAT16)[::5]):
        x = np.broadcast_to(x, (64, x.size))
        expected = reference.quantize(x, inv_scale, format, "rowwise")
        assert_same_bits(quantize(jnp.asarray(x), jnp.asarray(inv_scale), format, "rowwise"), expected)


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_dequantized_values_equal_the_oracle(format) -> None:
    """Subnormal products too, in each output dtype."""
    rng = np.random.default_rng(3)
    odd = np.array(SPECIAL + SUBNORMAL_SCALES + HUGE_SCALES, np.float32)
    small, any_ = rng.integers(0, 1 << 25, 500, np.uint32), rng.integers(0, 2**32, 500, np.uint32)
    scale = np.concatenate([odd, small.view("f4"), any_.view("f4")])[:, None]
    codes = np.broadcast_to(every_code(format), (scale.size, 256))
    expected = reference.dequantize(codes, scale, "rowwise")
    for out in (FLOAT32, BFLOAT16, FLOAT16):
        observed = dequantize(jnp.asarray(codes), jnp.asarray(scale), "rowwise", out_dtype=out)
        assert_same_bits(observed, convert(expected, out))


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
def test_each_group_has_its_own_scale(granularity) -> None:
    """Each has its own magnitude, so that a scale of the wrong group cannot go unseen."""
    rng = np.random.default_rng(4)
    rows, k = 257, 272
    x = (rng.standard_normal((rows, k)) * np.exp2(rng.integers(-6, 6, (rows, k)))).astype(ml_dtypes.bfloat16)
    inv_scale = (rng.random(granularity.scale_shape(rows, k)) * 300).astype(np.float32)
    codes = quantize(jnp.asarray(x), jnp.asarray(inv_scale), E4M3FN, granularity)
    expected = reference.quantize(x, inv_scale, E4M3FN, granularity)
    assert_same_bits(codes, expected)
    values = dequantize(codes, jnp.asarray(inv_scale), granularity)
    assert_same_bits(values, reference.dequantize(expected, inv_scale, granularity))


def test_casts_are_of_the_values_as_they_are_stored() -> None:
    """What XLA computed in float32 before a cast is rounded to its dtype first, jitted with the cast or not."""
    rng = np.random.default_rng(5)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.asarray(rng.standard_normal((256, 512)), dtype)
        inv_scale = jnp.full((1, 1), 37.7, jnp.float32)
        stored = np.asarray(x).astype(np.float64)
        observed = jax.jit(lambda x, s: quantize(x * x, s, E4M3FN))(x, inv_scale)
        exact = (stored * stored).astype(np.float32).astype(x.dtype)  # both are exact in float64 and float32
        assert_same_bits(observed, reference.quantize(exact, np.asarray(inv_scale), E4M3FN))


def test_constant_scales_are_not_merged_with_what_precedes() -> None:
    """XLA turns `(x * c1) * c2` into `x * (c1 * c2)`; each product here is rounded by itself (NUMERICS 6)."""
    x = np.random.default_rng(6).standard_normal((256, 512)).astype(np.float32)
    inv_scale = np.full((1, 1), 37.7, np.float32)
    jitted = jax.jit(lambda x: quantize(x * np.float32(0.3), jnp.asarray(inv_scale), E4M3FN))
    assert_same_bits(jitted(x), reference.quantize(x * np.float32(0.3), inv_scale, E4M3FN))


def test_any_rank_and_nothing() -> None:
    x = jnp.asarray(np.random.default_rng(7).standard_normal((2, 3, 5)), jnp.float32)
    inv_scale = jnp.arange(1, 7, dtype=jnp.float32)[:, None]
    codes = quantize(x, inv_scale, jnp.float8_e4m3fn, "rowwise")
    assert_same_bits(codes.reshape(6, 5), quantize(x.reshape(6, 5), inv_scale, "float8_e4m3fn", "rowwise"))
    assert dequantize(codes, inv_scale, "rowwise", out_dtype=jnp.bfloat16).shape == (2, 3, 5)
    for shape in ((), (0,), (3, 0)):
        assert decode(cast(jnp.ones(shape), E4M3FN)).shape == shape


def test_wrong_arguments_are_refused() -> None:
    x, one = jnp.zeros((4, 256)), jnp.ones((1, 1))
    with pytest.raises(OperandError, match=r"cast: x must be .*got int32"):
        cast(jnp.zeros(3, jnp.int32), E4M3FN)
    with pytest.raises(OperandError, match=r"cast: x must be .*got float8_e4m3fn"):
        cast(cast(x, E4M3FN), E4M3FN)
    with pytest.raises(OperandError, match=r"cast: x must be .*got list"):
        cast([1.0], E4M3FN)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match=r"cast: format must be one of .*got float8_e8m0fnu"):
        cast(x, E8M0FNU)
    with pytest.raises(OperandError, match=r"quantize: inv_scale must have shape \[4, 2\]"):
        quantize(x, one, E4M3FN, "blockwise_1x128")
    with pytest.raises(OperandError, match=r"quantize: inv_scale must be .*float32.*got bfloat16"):
        quantize(x, one.astype(jnp.bfloat16), E4M3FN)
    with pytest.raises(OperandError, match=r"dequantize: codes must be .*got float32"):
        dequantize(x, one)
    with pytest.raises(OperandError, match=r"dequantize: out_dtype must be float32, bfloat16 or float16"):
        dequantize(cast(x, E4M3FN), one, out_dtype="float8_e5m2")
    with pytest.raises(SpecError, match="granularity"):
        quantize(x, one, E4M3FN, "columnwise")


VERBS: dict[str, Callable[[jax.Array], Any]] = {
    "cast": lambda x: cast(x, E4M3FN),
    "quantize": lambda x: quantize(x, jnp.float32(1), E4M3FN),
    "quantize, scale": lambda x: quantize(jnp.ones((2, 3)), x[0, 0], E4M3FN),
    "decode": lambda x: decode(x.astype(jnp.bfloat16)),
    "dequantize": lambda x: dequantize(x.astype(jnp.float8_e4m3fn), jnp.float32(1)),
    "amax": amax,
    "scale_from_amax": lambda x: scale_from_amax(x, E4M3FN).scale,
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_refuse_to_be_differentiated(verb: str) -> None:
    """Their gradients were silently zero. Without a derivative, all transformations stay."""

    def total(x: jax.Array) -> jax.Array:
        return VERBS[verb](x).astype(jnp.float32).sum()

    x = jnp.ones((2, 3))
    for function in (total, jax.jit(total)):
        with pytest.raises(UnsupportedError, match=rf"{verb.split(',')[0]}: codes have no gradient.*dot_general"):
            jax.grad(function)(x)
    stopped = jax.grad(lambda x: x.sum() + total(jax.lax.stop_gradient(x)))
    assert_same_bits(jax.jit(jax.vmap(stopped))(jnp.stack([x, x])), jnp.ones((2, 2, 3)))


def test_a_number_is_a_tensorwise_scale() -> None:
    x, half = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32), jnp.full((1, 1), 0.5)
    a, b = (quantize(x, scale, E4M3FN) for scale in (0.5, half))
    assert (a.view(jnp.uint8) == b.view(jnp.uint8)).all()
    assert jnp.array_equal(dequantize(a, 0.5), dequantize(b, half))
    with pytest.raises(OperandError, match=r"inv_scale must be float32; got 0\.1, which float32 does not hold"):
        quantize(x, 0.1, E4M3FN)
    with pytest.raises(OperandError, match=r"\[4, 1\] for rowwise"):
        quantize(x, 1, E4M3FN, "rowwise")
