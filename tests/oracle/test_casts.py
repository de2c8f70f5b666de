"""Codes, the one rounding and exact arithmetic of the definition, and the casts of the oracle.

The witnesses are literals of the documents, ml_dtypes and numpy; `test_exact_vs_numpy` compares the two.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import f8ref.numpy as f8
from f8emu.conformance.run.oracle import exact_subject
from f8emu.spec import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FLOAT8, FLOAT16, FLOAT32, Format, Overflow
from f8ref.exact import NAN, ZERO, Number, NumberKind, add, decode, encode, exponent_of, finite, infinity, multiply
from tests.oracle.exactly import codes_of, dtype_of, typed

SATURATE, NONFINITE = Overflow.SATURATE, Overflow.NONFINITE
MINUS_ZERO = Number(NumberKind.FINITE, negative=True)
FORMATS = pytest.mark.parametrize("format", FLOAT8, ids=str)
POLICIES = pytest.mark.parametrize("overflow", Overflow, ids=lambda overflow: overflow.value)
VERBS: dict[str, dict[str, Callable[..., Any]]] = {
    "exact": dict(exact_subject().verbs),
    "numpy": {name: getattr(f8, name) for name in ("cast", "decode")},
}
BACKENDS = pytest.mark.parametrize("backend", VERBS)
Codes = NDArray[np.uint8]

# OFP8 revision 1.0, tables 1 and 2; MX 1.0, section 5.4.1; IEEE 754-2019, table 3.5.
VALUES: list[tuple[Format, int, Fraction | int]] = [
    (E4M3FN, 0x01, Fraction(1, 512)),  # smallest subnormal, 2^-9
    (E4M3FN, 0x07, Fraction(7, 512)),  # largest subnormal, 0.875 * 2^-6
    (E4M3FN, 0x08, Fraction(1, 64)),  # smallest normal, 2^-6
    (E4M3FN, 0x38, 1),
    (E4M3FN, 0xB9, Fraction(-9, 8)),
    (E4M3FN, 0x78, 256),  # exponent field 15 holds numbers
    (E4M3FN, 0x7E, 448),  # largest, 1.75 * 2^8
    (E5M2, 0x01, Fraction(1, 65536)),  # smallest subnormal, 2^-16
    (E5M2, 0x03, Fraction(3, 65536)),  # largest subnormal, 0.75 * 2^-14
    (E5M2, 0x04, Fraction(1, 16384)),  # smallest normal, 2^-14
    (E5M2, 0x3C, 1),
    (E5M2, 0xBD, Fraction(-5, 4)),
    (E5M2, 0x7B, 57344),  # largest, 1.75 * 2^15
    (E8M0FNU, 0x00, Fraction(1, 1 << 127)),  # field 0 is a power of two like any other
    (E8M0FNU, 0x7F, 1),
    (E8M0FNU, 0xFE, 1 << 127),
    (FLOAT16, 0x0001, Fraction(1, 1 << 24)),
    (FLOAT16, 0x7BFF, 65504),
    (BFLOAT16, 0x0001, Fraction(1, 1 << 133)),
    (BFLOAT16, 0x3FC0, Fraction(3, 2)),
    (FLOAT32, 0x00000001, Fraction(1, 1 << 149)),
    (FLOAT32, 0x00800000, Fraction(1, 1 << 126)),
    (FLOAT32, 0x7F7FFFFF, ((1 << 24) - 1) << 104),
    (FLOAT32, 0xC0490FDB, Fraction(-0x490FDB - (1 << 23), 1 << 22)),  # float32 of -pi
]
SPECIALS: list[tuple[Format, int, Number]] = [
    (E4M3FN, 0x00, ZERO),
    (E4M3FN, 0x80, MINUS_ZERO),
    (E4M3FN, 0x7F, NAN),
    (E4M3FN, 0xFF, NAN),
    (E5M2, 0x80, MINUS_ZERO),
    (E5M2, 0x7C, infinity()),
    (E5M2, 0xFC, infinity(negative=True)),
    *((E5M2, code, NAN) for code in (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    (E4M3FNUZ, 0x80, NAN),
    (E4M3FNUZ, 0xFF, finite(-240)),
    (E5M2FNUZ, 0x80, NAN),
    (E5M2FNUZ, 0x7F, finite(57344)),
    (E8M0FNU, 0xFF, NAN),
    (FLOAT32, 0x80000000, MINUS_ZERO),
    (FLOAT32, 0xFF800000, infinity(negative=True)),
    (FLOAT32, 0xFF800001, NAN),
]


@pytest.mark.parametrize(("format", "code", "value"), [*VALUES, *SPECIALS], ids=lambda v: str(v)[:24])
def test_decode_literals(format: Format, code: int, value: Fraction | int | Number) -> None:
    number = decode(code, format)
    assert number == (value if isinstance(value, Number) else finite(value))
    if format is not FLOAT32:
        assert codes_of(f8.decode(typed(code, format))).item() == encode(number, FLOAT32)


@BACKENDS
@pytest.mark.parametrize("format", [*FLOAT8, E8M0FNU, BFLOAT16, FLOAT16], ids=str)
def test_decode_every_code_against_ml_dtypes(format: Format, backend: str) -> None:
    x = typed(np.arange(1 << format.bits), format)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = x.astype(np.float32)
    expected[np.isnan(expected)] = np.uint32(0x7FFFFFFF).view(np.float32)
    np.testing.assert_array_equal(codes_of(VERBS[backend]["decode"](x)), codes_of(expected))


@pytest.mark.parametrize("format", [E4M3FN, E5M2, FLOAT16, BFLOAT16], ids=str)
def test_encode_is_the_inverse_of_decode(format: Format) -> None:
    for code in range(1 << format.bits):
        number = decode(code, format)
        assert encode(number, format) == (format.nan_code if number.is_nan else code)


def test_exponent_of() -> None:
    """`2^e <= x < 2^(e+1)`, on both sides of powers of two and for fractions that are not dyadic."""
    expected = {1: 0, Fraction(3, 2): 0, 2: 1, Fraction(1, 2): -1, Fraction(1, 3): -2, Fraction(2, 3): -1, 448: 8, 7: 2}
    assert {x: exponent_of(Fraction(x)) for x in expected} == expected
    assert exponent_of(Fraction((1 << 60) - 1, 1 << 60)) == -1
    assert exponent_of(Fraction(1, (1 << 149))) == -149


TINY = Fraction(1, 1 << 200)

# (value, code, why); each with its mirror image below zero.
ROUNDING: dict[Format, list[tuple[Fraction | int, int, str]]] = {
    E4M3FN: [
        (17, 0x58, "tie of 16 (code 0x58) and 18 (0x59): the even code"),
        (17 + TINY, 0x59, "a hair above that tie"),
        (19, 0x5A, "tie of 18 (0x59) and 20 (0x5a)"),
        (19 - TINY, 0x59, "a hair below that tie"),
        (Fraction(31, 16), 0x40, "tie of 1.875 (0x3f) and 2 (0x40): up into the next binade"),
        (Fraction(1, 1024), 0x00, "2^-10, tie of 0 and the smallest subnormal 2^-9"),
        (Fraction(1, 1024) + TINY, 0x01, "a hair above 2^-10"),
        (Fraction(3, 1024), 0x02, "tie of subnormals 1 and 2"),
        (Fraction(15, 1024), 0x08, "tie of the largest subnormal 7 * 2^-9 and the smallest normal 8 * 2^-9"),
        (Fraction(15, 1024) - TINY, 0x07, "a hair below it"),
        (Fraction(17, 1024), 0x08, "tie of 8 * 2^-9 and 9 * 2^-9: the first binade has the spacing of the subnormals"),
        (TINY, 0x00, "far below the smallest subnormal: a zero with the sign of the number"),
        (464, 0x7E, "448 + 16, tie of 448 (0x7e) and 480, which would be the odd 0x7f: still 448"),
    ],
    E5M2: [
        (Fraction(9, 8), 0x3C, "tie of 1 (0x3c) and 1.25 (0x3d)"),
        (Fraction(11, 8), 0x3E, "tie of 1.25 (0x3d) and 1.5 (0x3e)"),
        (Fraction(15, 8), 0x40, "tie of 1.75 (0x3f) and 2 (0x40)"),
        (Fraction(1, 1 << 17), 0x00, "2^-17, tie of 0 and the smallest subnormal 2^-16"),
        (Fraction(3, 1 << 17), 0x02, "tie of subnormals 1 and 2"),
        (Fraction(7, 1 << 17), 0x04, "tie of the largest subnormal 3 and the smallest normal 4 * 2^-16"),
        (61440 - TINY, 0x7B, "just below 57344 + 4096, the tie of 57344 and what would be 65536"),
    ],
    E4M3FNUZ: [
        (17, 0x60, "tie of 16 (code 0x60) and 18 (0x61): the even code"),
        (
            Fraction(1, 2048),
            0x00,
            "2^-11, tie of 0 and the smallest subnormal 2^-10: from below too it is the one zero",
        ),
        (TINY, 0x00, "far below the smallest subnormal: zero, which has no sign"),
        (248 - TINY, 0x7F, "just below 240 + 8, the tie of 240 and what would be 256"),
    ],
    E5M2FNUZ: [
        (Fraction(9, 8), 0x40, "tie of 1 (0x40) and 1.25 (0x41)"),
        (TINY, 0x00, "zero, which has no sign"),
        (61440 - TINY, 0x7F, "just below 57344 + 4096, the tie of 57344 and what would be 65536"),
    ],
    FLOAT16: [(2049, 0x6800, "tie of 2048 and 2050"), (65520 - TINY, 0x7BFF, "just below the tie of 65504 and 65536")],
    BFLOAT16: [(257, 0x4380, "tie of 256 and 258"), (259, 0x4382, "tie of 258 and 260")],
    FLOAT32: [
        ((1 << 24) + 1, 0x4B800000, "tie of 2^24 and 2^24 + 2"),
        ((1 << 24) + 3, 0x4B800002, "tie of 2^24 + 2 and 2^24 + 4"),
        (Fraction(1, 1 << 150), 0x00000000, "tie of 0 and the smallest subnormal 2^-149"),
        (Fraction(3, 1 << 150), 0x00000002, "tie of subnormals 1 and 2"),
        (Fraction((1 << 24) - 1, 1 << 150), 0x00800000, "tie of the largest subnormal and the smallest normal"),
        ((1 << 128) - (1 << 103) - 1, 0x7F7FFFFF, "just below the overflow boundary 2^128 - 2^103"),
    ],
}


@pytest.mark.parametrize(
    ("format", "value", "code"),
    [
        pytest.param(format, value, code, id=f"{format}: {why}")
        for format, rows in ROUNDING.items()
        for value, code, why in rows
    ],
)
@POLICIES
def test_rounding(format: Format, value: Fraction, code: int, overflow: Overflow) -> None:
    number = finite(value)
    assert encode(number, format, overflow) == code
    has_sign = code != 0 or format not in (E4M3FNUZ, E5M2FNUZ)
    assert encode(multiply(number, finite(-1)), format, overflow) == code | has_sign << (format.bits - 1)


# (format, value, code under SATURATE, code under NONFINITE)
OVERFLOWS = [
    (E4M3FN, finite(464 + TINY), 0x7E, 0x7F),
    (E4M3FN, finite(-464 - TINY), 0xFE, 0x7F),
    (E4M3FN, finite(1 << 300), 0x7E, 0x7F),
    (E4M3FN, infinity(), 0x7E, 0x7F),
    (E4M3FN, infinity(negative=True), 0xFE, 0x7F),
    (E4M3FN, NAN, 0x7F, 0x7F),
    (E5M2, finite(61440), 0x7B, 0x7C),  # the tie's even neighbour is beyond the largest finite value
    (E5M2, finite(-61440), 0xFB, 0xFC),
    (E5M2, finite(65536), 0x7B, 0x7C),
    (E5M2, infinity(), 0x7B, 0x7C),
    (E5M2, infinity(negative=True), 0xFB, 0xFC),
    (E5M2, NAN, 0x7F, 0x7F),
    (E4M3FNUZ, finite(248), 0x7F, 0x80),  # the tie's even neighbour is beyond the largest finite value
    (E4M3FNUZ, finite(-248), 0xFF, 0x80),
    (E4M3FNUZ, infinity(negative=True), 0xFF, 0x80),
    (E4M3FNUZ, NAN, 0x80, 0x80),
    (E5M2FNUZ, finite(61440), 0x7F, 0x80),
    (E5M2FNUZ, infinity(), 0x7F, 0x80),
    (FLOAT16, finite(65520), 0x7BFF, 0x7C00),
    (BFLOAT16, finite((1 << 128) - (1 << 119)), 0x7F7F, 0x7F80),
    (FLOAT32, finite((1 << 128) - (1 << 103)), 0x7F7FFFFF, 0x7F800000),
]


@pytest.mark.parametrize(("format", "number", "saturated", "nonfinite"), OVERFLOWS, ids=lambda v: str(v)[:24])
def test_overflow(format: Format, number: Number, saturated: int, nonfinite: int) -> None:
    assert encode(number, format, SATURATE) == saturated
    assert encode(number, format, NONFINITE) == nonfinite


@pytest.mark.parametrize("to_format", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_encode_of_drawn_float64_against_numpy(to_format: Format) -> None:
    """Random significands and midpoints, from below the smallest subnormal to beyond the largest value."""
    draw = np.random.default_rng(20261121)
    low, high = to_format.min_exponent - to_format.fraction_bits - 3, to_format.max_exponent + 2
    significands = np.concatenate(
        [
            draw.integers(1 << 23, 1 << 24, 3000),  # any float32
            (draw.integers(1 << to_format.fraction_bits, 2 << to_format.fraction_bits, 2000) * 2 + 1),  # midpoints
        ]
    )
    values = np.ldexp(
        significands.astype(np.float64) * draw.choice([-1.0, 1.0], 5000),
        draw.integers(low, high + 1, 5000) - np.floor(np.log2(significands)).astype(np.int64),
    )
    with np.errstate(over="ignore", under="ignore"):
        if to_format is FLOAT32:
            witness = values.astype(np.float32).view(np.uint32)
        else:
            exact = np.float32(values).astype(np.float64) == values  # float32 in between must not round
            values = values[exact]
            assert len(values) > 2000
            witness = values.astype(np.float32).astype(dtype_of(to_format)).view(np.uint16)
    for value, expected in zip(values.tolist(), witness.tolist(), strict=True):
        assert encode(finite(Fraction(value)), to_format) == expected, value.hex()


def float32_operands() -> list[int]:
    """Float32 codes: 18 specials and edges, and random ones of close exponents."""
    edges = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    draw = np.random.default_rng(7)
    near = draw.integers(0x3E000000, 0x41000000, 60).tolist()
    anywhere = draw.integers(0, 0x7F800000, 40).tolist()
    return [code | sign for code in edges + near + anywhere for sign in (0, 0x80000000)]


@pytest.mark.parametrize("operation", ["add", "multiply"])
def test_float32_arithmetic_against_numpy(operation: str) -> None:
    """An exact operation followed by the one rounding is IEEE arithmetic, signed zeros and subnormals included."""
    codes = np.array(float32_operands(), np.uint32)
    edges, pairs = (np.stack(np.meshgrid(c, c)).reshape(2, -1) for c in (codes[:18], codes))
    x, y = np.concatenate([edges, np.random.default_rng(3).permutation(pairs, axis=1)[:, :12000]], axis=1)
    with np.errstate(all="ignore"):
        exact = {"add": (add, np.add), "multiply": (multiply, np.multiply)}[operation]
        witness = exact[1](x.view(np.float32), y.view(np.float32))
    for a, b, expected, is_nan in zip(
        x.tolist(), y.tolist(), witness.view(np.uint32).tolist(), np.isnan(witness).tolist(), strict=True
    ):
        observed = encode(exact[0](decode(a, FLOAT32), decode(b, FLOAT32)), FLOAT32)
        assert observed == (0x7FFFFFFF if is_nan else expected), (operation, hex(a), hex(b))


# ---- casts


def witness_codes(x: NDArray[np.float32], format: Format, overflow: Overflow) -> Codes:
    """ml_dtypes, which overflows to what is not finite; clamped first where the policy saturates."""
    limit = np.float32(format.max)
    clamped = np.clip(x, -limit, limit) if overflow is Overflow.SATURATE else x
    with np.errstate(all="ignore"):
        code = clamped.astype(getattr(ml_dtypes, format.name)).view(np.uint8)
    is_nan = np.isnan(code.view(getattr(ml_dtypes, format.name)).astype(np.float32))
    return np.where(is_nan, format.nan_code, code)


def assert_right(x: np.ndarray, format: Format, overflow: Overflow, backend: str = "numpy") -> None:
    codes = VERBS[backend]["cast"](x, format, overflow=overflow)
    assert codes.dtype == dtype_of(format) and codes.shape == x.shape
    with np.errstate(invalid="ignore"):  # signalling NaN
        x32 = x.astype(np.float32)
    np.testing.assert_array_equal(codes.view(np.uint8), witness_codes(x32, format, overflow))


@FORMATS
@POLICIES
@pytest.mark.parametrize("source", [BFLOAT16, FLOAT16], ids=str)
def test_all_16_bit_inputs(source: Format, format: Format, overflow: Overflow) -> None:
    """Of the oracle, with which `test_exact_vs_numpy` compares the definition."""
    assert_right(typed(np.arange(1 << 16), source), format, overflow)


@BACKENDS
@FORMATS
@POLICIES
def test_float32_boundaries(format: Format, overflow: Overflow, backend: str) -> None:
    """Each value of the format, each midpoint and each power of two with both neighbours; subnormals, infinity, NaN."""
    values = f8.decode(typed(np.arange(format.max_code + 1), format)).tolist()
    midpoints = [(low + high) / 2 for low, high in pairwise([*values, 2 * values[-1] - values[-2]])]
    powers = [2.0**e for e in range(-149, 128)]
    points = np.array(values + midpoints + powers, np.float32)
    assert points.astype(np.float64).tolist() == values + midpoints + powers
    neighbours = [np.nextafter(points, np.float32(s) * np.float32(np.inf)) for s in (1, -1)]
    subnormals = np.array([*range(1, 1000), *range((1 << 23) - 1000, 1 << 23)], np.uint32).view(np.float32)
    specials = np.array([0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF], np.uint32)
    x = np.concatenate([points, *neighbours, subnormals, specials.view(np.float32)])
    assert_right(np.concatenate([x, -x]), format, overflow, backend)


@FORMATS
@POLICIES
def test_drawn_float32(format: Format, overflow: Overflow) -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    near = (rng.normal(size=1 << 18) * format.smallest_normal).astype(np.float32)
    assert_right(np.concatenate([bits, near]), format, overflow)


@pytest.mark.parametrize("verb", [f8.decode, lambda x: f8.cast(f8.decode(x), E4M3FN)], ids=["decode", "cast"])
def test_shapes_and_strides(verb: Callable[[np.ndarray], np.ndarray]) -> None:
    x = np.random.default_rng(3).integers(0, 0x7F, (300, 130)).astype(np.uint8).view(dtype_of(E4M3FN))
    codes = codes_of(verb(x))
    np.testing.assert_array_equal(codes_of(verb(x.T)), codes.T)
    np.testing.assert_array_equal(codes_of(verb(x[::7, 1::3])), codes[::7, 1::3])
    assert verb(x[:0]).shape == (0, 130) and verb(x[0, 0]).shape == ()
    assert codes_of(verb(x[0, 0])) == codes[0, 0]


def test_results_are_writable_and_apart() -> None:
    x = np.zeros(4, np.uint8).view(ml_dtypes.float8_e5m2)
    first = f8.decode(x)
    first[:] = 7
    assert f8.decode(x).tolist() == [0, 0, 0, 0]
