"""f8ref.jax amax, scales, quantise and dequantise, against numpy's own IEEE arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from f8emu.spec import (
    E4M3FN,
    E5M2,
    HOPPER,
    MAX_MARGIN,
    MIN_AMAX_FLOOR,
    AmaxHistoryReduction,
    DelayedScaling,
    Format,
    Granularity,
    OperandError,
    ScaleRule,
    SpecError,
)
from f8ref.jax import (
    amax,
    decode,
    dequantize,
    initial_delayed_state,
    quantize,
    scale_from_amax,
    update_delayed_state,
)

F32 = npt.NDArray[np.float32]


def bits(x: jax.Array | F32) -> npt.NDArray[np.uint32]:
    return np.asarray(x, np.float32).view(np.uint32)


def groups(granularity: Granularity, rows: int, k: int) -> list[tuple[slice, slice]]:
    """The index of each group, in the order of the scales."""
    m, n = granularity.scale_shape(rows, k)
    block_m, block_k = (extent or whole for extent, whole in zip(granularity.block, (rows, k), strict=True))
    rows_of = [slice(i * block_m, (i + 1) * block_m) for i in range(m)]
    k_of = [slice(j * block_k, (j + 1) * block_k) for j in range(n)]
    return [(i, j) for i in rows_of for j in k_of]


def spread(scale: F32, granularity: Granularity, rows: int, k: int) -> F32:
    full = np.empty((rows, k), np.float32)
    for value, where in zip(scale.ravel(), groups(granularity, rows, k), strict=True):
        full[where] = value
    return full


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amax(granularity: Granularity, dtype: str) -> None:
    rng = np.random.default_rng(40)
    rows, k = 150, 300
    x = (rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-14, 10, (rows, k))).astype(dtype)
    wide = x.astype(np.float32)
    expected = [np.max(np.abs(wide[where])) for where in groups(granularity, rows, k)]
    observed = amax(jnp.asarray(x), granularity)
    assert observed.shape == granularity.scale_shape(rows, k)
    assert np.array_equal(bits(observed).ravel(), bits(np.array(expected)))


def test_amax_of_little() -> None:
    assert bits(amax(jnp.zeros((3, 0), jnp.float32), Granularity.ROWWISE)).tolist() == [[0]] * 3
    assert bits(amax(jnp.zeros((0, 5), jnp.bfloat16))).tolist() == [[0]]
    assert amax(jnp.zeros((3, 0)), Granularity.BLOCKWISE_1X128).shape == (3, 0)
    assert bits(amax(jnp.asarray([[-0.0, -1e-45]], jnp.float32))).tolist() == [[1]]
    assert bits(amax(jnp.asarray([[1.0, -np.inf]], jnp.float32))).tolist() == [[0x7F800000]]


@pytest.mark.parametrize("format", HOPPER.operand_formats, ids=str)
def test_every_mantissa_of_amax(format: Format) -> None:
    a = np.arange(1 << 23, dtype=np.uint32) + np.uint32(0x3F800000)
    inv_scale, scale = scale_from_amax(jnp.asarray(a.view(np.float32)), format)
    # A float64 quotient of two float32, rounded to float32, is the correctly rounded float32 quotient.
    expected = (format.max / a.view(np.float32).astype(np.float64)).astype(np.float32)
    assert np.array_equal(bits(inv_scale), bits(expected))
    assert np.array_equal(bits(scale), bits((1.0 / expected.astype(np.float64)).astype(np.float32)))


@pytest.mark.parametrize("floor", [1e-12, MIN_AMAX_FLOOR, 0.75])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_every_exponent_and_edge(floor: float, power_of_two: bool) -> None:
    rng = np.random.default_rng(41)
    exponents = np.repeat(np.arange(255, dtype=np.uint32) << np.uint32(23), 64)
    fractions = rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
    edges = [0, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xFFC00000, 0x3F3FFFFF, 0x3F400000]
    a = np.concatenate([exponents | fractions, exponents, np.array(edges, np.uint32)]).view(np.float32)
    for format, margin in ((E4M3FN, 0), (E5M2, MAX_MARGIN)):
        with np.errstate(all="ignore"):
            expected = (format.max * 2.0**-margin / np.maximum(a.astype(np.float64), floor)).astype(np.float32)
            if power_of_two:
                cut = (expected.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
                expected = np.where(np.isnan(expected), expected, cut)
            inverse = (1.0 / expected.astype(np.float64)).astype(np.float32)
        rule = ScaleRule(power_of_two=power_of_two, amax_floor=floor)
        inv_scale, scale = scale_from_amax(jnp.asarray(a), format, rule, margin=margin)
        for observed, wanted in ((inv_scale, expected), (scale, inverse)):
            canonical = np.where(np.isnan(wanted), np.uint32(0x7FFFFFFF), wanted.view(np.uint32))
            assert np.array_equal(bits(observed), canonical)


def test_a_power_of_two_is_cut_not_rounded() -> None:
    just_above = np.nextafter(np.float32(3.5), np.float32(4))  # 448 / 3.5 is 2^7, so this gives a bit less
    two_amaxes = jnp.asarray([3.5, just_above], jnp.float32)
    inv_scale, scale = scale_from_amax(two_amaxes, E4M3FN, ScaleRule(power_of_two=True))
    assert np.asarray(inv_scale).tolist() == [128.0, 64.0]
    assert np.asarray(scale).tolist() == [1 / 128, 1 / 64]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_quantize_and_dequantize(granularity: Granularity) -> None:
    rng = np.random.default_rng(42)
    rows, k = 150, 300
    x = rng.standard_normal((rows, k)).astype(np.float32)
    inv_scale = np.exp2(rng.uniform(-4, 10, granularity.scale_shape(rows, k))).astype(np.float32)
    factor = spread(inv_scale, granularity, rows, k)
    expected = np.clip(x * factor, -448, 448).astype("float8_e4m3fn")
    codes = quantize(jnp.asarray(x), jnp.asarray(inv_scale), E4M3FN, granularity)
    assert np.array_equal(np.asarray(codes).view(np.uint8), expected.view(np.uint8))
    values = dequantize(codes, jnp.asarray(inv_scale), granularity)
    assert np.array_equal(bits(values), bits(expected.astype(np.float32) * factor))


def test_products_with_subnormals() -> None:
    tiny = np.array([[1e-40, -1e-45, 1e-39, 0.0]], np.float32)
    codes = quantize(jnp.asarray(tiny), jnp.asarray([[3e38]], jnp.float32), E5M2)
    assert np.array_equal(np.asarray(codes), (tiny * np.float32(3e38)).astype("float8_e5m2"))
    one = jnp.asarray([[1.0, -1.5, 0.25]], jnp.float8_e4m3fn)
    observed = dequantize(one, jnp.asarray([[3e-39]], jnp.float32))
    assert np.array_equal(bits(observed), bits(np.asarray(decode(one)) * np.float32(3e-39)))


def test_delayed_scaling() -> None:
    rule, delayed = ScaleRule(), DelayedScaling(history_length=3, margin=1)
    state = initial_delayed_state(delayed)
    assert np.asarray(state.amax_history).tolist() == [0, 0, 0]
    assert (float(state.inv_scale), bool(state.initialized)) == (1.0, False)
    steps = [
        (np.nan, [0, 0, 0], 1.0, False),
        (4.0, [4, 0, 0], 56.0, True),
        (2.0, [2, 4, 0], 56.0, True),
        (0.0, [0, 2, 4], 56.0, True),
        (np.inf, [0, 0, 2], 56.0, True),
        (1.0, [1, 0, 0], 224.0, True),
    ]
    for value, history, inv_scale, initialized in steps:
        state = update_delayed_state(state, jnp.full((1, 1), value, jnp.float32), E4M3FN, rule, delayed)
        assert np.asarray(state.amax_history).tolist() == history
        assert (float(state.inv_scale), bool(state.initialized)) == (inv_scale, initialized)


def test_delayed_scaling_by_the_newest_amax() -> None:
    delayed = DelayedScaling(history_length=2, reduction=AmaxHistoryReduction.MOST_RECENT)
    state = initial_delayed_state(delayed)
    for value in (8.0, 2.0):
        state = update_delayed_state(state, jnp.float32(value), E5M2, ScaleRule(), delayed)
    assert float(state.inv_scale) == 57344 / 2


def test_refusals() -> None:
    x = jnp.ones((4, 8), jnp.float32)
    with pytest.raises(OperandError, match="amax: x must be a matrix"):
        amax(jnp.ones(3))
    with pytest.raises(OperandError, match="float64"):
        amax(np.ones((2, 2)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(OperandError, match=r"inv_scale must have shape \(4, 1\) for rowwise"):
        quantize(x, jnp.ones((1, 4)), E4M3FN, Granularity.ROWWISE)
    with pytest.raises(OperandError, match="scale must be an array of float32; got an array of bfloat16"):
        dequantize(x.astype(jnp.float8_e5m2), jnp.ones((1, 1), jnp.bfloat16))
    with pytest.raises(SpecError, match=r"margin must be in 0\.\.6"):
        scale_from_amax(jnp.ones(1), E4M3FN, margin=7)
    with pytest.raises(OperandError, match="history"):
        update_delayed_state(
            initial_delayed_state(DelayedScaling()), jnp.ones(1), E4M3FN, ScaleRule(), DelayedScaling(history_length=2)
        )
