"""The cast against ml_dtypes, and against a search for the nearest code in exact arithmetic."""

import re
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import f8ref.numpy as f8
from f8emu.spec import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT8, Format, OperandError, Overflow, SpecError

FORMATS = pytest.mark.parametrize("format", FLOAT8, ids=str)
POLICIES = pytest.mark.parametrize("overflow", Overflow, ids=lambda overflow: overflow.value)
DTYPES_16 = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])

Codes = NDArray[np.uint8]


def magnitudes(format: Format) -> list[Fraction]:
    """The finite magnitudes in the order of their codes, and the one after the last, had the format one more."""
    step = Fraction(2) ** (1 - format.bias - format.fraction_bits)
    per_binade = 1 << format.fraction_bits
    return [
        (code % per_binade + per_binade * (code >= per_binade)) * step * 2 ** max(code // per_binade - 1, 0)
        for code in range(format.max_code + 2)
    ]


def nearest_codes(x: NDArray[np.float32], format: Format, overflow: Overflow) -> Codes:
    """Nearest-even by search among the midpoints: few-bit numbers, so that comparing in float64 is exact."""
    exact = magnitudes(format)
    midpoints = [(low + high) / 2 for low, high in pairwise(exact)]
    bounds = np.array([float(m) for m in midpoints])
    assert [Fraction(bound) for bound in bounds] == midpoints
    with np.errstate(invalid="ignore"):  # signalling NaN
        size = np.abs(x.astype(np.float64))
    below = np.searchsorted(bounds, size, side="left")
    above = np.searchsorted(bounds, size, side="right")  # differs from `below` on a midpoint only
    code = np.where(below % 2 == 0, below, above)
    beyond = {Overflow.SATURATE: format.max_code, Overflow.NONFINITE: format.infinity_code or format.nan_code}[overflow]
    code = np.where(code > format.max_code, beyond, code)
    is_signed = np.signbit(x) & (True if format.has_negative_zero else code != 0)
    code = np.where(np.isnan(x) | (code == format.nan_code), format.nan_code, code | is_signed * 0x80)
    return code.astype(np.uint8)


def witness_codes(x: NDArray[np.float32], format: Format, overflow: Overflow) -> Codes:
    """ml_dtypes, which overflows to what is not finite; clamped first where the policy saturates."""
    limit = np.float32(format.max)
    clamped = np.clip(x, -limit, limit) if overflow is Overflow.SATURATE else x
    with np.errstate(all="ignore"):
        code = clamped.astype(getattr(ml_dtypes, format.name)).view(np.uint8)
    is_nan = np.isnan(code.view(getattr(ml_dtypes, format.name)).astype(np.float32))
    return np.where(is_nan, format.nan_code, code)


def assert_right(x: np.ndarray, format: Format, overflow: Overflow) -> None:
    codes = f8.cast(x, format, overflow=overflow)
    assert codes.dtype == np.dtype(getattr(ml_dtypes, format.name))
    assert codes.shape == x.shape
    with np.errstate(invalid="ignore"):  # signalling NaN
        x32 = x.astype(np.float32)
    np.testing.assert_array_equal(codes.view(np.uint8), nearest_codes(x32, format, overflow))
    np.testing.assert_array_equal(codes.view(np.uint8), witness_codes(x32, format, overflow))


@FORMATS
def test_the_search_itself(format: Format) -> None:
    """Its midpoint trick equals the smallest distance, ties to the even code, in fractions."""
    values = magnitudes(format)
    assert values[format.max_code] == Fraction(format.max)
    x = np.random.default_rng(1).uniform(-1.2, 1.2, 400).astype(np.float32) * np.float32(format.max)
    x[:200] *= np.float32(2.0) ** np.random.default_rng(2).integers(-30, 0, 200).astype(np.float32)
    x[300:] = [float((values[i] + values[i + 1]) / 2) for i in range(100)]
    found = nearest_codes(x, format, Overflow.SATURATE) & 0x7F
    for number, code in zip(x.tolist(), found.tolist(), strict=True):
        distances = [(abs(abs(Fraction(number)) - v), i % 2, i) for i, v in enumerate(values)]
        assert code == min(min(distances)[2], format.max_code)


@FORMATS
@POLICIES
@DTYPES_16
def test_all_16_bit_inputs(dtype: type, format: Format, overflow: Overflow) -> None:
    assert_right(np.arange(1 << 16, dtype=np.uint16).view(dtype), format, overflow)


@FORMATS
@POLICIES
def test_float32_boundaries(format: Format, overflow: Overflow) -> None:
    """Each value of the format, each midpoint and each power of two with both neighbours; subnormals, infinity, NaN."""
    exact = magnitudes(format)
    values = [float(v) for v in exact]
    midpoints = [float((low + high) / 2) for low, high in pairwise(exact)]
    powers = [2.0**e for e in range(-149, 128)]
    points = np.array(values + midpoints + powers, np.float32)
    assert points.astype(np.float64).tolist() == values + midpoints + powers
    neighbours = [np.nextafter(points, np.float32(s) * np.float32(np.inf)) for s in (1, -1)]
    subnormals = np.array([*range(1, 1000), *range((1 << 23) - 1000, 1 << 23)], np.uint32).view(np.float32)
    specials = np.array([0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF], np.uint32)
    x = np.concatenate([points, *neighbours, subnormals, specials.view(np.float32)])
    assert_right(np.concatenate([x, -x]), format, overflow)


@FORMATS
@POLICIES
def test_drawn_float32(format: Format, overflow: Overflow) -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    near = (rng.normal(size=1 << 18) * format.smallest_normal).astype(np.float32)
    assert_right(np.concatenate([bits, near]), format, overflow)


@pytest.mark.parametrize(
    ("format", "x", "saturated", "nonfinite"),
    [
        # 464 is halfway between 448, which is even, and a missing 480; 61440 between 57344, which is odd, and 65536.
        (E4M3FN, 464.0, 0x7E, 0x7E),
        (E4M3FN, np.nextafter(np.float32(464), np.float32(1e9)), 0x7E, 0x7F),
        (E4M3FN, -1e30, 0xFE, 0x7F),
        (E4M3FN, -np.inf, 0xFE, 0x7F),
        (E5M2, np.nextafter(np.float32(61440), np.float32(0)), 0x7B, 0x7B),
        (E5M2, 61440.0, 0x7B, 0x7C),
        (E5M2, -61440.0, 0xFB, 0xFC),
        (E5M2, -np.inf, 0xFB, 0xFC),
        (E4M3FN, -np.nan, 0x7F, 0x7F),
        (E5M2, -np.nan, 0x7F, 0x7F),
        (E4M3FN, -(2.0**-10), 0x80, 0x80),
        (E4M3FN, 1.5 * 2.0**-9, 0x02, 0x02),
        (E5M2, -0.0, 0x80, 0x80),
        # FNUZ: 248 is halfway between 240, which is odd, and a missing 256; there is one zero, and NaN is its negative.
        (E4M3FNUZ, np.nextafter(np.float32(248), np.float32(0)), 0x7F, 0x7F),
        (E4M3FNUZ, 248.0, 0x7F, 0x80),
        (E4M3FNUZ, -np.inf, 0xFF, 0x80),
        (E4M3FNUZ, -0.0, 0x00, 0x00),
        (E4M3FNUZ, -(2.0**-11), 0x00, 0x00),
        (E5M2FNUZ, -61440.0, 0xFF, 0x80),
        (E5M2FNUZ, np.nan, 0x80, 0x80),
    ],
)
def test_overflow_ties_and_signs(format: Format, x: float, saturated: int, nonfinite: int) -> None:
    array = np.array(x, np.float32)
    assert f8.cast(array, format).view(np.uint8) == saturated
    assert f8.cast(array, format.name, overflow=Overflow.NONFINITE).view(np.uint8) == nonfinite


def test_shapes_and_strides() -> None:
    x = np.random.default_rng(3).normal(size=(300, 130)).astype(np.float32)
    codes = f8.cast(x, E4M3FN).view(np.uint8)
    np.testing.assert_array_equal(f8.cast(x.T, E4M3FN).view(np.uint8), codes.T)
    np.testing.assert_array_equal(f8.cast(x[::7, 1::3], E4M3FN).view(np.uint8), codes[::7, 1::3])
    assert f8.cast(x[:0], E5M2).shape == (0, 130)
    assert f8.cast(x[0, 0], E5M2).shape == ()


@pytest.mark.parametrize("x", [np.zeros(3), 1.0, np.zeros(3, np.int32), np.zeros(3, ml_dtypes.float8_e5m2)])
def test_other_dtypes_are_refused(x: np.ndarray) -> None:
    with pytest.raises(OperandError, match="cast: x must have dtype float32, bfloat16, float16; got "):
        f8.cast(x, E4M3FN)


def test_float64_is_named() -> None:
    with pytest.raises(OperandError, match="got float64; convert it"):
        f8.cast(np.zeros(2), E4M3FN)


@pytest.mark.parametrize("format", ["float8_e8m0fnu", "bfloat16", "e4m3"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(SpecError, match=re.escape(format)):
        f8.cast(np.zeros(2, np.float32), format)
