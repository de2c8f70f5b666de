"""Amax and scales of f8emu.jax against the oracle, and what XLA compiles them to."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as reference
from f8emu.jax import scale as module
from f8emu.jax.scale import amax, divide, inverse_power, reciprocal, scale_from_amax
from f8emu.spec import E4M3FN, E5M2, FLOAT8, Granularity, OperandError, ScaleRule, SpecError

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
RULES = [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(amax_floor=1e-4), ScaleRule(amax_floor=2.0**-110)]
ODD_AMAX = [0.0, 1e-45, 1e-38, 1e-13, 1e-12, 1.0, 447.99997, 448.0, 57344.0, 3.4e38, np.inf, np.nan, -1.0, -np.nan]


def assert_same_bits(observed, expected) -> None:
    """Equal as integers, in dtype and in shape."""
    observed, expected = np.asarray(observed), np.asarray(expected)
    assert observed.dtype == expected.dtype
    assert observed.shape == expected.shape
    integer = np.dtype(f"uint{8 * observed.dtype.itemsize}")
    np.testing.assert_array_equal(observed.view(integer), expected.view(integer))


def random_float32(count: int, seed: int) -> np.ndarray:
    """Any bit patterns, a third of them subnormal or nearly."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 1 << 25, count // 3, dtype=np.uint32)
    any_ = rng.integers(0, 1 << 32, count - count // 3, dtype=np.uint32)
    return rng.permutation(np.concatenate([small, any_])).view(np.float32)


def quotient(a, b) -> np.ndarray:
    """Float32 quotients of numpy, which are IEEE's, every NaN as the canonical one."""
    with np.errstate(all="ignore"):
        found = np.divide(a, b, dtype=np.float32)
    found[np.isnan(found)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return found


@pytest.mark.parametrize("exponent", [-39, 0, 127], ids=lambda e: f"2^{e}")
def test_every_significand_gives_the_correctly_rounded_quotients(exponent) -> None:
    significands = np.arange(1 << 23, dtype=np.uint32)
    largest = ((np.uint32(127 + exponent) << 23) | significands).view(np.float32)
    inv_scale, scale = scale_from_amax(jnp.asarray(largest), E4M3FN)
    expected = (448.0 / largest.astype(np.float64)).astype(np.float32)
    assert_same_bits(inv_scale, expected)
    assert_same_bits(scale, (1.0 / expected.astype(np.float64)).astype(np.float32))


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


@pytest.mark.parametrize("margin", [0, 6])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_scale_rules_equal_the_oracle(format, rule, margin) -> None:
    powers = np.ldexp(np.float32(1), np.arange(-140, 128)).astype(np.float32)
    odd = np.array(ODD_AMAX, np.float32)
    largest = np.concatenate([powers, np.nextafter(powers, np.float32(0)), odd, random_float32(1 << 14, 3)])
    observed = scale_from_amax(jnp.asarray(largest), format, rule, margin=margin)
    expected = reference.scale_from_amax(largest, format, rule, margin=margin)
    assert_same_bits(observed.inv_scale, expected.inv_scale)
    assert_same_bits(observed.scale, expected.scale)


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


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_the_compiled_program_has_no_loop(rule) -> None:
    """A loop is a kernel launch for every step on a GPU: 27 of them for each scale."""
    compiled = jax.jit(lambda x: scale_from_amax(x, E4M3FN, rule)).lower(jnp.ones((64, 1))).compile()
    assert " while(" not in str(compiled.as_text())


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)
@pytest.mark.parametrize("shape", [(1, 1), (257, 129), (5, 4097)], ids=str)
def test_amax_equals_the_oracle(shape, granularity) -> None:
    """Each element has its own magnitude, and the largest of a group stands anywhere in it."""
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))
    for dtype in DTYPES:
        x = drawn.astype(dtype)
        assert_same_bits(amax(jnp.asarray(x), granularity), reference.amax(x, granularity))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, 1e-40], ids=str)
def test_amax_hides_nothing(value) -> None:
    """Not even where XLA's maximum on a CPU does: it loses NaN from 4096 elements on, and flushes subnormals."""
    for dtype in DTYPES:
        x = np.zeros((130, 4100), np.float32)
        x[129, 4099] = value
        x = x.astype(dtype)
        for granularity in Granularity:
            assert_same_bits(amax(jnp.asarray(x), granularity), reference.amax(x, granularity))


def test_amax_takes_any_rank_and_nothing() -> None:
    x = np.random.default_rng(6).standard_normal((2, 3, 5)).astype(np.float32)
    assert_same_bits(amax(jnp.asarray(x), "rowwise"), reference.amax(x.reshape(6, 5), "rowwise"))
    for shape in ((0, 32), (32, 0), (0, 0)):
        for granularity in Granularity:
            nothing = np.zeros(shape, np.float32)
            assert_same_bits(amax(jnp.asarray(nothing), granularity), reference.amax(nothing, granularity))


def test_amax_is_of_the_values_as_they_are_stored() -> None:
    """XLA may keep a bfloat16 product in float32 (`xla_allow_excess_precision`); the amax is that of its rounding."""
    x = np.random.default_rng(7).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
    product = jax.jit(lambda x: x * jnp.bfloat16(1.1))(x)
    assert_same_bits(jax.jit(lambda x: amax(x * jnp.bfloat16(1.1), "rowwise"))(x), amax(product, "rowwise"))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(OperandError, match=r"amax: x must be .* got int32"):
        amax(jnp.zeros((2, 2), jnp.int32))
    with pytest.raises(OperandError, match=r"amax: x must have 2 dimensions or more"):
        amax(jnp.zeros(2))
    with pytest.raises(OperandError, match=r"scale_from_amax: amax must be .*float32.* got bfloat16"):
        scale_from_amax(jnp.zeros(2, jnp.bfloat16), E5M2)
    with pytest.raises(SpecError, match=r"margin must be in 0..6; got 7"):
        scale_from_amax(jnp.zeros(2), E5M2, margin=7)
