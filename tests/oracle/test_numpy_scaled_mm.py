"""Whole GEMMs: tiles, epilogues, block scales with a magnitude of their own each, groups, and what is refused."""

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tests.oracle.together as f8
from f8emu.spec import Granularity

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
TENSORWISE, ROWWISE = Granularity.TENSORWISE, Granularity.ROWWISE
VECTORS, SQUARES = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
ONE = np.ones(1, np.float32)


def codes(rng: np.random.Generator, *shape: int, dtype: type = E4M3) -> np.ndarray:
    return (rng.normal(size=shape) * 8).astype(dtype)


def magnitudes(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Scales of very different sizes, so that none can stand for another."""
    return (rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-12, 3, shape)).astype(np.float32)


def accumulators(a: np.ndarray, b: np.ndarray, **options: Any) -> NDArray[np.float32]:
    """What comes before the epilogue: scales of 1 and a float32 output change nothing."""
    return f8.scaled_mm(a, b, ONE, ONE, out_dtype="float32", **options)


def assert_same_bits(result: np.ndarray, expected: np.ndarray) -> None:
    assert result.dtype == expected.dtype
    word = np.dtype(f"uint{8 * result.dtype.itemsize}")
    np.testing.assert_array_equal(result.view(word), expected.view(word))


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


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tensorwise_and_rowwise_epilogues(out_dtype: str, with_bias: bool) -> None:
    """[EPI-1] to [EPI-4], each rounding written out; the witness rounds to the output's dtype."""
    rng = np.random.default_rng(3)
    a, b = codes(rng, 33, 160), codes(rng, 160, 47, dtype=E5M2)
    acc = accumulators(a, b)
    bias = (rng.normal(size=47) * 3).astype(BF16) if with_bias else None
    dtype = np.dtype(getattr(ml_dtypes, out_dtype, out_dtype))

    def expected(x: NDArray[np.float32]) -> np.ndarray:
        return (x if bias is None else x + bias.astype(np.float32)).astype(dtype)

    scale_a, scale_b = magnitudes(rng, 1), magnitudes(rng, 1, 1, 1)
    result = f8.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    assert_same_bits(result, expected(acc * (scale_a * scale_b[0, 0])))

    scale_a, scale_b = magnitudes(rng, 33, 1), magnitudes(rng, 1, 47)
    rowwise: Any = {"granularity_a": ROWWISE, "granularity_b": ROWWISE, "out_dtype": out_dtype}
    result = f8.scaled_mm(a, b, scale_a, scale_b, bias=bias, **rowwise)
    assert_same_bits(result, expected((acc * scale_b) * scale_a))
    assert ((acc * scale_a) * scale_b != (acc * scale_b) * scale_a).any()  # the order does matter


def rounded(exact: Fraction) -> np.float32:
    """Nearest-even float32 of a fraction that is normal in float32."""
    if exact == 0:
        return np.float32(0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    unit = Fraction(2) ** (exponent - (size < Fraction(2) ** exponent) - 23)
    return np.float32(float(round(exact / unit) * unit))


def block_of(granularity: Granularity, row: int, block: int) -> tuple[int, int]:
    return (row, block) if granularity is VECTORS else (row // 128, block)


@pytest.mark.parametrize(
    ("granularity_a", "granularity_b"),
    [(VECTORS, VECTORS), (VECTORS, SQUARES), (SQUARES, VECTORS)],
    ids=lambda granularity: granularity.value,
)
@pytest.mark.parametrize("k", [300, 512])
def test_blockwise_by_element(granularity_a: Granularity, granularity_b: Granularity, k: int) -> None:
    """[EPI-5] in fractions, for outputs in every pair of blocks; each scale differs, and K, M and N have tails."""
    rng = np.random.default_rng(4)
    m, n = 140, 270
    a, b = codes(rng, m, k), codes(rng, k, n)
    scale_a = magnitudes(rng, *granularity_a.scale_shape(m, k))
    scale_b = magnitudes(rng, *granularity_b.scale_shape(n, k)[::-1])
    options: Any = {"granularity_a": granularity_a, "granularity_b": granularity_b}
    result = f8.scaled_mm(a, b, scale_a, scale_b, out_dtype="float32", **options)
    blocks = range(-(-k // 128))
    partials = [accumulators(a[:, 128 * g : 128 * g + 128], b[128 * g : 128 * g + 128]) for g in blocks]
    for i, j in [(0, 0), (127, 127), (128, 128), (139, 255), (139, 256), (139, 269), *rng.integers(0, (m, n), (60, 2))]:
        total = np.float32(0)
        for g in blocks:
            factor_a = scale_a[block_of(granularity_a, i, g)]
            factor_b = scale_b.T[block_of(granularity_b, j, g)]
            p = partials[g][i, j]
            x, y = (p * factor_a, factor_b) if granularity_a == granularity_b else (p, factor_a * factor_b)
            total = rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(total)))
        assert result[i, j] == total
    bias = magnitudes(rng, n)
    with_bias = f8.scaled_mm(a, b, scale_a, scale_b, bias=bias, **options)
    assert_same_bits(with_bias, (result + bias).astype(BF16))


def test_grouped_by_group() -> None:
    """[EPI-6] with an empty group and groups that are no multiple of anything."""
    rng = np.random.default_rng(5)
    bounds = [0, 5, 5, 40, 61]
    a, b = codes(rng, 61, 200), codes(rng, 4, 200, 30)
    scale_a, scale_b = magnitudes(rng, 61), magnitudes(rng, 4, 30)
    offs = np.array(bounds[1:], np.int32)
    for fast in (True, False):
        result = f8.scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype="float32", use_fast_accum=fast)
        for g in range(4):
            rows = slice(bounds[g], bounds[g + 1])
            acc = accumulators(a[rows], b[g], use_fast_accum=fast)
            assert_same_bits(result[rows], (acc * scale_a[rows, None]) * scale_b[g])
    nothing = f8.scaled_grouped_mm(a[:0], b, scale_a[:0], scale_b, np.zeros(4, np.int32))
    assert nothing.shape == (0, 30)
    assert nothing.dtype == BF16


def test_outputs_out_of_range() -> None:
    """[EPI-4] overflow gives infinity, in float16 too; subnormal float32 and float16 outputs are kept."""
    a, b = np.array([[448.0, -448.0]], E4M3), np.array([[448.0], [0.0]], E4M3)
    minus_b = np.array([[-448.0], [0.0]], E4M3)
    assert f8.scaled_mm(a, b, ONE, ONE, out_dtype="float16").tolist() == [[np.inf]]
    assert f8.scaled_mm(a, minus_b, ONE, ONE, out_dtype="float16").tolist() == [[-np.inf]]
    huge, tiny = np.full(1, 2.0**120, np.float32), np.full(1, 2.0**-140, np.float32)
    assert f8.scaled_mm(a, b, huge, ONE, out_dtype="bfloat16").astype(np.float32).tolist() == [[np.inf]]
    # The product of these scales is itself a subnormal, 2^-149; of those below, 448^2 * 2^-40 = 3.0625 * 2^-24.
    small = np.full(1, 2.0**-20, np.float32)
    tiny_out = f8.scaled_mm(a, b, tiny, np.full(1, 2.0**-9, np.float32), out_dtype="float32")
    assert tiny_out.tolist() == [[448.0 * 448.0 * 2.0**-149]]
    assert f8.scaled_mm(a, b, small, small, out_dtype="float16").tolist() == [[3 * 2.0**-24]]


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_nan_is_all_ones(out_dtype: str) -> None:
    """[SPEC-1] of an operand, of a scale, of a bias, and of infinity times a zero scale."""
    word = np.uint32 if out_dtype == "float32" else np.uint16
    ones = 0x7FFFFFFF if out_dtype == "float32" else 0x7FFF
    a, b = np.ones((1, 1), E5M2), np.ones((1, 1), E4M3)
    nan = np.full(1, -np.nan, np.float32)
    hp = np.ones((1, 1), BF16)
    results = [
        f8.scaled_mm(np.full((1, 1), -np.nan, E5M2), b, ONE, ONE, out_dtype=out_dtype),
        f8.scaled_mm(a, b, nan, ONE, out_dtype=out_dtype),
        f8.scaled_mm(a, b, ONE, ONE, bias=nan, out_dtype=out_dtype),
        f8.scaled_mm(np.full((1, 1), np.inf, E5M2), b, ONE * 0, ONE, out_dtype=out_dtype),
        f8.mm(np.full((1, 1), -np.nan, BF16), hp, out_dtype=out_dtype),
    ]
    assert [result.view(word).item() for result in results] == [ones] * 5


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
    blockwise = f8.scaled_mm(a, b, *nothing, granularity_a=VECTORS, granularity_b=VECTORS, bias=bias)
    assert blockwise.tolist() == [[1, 2, 3]] * 2
    assert f8.mm(a.astype(BF16), b.astype(BF16)).tolist() == [[0] * 3] * 2
    assert f8.scaled_mm(a[:0], b, ONE, ONE).shape == (0, 3)
    assert f8.scaled_mm(a, b[:, :0], ONE, ONE).shape == (2, 0)
    assert f8.mm(np.zeros((0, 5), BF16), np.zeros((5, 4), BF16)).shape == (0, 4)
