"""Float32 arithmetic of the oracles: the integers of f8ref.jax.softfloat and the fused multiply-add of f8ref.numpy.

The witnesses are numpy's float32, the definition and ml_dtypes.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, Format
from f8ref.exact import add, decode, encode, multiply
from f8ref.jax import softfloat
from f8ref.numpy.cast import convert
from f8ref.numpy.scaled_mm import fma
from tests.oracle.exactly import codes_of, dtype_of

Codes = npt.NDArray[np.uint32]

# Signed zeros, subnormals, the edges of the normal range, ties, infinities and NaNs.
EDGES = [0x0, 0x1, 0x2, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x33800000, 0x34000001, 0x3EFFFFFF]
EDGES += [0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x4B7FFFFF, 0x4B800001, 0x5F800000, 0x7F000000, 0x7F7FFFFF]
EDGES += [0x7F800000, 0x7FC00000, 0x7F800001, 0x1F800000, 0x20000001]
EDGES += [code | 0x80000000 for code in EDGES]


def floats(codes: Any) -> npt.NDArray[np.float32]:
    return np.asarray(codes, np.uint32).view(np.float32)


def canonical(value: npt.NDArray[np.float32]) -> Codes:
    """Bit patterns, every NaN as the one that f8ref emits."""
    return np.where(np.isnan(value), np.uint32(0x7FFFFFFF), value.view(np.uint32))


FUSED: dict[str, Callable[..., Codes]] = {
    "numpy": lambda *codes: canonical(fma(*map(floats, codes))),
    "jax": lambda *codes: np.asarray(jax.jit(softfloat.fused_multiply_add)(*codes)),
}
BACKENDS = pytest.mark.parametrize("backend", FUSED)


def drawn(rng: np.random.Generator, n: int) -> Codes:
    """Bit patterns: any, near one in exponent, with short significands, subnormal, edges."""
    code = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    near = (code & np.uint32(0x807FFFFF)) | (rng.integers(90, 160, n, dtype=np.uint32) << np.uint32(23))
    short = near & np.uint32(0xFFF80000)
    subnormal = code & np.uint32(0x807FFFFF)
    edge = np.array(EDGES, np.uint32)[rng.integers(0, len(EDGES), n)]
    return np.choose(rng.integers(0, 6, n), [code, near, near, short, subnormal, edge]).astype(np.uint32)


@pytest.mark.parametrize("name", ["multiply", "add"])
def test_equals_numpy_float32(name: str) -> None:
    rng = np.random.default_rng(20)
    pairs = np.array(list(itertools.product(EDGES, EDGES)), np.uint32).T
    a, b = (np.concatenate([edge, drawn(rng, (1 << 20) - edge.size)]) for edge in pairs)
    with np.errstate(all="ignore"):
        expected = canonical(getattr(np, name)(floats(a), floats(b)))
    observed = np.asarray(jax.jit(getattr(softfloat, name))(a, b))
    assert np.array_equal(observed, expected)


@BACKENDS
def test_fused_multiply_add_equals_the_definition(backend: str) -> None:
    rng = np.random.default_rng(21)
    a, b, c = (drawn(rng, 20_000) for _ in range(3))
    with np.errstate(all="ignore"):
        product = codes_of(floats(a) * floats(b))
    # A quarter each of the addends nearly cancels the product, lies at its rounding boundary or far below, is a power
    # of two far above it.
    near = (product ^ np.uint32(0x80000000)) + rng.integers(-3, 4, c.size).astype(np.uint32)
    apart = rng.integers(20, 60, c.size).astype(np.uint32) << np.uint32(23)
    above = (product + apart) & np.uint32(0xFF800000)
    c = np.choose(rng.integers(0, 4, c.size), [near, product - apart, above, c])
    finite = np.isfinite(floats([a, b, c])).all(axis=0)
    a, b, c = a[finite], b[finite], c[finite]

    zeros = 0
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), FUSED[backend](a, b, c).tolist(), strict=True):
        first, second, third = (decode(code, FLOAT32) for code in (x, y, z))
        value = add(multiply(first, second), third)
        assert result == encode(value, FLOAT32), (hex(x), hex(y), hex(z))
        zeros += value.is_zero
    assert zeros > 100


@BACKENDS
def test_fused_multiply_add_of_what_is_not_finite(backend: str) -> None:
    triples = np.array(list(itertools.product(EDGES, repeat=3)), np.uint32)
    triples = triples[~np.isfinite(floats(triples)).all(axis=1)]
    a, b, c = triples.T
    # No product here rounds to an infinity or zero that decides the sum, once finite operands are replaced by signs.
    with np.errstate(all="ignore"):
        x, y, z = (np.where(np.isfinite(v), np.sign(v), v) for v in map(floats, (a, b, c)))
        expected = canonical((x * y + z).astype(np.float32))
        assert np.array_equal(FUSED[backend](a, b, c), expected)


PRODUCTS: list[tuple[float, float, float, float]] = [
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
]


@BACKENDS
def test_fused_multiply_add_by_hand(backend: str) -> None:
    a, b, c, expected = (codes_of(np.array(column, np.float32)) for column in zip(*PRODUCTS, strict=True))
    assert list(map(hex, FUSED[backend](a, b, c))) == list(map(hex, expected))


@pytest.mark.parametrize(
    ("exponent", "significand", "expected"),
    [
        (0, 1 << 31, 0x3F800000),
        (0, (1 << 32) - 1, 0x3FFFFFFF),
        (127, (1 << 32) - 1, 0x7F7FFFFF),
        (128, 1 << 31, 0x7F800000),
        (-126, 1 << 31, 0x00800000),
        (-127, (1 << 32) - 1, 0x007FFFFF),
        (-149, (1 << 32) - 1, 0x00000001),
        (-150, (1 << 32) - 1, 0x00000000),
        (-4000, (1 << 32) - 1, 0x00000000),
        (12, 0, 0x00000000),
    ],
)
def test_pack_toward_zero(exponent: int, significand: int, expected: int) -> None:
    packed = softfloat.pack_toward_zero(np.array([exponent], np.int32), np.array([significand], np.uint32))  # pyright: ignore[reportArgumentType]
    assert np.asarray(packed).tolist() == [expected]


@pytest.mark.parametrize("format", [FLOAT16, BFLOAT16], ids=str)
def test_narrowing(format: Format) -> None:
    """Random bits and every midpoint of the 16-bit format with its neighbours, against the witness's cast [EPI-4]."""
    codes = np.arange(1 << 15, dtype=np.uint16).view(dtype_of(format)).astype(np.float32)
    finite = codes[np.isfinite(codes)]
    midpoints = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    x = np.concatenate([finite, midpoints, *(np.nextafter(midpoints, np.float32(s)) for s in (-np.inf, np.inf))])
    drawn = floats(np.random.default_rng(5).integers(0, 1 << 32, 1 << 18, dtype=np.uint32))
    x = np.concatenate([x, -x, drawn, np.array([np.inf, -np.inf, np.nan, 3.4e38, 65520, 65519], np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaN
        expected = np.where(np.isnan(x), np.uint16(0x7FFF), codes_of(x.astype(dtype_of(format))))
    np.testing.assert_array_equal(codes_of(convert(x, format)), expected)


def test_float32_stays_but_for_nan() -> None:
    x = floats([0x80000000, 0x00000001, 0xFFC00000, 0xFF800000])
    assert codes_of(convert(x, FLOAT32)).tolist() == [0x80000000, 0x00000001, 0x7FFFFFFF, 0xFF800000]
