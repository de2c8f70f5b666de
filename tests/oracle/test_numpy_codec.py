"""Every code of every format against ml_dtypes, and the typing of arrays."""

import re

import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as f8
from f8emu.spec import OperandError

FORMATS_8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
FORMATS_16 = (ml_dtypes.bfloat16, np.float16)


@pytest.mark.parametrize("dtype", FORMATS_8 + FORMATS_16, ids=lambda dtype: np.dtype(dtype).name)
def test_all_codes(dtype: type) -> None:
    bits = 8 * np.dtype(dtype).itemsize
    x = np.arange(1 << bits, dtype=f"uint{bits}").view(dtype)
    values = f8.decode(x)
    expected = x.astype(np.float32)
    nan = np.isnan(expected)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    assert set(values.view(np.uint32)[nan].tolist()) <= {0x7FFFFFFF}


@pytest.mark.parametrize(
    ("dtype", "code", "value"),
    [
        # OFP8 table 2: largest, smallest normal, largest and smallest subnormal.
        (ml_dtypes.float8_e4m3fn, 0x7E, 448.0),
        (ml_dtypes.float8_e4m3fn, 0x08, 2.0**-6),
        (ml_dtypes.float8_e4m3fn, 0x07, 0.875 * 2.0**-6),
        (ml_dtypes.float8_e4m3fn, 0x81, -(2.0**-9)),
        (ml_dtypes.float8_e5m2, 0x7B, 57344.0),
        (ml_dtypes.float8_e5m2, 0x04, 2.0**-14),
        (ml_dtypes.float8_e5m2, 0x03, 0.75 * 2.0**-14),
        (ml_dtypes.float8_e5m2, 0x81, -(2.0**-16)),
        (ml_dtypes.float8_e5m2, 0xFC, -np.inf),
        # OCP MX 5.4.1: exponent field 0 is 2^-127, a subnormal of float32, and not zero.
        (ml_dtypes.float8_e8m0fnu, 0x00, 2.0**-127),
        (ml_dtypes.float8_e8m0fnu, 0xFE, 2.0**127),
    ],
)
def test_documented_values(dtype: type, code: int, value: float) -> None:
    assert f8.decode(np.array([code], np.uint8).view(dtype)).tolist() == [value]


def test_shapes_and_strides() -> None:
    x = np.arange(48, dtype=np.uint8).reshape(4, 12).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(f8.decode(x.T), f8.decode(x).T)
    np.testing.assert_array_equal(f8.decode(x[:, ::3]), f8.decode(x)[:, ::3])
    assert f8.decode(x[:0]).shape == (0, 12)
    assert f8.decode(x[1, 2]).shape == ()
    assert f8.decode(x[1, 2]) == f8.decode(x)[1, 2]


def test_results_are_writable_and_apart() -> None:
    x = np.zeros(4, np.uint8).view(ml_dtypes.float8_e5m2)
    first = f8.decode(x)
    first[:] = 7
    assert f8.decode(x).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("x", [np.zeros(3), np.zeros(3, np.uint8), np.zeros(3, np.float32), "code"])
def test_other_dtypes_are_refused(x: object) -> None:
    with pytest.raises(OperandError, match=re.escape("decode: x must have dtype float8_e4m3fn")):
        f8.decode(x)  # type: ignore[arg-type]
