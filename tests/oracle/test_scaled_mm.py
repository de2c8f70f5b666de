"""Epilogues that separate one order of roundings from another, derived by hand, of the definition, the oracle and the
engine; then tiles, layouts and empty operands of the last two. Whole GEMMs are in `test_exact_vs_numpy`.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.oracle.together as f8
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format, Granularity, OperandError
from f8ref.exact import group_of_row, mm_dot, scaled_dot
from tests.oracle.exactly import IMPLEMENTATIONS, assert_same_bits, codes_of, dtype_of, implementation

TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTOR, SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
INF, NAN = float("inf"), float("nan")
MINUS_ZERO_32 = 0x80000000
T, R = TENSORWISE, ROWWISE
VECTORS, SQUARE_OF_B, SQUARE_OF_A = BLOCKWISE_PAIRS = ((VECTOR, VECTOR), (VECTOR, SQUARE), (SQUARE, VECTOR))
Granularities = Granularity | tuple[Granularity, Granularity]
Row = tuple[str, Sequence[float], Sequence[float], Any, Any, Granularities, dict[str, Any], int]


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def array(values: Sequence[float | Fraction], format: Format) -> np.ndarray:
    """Values that the format holds exactly."""
    values_of_format = np.array([float(value) for value in values]).astype(dtype_of(format))
    np.testing.assert_array_equal(values_of_format.astype(np.float64), [float(value) for value in values])
    return values_of_format


def code(value: float | Fraction, format: Format) -> int:
    return format.nan_code if value != value else int(codes_of(array([value], format))[0])


def f32(value: float | Fraction) -> int:
    return code(value, FLOAT32)


def blocks(*values: float) -> list[float]:
    """K of 128 for each value, which stands first in its block."""
    return [x for value in values for x in [value] + [0.0] * 127]


def bias(value: float | Fraction, **more: Any) -> dict[str, Any]:
    return {"bias": f32(value), **more}


A, B = 1 + power(-12), Fraction((257 << 17) + 2, 3) * power(-25)
E5_E4: dict[str, Any] = {"formats": (E5M2, E4M3FN)}
TO_BF16, TO_F16 = {"out_format": BFLOAT16}, {"out_format": FLOAT16}
TIES = [3 + power(-21), 1 + power(-23)]
MINUS_BIAS = {"bias": MINUS_ZERO_32}
ROWS: list[Row] = [
    ("EPI-1: acc 2^10; the product of scales underflows to 0 before acc could rescue it",
        [32], [32], power(-100), power(-60), T, {}, f32(0)),
    ("EPI-1: here it does not", [32], [32], power(-60), power(-60), T, {}, f32(power(-110))),
    ("EPI-1: a subnormal product of scales is kept", [32], [32], power(-100), power(-49), T, {}, f32(power(-139))),
    # (1 + 2^-12)^2 is a tie to 1 + 2^-11. Unrounded, 1.5 of it would be 3 * 2^-25 more, 3/4 of the spacing 2^-23.
    ("EPI-1: the product of scales is rounded", [1.5], [1], A, A, T, {}, f32(Fraction(3, 2) + 3 * power(-12))),
    ("EPI-2: acc 1/2 times scale_b, 2^-150, is a tie to 0", [0.5], [1], power(100), power(-149), R, {}, f32(0)),
    ("EPI-2: swapped it is not", [0.5], [1], power(-149), power(100), R, {}, f32(power(-50))),
    ("EPI-2: acc 2^11 times scale_b is 2^-49, then 2^-149",
        [64], [32], power(-100), power(-60), R, {}, f32(power(-149))),
    ("EPI-1: which underflows to 0", [64], [32], power(-100), power(-60), T, {}, f32(0)),
    # 3 * (1 + 2^-23) = 3 + 3 * 2^-23 is a tie to 3 + 2^-21, less 3: an fma gives 3 * 2^-23.
    *(("EPI-3: a bias is added after a rounding", [3], [1], TIES[1], 1, g, bias(-3), f32(power(-21))) for g in (T, R)),
    ("EPI-4: 257 is a tie of bfloat16 to 256", [16, 1], [16, 1], 1, 1, T, TO_BF16, code(256, BFLOAT16)),
    ("EPI-3: with the bias 257.5", [16, 1], [16, 1], 1, 1, T, bias(0.5, **TO_BF16), code(258, BFLOAT16)),
    # 1 + 2^-8, a tie of bfloat16; rounded once it would be 1 + 2^-7.
    ("EPI-3: the sum with the bias is rounded to float32",
        [1], [1], 1, 1, T, bias(power(-8) + power(-30), **TO_BF16), code(1, BFLOAT16)),
    # Exactly 1 + 2^-8 + 2^-24, in float32 a tie to 1 + 2^-8, which is a tie of bfloat16; once it would be 1 + 2^-7.
    ("EPI-4: an output is rounded from float32", [3], [1], B, 1, T, TO_BF16, code(1, BFLOAT16)),
    *(row for g in (T, R) for row in (
        ("EPI-4: the largest float16", [256], [256], 1, 1, g, bias(-32, **TO_F16), 0x7BFF),
        ("EPI-4: 65520, the tie to infinity", [256], [256], 1, 1, g, bias(-16, **TO_F16), 0x7C00),
        ("EPI-4: float16 overflows", [-256], [256], 1, 1, g, TO_F16, 0xFC00),
        ("EPI-4: and bfloat16", [256], [256], power(100), power(12), g, TO_BF16, 0x7F80),
        ("EPI-4: and float32", [256], [-256], power(100), power(12), g, {}, 0xFF800000))),
    # A zero sum is +0, so the sign of a scaled zero is that of the scales; tensorwise it is +0.
    ("ACC-5: +0", [-1, 1], [1, 1], 2, 3, R, {}, 0),
    ("ACC-5: scaled by -2", [-1, 1], [1, 1], -2, 3, R, {}, MINUS_ZERO_32),
    ("ACC-5: and a bias of 0", [-1, 1], [1, 1], -2, 3, R, bias(0), 0),
    ("ACC-5: and one of -0", [-1, 1], [1, 1], -2, 3, R, MINUS_BIAS, MINUS_ZERO_32),
    ("EPI-2: a negative result underflows", [-1], [1], power(-100), power(-100), R, {}, MINUS_ZERO_32),
    ("ACC-5: nothing, scaled by -2", [], [], -2, 3, R, {}, MINUS_ZERO_32),
    ("EPI-1: +0 whatever the scales", [-1, 1], [1, 1], -2, 3, T, {}, 0),
    ("EPI-1: of an underflow too", [-1], [1], power(-100), power(-100), T, {}, 0),
    ("EPI-1: 0 is added before the bias, which is -0 alone", [-1, 1], [1, 1], -2, 3, T, MINUS_BIAS, 0),
    ("EPI-1: of nothing", [], [], -2, 3, T, {}, 0),
    ("EPI-1: but not after the output is rounded to zero", [-1], [1], power(-100), 1, T, TO_F16, 0x8000),
    # NaN comes out as all ones; an infinity keeps the sign that the scales give it; inf * 0 is NaN.
    *((f"SPEC-1: {a} * {b}, scales {s}, bias {more.get('bias')}",
        [a], [b], s, 1, g, {**E5_E4, "out_format": out, **more}, code(found, out))
        for g in (T, R) for out in (FLOAT32, BFLOAT16, FLOAT16) for a, b, s, more, found in (
            (1, NAN, 1, {}, NAN), (INF, 1, -1, {}, -INF), (INF, 1, 1, bias(-1), INF), (INF, 1, 1, bias(-INF), NAN),
            (INF, 1, 0, {}, NAN), (1, 1, NAN, {}, NAN), (1, 1, INF, {}, INF))),
    # Block 0: 1 * (3 + 2^-21). Block 1: -3 * (1 + 2^-23) = -3 - 3 * 2^-23, a tie of float32 to -3 - 2^-21. Fused the
    # total is (4 - 3) * 2^-23; with a rounded product it would be 0. The fused factor is scale_b for two vectors.
    *(("EPI-5: a fused multiply-add", blocks(1, -3), blocks(1, 1), [1, 1], TIES, pair, {}, f32(power(-23)))
        for pair in BLOCKWISE_PAIRS),
    *(("EPI-5: of either scale where one is square", blocks(1, -3), blocks(1, 1), TIES, [1, 1], pair, {}, f32(total))
        for pair, total in zip(BLOCKWISE_PAIRS, (0, power(-23), power(-23)), strict=True)),
    # p = 1/2: 2^-150 is a tie to 0.
    ("EPI-5: two vectors, p * scale_a", blocks(0.5), blocks(1), [power(-149)], [power(100)], VECTORS, {}, f32(0)),
    ("EPI-5: the other way round", blocks(0.5), blocks(1), [power(100)], [power(-149)], VECTORS, {}, f32(power(-50))),
    *(("EPI-5: the scales first", blocks(0.5), blocks(1), [power(x)], [power(y)], pair, {}, f32(power(-50)))
        for pair in BLOCKWISE_PAIRS[1:] for x, y in ((-149, 100), (100, -149))),
    # 1 * 1 * 2 + 2 * 4 * 8 + 3 * 16 * 32, and a tail of 44 in a block of its own: + 5 * 64 * 128.
    *(("EPI-5: each block meets its own scales", [*blocks(1, 2, 3), *[0.0] * 43, 5], [*blocks(1, 1, 1), *[0.0] * 43, 1],
        [1, 4, 16, 64], [2, 8, 32, 128], pair, {}, f32(42562)) for pair in BLOCKWISE_PAIRS),
    ("EPI-5: 2^24 + 1 is a tie",
        blocks(1, 1, -1), blocks(1, 1, 1), [1] * 3, [1 << 24, 1, 1 << 24], VECTORS, {}, f32(0)),
    ("EPI-5: unless it comes last",
        blocks(1, -1, 1), blocks(1, 1, 1), [1] * 3, [1 << 24, 1 << 24, 1], VECTORS, {}, f32(1)),
    *(("EPI-5: partials start from zero", blocks(64, 0.5), blocks(128, 1), [1, 1], [1, 1], pair, {}, f32(8192.5))
        for pair in BLOCKWISE_PAIRS),
    ("EPI-3, EPI-4: after the blocks",
        blocks(16, 1), blocks(16, 1), [1, 1], [1, 1], SQUARE_OF_B, bias(0.5, **TO_BF16), code(258, BFLOAT16)),
]  # fmt: skip


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_epilogue(row: Row, backend: str) -> None:
    _, a, b, scale_a, scale_b, granularity, options, expected = row
    pair = granularity if isinstance(granularity, tuple) else (granularity, granularity)
    given: dict[str, Any] = {"formats": (E4M3FN, E4M3FN), "out_format": FLOAT32, **options}
    formats, out_dtype = given.pop("formats"), given.pop("out_format")
    if "bias" in given:
        given["bias"] = np.array([given["bias"]], np.uint32).view(np.float32)
    scales = [array(s if isinstance(s, list) else [s], FLOAT32) for s in (scale_a, scale_b)]
    observed = implementation(backend).scaled_mm(
        array(a, formats[0])[None],
        array(b, formats[1])[:, None],
        scales[0][None],
        scales[1][:, None],
        granularity_a=pair[0],
        granularity_b=pair[1],
        out_dtype=out_dtype,
        **given,
    )
    assert hex(codes_of(observed).item()) == hex(expected)


# ---- Of the definition alone


def test_epi_6_group_of_row() -> None:
    """[EPI-6] offs are the ends of the groups; an empty group has no row."""
    assert [group_of_row(row, [16, 16, 48]) for row in (0, 15, 16, 47)] == [0, 0, 2, 2]


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


@pytest.mark.parametrize("kind", ["columns", "K", "batch"])
def test_groups_of_every_kind_are_groups_of_rows(kind: str) -> None:
    """Each group by itself, as rows of which there is one group: recorded are GEMMs that divide rows."""
    r, groups, m, n, k = np.random.default_rng(0), 3, 5, 7, 70
    ends = {"columns": [2, 2, n], "K": [33, 33, k], "batch": None}[kind]
    a = r.standard_normal((m, k) if kind == "K" else (groups, m, k)).astype(E4M3)
    b = r.standard_normal((groups, k, n) if kind == "batch" else (k, n)).astype(E4M3)
    scale_a = r.random((groups, m), np.float32)
    scale_b = r.random(n if kind == "columns" else (groups, n), np.float32)
    flat = [scale.reshape(-1) if kind == "K" else scale for scale in (scale_a, scale_b)]
    observed = f8.scaled_grouped_mm(a, b, *flat, None if ends is None else np.array(ends, np.int32))
    parts = []
    for group in range(groups):
        run = slice(None) if ends is None else slice(([0, *ends])[group], ends[group])
        own_a = a[:, run] if kind == "K" else a[group]
        own_b = b[run] if kind == "K" else b[group] if kind == "batch" else b[:, run]
        own_scale = scale_b[run] if kind == "columns" else scale_b[group]
        parts.append(f8.scaled_grouped_mm(own_a, own_b[None], scale_a[group], own_scale[None], np.array([m], np.int32)))
    expected = np.concatenate(parts, axis=1) if kind == "columns" else np.stack(parts)
    assert_same_bits(observed, expected)


def test_what_lies_beyond_the_last_group() -> None:
    """Outputs of zeros, and a K that is not summed: as if it were not there, in the oracle and in the engine."""
    r = np.random.default_rng(0)
    a, b = r.standard_normal((6, 48)).astype(E4M3), r.standard_normal((48, 5)).astype(E4M3)
    one, ends = np.ones(12, np.float32), np.array([2, 4], np.int32)
    rows = f8.scaled_grouped_mm(a, np.stack([b, b]), one[:6], np.ones((2, 5), np.float32), ends)
    columns = f8.scaled_grouped_mm(np.stack([a, a]), b, one.reshape(2, 6), one[:5], ends)
    for observed in (rows, columns.T):
        assert observed[:4].any(axis=1).all() and not observed[4:].any()
    summed = f8.scaled_grouped_mm(a, b, one, one[:10], ends * 8)
    assert_same_bits(summed, f8.scaled_grouped_mm(a[:, :32], b[:32], one, one[:10], ends * 8))
