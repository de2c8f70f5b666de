"""f8ref.jax decode and cast, against ml_dtypes and the definition of a nearest code."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from f8emu.spec import E4M3FN, E5M2, FLOAT8, FORMATS, Format, OperandError, Overflow, SpecError
from f8ref.jax import cast, decode

DECODABLE = [*(f.name for f in FLOAT8), "float8_e8m0fnu", "float16", "bfloat16"]


def all_codes(name: str) -> npt.NDArray[np.generic]:
    """Every code of a format, typed."""
    bits = FORMATS[name].bits
    return np.arange(1 << bits, dtype=f"uint{bits}").view(name)


def expected_codes(x: npt.NDArray[np.float32], format: Format, overflow: Overflow) -> npt.NDArray[np.uint8]:
    """What ml_dtypes gives; it overflows to NaN or infinity, so saturation clamps first. NaN is one code."""
    with np.errstate(all="ignore"):
        limited = np.clip(x, -format.max, format.max) if overflow is Overflow.SATURATE else x
        typed = limited.astype(format.name)
    is_nan = np.isnan(typed.astype(np.float32))
    return np.where(is_nan, np.uint8(format.nan_code), typed.view(np.uint8))


@pytest.mark.parametrize("name", DECODABLE)
def test_decode_of_every_code(name: str) -> None:
    codes = all_codes(name)
    expected = codes.astype(np.float32)
    expected = np.where(np.isnan(expected), np.uint32(0x7FFFFFFF), expected.view(np.uint32))
    observed = np.asarray(decode(jnp.asarray(codes)))
    assert observed.dtype == np.float32
    assert np.array_equal(observed.view(np.uint32), expected)


@pytest.mark.parametrize("overflow", list(Overflow))
@pytest.mark.parametrize("format", FLOAT8, ids=str)
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_cast_of_every_input(source: str, format: Format, overflow: Overflow) -> None:
    x = all_codes(source)
    observed = np.asarray(cast(jnp.asarray(x), format, overflow=overflow))
    assert observed.dtype == np.dtype(format.name)
    assert np.array_equal(observed.view(np.uint8), expected_codes(x.astype(np.float32), format, overflow))


def boundaries(format: Format) -> npt.NDArray[np.float32]:
    """Every value of a format, the midpoints between neighbours, and the float32 next to each on both sides."""
    values = np.arange(format.max_code + 2, dtype=np.uint8)[: format.max_code + 1].view(format.name).astype(np.float64)
    beyond = 2 * values[-1] - values[-2]
    values = np.append(values, beyond)
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    return np.concatenate([around, -around])


@pytest.mark.parametrize("overflow", list(Overflow))
@pytest.mark.parametrize("format", FLOAT8, ids=str)
def test_cast_of_float32(format: Format, overflow: Overflow) -> None:
    rng = np.random.default_rng(30)
    anything = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    in_range = (rng.standard_normal(1 << 18) * 2.0 ** rng.integers(-20, 17, 1 << 18)).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3e38], np.float32)
    x = np.concatenate([boundaries(format), anything, in_range, special])
    observed = np.asarray(cast(jnp.asarray(x), format, overflow=overflow)).view(np.uint8)
    assert np.array_equal(observed, expected_codes(x, format, overflow))


def test_overflow_policies() -> None:
    x = jnp.asarray([464.0, 464.1, -1e9, np.inf, -np.inf, np.nan, -0.0], jnp.float32)
    assert codes(cast(x, E4M3FN)) == [0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x80]
    assert codes(cast(x, E4M3FN, overflow=Overflow.NONFINITE)) == [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x80]
    y = jnp.asarray([61439.0, 61440.0, -1e9, np.inf, -np.inf, np.nan, -0.0], jnp.float32)
    assert codes(cast(y, E5M2)) == [0x7B, 0x7B, 0xFB, 0x7B, 0xFB, 0x7F, 0x80]
    assert codes(cast(y, "float8_e5m2", overflow=Overflow.NONFINITE)) == [0x7B, 0x7C, 0xFC, 0x7C, 0xFC, 0x7F, 0x80]


def codes(x: jax.Array) -> list[int]:
    return np.asarray(x).view(np.uint8).tolist()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert cast(jnp.ones(shape, jnp.float32), E5M2).shape == shape
    assert decode(jnp.ones(shape, jnp.float8_e5m2)).shape == shape


def test_refusals() -> None:
    for bad in (np.ones(3), np.ones(3, np.int32), np.ones(3, ml_dtypes.float8_e4m3fn), 1.0):
        with pytest.raises(OperandError, match="cast: x must be an array of float32, bfloat16, float16; got"):
            cast(bad, E4M3FN)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OperandError, match="float64"):
        cast(np.ones(3), E4M3FN)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OperandError, match="decode: x must be"):
        decode(np.ones(3, np.float32))  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="known formats are"):
        cast(jnp.ones(3), "float8_e4m3")
    with pytest.raises(SpecError, match="one of float8_e4m3fn, float8_e5m2"):
        cast(jnp.ones(3), "float16")
