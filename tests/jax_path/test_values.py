"""Casts and scales of f8emu.jax: the oracle's values, and what XLA would make of them."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as reference
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import verify
from f8emu.jax import scale as module
from f8emu.jax.cast import cast, decode, dequantize, quantize
from f8emu.jax.scale import amax, divide, inverse_power, reciprocal, scale_from_amax
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    Format,
    Granularity,
    ScaleRule,
    SpecError,
    UnsupportedError,
)
from f8ref.numpy.cast import convert
from tests.jax_path.layers import assert_same_bits

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
ODD = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, -np.nan]
ODD += [3e-42, -1e-39, 1.1e-38, 2.0**63, 2.0**64, 2.0**100, -(2.0**126)]


def every_code(format: Format) -> np.ndarray:
    return np.arange(1 << format.bits, dtype=f"uint{format.bits}").view(getattr(ml_dtypes, format.name, format.name))


def random_float32(count: int, seed: int) -> np.ndarray:
    """Any bit patterns, a third of them subnormal or nearly."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 1 << 25, count // 3, dtype=np.uint32)
    any_ = rng.integers(0, 1 << 32, count - count // 3, dtype=np.uint32)
    return rng.permutation(np.concatenate([small, any_])).view(np.float32)


def test_values_equal_the_oracle() -> None:
    """Every code and every 16-bit input, amaxes, scales, states, quantised and back, as the suite has them."""
    (subject,) = verify([load_subject("f8emu.jax")], stages=["formats", "scales"]).subjects
    assert subject.is_equal and [stage.cases_total > 30 for stage in subject.stages] == [True, True]


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_products_equal_the_oracle_though_xla_flushes_subnormals(format) -> None:
    """Subnormal values under huge inv_scales, and huge values under subnormal ones: their codes are not zero."""
    odd = np.array(ODD, np.float32)
    inv_scale = np.concatenate([odd, random_float32(64 - odd.size, 1)])[:, None]
    values = np.concatenate([odd, random_float32(1 << 14, 2)])
    for x in (values, every_code(BFLOAT16)[::5], every_code(FLOAT16)[::5]):
        x = np.broadcast_to(x, (64, x.size))
        expected = reference.quantize(x, inv_scale, format, "rowwise")
        assert_same_bits(quantize(jnp.asarray(x), jnp.asarray(inv_scale), format, "rowwise"), expected)


@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_dequantized_values_equal_the_oracle(format) -> None:
    """Subnormal products too, in each output dtype."""
    scale = np.concatenate([np.array(ODD, np.float32), random_float32(1000, 3)])[:, None]
    codes = np.broadcast_to(every_code(format), (scale.size, 256))
    expected = reference.dequantize(codes, scale, "rowwise")
    for out in (FLOAT32, BFLOAT16, FLOAT16):
        observed = dequantize(jnp.asarray(codes), jnp.asarray(scale), "rowwise", out_dtype=out)
        assert_same_bits(observed, convert(expected, out))


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
    assert_same_bits(amax(x, "rowwise"), reference.amax(np.asarray(x).reshape(6, 5), "rowwise"))
    for shape, granularity in itertools.product(((0, 32), (32, 0), (0, 0)), Granularity):
        nothing = np.zeros(shape, np.float32)
        assert_same_bits(amax(jnp.asarray(nothing), granularity), reference.amax(nothing, granularity))


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


def quotient(a, b) -> np.ndarray:
    """Float32 quotients of numpy, which are IEEE's, every NaN as the canonical one."""
    with np.errstate(all="ignore"):
        quotients = np.divide(a, b, dtype=np.float32)
    quotients[np.isnan(quotients)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return quotients


def test_division_is_that_of_ieee() -> None:
    """Over the full range, subnormal operands and quotients, zeros and infinities included."""
    a, b = random_float32(1 << 20, 1), random_float32(1 << 20, 2)
    special = np.array([0.0, -0.0, 1e-45, -1e-39, 1.0, np.inf, -np.inf, np.nan], np.float32)
    a = np.concatenate([a, np.repeat(special, 8)])
    b = np.concatenate([b, np.tile(special, 8)])
    observed = jax.jit(divide)(jnp.asarray(a.view(np.uint32)), jnp.asarray(b.view(np.uint32)))
    assert_same_bits(observed, quotient(a, b).view(np.uint32))
    assert_same_bits(reciprocal(jnp.asarray(b)), quotient(np.float32(1), b))


def test_the_inverse_of_a_power_of_two_needs_no_division() -> None:
    """Of every inv_scale that such a rule gives."""
    inv = np.append(np.arange(256, dtype=np.uint32) << 23, np.uint32(0x7FFFFFFF))
    assert_same_bits(jax.jit(inverse_power)(inv), jax.jit(divide)(np.uint32(0x3F800000), inv))


@jax.jit
def quotient_of_wrong_estimate(error, significands) -> jax.Array:
    """`rounded_quotient` of a backend whose estimates are off by `error`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "estimated", lambda a, b, unit: (a / b * unit).astype(jnp.int32) + error)
        return module.rounded_quotient(jnp.zeros(significands.shape[1], jnp.int32), *significands)


@pytest.mark.parametrize("error", [-127, -1, 2, 127])
def test_an_estimate_of_the_quotient_may_be_wrong(error) -> None:
    """A backend divides approximately: whatever the estimate is, up to the error that `rounded_quotient` allows."""
    significands = np.random.default_rng(4).integers(1 << 23, 1 << 24, (2, 1 << 12), dtype=np.uint32)
    a, b = (x.astype(np.float64) for x in significands)
    observed = quotient_of_wrong_estimate(error, significands)
    assert_same_bits(observed, (a / b).astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(power_of_two=True)], ids=str)
def test_the_compiled_program_has_no_loop(rule) -> None:
    """A loop is a kernel launch for every step on a GPU: 27 of them for each scale."""
    compiled = jax.jit(lambda x: scale_from_amax(x, E4M3FN, rule)).lower(jnp.ones((64, 1))).compile()
    assert " while(" not in str(compiled.as_text())


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, 1e-40], ids=str)
def test_amax_hides_nothing(value) -> None:
    """Not even where XLA's maximum on a CPU does: it loses NaN from 4096 elements on, and flushes subnormals."""
    for dtype in DTYPES[:2]:
        x = np.zeros((130, 4100), np.float32)
        x[129, 4099] = value
        x = x.astype(dtype)
        for granularity in Granularity:
            assert_same_bits(amax(jnp.asarray(x), granularity), reference.amax(x, granularity))


def test_amax_is_of_the_values_as_they_are_stored() -> None:
    """XLA may keep a bfloat16 product in float32 (`xla_allow_excess_precision`); the amax is that of its rounding."""
    x = np.random.default_rng(7).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
    product = jax.jit(lambda x: x * jnp.bfloat16(1.1))(x)
    assert_same_bits(jax.jit(lambda x: amax(x * jnp.bfloat16(1.1), "rowwise"))(x), amax(product, "rowwise"))


def test_overflow_is_a_member_or_its_name() -> None:
    x = jnp.array([448.0, 1e9])
    assert cast(x, "float8_e4m3fn", overflow="nonfinite").view(np.uint8).tolist() == [0x7E, 0x7F]
    with pytest.raises(SpecError, match="overflow must be one of saturate, nonfinite; got 'bogus'"):
        cast(x, "float8_e4m3fn", overflow="bogus")  # pyright: ignore[reportArgumentType]
