"""The fused multiply-add against fractions, and the narrowing of outputs against numpy and ml_dtypes."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32
from f8ref.numpy.cast import convert
from f8ref.numpy.float32 import fma
from tests.oracle.exactly import rounded


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(11)
    n = 20_000
    x, y, z = (rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32) for _ in range(3))
    # A third each: any bits; close exponents, where digits cancel; powers of two beside products of any size.
    near = slice(n // 3, None)
    x[near], y[near] = (rng.normal(size=n - n // 3).astype(np.float32) for _ in range(2))
    product = x[near].astype(np.float64) * y[near]
    z[near] = (-product * (1 + rng.normal(size=product.size) * 2.0**-24)).astype(np.float32)
    middle = slice(2 * n // 3, None)
    z[middle] = 2.0 ** rng.integers(-60, 61, z[middle].size) * rng.choice([-1, 1], z[middle].size)
    x[middle] = np.ldexp(x[middle], rng.integers(-30, 31, z[middle].size))
    keep = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    x, y, z = x[keep], y[keep], z[keep]
    expected = [
        rounded(Fraction(p) * Fraction(q) + Fraction(r))
        for p, q, r in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    result = fma(x, y, z)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.array(expected))  # compares values: the sign of a zero is checked below


@pytest.mark.parametrize(
    ("x", "y", "z", "expected"),
    [
        # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a product rounded first would lose the last term.
        (1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11, 2.0**-24),
        # 1 + 2^-23 + 2^-24 - 2^-70 is a middle less what float64 cannot see: rounding twice would go to even, up.
        (1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-23), 1 + 2.0**-23, 1 + 2.0**-23),
        (1 + 2.0**-23, -(2.0**-24) * (1 - 2.0**-23), -1 - 2.0**-23, -1 - 2.0**-23),
        (1 + 2.0**-23, 2.0**-24, 1.0, 1 + 2.0**-23),
        (-(2.0**-60), 2.0**-60, 1 + 2.0**-23, 1 + 2.0**-23),
        # Down to subnormals and up to infinity.
        (2.0**-75, 2.0**-75, 0.0, 0.0),
        (2.0**-75, 1.5 * 2.0**-75, 0.0, 2.0**-149),
        (2.0**-75, 2.0**-75, 2.0**-149, 2.0**-148),
        (2.0**100, 2.0**28, 0.0, np.inf),
        (2.0**100, 2.0**28, -(2.0**127), 2.0**127),
        # Signed zeros as IEEE 754 has them.
        (0.0, -1.0, 0.0, 0.0),
        (0.0, -1.0, -0.0, -0.0),
        (1.0, 1.0, -1.0, 0.0),
        (np.inf, 0.0, 1.0, np.nan),
        (np.inf, 1.0, -np.inf, np.nan),
        (np.inf, -1.0, 1.0, -np.inf),
    ],
)
def test_fma_by_hand(x: float, y: float, z: float, expected: float) -> None:
    result = fma(*(np.array([value], np.float32) for value in (x, y, z)))
    np.testing.assert_array_equal(result, np.float32(expected))
    assert np.isnan(expected) or np.signbit(result) == np.signbit(expected)


@pytest.mark.parametrize(("format", "dtype"), [(FLOAT16, np.float16), (BFLOAT16, ml_dtypes.bfloat16)], ids=str)
def test_narrowing(format: object, dtype: type) -> None:
    """Random bits and every midpoint of the 16-bit format with its neighbours, against the witness's cast [EPI-4]."""
    assert format in (FLOAT16, BFLOAT16)
    codes = np.arange(1 << 15, dtype=np.uint16).view(dtype).astype(np.float32)
    finite = codes[np.isfinite(codes)]
    midpoints = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    x = np.concatenate([finite, midpoints, *(np.nextafter(midpoints, np.float32(s)) for s in (-np.inf, np.inf))])
    drawn = np.random.default_rng(5).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, -x, drawn, np.array([np.inf, -np.inf, np.nan, 3.4e38, 65520, 65519], np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaN
        expected = x.astype(dtype)
    result = convert(x, format)  # type: ignore[arg-type]
    nan = np.isnan(x)
    np.testing.assert_array_equal(result.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert set(result.view(np.uint16)[nan].tolist()) == {0x7FFF}


def test_float32_stays_but_for_nan() -> None:
    x = np.array([0x80000000, 0x00000001, 0xFFC00000, 0xFF800000], np.uint32).view(np.float32)
    assert [hex(code) for code in convert(x, FLOAT32).view(np.uint32)] == [
        "0x80000000",
        "0x1",
        "0x7fffffff",
        "0xff800000",
    ]
