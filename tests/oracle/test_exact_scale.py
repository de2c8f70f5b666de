"""f8ref.exact: amax, scales, quantisation, delayed scaling; literals, and IEEE double division as witness."""

import random
import struct
from fractions import Fraction

import pytest

from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    FLOAT16,
    FLOAT32,
    MAX_MARGIN,
    AmaxHistoryReduction,
    DelayedScaling,
    DelayedState,
    Format,
    ScaleRule,
    Scales,
)
from f8ref.exact import (
    amax,
    decode,
    dequantize,
    encode,
    finite,
    initial_delayed_state,
    quantize,
    scale_from_amax,
    update_delayed_state,
)

POWER_OF_TWO = ScaleRule(power_of_two=True)
INF, NAN, ONE = 0x7F800000, 0x7FFFFFFF, 0x3F800000


def f32(value: float) -> int:
    """The float32 code of a float64, rounded by the C library."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def value(code: int) -> float:
    return struct.unpack("<f", struct.pack("<I", code))[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -3.0, 2.5], 3.0),
        ([-0.0, -0.0], 0.0),
        ([], 0.0),
        ([2.0**-149, 0.0], 2.0**-149),
        ([1.0, -float("inf"), 5.0], float("inf")),
    ],
)
def test_amax(values: list[float], expected: float) -> None:
    assert amax([f32(v) for v in values], FLOAT32) == f32(expected)


def test_amax_keeps_nan() -> None:
    for codes in ([0xFFC00001, ONE], [ONE, 0x7F800001], [INF, 0x7FC00000], [0x7FC00000, INF]):
        assert amax(codes, FLOAT32) == NAN


def test_amax_of_16_bit_formats_is_exact() -> None:
    assert amax([0x0001, 0x8003], BFLOAT16) == f32(3 * 2.0**-133)
    assert amax([0x3C00, 0xFBFF], FLOAT16) == f32(65504.0)


# (amax, format, rule, margin, inv_scale, scale)
SCALES = [
    (448.0, E4M3FN, ScaleRule(), 0, 1.0, 1.0),
    (57344.0, E5M2, ScaleRule(), 0, 1.0, 1.0),
    (3.5, E4M3FN, ScaleRule(), 0, 128.0, 2.0**-7),
    (3.5, E4M3FN, ScaleRule(), 3, 16.0, 2.0**-4),
    (0.0, E4M3FN, ScaleRule(amax_floor=2.0**-40), 0, 448 * 2.0**40, None),
    (2.0**-41, E4M3FN, ScaleRule(amax_floor=2.0**-40), 0, 448 * 2.0**40, None),
    (float("inf"), E4M3FN, ScaleRule(), 0, 0.0, float("inf")),
    (float("inf"), E4M3FN, POWER_OF_TWO, 0, 0.0, float("inf")),
    (1.0, E4M3FN, POWER_OF_TWO, 0, 256.0, 2.0**-8),  # 448 cut to 256
    (224.0, E4M3FN, POWER_OF_TWO, 0, 2.0, 0.5),
    (value(f32(224.0) + 1), E4M3FN, POWER_OF_TWO, 0, 1.0, 1.0),  # just below 2, where exp2(floor(log2)) rounds up
]


@pytest.mark.parametrize(("largest", "format", "rule", "margin", "inv_scale", "scale"), SCALES)
def test_scale_from_amax(
    largest: float, format: Format, rule: ScaleRule, margin: int, inv_scale: float, scale: float | None
) -> None:
    scales = scale_from_amax(f32(largest), format, rule, margin=margin)
    assert scales.inv_scale == f32(inv_scale)
    assert scales.scale == f32(1 / inv_scale if scale is None else scale)


@pytest.mark.parametrize("rule", [ScaleRule(), POWER_OF_TWO], ids=["any", "power_of_two"])
def test_nan_amax_gives_nan_scales(rule: ScaleRule) -> None:
    assert scale_from_amax(0x7FC00000, E4M3FN, rule) == Scales(NAN, NAN)


@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
def test_scale_rule_against_double_division(format: Format) -> None:
    """The machine's own float64 division; and, for float32 divisors, one rounding of the exact quotient is the same."""
    draw = random.Random(20261121)
    amaxes = [draw.randrange(0, INF) for _ in range(1000)] + [draw.randrange(f32(1e-9), f32(1e4)) for _ in range(1000)]
    for code in amaxes:
        scales = scale_from_amax(code, format)
        divisor = max(value(code), 1e-12)
        assert scales.inv_scale == f32(format.max / divisor), hex(code)
        assert scales.scale == f32(1 / value(scales.inv_scale)), hex(code)
        if divisor == value(code):
            exact = Fraction(format.max) / Fraction(divisor)
            assert scales.inv_scale == encode(finite(exact), FLOAT32), hex(code)


