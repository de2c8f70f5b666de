"""f8ref.jax.softfloat: integer float32 arithmetic, against numpy's float32 and against exact fractions."""

import itertools
from collections.abc import Callable
from fractions import Fraction

import jax
import numpy as np
import numpy.typing as npt
import pytest

from f8ref.jax import softfloat

Codes = npt.NDArray[np.uint32]

# Signed zeros, subnormals, the edges of the normal range, ties, infinities and NaNs.
EDGES = [0x0, 0x1, 0x2, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x33800000, 0x34000001, 0x3EFFFFFF]
EDGES += [0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x4B7FFFFF, 0x4B800001, 0x5F800000, 0x7F000000, 0x7F7FFFFF]
EDGES += [0x7F800000, 0x7FC00000, 0x7F800001, 0x1F800000, 0x20000001]
EDGES += [code | 0x80000000 for code in EDGES]


def drawn(rng: np.random.Generator, n: int) -> Codes:
    """Bit patterns: any, near one in exponent, with short significands, subnormal, edges."""
    code = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    near = (code & np.uint32(0x807FFFFF)) | (rng.integers(90, 160, n, dtype=np.uint32) << np.uint32(23))
    short = near & np.uint32(0xFFF80000)
    subnormal = code & np.uint32(0x807FFFFF)
    edge = np.array(EDGES, np.uint32)[rng.integers(0, len(EDGES), n)]
    return np.choose(rng.integers(0, 6, n), [code, near, near, short, subnormal, edge]).astype(np.uint32)


def canonical(value: npt.NDArray[np.float32]) -> Codes:
    """Bit patterns, every NaN as the one that f8ref emits."""
    return np.where(np.isnan(value), np.uint32(0x7FFFFFFF), value.view(np.uint32))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(softfloat.multiply, np.multiply), (softfloat.add, np.add)],
    ids=["multiply", "add"],
)
def test_equals_numpy_float32(ours: Callable[..., jax.Array], theirs: np.ufunc) -> None:
    rng = np.random.default_rng(20)
    pairs = np.array(list(itertools.product(EDGES, EDGES)), np.uint32).T
    a, b = (np.concatenate([edge, drawn(rng, (1 << 20) - edge.size)]) for edge in pairs)
    with np.errstate(all="ignore"):
        expected = canonical(theirs(a.view(np.float32), b.view(np.float32)))
    observed = np.asarray(jax.jit(ours)(a, b))
    assert np.array_equal(observed, expected)


def fraction(code: int) -> Fraction:
    field, sig = code >> 23 & 0xFF, code & 0x7FFFFF
    magnitude = Fraction(sig | (field > 0) << 23) * Fraction(2) ** (max(field, 1) - 150)
    return -magnitude if code >> 31 else magnitude


def rounded(value: Fraction) -> int:
    """The bit pattern of a non-zero number rounded to nearest even, from the definition."""
    sign, magnitude = (1 << 31 if value < 0 else 0), abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    exponent = max(exponent, -126)
    units = round(magnitude / Fraction(2) ** (exponent - 23))  # Python rounds half to even
    return sign | min((exponent + 126 << 23) + units, 0x7F800000)


def test_fused_multiply_add_equals_exact_fractions() -> None:
    rng = np.random.default_rng(21)
    a, b, c = (drawn(rng, 40_000) for _ in range(3))
    finite = np.isfinite(np.stack([a, b, c]).view(np.float32)).all(axis=0)
    a, b, c = a[finite], b[finite], c[finite]
    # A third of the addends nearly cancels the product, a third lies at its rounding boundary or far below.
    with np.errstate(all="ignore"):
        product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
    kind = rng.integers(0, 3, c.size)
    near = (product ^ np.uint32(0x80000000)) + rng.integers(-3, 4, c.size).astype(np.uint32)
    c = np.where((kind == 0) & np.isfinite(near.view(np.float32)), near, c)
    below = product - (rng.integers(20, 60, c.size).astype(np.uint32) << np.uint32(23))
    c = np.where((kind == 1) & np.isfinite(below.view(np.float32)), below, c)
    observed = np.asarray(jax.jit(softfloat.fused_multiply_add)(a, b, c))

    zeros = 0
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), observed.tolist(), strict=True):
        value = fraction(x) * fraction(y) + fraction(z)
        if value:
            assert result == rounded(value), (hex(x), hex(y), hex(z))
        else:
            both_negative = (x ^ y) >> 31 and z >> 31 and not (fraction(x) * fraction(y))
            assert result == (1 << 31 if both_negative else 0), (hex(x), hex(y), hex(z))
            zeros += 1
    assert zeros > 100


def test_fused_multiply_add_of_what_is_not_finite() -> None:
    triples = np.array(list(itertools.product(EDGES, repeat=3)), np.uint32)
    triples = triples[~np.isfinite(triples.view(np.float32)).all(axis=1)]
    a, b, c = triples.T
    # No product here rounds to an infinity or zero that decides the sum, once finite operands are replaced by signs.
    with np.errstate(all="ignore"):
        x, y, z = (np.where(np.isfinite(v), np.sign(v), v) for v in (a.view("f4"), b.view("f4"), c.view("f4")))
        expected = canonical((x * y + z).astype(np.float32))
    assert np.array_equal(np.asarray(jax.jit(softfloat.fused_multiply_add)(a, b, c)), expected)


def test_one_rounding_differs_from_two() -> None:
    rng = np.random.default_rng(22)
    a, b, c = ((rng.standard_normal(4096)).astype(np.float32).view(np.uint32) for _ in range(3))
    fused = np.asarray(jax.jit(softfloat.fused_multiply_add)(a, b, c))
    separate = np.asarray(jax.jit(lambda a, b, c: softfloat.add(softfloat.multiply(a, b), c))(a, b, c))
    assert 0.1 < np.mean(fused != separate) < 0.4


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
