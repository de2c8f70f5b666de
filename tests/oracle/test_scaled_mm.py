"""Epilogues that separate one order of roundings from another, derived by hand, of the definition, the oracle and the
engine; then tiles, layouts and empty operands of the last two. Whole GEMMs are in `test_exact_vs_numpy`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.oracle.together as f8
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, Granularity, OperandError
from f8ref.exact import encode, finite, group_of_row, mm_dot, scaled_dot
from tests.oracle.exactly import IMPLEMENTATIONS, assert_same_bits, codes_of, dtype_of, implementation

TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTOR, SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
INF, NAN = float("inf"), float("nan")
MINUS_ZERO_32 = 0x80000000
Dot = Callable[..., int]


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def array(values: Sequence[float | Fraction], format: Format) -> np.ndarray:
    """Values that the format holds exactly."""
    found = np.array([float(value) for value in values]).astype(dtype_of(format))
    np.testing.assert_array_equal(found.astype(np.float64), [float(value) for value in values])
    return found


def code(value: float | Fraction, format: Format) -> int:
    return format.nan_code if value != value else int(codes_of(array([value], format))[0])


def f32(value: float | Fraction) -> int:
    return code(value, FLOAT32)


@pytest.fixture(params=IMPLEMENTATIONS)
def dot(request: pytest.FixtureRequest) -> Dot:
    """The code of one output of `scaled_mm`."""
    backend = implementation(request.param)

    def call(
        a: Sequence[float],
        b: Sequence[float],
        scale_a: Any = 1,
        scale_b: Any = 1,
        granularity: Granularity | tuple[Granularity, Granularity] = TENSORWISE,
        formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
        out_format: Format = FLOAT32,
        bias: int | None = None,
        **options: Any,
    ) -> int:
        pair = granularity if isinstance(granularity, tuple) else (granularity, granularity)
        scales = [array(s if isinstance(s, list) else [s], FLOAT32) for s in (scale_a, scale_b)]
        if bias is not None:
            options["bias"] = np.array([bias], np.uint32).view(np.float32)
        found = backend.scaled_mm(
            array(a, formats[0])[None],
            array(b, formats[1])[:, None],
            scales[0][None],
            scales[1][:, None],
            granularity_a=pair[0],
            granularity_b=pair[1],
            out_dtype=out_format,
            **options,
        )
        return int(codes_of(found).item())

    return call


def test_epi_1_scales_are_multiplied_first(dot: Dot) -> None:
    """[EPI-1] acc 2^10, scales 2^-100 and 2^-60: their product underflows to 0 before acc could rescue it."""
    assert dot([32], [32], power(-100), power(-60)) == f32(0)
    assert dot([32], [32], power(-60), power(-60)) == f32(power(-110))
    assert dot([32], [32], power(-100), power(-49)) == f32(power(-139))  # a subnormal product of scales is kept


def test_epi_1_product_of_scales_is_rounded(dot: Dot) -> None:
    """[EPI-1] (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is a tie to 1 + 2^-11; times 1.5 that is exactly 1.5 + 3 * 2^-12.

    Unrounded it would be 3 * 2^-25 more, three quarters of the spacing 2^-23: the next float32.
    """
    scale = 1 + power(-12)
    assert dot([1.5], [1], scale, scale) == f32(Fraction(3, 2) + 3 * power(-12))
    assert f32(Fraction(3, 2) + 3 * power(-12)) + 1 == encode(finite(Fraction(3, 2) * scale * scale), FLOAT32)


def test_epi_2_scale_b_then_scale_a(dot: Dot) -> None:
    """[EPI-2] acc 1/2, scale_b 2^-149: the first product 2^-150 is a tie to 0, whatever scale_a is. Swapped, 2^-50."""
    assert dot([0.5], [1], power(100), power(-149), ROWWISE) == f32(0)
    assert dot([0.5], [1], power(-149), power(100), ROWWISE) == f32(power(-50))


def test_epi_2_is_not_epi_1(dot: Dot) -> None:
    """[EPI-2] acc 2^11, scale_b 2^-60, scale_a 2^-100: 2^-49, then 2^-149. [EPI-1] underflows to 0 first."""
    assert dot([64], [32], power(-100), power(-60), ROWWISE) == f32(power(-149))
    assert dot([64], [32], power(-100), power(-60), TENSORWISE) == f32(0)


def test_epi_3_bias_is_added_after_a_rounding(dot: Dot) -> None:
    """[EPI-3] 3 * (1 + 2^-23) = 3 + 3 * 2^-23 is a tie to 3 + 2^-21; less 3 that is 2^-21. An fma gives 3 * 2^-23."""
    for granularity in (TENSORWISE, ROWWISE):
        assert dot([3], [1], 1 + power(-23), 1, granularity, bias=f32(-3)) == f32(power(-21))


def test_epi_3_bias_is_added_in_float32_before_the_output_rounding(dot: Dot) -> None:
    """[EPI-3] bfloat16 has a spacing of 2 at 256: 257 is a tie to 256; with the bias 257.5 rounds to 258."""
    a, b = [16, 1], [16, 1]
    assert dot(a, b, out_format=BFLOAT16) == code(256, BFLOAT16)
    assert dot(a, b, out_format=BFLOAT16, bias=f32(0.5)) == code(258, BFLOAT16)


def test_epi_3_sum_with_the_bias_is_rounded_to_float32(dot: Dot) -> None:
    """[EPI-3] 1 + (2^-8 + 2^-30) is 1 + 2^-8 in float32, a tie of bfloat16 to 1; rounded once it would be 1 + 2^-7."""
    bias = power(-8) + power(-30)
    assert dot([1], [1], out_format=BFLOAT16, bias=f32(bias)) == code(1, BFLOAT16)
    assert encode(finite(1 + bias), BFLOAT16) == code(1 + power(-7), BFLOAT16)


def test_epi_4_output_is_rounded_from_float32(dot: Dot) -> None:
    """[EPI-4] acc 3, scale (257 * 2^17 + 2) / 3 * 2^-25: exactly 1 + 2^-8 + 2^-24, in float32 a tie to 1 + 2^-8.

    That is a tie of bfloat16 and gives 1; rounding once would give 1 + 2^-7.
    """
    scale = Fraction((257 << 17) + 2, 3) * power(-25)
    assert dot([3], [1], scale, out_format=BFLOAT16) == code(1, BFLOAT16)
    assert encode(finite(3 * scale), BFLOAT16) == code(1 + power(-7), BFLOAT16)


@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE], ids=lambda g: g.value)
def test_epi_4_overflow_gives_infinity(granularity: Granularity, dot: Dot) -> None:
    """[EPI-4] float16: 65504 is the largest, 65520 the tie to infinity; float32 and bfloat16 overflow too."""
    assert dot([256], [256], 1, 1, granularity, out_format=FLOAT16, bias=f32(-32)) == 0x7BFF
    assert dot([256], [256], 1, 1, granularity, out_format=FLOAT16, bias=f32(-16)) == 0x7C00
    assert dot([-256], [256], 1, 1, granularity, out_format=FLOAT16) == 0xFC00
    assert dot([256], [256], power(100), power(12), granularity, out_format=BFLOAT16) == 0x7F80
    assert dot([256], [-256], power(100), power(12), granularity) == 0xFF800000


def test_signed_zeros(dot: Dot) -> None:
    """[ACC-5] A zero sum is +0, so the sign of a scaled zero is that of the scales; tensorwise it is +0 [EPI-1]."""
    assert dot([-1, 1], [1, 1], 2, 3, ROWWISE) == 0
    assert dot([-1, 1], [1, 1], -2, 3, ROWWISE) == MINUS_ZERO_32
    assert dot([-1, 1], [1, 1], -2, 3, ROWWISE, bias=f32(0)) == 0
    assert dot([-1, 1], [1, 1], -2, 3, ROWWISE, bias=MINUS_ZERO_32) == MINUS_ZERO_32
    assert dot([-1], [1], power(-100), power(-100), ROWWISE) == MINUS_ZERO_32  # a negative result that underflows
    assert dot([], [], -2, 3, ROWWISE) == MINUS_ZERO_32
    assert dot([-1, 1], [1, 1], -2, 3) == 0
    assert dot([-1], [1], power(-100), power(-100)) == 0
    assert dot([-1, 1], [1, 1], -2, 3, bias=MINUS_ZERO_32) == 0  # 0 is added before the bias, which is -0 alone
    assert dot([], [], -2, 3) == 0
    # What the output type rounds to zero keeps its sign: 0 was added before.
    assert dot([-1], [1], power(-100), 1, out_format=FLOAT16) == 0x8000


@pytest.mark.parametrize("out_format", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_spec_1_through_the_epilogue(out_format: Format, dot: Dot) -> None:
    """[SPEC-1] NaN comes out as all ones; an infinity keeps the sign that the scales give it; inf * 0 is NaN."""
    formats, nan = (E5M2, E4M3FN), out_format.nan_code
    plus, minus = code(INF, out_format), code(-INF, out_format)
    for granularity in (TENSORWISE, ROWWISE):
        assert dot([1], [NAN], 1, 1, granularity, formats, out_format) == nan
        assert dot([INF, 1], [1, 1], -1, 1, granularity, formats, out_format) == minus
        assert dot([INF], [1], 1, 1, granularity, formats, out_format, bias=f32(-1)) == plus
        assert dot([INF], [1], 1, 1, granularity, formats, out_format, bias=f32(-INF)) == nan
        assert dot([INF], [1], 0, 1, granularity, formats, out_format) == nan
        assert dot([1], [1], NAN, 1, granularity, formats, out_format) == nan
        assert dot([1], [1], INF, 1, granularity, formats, out_format) == plus


def test_fast_accumulation_and_split_reach_the_chain(dot: Dot) -> None:
    """[CHAIN-1, 2, 3] 8192 + 0.5 at k = 130; then K = 320 in 2 slices, 12 at k = 256."""
    a, b = [64.0] + [0.0] * 129 + [0.5], [128.0] + [0.0] * 129 + [1.0]
    assert dot(a, b, use_fast_accum=True) == f32(8192)
    assert dot(a, b) == f32(8192.5)
    a, b = [0.0] * 192 + [256.0] + [0.0] * 63 + [12.0] + [0.0] * 63, [0.0] * 192 + [256.0] + [1.0] * 127
    assert dot(a, b, use_fast_accum=True) == f32(65544)
    assert dot(a, b, use_fast_accum=True, split_k=2) == f32(65548)


# ---- blockwise


BLOCKWISE_PAIRS = [(VECTOR, VECTOR), (VECTOR, SQUARE), (SQUARE, VECTOR)]


def test_blocks_are_as_long_in_both_granularities() -> None:
    """The one block length of the kernel is that of the spec."""
    assert VECTOR.block == (1, 128)
    assert SQUARE.block == (128, 128)


def blocks(*values: float) -> list[float]:
    """K of 128 for each value, which stands first in its block."""
    return [x for value in values for x in [value] + [0.0] * 127]


@pytest.mark.parametrize("pair", BLOCKWISE_PAIRS, ids=lambda p: f"{p[0].value}-{p[1].value}")
def test_epi_5_is_a_fused_multiply_add(pair: tuple[Granularity, Granularity], dot: Dot) -> None:
    """[EPI-5] Block 0: 1 * (3 + 2^-21). Block 1: -3 * (1 + 2^-23) = -3 - 3 * 2^-23, a tie of float32 to -3 - 2^-21.

    Fused the total is (4 - 3) * 2^-23 = 2^-23; with a rounded product it would be 0. The fused factor is scale_b for
    two vectors, and either scale where one is square.
    """
    factor = [3 + power(-21), 1 + power(-23)]
    ones = [Fraction(1), Fraction(1)]
    a, b = blocks(1, -3), blocks(1, 1)
    assert dot(a, b, ones, factor, pair) == f32(power(-23))
    expected = f32(0) if pair == (VECTOR, VECTOR) else f32(power(-23))
    assert dot(a, b, factor, ones, pair) == expected


def test_epi_5_which_product_is_rounded_first(dot: Dot) -> None:
    """[EPI-5] p = 1/2, scales 2^-149 and 2^100. Two vectors: p * scale_a first; with a square the scales first."""
    small, large = [power(-149)], [power(100)]
    a, b = blocks(0.5), blocks(1)
    assert dot(a, b, small, large, (VECTOR, VECTOR)) == f32(0)  # 2^-150 is a tie to 0
    assert dot(a, b, large, small, (VECTOR, VECTOR)) == f32(power(-50))
    for pair in ((VECTOR, SQUARE), (SQUARE, VECTOR)):
        assert dot(a, b, small, large, pair) == f32(power(-50))
        assert dot(a, b, large, small, pair) == f32(power(-50))


@pytest.mark.parametrize("pair", BLOCKWISE_PAIRS, ids=lambda p: f"{p[0].value}-{p[1].value}")
def test_epi_5_every_block_meets_its_own_scales(pair: tuple[Granularity, Granularity], dot: Dot) -> None:
    """[EPI-5] 1 * 1 * 2 + 2 * 4 * 8 + 3 * 16 * 32, and a tail of 44 in a block of its own: + 5 * 64 * 128 = 42562."""
    scale_a, scale_b = [Fraction(s) for s in (1, 4, 16, 64)], [Fraction(s) for s in (2, 8, 32, 128)]
    a, b = blocks(1, 2, 3) + [0.0] * 43 + [5.0], blocks(1, 1, 1) + [0.0] * 43 + [1.0]
    assert dot(a, b, scale_a, scale_b, pair) == f32(42562)


def test_epi_5_total_is_rounded_to_nearest_even_in_order(dot: Dot) -> None:
    """[EPI-5] 2^24 + 1 - 2^24 by scales: the 1 is a tie and lost, unless it comes last."""
    one = [Fraction(1)] * 3
    scales = {"early": [power(24), Fraction(1), power(24)], "late": [power(24), power(24), Fraction(1)]}
    assert dot(blocks(1, 1, -1), blocks(1, 1, 1), one, scales["early"], (VECTOR, VECTOR)) == f32(0)
    assert dot(blocks(1, -1, 1), blocks(1, 1, 1), one, scales["late"], (VECTOR, VECTOR)) == f32(1)


def test_epi_5_partials_start_from_zero(dot: Dot) -> None:
    """[EPI-5] 8192 then 0.5 with scales of 1: the second block is a chain of its own, so 8192.5."""
    one = [Fraction(1)] * 2
    for pair in BLOCKWISE_PAIRS:
        assert dot(blocks(64, 0.5), blocks(128, 1), one, one, pair) == f32(8192.5)


def test_epi_5_with_bias_and_output(dot: Dot) -> None:
    """[EPI-3], [EPI-4] after the blocks: 256 + 1 and a bias of 0.5 make 257.5, in bfloat16 258."""
    one = [Fraction(1)] * 2
    a, b = blocks(16, 1), blocks(16, 1)
    assert dot(a, b, one, one, (VECTOR, SQUARE), out_format=BFLOAT16, bias=f32(0.5)) == code(258, BFLOAT16)


# ---- Of the definition alone


def test_epi_6_group_of_row() -> None:
    """[EPI-6] offs are the ends of the groups; an empty group has no row."""
    assert [group_of_row(row, [16, 16, 48]) for row in (0, 15, 16, 47)] == [0, 0, 2, 2]


def test_bf16_mm_dot() -> None:
    """[BF16-1] 2^24 + 3 is cut to 2^24 + 2 in float32; [BF16-2] in two slices float32 rounds it to 2^24 + 4."""
    a = [code(v, BFLOAT16) for v in [4096.0] + [0.0] * 63 + [3.0]]
    b = [code(v, BFLOAT16) for v in [4096.0] + [0.0] * 63 + [1.0]]
    assert mm_dot(a, b, out_format=FLOAT32) == f32((1 << 24) + 2)
    assert mm_dot(a, b, out_format=FLOAT32, split_k=2) == f32((1 << 24) + 4)
    assert mm_dot(a, b) == code(1 << 24, BFLOAT16)
    assert mm_dot([], []) == 0
    huge = [code(2.0**127, BFLOAT16)]
    assert mm_dot(huge, [code(-1.0, BFLOAT16)], out_format=FLOAT16) == 0xFC00
    assert mm_dot([BFLOAT16.nan_code], huge) == 0x7FFF


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("same K", {"b": 1}),
    ("2 scale", {"a": 129, "b": 129, "granularity_a": VECTOR, "granularity_b": SQUARE}),
    ("takes 1 scale", {"scale_a": 2}),
    ("got bfloat16 and float8_e4m3fn", {"a_format": BFLOAT16}),
]


@pytest.mark.parametrize(("message", "change"), REFUSED)
def test_refusals_of_the_definition(message: str, change: dict[str, Any]) -> None:
    lengths: dict[str, Any] = {"a": 2, "b": 2, "scale_a": 1, "scale_b": 1, "a_format": E4M3FN, "b_format": E4M3FN}
    call: dict[str, Any] = {key: [0] * x if isinstance(x, int) else x for key, x in (lengths | change).items()}
    with pytest.raises(OperandError, match=message):
        scaled_dot(call.pop("a"), call.pop("b"), **call)
    with pytest.raises(OperandError, match="same K"):
        mm_dot([0], [])


# ---- Whole GEMMs


ONE = np.ones(1, np.float32)


def codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * 8).astype(E4M3)


def accumulators(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
    """What comes before the epilogue: scales of 1 and a float32 output change nothing."""
    return f8.scaled_mm(a, b, ONE, ONE, out_dtype="float32", **options)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(23, 530), (2100, 1), (1, 300), (9, 256), (17, 257)])
def test_an_output_depends_on_its_row_and_column_alone(shape: tuple[int, int], fast: bool) -> None:
    rng = np.random.default_rng(1)
    a, b = codes(rng, shape[0], 70), codes(rng, 70, shape[1])
    whole = accumulators(a, b, use_fast_accum=fast)
    for i, j in [(0, 0), (shape[0] - 1, shape[1] - 1), *rng.integers(0, shape, (20, 2)).tolist()]:
        assert accumulators(a[i : i + 1], b[:, j : j + 1], use_fast_accum=fast) == whole[i, j]


def test_layouts_do_not_matter() -> None:
    rng = np.random.default_rng(2)
    a, b = codes(rng, 40, 96), codes(rng, 96, 24)
    expected = accumulators(a, b)
    assert_same_bits(accumulators(np.asfortranarray(a), np.asfortranarray(b)), expected)
    apart = codes(rng, 80, 192)
    apart[::2, ::2] = a
    assert_same_bits(accumulators(apart[::2, ::2], b), expected)


def test_nothing_to_sum() -> None:
    """K = 0 gives zeros, which then meet scales and bias; a zero has the sign of its scale, not tensorwise [EPI-1]."""
    a, b = np.zeros((2, 0), E4M3), np.zeros((0, 3), E4M3)
    assert f8.scaled_mm(a, b, ONE, ONE).tolist() == [[0] * 3] * 2
    rows = -np.ones((2, 1), np.float32), np.ones((1, 3), np.float32)
    for scales, granularity, zero in (((-ONE, ONE), TENSORWISE, 0), (rows, ROWWISE, 0x80000000)):
        pair: Any = {"granularity_a": granularity, "granularity_b": granularity}
        assert f8.scaled_mm(a, b, *scales, **pair, out_dtype="float32").view(np.uint32).tolist() == [[zero] * 3] * 2
    bias = np.array([1, 2, 3], np.float16)
    assert f8.scaled_mm(a, b, ONE, ONE, bias=bias).tolist() == [[1, 2, 3]] * 2
    nothing = np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)
    for options in ({"use_fast_accum": True}, {"split_k": 3}):
        assert f8.scaled_mm(a, b, ONE, ONE, **options).tolist() == [[0] * 3] * 2  # type: ignore[arg-type]
    blockwise = f8.scaled_mm(a, b, *nothing, granularity_a=VECTOR, granularity_b=VECTOR, bias=bias)
    assert blockwise.tolist() == [[1, 2, 3]] * 2
    assert f8.mm(a.astype(BF16), b.astype(BF16)).tolist() == [[0] * 3] * 2
    assert f8.scaled_mm(a[:0], b, ONE, ONE).shape == (0, 3)
    assert f8.scaled_mm(a, b[:, :0], ONE, ONE).shape == (2, 0)
    assert f8.mm(np.zeros((0, 5), BF16), np.zeros((5, 4), BF16)).shape == (0, 4)
    of_groups = np.ones((1, 3), np.float32), np.zeros(1, np.int32)
    assert f8.scaled_grouped_mm(a[:0], b[None], ONE[:0], *of_groups).shape == (0, 3)
