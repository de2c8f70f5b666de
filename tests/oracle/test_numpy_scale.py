"""Amax, the scale rule (proved in integers), quantise and dequantise."""

import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import f8ref.numpy as f8
from f8emu.spec import E4M3FN, E5M2, Format, Granularity, OperandError, ScaleRule, SpecError

TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTORS, SQUARES = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
GRANULARITIES = pytest.mark.parametrize("granularity", Granularity, ids=lambda granularity: granularity.value)
FORMATS = pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
POWER_OF_TWO = ScaleRule(power_of_two=True)


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def many_magnitudes(rows: int, k: int, dtype: type = np.float32) -> np.ndarray:
    """A different magnitude in every 128 x 128 block and in every row of it, so that a wrong index shows."""
    rng = np.random.default_rng(rows * 1000 + k)
    i, j = np.indices((rows, k))
    return (rng.uniform(-1, 1, (rows, k)) * 2.0 ** ((i // 128) * 3 - (j // 128) * 2) * (1 + i % 128)).astype(dtype)


def group(granularity: Granularity, i: int, j: int) -> tuple[int, int]:
    """The scale of element (i, j), from the words of the glossary."""
    match granularity:
        case Granularity.TENSORWISE:
            return (0, 0)
        case Granularity.ROWWISE:
            return (i, 0)
        case Granularity.BLOCKWISE_1X128:
            return (i, j // 128)
        case Granularity.BLOCKWISE_128X128:
            return (i // 128, j // 128)


@GRANULARITIES
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("shape", [(130, 257), (128, 256), (3, 5), (257, 1)])
def test_amax_by_element(shape: tuple[int, int], dtype: type, granularity: Granularity) -> None:
    x = many_magnitudes(*shape, dtype=dtype)
    expected = np.zeros(granularity.scale_shape(*shape))
    for (i, j), value in np.ndenumerate(np.abs(x.astype(np.float64))):
        at = group(granularity, i, j)
        expected[at] = max(expected[at], value)
    result = f8.amax(x, granularity)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, expected)
    # Drawn float32 numbers all differ, so that no two groups can be confused.
    assert dtype is not np.float32 or len(set(result.ravel().tolist())) == result.size


@pytest.mark.parametrize("code", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF])
@pytest.mark.parametrize("place", [(0, 0), (1, 127), (1, 128), (129, 130)])
def test_amax_keeps_nan(place: tuple[int, int], code: int) -> None:
    x = many_magnitudes(130, 131)
    x[0, 1] = np.inf
    x.view(np.uint32)[place] = code
    for granularity in Granularity:
        at = group(granularity, *place)
        result = f8.amax(x, granularity)
        assert result.view(np.uint32)[at] == 0x7FFFFFFF
        assert np.isnan(result).sum() == 1


def test_amax_of_little() -> None:
    x = f32(-0.0, 2.0**-149, -(2.0**-148))[None]
    assert f8.amax(x).tolist() == [[2.0**-148]]
    assert f8.amax(f32(-0.0)[None]).view(np.uint32).tolist() == [[0]]
    assert f8.amax(f32(-np.inf, 3.0)[None]).tolist() == [[np.inf]]
    assert f8.amax(np.zeros((0, 5), np.float32)).tolist() == [[0]]
    assert f8.amax(np.zeros((2, 0), np.float32), ROWWISE).tolist() == [[0], [0]]
    assert f8.amax(np.zeros((2, 0), np.float32), VECTORS).shape == (2, 0)
    assert f8.amax(np.zeros((0, 300), np.float32), SQUARES).shape == (0, 3)


def significand_and_exponent(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`x = significand * 2^exponent` of positive normal float32 numbers, from the bits."""
    bits = x.view(np.uint32).astype(np.int64)
    assert ((bits >> 23 > 0) & (bits >> 23 < 255)).all()
    return (bits & 0x7FFFFF) | 0x800000, (bits >> 23) - 150


def assert_correctly_rounded(quotient: NDArray[np.float32], numerator: int, denominator: NDArray[np.float32]) -> None:
    """`quotient` is the nearest float32 of `numerator / denominator`: twice the remainder is at most one unit.

    All in integers: q * 2^e, times d * 2^f, differs from n by at most half of d * 2^(e + f).
    """
    q, e = significand_and_exponent(quotient)
    d, f = significand_and_exponent(denominator)
    shift = -(e + f)
    assert ((shift >= 0) & (shift < 62 - numerator.bit_length())).all()
    remainder = np.abs((np.int64(numerator) << shift) - q * d)
    assert ((2 * remainder < d) | ((2 * remainder == d) & (q % 2 == 0))).all()


@FORMATS
def test_every_significand_is_correctly_rounded(format: Format) -> None:
    for start in range(0, 1 << 23, 1 << 20):
        amax = (np.arange(start, start + (1 << 20), dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
        scales = f8.scale_from_amax(amax, format)
        assert_correctly_rounded(scales.inv_scale, int(format.max), amax)
        assert_correctly_rounded(scales.scale, 1, scales.inv_scale)


@FORMATS
@pytest.mark.parametrize("margin", [0, 1, 6])
def test_every_exponent_scales_alike(format: Format, margin: int) -> None:
    """From the floor to the largest float32 a power of two in amax is one in both scales, exactly."""
    significands = np.random.default_rng(3).integers(0, 1 << 23, 50, dtype=np.uint32)
    one_to_two = (significands | np.uint32(127 << 23)).view(np.float32)
    base = f8.scale_from_amax(one_to_two, format)
    for exponent in range(-39, 128):
        amax = np.ldexp(one_to_two, exponent)
        scales = f8.scale_from_amax(amax, format, margin=margin)
        np.testing.assert_array_equal(scales.inv_scale, np.ldexp(base.inv_scale, -exponent - margin))
        np.testing.assert_array_equal(scales.scale, np.ldexp(base.scale, exponent + margin))


@FORMATS
def test_the_floor(format: Format) -> None:
    below, above = np.nextafter(np.float32(1e-12), np.float32(0)), np.nextafter(np.float32(1e-12), np.float32(1))
    at_floor = np.float32(format.max / 1e-12)
    small = f8.scale_from_amax(f32(0, 2.0**-149, 1e-30, below), format)
    assert small.inv_scale.tolist() == [at_floor] * 4
    assert small.scale.tolist() == [np.float32(1) / at_floor] * 4
    first = f8.scale_from_amax(np.asarray(above), format).inv_scale
    exact = Fraction(int(format.max)) / Fraction(float(above))
    spacing = Fraction(float(np.spacing(first)))
    assert abs(Fraction(float(first)) - exact) <= spacing / 2
    assert f8.scale_from_amax(f32(0.25), format, ScaleRule(amax_floor=0.5)).inv_scale == format.max * 2
    # The floor is a float64 number: 0.03 in float32 gives another quotient.
    assert f8.scale_from_amax(f32(0), format, ScaleRule(amax_floor=0.03)).inv_scale == np.float32(format.max / 0.03)
    assert np.float32(format.max / 0.03) != np.float32(format.max) / np.float32(0.03)


@FORMATS
@pytest.mark.parametrize("rule", [ScaleRule(), POWER_OF_TWO], ids=["plain", "power_of_two"])
def test_infinity_and_nan(rule: ScaleRule, format: Format) -> None:
    amax = np.array([0x7F800000, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    scales = f8.scale_from_amax(amax, format, rule)
    assert scales.inv_scale[0] == 0
    assert scales.scale[0] == np.inf
    assert scales.inv_scale.view(np.uint32)[1:].tolist() == [0x7FFFFFFF] * 2
    assert scales.scale.view(np.uint32)[1:].tolist() == [0x7FFFFFFF] * 2


@FORMATS
def test_power_of_two_is_the_one_below(format: Format) -> None:
    rng = np.random.default_rng(5)
    amax = np.abs(rng.integers(0, 0x7F800000, 1 << 16, dtype=np.uint32).view(np.float32))
    # Quotients at and just beside a power of two, where a logarithm would round up.
    exact = np.float32(format.max) * np.float32(2.0) ** np.arange(-30, 30, dtype=np.float32)
    amax = np.concatenate(
        [amax, exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf)), f32(0)]
    )
    plain = f8.scale_from_amax(amax, format).inv_scale
    cut = f8.scale_from_amax(amax, format, POWER_OF_TWO)
    assert (cut.inv_scale.view(np.uint32) & 0x7FFFFF == 0).all()
    assert ((cut.inv_scale <= plain) & (plain < 2 * cut.inv_scale)).all()
    np.testing.assert_array_equal(cut.scale.astype(np.float64), 1 / cut.inv_scale.astype(np.float64))
    # The float32 just below 0.5 has the logarithm -1 in float32, which would give 0.5.
    assert f8.scale_from_amax(np.nextafter(f32(896), f32(1e9)), E4M3FN).inv_scale == np.nextafter(f32(0.5), f32(0))
    assert f8.scale_from_amax(np.nextafter(f32(896), f32(1e9)), E4M3FN, POWER_OF_TWO).inv_scale == 0.25


def test_scale_shapes_and_bad_input() -> None:
    for shape in ((), (1, 1), (3, 4), (0, 2)):
        scales = f8.scale_from_amax(np.ones(shape, np.float32), "float8_e4m3fn")
        assert scales.inv_scale.shape == scales.scale.shape == shape
        assert scales.inv_scale.dtype == scales.scale.dtype == np.float32
    with pytest.raises(OperandError, match="amax must have dtype float32; got float64"):
        f8.scale_from_amax(np.ones(1), E4M3FN)
    with pytest.raises(SpecError, match=re.escape("margin must be in 0..6; got 7")):
        f8.scale_from_amax(f32(1), E4M3FN, margin=7)
    with pytest.raises(SpecError, match=r"format must be one of float8_e4m3fn, .*; got float8_e8m0fnu"):
        f8.scale_from_amax(f32(1), "float8_e8m0fnu")


@GRANULARITIES
@FORMATS
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda t: np.dtype(t).name)
def test_quantize_by_element(dtype: type, format: Format, granularity: Granularity) -> None:
    """Each element with the factor of its own group, rounded to float32, clamped, and cast by the witness."""
    x = many_magnitudes(130, 257, dtype=dtype)
    scales = f8.scale_from_amax(f8.amax(x, granularity), format)
    factors = np.empty(x.shape, np.float32)
    divisors = np.empty(x.shape, np.float32)
    for i, j in np.ndindex(*x.shape):
        at = group(granularity, i, j)
        factors[i, j], divisors[i, j] = scales.inv_scale[at], scales.scale[at]
    scaled = np.clip(x.astype(np.float32) * factors, -np.float32(format.max), np.float32(format.max))
    expected = scaled.astype(getattr(ml_dtypes, format.name))
    codes = f8.quantize(x, scales.inv_scale, format, granularity)
    assert codes.dtype == expected.dtype
    np.testing.assert_array_equal(codes.view(np.uint8), expected.view(np.uint8))
    values = f8.dequantize(codes, scales.scale, granularity)
    np.testing.assert_array_equal(values, expected.astype(np.float32) * divisors)


def test_quantize_specials() -> None:
    x = f32(np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, 1e-45)[None]
    codes = f8.quantize(x, f32(2.0), E4M3FN).view(np.uint8)
    assert codes.tolist() == [[0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x7E, 0x00]]
    # An infinite amax has inv_scale 0: what is finite becomes 0, infinity NaN.
    scales = f8.scale_from_amax(f8.amax(f32(np.inf, -1.0, 2.0)[None]), E5M2)
    assert f8.quantize(f32(np.inf, -1.0, 2.0)[None], scales.inv_scale, E5M2).view(np.uint8).tolist() == [
        [0x7F, 0x80, 0]
    ]
    values = f8.dequantize(np.array([[0x7F, 0x80, 0x7C]], np.uint8).view(ml_dtypes.float8_e5m2), f32(np.inf))
    assert values.view(np.uint32).tolist() == [[0x7FFFFFFF, 0x7FFFFFFF, 0x7F800000]]


def test_empty() -> None:
    for shape in ((0, 4), (4, 0), (0, 0)):
        x = np.zeros(shape, np.float32)
        for granularity in Granularity:
            scales = f8.scale_from_amax(f8.amax(x, granularity), E4M3FN)
            codes = f8.quantize(x, scales.inv_scale, E4M3FN, granularity)
            assert codes.shape == f8.dequantize(codes, scales.scale, granularity).shape == shape


def test_bad_operands() -> None:
    x = np.zeros((4, 300), np.float32)
    with pytest.raises(OperandError, match=re.escape("amax: x must be a matrix [rows, K]; got shape (3,)")):
        f8.amax(f32(1, 2, 3))
    with pytest.raises(OperandError, match="amax: x must have dtype float32, bfloat16, float16; got float64"):
        f8.amax(np.zeros((2, 2)))
    with pytest.raises(OperandError, match="quantize: x must have dtype float32, bfloat16, float16; got float64"):
        f8.quantize(np.zeros((2, 2)), f32(1), E4M3FN)
    with pytest.raises(OperandError, match=re.escape("inv_scale must have shape (4, 3) for blockwise_1x128")):
        f8.quantize(x, np.ones((3, 4), np.float32), E4M3FN, VECTORS)
    with pytest.raises(OperandError, match=re.escape("must have shape (4, 1) for rowwise")):
        f8.quantize(x, np.ones(4, np.float32), E4M3FN, ROWWISE)
    with pytest.raises(OperandError, match="inv_scale must have dtype float32; got float64"):
        f8.quantize(x, np.ones((1, 1)), E4M3FN)
    with pytest.raises(OperandError, match=r"dequantize: codes must have dtype float8_e4m3fn, .*; got float32"):
        f8.dequantize(x, f32(1))