def test_scale_rule_rounds_twice() -> None:
    """A floor with 53 bits, for which 448 / floor is just above the midpoint of 0x44800022 and the next float32.

    The float64 quotient is the midpoint, which goes to the even code; one rounding would give the odd one.
    """
    floor = float.fromhex("0x1.bfff8740208bbp-2")
    assert encode(finite(Fraction(448) / Fraction(floor)), FLOAT32) == 0x44800023
    assert scale_from_amax(0, E4M3FN, ScaleRule(amax_floor=floor)).inv_scale == 0x44800022


def test_power_of_two_is_below_and_within_a_factor_of_two() -> None:
    draw = random.Random(1)
    for code in (draw.randrange(f32(1e-9), f32(1e9)) for _ in range(500)):
        inv_scale = value(scale_from_amax(code, E4M3FN).inv_scale)
        cut = scale_from_amax(code, E4M3FN, POWER_OF_TWO)
        assert value(cut.inv_scale) <= inv_scale < 2 * value(cut.inv_scale)
        assert cut.inv_scale & FLOAT32.fraction_mask == 0
        assert value(cut.scale) * value(cut.inv_scale) == 1


def test_largest_margin_keeps_scales_normal() -> None:
    scales = scale_from_amax(0x7F7FFFFF, E4M3FN, margin=MAX_MARGIN)
    assert decode(scales.inv_scale, FLOAT32).value >= Fraction(FLOAT32.smallest_normal)


def test_quantize_rounds_the_product_first() -> None:
    """(1 + 2^-23) * (17 - 2^-19) = 17 + 2^-23 - 2^-42, above the tie of 16 and 18; rounded once it would be 18.

    Float32 has a spacing of 2^-19 there and rounds the product to 17, and the tie goes to the even 16.
    """
    x, factor = 0x3F800001, f32(17.0) - 1
    exact = decode(x, FLOAT32).value * decode(factor, FLOAT32).value
    assert exact == 17 + Fraction(1, 1 << 23) - Fraction(1, 1 << 42)
    assert encode(finite(exact), E4M3FN) == 0x59
    assert quantize(x, FLOAT32, factor, E4M3FN) == 0x58
    # (1 + 2^-23) * 17 = 17 + 17 * 2^-23 stays above the tie in float32, 17 + 2^-19.
    assert quantize(x, FLOAT32, f32(17.0), E4M3FN) == 0x59


@pytest.mark.parametrize(
    ("x", "inv_scale", "e4m3", "e5m2"),
    [
        (f32(1e30), f32(1e30), 0x7E, 0x7B),  # the product overflows float32
        (f32(-1e30), f32(1e30), 0xFE, 0xFB),
        (INF, ONE, 0x7E, 0x7B),
        (INF, 0, 0x7F, 0x7F),  # inf * 0
        (NAN, ONE, 0x7F, 0x7F),
        (ONE, NAN, 0x7F, 0x7F),
        (0x80000000, ONE, 0x80, 0x80),
        (f32(-1e-30), f32(1e-30), 0x80, 0x80),
        (f32(460.0), ONE, 0x7E, 0x5F),  # 460 is 448 in both: 448 = 1.75 * 2^8
    ],
)
def test_quantize_edges(x: int, inv_scale: int, e4m3: int, e5m2: int) -> None:
    assert quantize(x, FLOAT32, inv_scale, E4M3FN) == e4m3
    assert quantize(x, FLOAT32, inv_scale, E5M2) == e5m2


