"""The tables of generated cases: what the suite puts to a subject, and what a test's parametrisation derives from.

Every table is seeded: the same inputs on every machine. No expected value is here; an oracle gives those. Generated
GEMMs are in `gemm_cases`.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np

from f8emu.conformance.cases.distributions import draw, dtype_of, rng, scaled_case
from f8emu.conformance.cases.gemm import Family, GemmCase, Sample
from f8emu.spec import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    HIGH_PRECISION,
    MAX_MARGIN,
    AmaxHistoryReduction,
    DelayedScaling,
    Format,
    Granularity,
    Overflow,
    ScaleRule,
)

# 1 Formats and casts

DECODED: tuple[Format, ...] = (*FLOAT8, E8M0FNU, BFLOAT16, FLOAT16)
"""Formats of which every code is decoded."""

CASTS: tuple[tuple[Format, Format, Overflow], ...] = tuple(product(HIGH_PRECISION, FLOAT8, Overflow))
"""(source, float8 format, overflow policy)."""


@cache
def all_codes(fmt: Format) -> np.ndarray:
    """Every code of a format of 8 or 16 bits, in order, typed."""
    return np.arange(1 << fmt.bits, dtype=f"u{fmt.bits // 8}").view(dtype_of(fmt))


@cache
def cast_inputs(source: Format, target: Format) -> np.ndarray:
    """What is cast: all codes of bfloat16 and float16, the boundaries of float32."""
    return float32_boundaries(target) if source == FLOAT32 else all_codes(source)


@cache
def float32_boundaries(target: Format) -> np.ndarray:
    """Float32 values where a cast to a float8 format changes its mind, and their neighbours, in both signs.

    Every value of the format and every midpoint of two, the midpoint beyond the largest, every power of two of float32,
    the smallest and largest subnormals; of each the two neighbours on both sides. Infinity, NaN of several payloads and
    signs, and 8,192 random bit patterns.
    """
    codes = np.arange(target.max_code + 1, dtype=np.uint8)
    values = codes.view(dtype_of(target)).astype(np.float64)
    midpoints = (values[1:] + values[:-1]) / 2
    beyond = 2 * values[-1] - midpoints[-1]
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
    subnormals = np.array([0x0000_0001, 0x007F_FFFF, 0x0080_0000, 0x7F7F_FFFF], np.uint32).view(np.float32)
    points = np.concatenate([values, midpoints, [beyond, 2 * values[-1]], powers, subnormals]).astype(np.float32)
    near = (points.view(np.uint32)[:, None].astype(np.int64) + np.arange(-2, 3)).clip(0, 0x7F80_0000)
    nan = np.array([0x7FC0_0000, 0x7F80_0001, 0x7FFF_FFFF, 0x7FA5_A5A5], np.int64)
    bits = np.unique(np.concatenate([near.ravel(), nan]))
    random = rng("float32_boundaries", target.name).integers(0, 1 << 32, 8192)
    return np.concatenate([bits, bits | 0x8000_0000, random]).astype(np.uint32).view(np.float32)


# 2 Scales

VALUE_DISTRIBUTIONS = ("normal", "outlier", "gradient", "blocks", "cancellation", "subnormals", "specials")
VALUE_SHAPES: tuple[tuple[int, int], ...] = ((1, 1), (3, 130), (20, 260))
"""[rows, K]: tails of a block along K, and more than 4096 elements (NUMERICS 6: XLA's max loses NaN)."""
SQUARE_SHAPE = (130, 140)
"""Tails of a 128x128 block in both directions."""

SCALE_RULES: tuple[tuple[ScaleRule, int], ...] = (
    (ScaleRule(), 0),
    (ScaleRule(), MAX_MARGIN),
    (ScaleRule(power_of_two=True), 0),
    (ScaleRule(amax_floor=2.0**-20), 0),
)
"""(rule, margin)."""


@cache
def amax_corners() -> np.ndarray:
    """[n, 1] float32: where scale rules go wrong, and 4,096 random mantissas.

    0, subnormals, the default floor 1e-12, the maxima of the formats, every power of two (where log2 rounds the wrong
    way) with its neighbours, the largest float32, infinity, NaN.
    """
    corners = [0, 2.0**-149, 2.0**-126, 1e-12, 1, 3, 448, 57344, 448 * 2.0**100, 3.4028234663852886e38]
    points = np.concatenate([corners, np.exp2(np.arange(-126, 128, dtype=np.float64))]).astype(np.float32)
    near = (points.view(np.uint32)[:, None].astype(np.int64) + np.arange(-1, 2)).clip(0, 0x7F7F_FFFF)
    random = rng("amax_corners").integers(0x3000_0000, 0x5000_0000, 4096)
    bits = np.concatenate([np.unique(near), random, [0x7F80_0000, 0x7FC0_0000]])
    return bits.astype(np.uint32).view(np.float32)[:, None]


def amax_inputs() -> Iterator[tuple[str, tuple[int, int], Granularity]]:
    """(distribution, shape, granularity): everything with everything, and squares where a wrong index would show."""
    yield from product(VALUE_DISTRIBUTIONS, VALUE_SHAPES, Granularity)
    yield from product(("blocks", "specials"), (SQUARE_SHAPE,), (Granularity.TENSORWISE, Granularity.BLOCKWISE_128X128))


def quantize_inputs() -> Iterator[tuple[str, tuple[int, int], Granularity]]:
    """Fewer inputs than `amax_inputs`: each output is quantised and decoded again."""
    yield from product(VALUE_DISTRIBUTIONS, VALUE_SHAPES[:2], Granularity)
    yield from product(("blocks", "gradient", "specials"), VALUE_SHAPES[2:], Granularity)
    yield "blocks", SQUARE_SHAPE, Granularity.BLOCKWISE_128X128


@cache
def values(distribution: str, shape: tuple[int, int], fmt: Format) -> np.ndarray:
    """One input of amax and quantize."""
    return draw(distribution, shape, fmt, "values")


def inv_scales(x: np.ndarray, granularity: Granularity, fmt: Format) -> np.ndarray:
    """Factors of quantize, another one in every group: the codes fill the format, a few saturate."""
    rows, columns = granularity.block
    magnitude = np.nan_to_num(np.abs(x.astype(np.float32)), posinf=0)
    for axis, block in enumerate((rows or x.shape[0], columns or x.shape[1])):
        magnitude = np.maximum.reduceat(magnitude, np.arange(0, x.shape[axis], block), axis=axis)
    r = rng("inv_scales", granularity.value, x.shape)
    return (fmt.max / np.maximum(magnitude, 1e-30) * r.uniform(0.4, 1.6, magnitude.shape)).astype(np.float32)


DELAYED_TRACES: tuple[tuple[DelayedScaling, ScaleRule, Format], ...] = tuple(
    (DelayedScaling(history_length=length, reduction=reduction, margin=margin), rule, fmt)
    for (length, margin), reduction, (rule, fmt) in product(
        ((1, 0), (3, 0), (16, 2)), AmaxHistoryReduction, ((ScaleRule(), E4M3FN), (ScaleRule(power_of_two=True), E5M2))
    )
)
"""(rule, scale rule, format) of the states that are updated with every amax of DELAYED_AMAXES in turn."""

DELAYED_AMAXES: tuple[float, ...] = (
    0.0, float("nan"), 3.0, 5.0, 0.75, float("inf"), 0.5, 0.0, 1e-13, 700.3,
    2.0, 1.1, 1.3, 0.9, 2.0**-140, 1.7, 1.9, 0.3, 40.0,
)  # fmt: skip
"""Rises and falls, so that the order of the history shows; unusable first, so that the initial state shows."""


# 3 Layers of real models


TOKENS = 8192
LAYERS: dict[str, tuple[int, int]] = {
    "llama3-8b wq wo": (4096, 4096),
    "llama3-8b wk wv": (4096, 1024),
    "llama3-8b w1 w3": (4096, 14336),
    "llama3-8b w2": (14336, 4096),
    "llama3-70b wq wo": (8192, 8192),
    "llama3-70b wk wv": (8192, 1024),
    "llama3-70b w1 w3": (8192, 28672),
    "llama3-70b w2": (28672, 8192),
}
"""Name -> (features in, features out)."""
SAMPLED = 24
"""Rows and columns that are checked of each."""


def live_cases() -> Iterator[GemmCase]:
    """The three GEMMs of every layer for 8192 tokens, tensorwise and rowwise, in both chainings, sampled.

    Formats are those of the recipes: gradients float8_e5m2 tensorwise, float8_e4m3fn rowwise.
    """
    for layer, (k, n) in LAYERS.items():
        gemms = {"output": (TOKENS, n, k), "grad_input": (TOKENS, k, n), "grad_weight": (n, k, TOKENS)}
        table = product(gemms.items(), (Granularity.TENSORWISE, Granularity.ROWWISE), (True, False))
        for (gemm, shape), granularity, fast in table:
            gradient = gemm != "output" and granularity is Granularity.TENSORWISE
            name = f"{layer} {gemm} {'x'.join(map(str, shape))} {granularity.value} {'fast' if fast else 'promoted'}"
            m, n_out, _ = shape
            r = rng("sample", name)
            sample = Sample(m=m, n=n_out, rows=_places(r, m), cols=_places(r, n_out))
            yield scaled_case(
                name,
                (granularity, granularity),
                (E5M2 if gradient else E4M3FN, E4M3FN),
                (SAMPLED, SAMPLED, shape[2]),
                "normal",
                out_dtype=BFLOAT16,
                use_fast_accum=fast,
                sample=sample,
                family=Family.LAYERS,
            )


def _places(r: np.random.Generator, size: int) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in r.choice(size, SAMPLED, replace=False)))
