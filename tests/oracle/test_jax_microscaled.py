"""MXFP8 in f8ref.jax [MX-1..5] against f8ref.numpy and f8ref.exact; and what is not finite, step by step [SPEC-1]."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import f8ref.jax
import f8ref.numpy
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, E8M0FNU, RTX_BLACKWELL, Chip, Format, Granularity
from f8emu.spec import BLACKWELL_TCGEN05 as B200
from f8emu.spec.errors import OperandError, UnsupportedError
from f8ref import exact
from tests.oracle.exactly import EXACT, assert_same_bits, codes_of, typed

PAIRS = list(itertools.product((E4M3FN, E5M2), repeat=2))
SCALES = {
    "all": (0, 256),
    "near one": (110, 145),
    "tiny": (0, 70),
    "products that overflow": (170, 215),
    "ends": (-5, 6),
}
"""The bytes of scales, and what they make of the results."""
V32 = Granularity.BLOCKWISE_1X32
MX: dict[str, Any] = {"granularity_a": V32, "granularity_b": V32, "chip": B200}
CASES, K = 4000, 70


def drawn_scales(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return typed(rng.integers(*SCALES[kind], shape) % 256, E8M0FNU)


def drawn_codes(rng: np.random.Generator, format: Format, shape: tuple[int, int]) -> np.ndarray:
    """Every code; in most rows without infinities and NaN, in many with zeros, in some a few powers of two alone."""
    codes = rng.integers(0, 256, shape)
    is_special = ~np.isfinite(typed(codes, format).astype(np.float32)) & (rng.random((shape[0], 1)) < 0.9)
    is_few = rng.random((shape[0], 1)) < 0.3
    is_zero = rng.random(shape) < np.where(is_few, 0.9, rng.random((shape[0], 1)) ** 2)
    codes = np.where(is_special | is_zero, codes & 0x80, codes)
    return typed(np.where(is_few, codes & 0xFC if format == E5M2 else codes & 0xF8, codes), format)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_instructions(pair: tuple[Format, Format]) -> None:
    rng = np.random.default_rng(pair[0].fraction_bits + 4 * pair[1].fraction_bits)
    results = []
    for kind in SCALES:
        a, b = (drawn_codes(rng, format, (CASES, K)) for format in pair)
        scales = [drawn_scales(rng, kind, (CASES, 3)) for _ in "ab"]
        c = np.where(rng.random(CASES) < 0.4, 0, rng.integers(0, 2**32, CASES)).astype(np.uint32).view(np.float32)
        of_numpy = f8ref.numpy.mma(a, b, c, *scales, chip=B200)
        assert_same_bits(f8ref.jax.mma(a, b, c, *scales, chip=B200), of_numpy)  # pyright: ignore[reportArgumentType]
        of_exact = [
            exact.mma(
                *(codes_of(x[i]).tolist() for x in (a, b, c)),
                a_format=pair[0],
                b_format=pair[1],
                scale_a=codes_of(scales[0][i]).tolist(),
                scale_b=codes_of(scales[1][i]).tolist(),
                chip=B200,
            )
            for i in range(12)
        ]
        assert of_exact == codes_of(of_numpy[:12]).tolist()
        results.append(of_numpy)
    values = np.concatenate(results)
    kinds = np.isnan(values), np.isinf(values), values == 0, (np.abs(values) < 2.0**-126) & (values != 0)
    assert min(map(np.count_nonzero, kinds)) > 100, "of each kind there are many"


@pytest.mark.parametrize(
    ("k", "pair", "chip"), [(0, 0, B200), (20, 1, RTX_BLACKWELL), (167, 0, B200), (167, 2, B200), (500, 1, B200)]
)
def test_scaled_mm(k: int, pair: int, chip: Chip) -> None:
    """Tails of K, slices of it, outputs and biases."""
    rng = np.random.default_rng(k)
    m, n, blocks = 33, 40, -(-k // 32)
    options = MX | {"chip": chip, "split_k": 2 if k == 500 else 1}
    options["out_dtype"] = ("float32", "bfloat16", "float16")[pair]
    for i, kind in enumerate(SCALES):
        a, b = (drawn_codes(rng, format, (rows, k)) for format, rows in zip(PAIRS[pair], (m, n), strict=True))
        scales = drawn_scales(rng, kind, (m, blocks)), drawn_scales(rng, kind, (blocks, n))
        options["bias"] = rng.standard_normal(n).astype(np.float32) if i % 2 else None
        of_jax = f8ref.jax.scaled_mm(a, b.T, *scales, **options)  # pyright: ignore[reportArgumentType]
        assert_same_bits(of_jax, f8ref.numpy.scaled_mm(a, b.T, *scales, **options))


def test_groups_of_rows_in_jit_and_vmap() -> None:
    rng = np.random.default_rng(3)
    a, b = drawn_codes(rng, E4M3FN, (45, 95)), drawn_codes(rng, E4M3FN, (3 * 24, 95)).reshape(3, 24, 95)
    b = b.transpose(0, 2, 1)
    scales = drawn_scales(rng, "near one", (45, 3)), drawn_scales(rng, "near one", (3, 3, 24))
    ends = np.array([7, 7, 40], np.int32)
    call = jax.jit(lambda *x: f8ref.jax.scaled_grouped_mm(*x, chip=B200))
    assert_same_bits(call(a, b, *scales, ends), f8ref.numpy.scaled_grouped_mm(a, b, *scales, ends, chip=B200))
    batched = jax.vmap(lambda *x: f8ref.jax.scaled_mm(*x, **MX), in_axes=(None, 0, None, 0))(a, b, *scales)
    alone = [f8ref.numpy.scaled_mm(a, x, scales[0], y, **MX) for x, y in zip(b, scales[1], strict=True)]
    assert_same_bits(batched, np.stack(alone))
    few = EXACT.scaled_mm(a, b[1], scales[0], scales[1][1], at=((0, 1, 44), (0, 23)), **MX)
    assert_same_bits(few, alone[1][np.ix_((0, 1, 44), (0, 23))])


def test_scales_that_do_not_fit() -> None:
    a, c, scale = np.zeros((4, 64), "float8_e4m3fn"), np.zeros(4, np.float32), np.ones((4, 2), "float8_e8m0fnu")
    call: Any = f8ref.jax.mma
    with pytest.raises(OperandError, match=r"scale_a and scale_b must both be \[4, 2\]"):
        call(a, a, c, scale, scale[:, :1], chip=B200)
    with pytest.raises(OperandError, match="scale must be an array of float8_e8m0fnu"):
        call(a, a, c, scale, np.ones((4, 2), np.float32), chip=B200)
    with pytest.raises(UnsupportedError, match="with E8M0 scales"):
        call(a, a, c, scale, scale)
    with pytest.raises(UnsupportedError, match="B200"):
        f8ref.jax.scaled_mm(a, a.T, scale, scale.T)  # pyright: ignore[reportArgumentType]


# What is not finite, where an accumulator overflows before


def test_an_infinity_meets_the_opposite_one_of_an_overflow() -> None:
    """[SPEC-1] In a later step, as in f8ref.numpy: NaN; and in the same or an earlier step the operand's own."""
    big, infinity = typed([0x7B], E5M2)[0], typed([0x7C], E5M2)[0]
    places = np.zeros((5, 96), big.dtype)
    places[:, 0] = [big, big, 0, big, -big]
    places[np.arange(5), [33, 70, 5, 95, 33]] = [-infinity, infinity, -infinity, infinity, infinity]
    ones = np.full((5, 96), big)
    c = np.full(5, 6e4, np.float16)
    result = f8ref.jax.mma(places, ones, c, out_dtype="float16")  # pyright: ignore[reportArgumentType]
    assert_same_bits(result, f8ref.numpy.mma(places, ones, c, out_dtype="float16"))
    assert np.array_equal(np.asarray(result, np.float32), [np.nan, np.inf, -np.inf, np.inf, np.nan], equal_nan=True)


@pytest.mark.parametrize("split_k", [1, 2])
def test_infinities_of_bfloat16(split_k: int) -> None:
    rng = np.random.default_rng(5)
    a, b = (typed(rng.integers(0, 2**16, shape), BFLOAT16) for shape in ((300, 200), (200, 9)))
    a, b = (np.where(np.isnan(x.astype(np.float32)), x.dtype.type(1), x) for x in (a, b))
    a[rng.random(a.shape) < 0.01] = -np.inf
    of_numpy = f8ref.numpy.mm(a, b, out_dtype="float32", split_k=split_k)
    assert_same_bits(f8ref.jax.mm(a, b, out_dtype="float32", split_k=split_k), of_numpy)  # pyright: ignore[reportArgumentType]
    assert np.isnan(of_numpy).sum() > 50 < np.isinf(of_numpy).sum()
