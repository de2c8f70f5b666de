"""Amax, the scale rule, quantise and dequantise, delayed scaling: of definition and oracle.

`tests/test_exhaustive.py` proves the quotients in integers.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import f8ref.numpy as f8
from f8emu.conformance.run.oracle import exact_subject
from f8emu.spec import E4M3FN, E5M2, AmaxHistoryReduction, DelayedScaling, DelayedState, Format, Granularity, ScaleRule
from tests.oracle.exactly import assert_same_bits, codes_of, dtype_of, typed

TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTORS, SQUARES = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
GRANULARITIES = pytest.mark.parametrize("granularity", Granularity, ids=lambda granularity: granularity.value)
FORMATS = pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
POWER_OF_TWO = ScaleRule(power_of_two=True)
VERBS: dict[str, dict[str, Callable[..., Any]]] = {
    "exact": dict(exact_subject().verbs),
    "numpy": {name: getattr(f8, name) for name in exact_subject().verbs},
}
BACKENDS = pytest.mark.parametrize("backend", VERBS)


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def many_magnitudes(rows: int, k: int, dtype: type = np.float32) -> np.ndarray:
    """A different magnitude in every 128 x 128 block and in every row of it, so that a wrong index shows."""
    rng = np.random.default_rng(rows * 1000 + k)
    i, j = np.indices((rows, k))
    return (rng.uniform(-1, 1, (rows, k)) * 2.0 ** ((i // 128) * 3 - (j // 128) * 2) * (1 + i % 128)).astype(dtype)


def group(granularity: Granularity, i: Any, j: Any) -> tuple[Any, Any]:
    """The scale of element (i, j), from the words of the glossary."""
    match granularity:
        case Granularity.TENSORWISE:
            return (0 * i, 0 * j)
        case Granularity.ROWWISE:
            return (i, 0 * j)
        case Granularity.BLOCKWISE_1X128:
            return (i, j // 128)
        case Granularity.BLOCKWISE_128X128:
            return (i // 128, j // 128)
        case Granularity.BLOCKWISE_1X32:
            return (i, j // 32)


@GRANULARITIES
@pytest.mark.parametrize(
    ("shape", "dtype", "format"),
    [
        ((130, 257), np.float32, E4M3FN),
        ((130, 257), ml_dtypes.bfloat16, E5M2),
        ((128, 256), np.float16, E4M3FN),
        ((3, 5), np.float32, E5M2),
        ((257, 1), np.float32, E4M3FN),
        *((shape, np.float32, E4M3FN) for shape in ((0, 4), (4, 0), (0, 0))),
    ],
)
def test_by_element(shape: tuple[int, int], dtype: type, format: Format, granularity: Granularity) -> None:
    """The amax of a group; each element with the factor of its own, rounded, clamped, and cast by the witness."""
    x = many_magnitudes(*shape, dtype=dtype)
    at = group(granularity, *np.indices(shape))
    expected = np.zeros(granularity.scale_shape(*shape), np.float32)
    np.maximum.at(expected, at, np.abs(x.astype(np.float32)))
    amaxes = f8.amax(x, granularity)
    assert_same_bits(amaxes, expected)
    # Drawn float32 numbers all differ, so that no two groups can be confused.
    assert not x.size or dtype is not np.float32 or len(set(amaxes.ravel().tolist())) == amaxes.size
    scales, limit = f8.scale_from_amax(amaxes, format), np.float32(format.max)
    codes = np.clip(x.astype(np.float32) * scales.inv_scale[at], -limit, limit).astype(dtype_of(format))
    assert_same_bits(f8.quantize(x, scales.inv_scale, format, granularity), codes)
    assert_same_bits(f8.dequantize(codes, scales.scale, granularity), codes.astype(np.float32) * scales.scale[at])


@BACKENDS
def test_amax_of_little(backend: str) -> None:
    amax = VERBS[backend]["amax"]
    x = f32(-0.0, 2.0**-149, -(2.0**-148))[None]
    assert amax(x).tolist() == [[2.0**-148]]
    assert amax(f32(-0.0)[None]).view(np.uint32).tolist() == [[0]]
    assert amax(f32(-np.inf, 3.0)[None]).tolist() == [[np.inf]]
    assert amax(np.zeros((0, 5), np.float32)).tolist() == [[0]]
    assert amax(np.zeros((2, 0), np.float32), ROWWISE).tolist() == [[0], [0]]
    assert amax(np.zeros((2, 0), np.float32), VECTORS).shape == (2, 0)
    assert amax(np.zeros((0, 300), np.float32), SQUARES).shape == (0, 3)


INF, NAN, ONE = 0x7F800000, 0x7FFFFFFF, 0x3F800000


def code(value: float) -> int:
    return int(f32(value).view(np.uint32)[0])


# (code of amax, format, rule, margin, codes of inv_scale and scale)
SCALES: list[tuple[int, Format, ScaleRule, int, int, int]] = [
    (code(448), E4M3FN, ScaleRule(), 0, ONE, ONE),
    (code(57344), E5M2, ScaleRule(), 0, ONE, ONE),
    (code(3.5), E4M3FN, ScaleRule(), 0, code(128), code(2**-7)),
    (code(3.5), E4M3FN, ScaleRule(), 3, code(16), code(2**-4)),
    (0, E4M3FN, ScaleRule(amax_floor=2.0**-40), 0, code(448 * 2.0**40), code(1 / (448 * 2.0**40))),
    (code(2.0**-41), E4M3FN, ScaleRule(amax_floor=2.0**-40), 0, code(448 * 2.0**40), code(1 / (448 * 2.0**40))),
    (code(1), E4M3FN, POWER_OF_TWO, 0, code(256), code(2**-8)),  # 448 cut to 256
    (code(224), E4M3FN, POWER_OF_TWO, 0, code(2), code(0.5)),
    (code(224) + 1, E4M3FN, POWER_OF_TWO, 0, ONE, ONE),  # just below 2, where exp2(floor(log2)) rounds up
    *((INF, format, rule, 0, 0, INF) for format in (E4M3FN, E5M2) for rule in (ScaleRule(), POWER_OF_TWO)),
    *((nan, E4M3FN, rule, 0, NAN, NAN) for nan in (INF + 1, 0xFFC00000) for rule in (ScaleRule(), POWER_OF_TWO)),
    # A floor with 53 bits, for which 448 / floor is just above the midpoint of 0x44800022 and the next float32. The
    # float64 quotient is the midpoint, which goes to the even code; one rounding would give the odd one.
    (0, E4M3FN, ScaleRule(amax_floor=float.fromhex("0x1.bfff8740208bbp-2")), 0, 0x44800022, 0x3A7FFFBC),
]


@BACKENDS
@pytest.mark.parametrize("row", SCALES, ids=lambda row: f"{row[0]:#x} {row[1]} {row[2]} {row[3]}")
def test_scales_by_hand(row: Any, backend: str) -> None:
    amax, format, rule, margin, inv_scale, scale = row
    amaxes = np.array([amax], np.uint32).view(np.float32)
    scales = VERBS[backend]["scale_from_amax"](amaxes, format, rule, margin=margin)
    assert [hex(codes_of(x).item()) for x in scales] == [hex(inv_scale), hex(scale)]


# (code of x, code of inv_scale, in E4M3, in E5M2)
QUANTIZED = [
    # (1 + 2^-23) * (17 - 2^-19) is above the tie of 16 and 18, but in float32 it is 17, and goes to the even 16.
    (0x3F800001, code(17) - 1, 0x58, 0x4C),
    (0x3F800001, code(17), 0x59, 0x4C),  # 17 + 2^-19 stays above the tie in float32
    (code(1e30), code(1e30), 0x7E, 0x7B),  # the product overflows float32
    (code(-1e30), code(1e30), 0xFE, 0xFB),
    (INF, ONE, 0x7E, 0x7B),
    (INF, 0, 0x7F, 0x7F),  # inf * 0
    (NAN, ONE, 0x7F, 0x7F),
    (ONE, NAN, 0x7F, 0x7F),
    (0x80000000, ONE, 0x80, 0x80),
    (code(-1e-30), code(1e-30), 0x80, 0x80),
    (code(460), ONE, 0x7E, 0x5F),  # 460 is 448 in both: 448 = 1.75 * 2^8
]
# (code, format, code of scale, code of the value)
DEQUANTIZED = [
    (0x7E, E4M3FN, code(2), code(896)),
    (0x01, E4M3FN, code(2.0**-140), 1),
    (0x80, E4M3FN, code(2), 0x80000000),
    (0xFC, E5M2, code(2), 0xFF800000),
    (0x7F, E4M3FN, code(2), NAN),
    (0x80, E5M2, INF, NAN),
    (0x39, E4M3FN, 0x3F800001, code(1.125) + 1),  # 1.125 + 1.125 * 2^-23, to the nearest float32
]


@BACKENDS
def test_quantize_and_dequantize_by_hand(backend: str) -> None:
    verbs = VERBS[backend]
    for x, inv_scale, *expected in QUANTIZED:
        values, factor = (np.array([[bits]], np.uint32).view(np.float32) for bits in (x, inv_scale))
        observed = [codes_of(verbs["quantize"](values, factor, format)).item() for format in (E4M3FN, E5M2)]
        assert list(map(hex, observed)) == list(map(hex, expected)), (hex(x), hex(inv_scale))
    for codes, format, scale, expected_code in DEQUANTIZED:
        factor = np.array([[scale]], np.uint32).view(np.float32)
        assert codes_of(verbs["dequantize"](typed([[codes]], format), factor)).item() == expected_code, hex(codes)


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


def test_scale_shapes() -> None:
    for shape in ((), (1, 1), (3, 4), (0, 2)):
        scales = f8.scale_from_amax(np.ones(shape, np.float32), "float8_e4m3fn")
        assert scales.inv_scale.shape == scales.scale.shape == shape
        assert scales.inv_scale.dtype == scales.scale.dtype == np.float32


# ---- Delayed scaling, traced by hand from the words of `DelayedScaling`

PLAIN = ScaleRule()
RECENT = AmaxHistoryReduction.MOST_RECENT
ONE_STEP = DelayedScaling(history_length=1)
Trace = tuple[str, DelayedScaling, list[float], Format, ScaleRule, list[tuple[list[float], float, bool]]]
TRACES: list[Trace] = [
    ("448 / amax is exact: the 14 counts for three steps, then the 7 of the step after it",
        DelayedScaling(history_length=3), [14, 7, 3.5, 1.75, 0.875], E4M3FN, PLAIN,
        [([14, 0, 0], 32, True), ([7, 14, 0], 32, True), ([3.5, 7, 14], 32, True), ([1.75, 3.5, 7], 64, True),
            ([0.875, 1.75, 3.5], 128, True)]),
    ("the most recent", DelayedScaling(history_length=2, reduction=RECENT), [14, 7, 28], E4M3FN, PLAIN,
        [([14, 0], 32, True), ([7, 14], 64, True), ([28, 7], 16, True)]),
    ("a history of one", ONE_STEP, [14, 7], E4M3FN, PLAIN, [([14], 32, True), ([7], 64, True)]),
    ("57344 * 2^-3 / 7", replace(ONE_STEP, margin=3), [7], E5M2, PLAIN, [([7], 1024, True)]),
    ("448 * 2^-1 / 7", replace(ONE_STEP, margin=1), [7], E4M3FN, PLAIN, [([7], 32, True)]),
    ("448 / 5", ONE_STEP, [5], E4M3FN, PLAIN, [([5], float(np.float32(89.6)), True)]),
    ("89.6 cut to 64", ONE_STEP, [5], E4M3FN, POWER_OF_TWO, [([5], 64, True)]),
    ("below the floor", ONE_STEP, [2.0**-99], E4M3FN, PLAIN, [([2.0**-99], float(np.float32(448 / 1e-12)), True)]),
    ("another floor", ONE_STEP, [0.25], E4M3FN, ScaleRule(amax_floor=0.5), [([0.25], 896, True)]),
    *((f"{bad} enters the history as 0; neither the scale nor `initialized` moves",
        DelayedScaling(history_length=2, reduction=reduction), [bad, 14, bad, bad, bad, 7], E4M3FN, PLAIN,
        [([0, 0], 1, False), ([14, 0], 32, True), ([0, 14], 32, True), ([0, 0], 32, True), ([0, 0], 32, True),
            ([7, 0], 64, True)])
        for bad in (0.0, np.inf, np.nan) for reduction in AmaxHistoryReduction),
]  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("row", TRACES, ids=lambda row: row[0])
def test_delayed_by_hand(row: Trace, backend: str) -> None:
    """Every state, looked at after the last update: an old state stays as it is."""
    _, delayed, amaxes, format, rule, expected = row
    verbs = VERBS[backend]
    states: list[DelayedState] = [verbs["initial_delayed_state"](delayed)]
    for amax in amaxes:
        states.append(verbs["update_delayed_state"](states[-1], np.float32(amax), format, rule, delayed))
    observed = [(s.amax_history.tolist(), s.inv_scale.tolist(), s.initialized.tolist()) for s in states]
    assert observed == [([0] * delayed.history_length, 1, False), *expected]
    types = [(x.dtype, x.shape) for x in states[-1]]
    assert types == [(np.float32, (delayed.history_length,)), (np.float32, ()), (np.bool_, ())]