def test_dequantize() -> None:
    assert dequantize(0x7E, E4M3FN, f32(2.0)) == f32(896.0)
    assert dequantize(0x01, E4M3FN, f32(2.0**-140)) == f32(2.0**-149)
    assert dequantize(0x80, E4M3FN, f32(2.0)) == 0x80000000
    assert dequantize(0xFC, E5M2, f32(2.0)) == 0xFF800000
    assert dequantize(0x7F, E4M3FN, f32(2.0)) == NAN
    # 1.125 * (1 + 2^-23) = 1.125 + 1.125 * 2^-23, to the nearest float32
    assert dequantize(0x39, E4M3FN, 0x3F800001) == f32(1.125) + 1


# ---- delayed scaling


def run(amaxes: list[int], delayed: DelayedScaling, rule: ScaleRule | None = None) -> list[DelayedState]:
    """The states after each amax, the first being the initial one."""
    states = [initial_delayed_state(delayed)]
    for code in amaxes:
        states.append(update_delayed_state(states[-1], code, E4M3FN, rule or ScaleRule(), delayed))
    return states


def test_delayed_initial_state() -> None:
    assert initial_delayed_state(DelayedScaling(history_length=3)) == DelayedState((0, 0, 0), ONE, False)


def test_delayed_history_is_newest_first_and_forgets() -> None:
    """Length 2, maximum: 3.5, 7, 14, 1, 1: the 14 stays for two steps. inv_scale = 448 / maximum."""
    states = run([f32(v) for v in (3.5, 7.0, 14.0, 1.0, 1.0)], DelayedScaling(history_length=2))
    assert [s.amax_history for s in states] == [
        tuple(f32(v) for v in pair) for pair in ((0, 0), (3.5, 0), (7, 3.5), (14, 7), (1, 14), (1, 1))
    ]
    assert [value(s.inv_scale) for s in states] == [1, 128, 64, 32, 32, 448]
    assert [s.initialized for s in states] == [False] + [True] * 5


def test_delayed_most_recent() -> None:
    delayed = DelayedScaling(history_length=2, reduction=AmaxHistoryReduction.MOST_RECENT)
    states = run([f32(v) for v in (14.0, 3.5)], delayed)
    assert [value(s.inv_scale) for s in states] == [1, 32, 128]


@pytest.mark.parametrize("bad", [0, INF, NAN, 0x7FC00000], ids=hex)
@pytest.mark.parametrize("reduction", AmaxHistoryReduction, ids=lambda r: r.value)
def test_delayed_skips_what_is_no_scale(bad: int, reduction: AmaxHistoryReduction) -> None:
    """0, inf and NaN enter as 0 and leave inv_scale and initialized alone, before and after the first good amax."""
    delayed = DelayedScaling(history_length=3, reduction=reduction)
    states = run([bad, f32(14.0), bad], delayed)
    assert states[1] == DelayedState((0, 0, 0), ONE, False)
    assert states[2] == DelayedState((f32(14.0), 0, 0), f32(32.0), True)
    assert states[3] == DelayedState((0, f32(14.0), 0), f32(32.0), True)


def test_delayed_margin_and_power_of_two() -> None:
    states = run([f32(1.0)], DelayedScaling(margin=3))
    assert value(states[1].inv_scale) == 56  # 448 / 8
    states = run([f32(1.0)], DelayedScaling(margin=3), POWER_OF_TWO)
    assert value(states[1].inv_scale) == 32
    tiny = run([f32(1e-30)], DelayedScaling(), ScaleRule(amax_floor=2.0**-40))
    assert value(tiny[1].inv_scale) == 448 * 2.0**40
