"""The tables of generated cases: what the suite puts to a subject, and what a test's parametrisation derives from.

Every table is seeded: the same inputs on every machine. No expected value is here; an oracle gives those.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import (
    SAMPLED,
    bfloat16_case,
    draw,
    drawn_sample,
    dtype_of,
    grouped_case,
    rng,
    scaled_case,
    tiled_sample,
)
from f8emu.conformance.cases.families import BLOCK_PAIRS, VALUE_SHAPES, Pair, value_cases
from f8emu.conformance.cases.gemm import Family, GemmCase, Mode
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import (
    BFLOAT16,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    HIGH_PRECISION,
    Format,
    Overflow,
)
from f8emu.spec.gemm_call import GroupKind
from f8emu.spec.scaling import MAX_MARGIN, AmaxHistoryReduction, DelayedScaling, Granularity, ScaleRule

# 1 Formats and casts

DECODED: tuple[Format, ...] = (*FLOAT8, E8M0FNU, BFLOAT16, FLOAT16)  # formats of which every code is decoded

# (source, float8 format, overflow policy)
CASTS: tuple[tuple[Format, Format, Overflow], ...] = tuple(product(HIGH_PRECISION, FLOAT8, Overflow))


@cache
def all_codes(fmt: Format) -> np.ndarray:
    """Every code of a format of 8 or 16 bits, in order, typed."""
    return np.arange(1 << fmt.bits, dtype=f"u{fmt.bits // 8}").view(dtype_of(fmt))


@cache
def cast_inputs(source: Format, target: Format) -> np.ndarray:
    """Inputs of a cast: all codes of bfloat16 and float16, the boundaries of float32."""
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
    near = _neighbours([*values, *midpoints, beyond, 2 * values[-1], *powers, *subnormals], 2, 0x7F80_0000)
    nan = np.array([0x7FC0_0000, 0x7F80_0001, 0x7FFF_FFFF, 0x7FA5_A5A5], np.int64)
    bits = np.unique(np.concatenate([near, nan]))
    random = rng("float32_boundaries", target.name).integers(0, 1 << 32, 8192)
    return np.concatenate([bits, bits | 0x8000_0000, random]).astype(np.uint32).view(np.float32)


def _neighbours(points: list[float], reach: int, most: int) -> np.ndarray:
    """The bit patterns of float32 values, and `reach` on both sides of each, up to `most`."""
    bits = np.array(points).astype(np.float32).view(np.uint32)[:, None].astype(np.int64)
    return (bits + np.arange(-reach, reach + 1)).clip(0, most).ravel()


# 2 Scales

VALUE_DISTRIBUTIONS = ("normal", "outlier", "gradient", "blocks", "cancellation", "subnormals", "specials")
# [rows, K]: tails of a block along K, and more than 4096 elements (NUMERICS 6: XLA's max loses NaN)
MATRIX_SHAPES: tuple[tuple[int, int], ...] = ((1, 1), (3, 130), (20, 260))
SQUARE_SHAPE = (130, 140)  # tails of a 128x128 block in both directions

# (rule, margin)
SCALE_RULES: tuple[tuple[ScaleRule, int], ...] = (
    (ScaleRule(), 0),
    (ScaleRule(), MAX_MARGIN),
    (ScaleRule(power_of_two=True), 0),
    (ScaleRule(amax_floor=2.0**-20), 0),
)


@cache
def amax_corners() -> np.ndarray:
    """[n, 1] float32: where scale rules go wrong, and 4,096 random mantissas.

    0, subnormals, the default floor 1e-12, the maxima of the formats, every power of two (where log2 rounds the wrong
    way) with its neighbours, the largest float32, infinity, NaN.
    """
    corners = [0, 2.0**-149, 2.0**-126, 1e-12, 1, 3, 448, 57344, 448 * 2.0**100, 3.4028234663852886e38]
    near = _neighbours([*corners, *np.exp2(np.arange(-126, 128, dtype=np.float64))], 1, 0x7F7F_FFFF)
    random = rng("amax_corners").integers(0x3000_0000, 0x5000_0000, 4096)
    bits = np.concatenate([np.unique(near), random, [0x7F80_0000, 0x7FC0_0000]])
    return bits.astype(np.uint32).view(np.float32)[:, None]


def amax_inputs() -> Iterator[tuple[str, tuple[int, int], Granularity]]:
    """(distribution, shape, granularity): everything with everything, and squares where a wrong index would show."""
    yield from product(VALUE_DISTRIBUTIONS, MATRIX_SHAPES, Granularity)
    yield from product(("blocks", "specials"), (SQUARE_SHAPE,), (Granularity.TENSORWISE, Granularity.BLOCKWISE_128X128))


def quantize_inputs() -> Iterator[tuple[str, tuple[int, int], Granularity]]:
    """Fewer inputs than `amax_inputs`: each output is quantised and decoded again."""
    yield from product(VALUE_DISTRIBUTIONS, MATRIX_SHAPES[:2], Granularity)
    yield from product(("blocks", "gradient", "specials"), MATRIX_SHAPES[2:], Granularity)
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


# (rule, scale rule, format) of the states that are updated with every amax of DELAYED_AMAXES in turn
DELAYED_TRACES: tuple[tuple[DelayedScaling, ScaleRule, Format], ...] = tuple(
    (DelayedScaling(history_length=length, reduction=reduction, margin=margin), rule, fmt)
    for (length, margin), reduction, (rule, fmt) in product(
        ((1, 0), (3, 0), (16, 2)), AmaxHistoryReduction, ((ScaleRule(), E4M3FN), (ScaleRule(power_of_two=True), E5M2))
    )
)

# Rises and falls, so that the order of the history shows; unusable first, so that the initial state shows
DELAYED_AMAXES: tuple[float, ...] = (
    *(0.0, float("nan"), 3.0, 5.0, 0.75, float("inf"), 0.5, 0.0, 1e-13, 700.3),
    *(2.0, 1.1, 1.3, 0.9, 2.0**-140, 1.7, 1.9, 0.3, 40.0),
)


# 3 Layers of real models


TOKENS = 8192
# Name -> (features in, features out)
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


# Tokens of a decode step
DECODED_TOKENS = (1, 16, 64)
# M, N, K of block scales: training, prefill and decode of DeepSeek-V3's layers
BLOCK_LAYERS: tuple[tuple[int, int, int], ...] = (
    (4096, 7168, 2048),
    (8192, 2048, 7168),
    (64, 4096, 7168),
    (4, 16384, 2048),
)
# Ends of groups of tokens, N and K of mixtures of experts: few experts, 64, 256, and a decode step
EXPERTS: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = (
    (tuple(range(1024, 8193, 1024)), (4096, 4096)),
    (tuple(range(128, 8193, 128)), (1536, 2048)),
    (tuple(range(32, 8193, 32)), (256, 2048)),
    ((1, 1, 3, 8, 9, 9, 14, 16), (4096, 2048)),
)


def live_cases() -> Iterator[GemmCase]:
    """The three GEMMs of every layer for 8192 tokens, tensorwise and rowwise, in both chainings, sampled.

    Formats are those of the recipes: gradients float8_e5m2 tensorwise, float8_e4m3fn rowwise. Then decode steps, block
    scales and groups, of which every tile of 128 is sampled.
    """
    for layer, (k, n) in LAYERS.items():
        gemms = {"output": (TOKENS, n, k), "grad_input": (TOKENS, k, n), "grad_weight": (n, k, TOKENS)}
        table = product(gemms.items(), (Granularity.TENSORWISE, Granularity.ROWWISE), (True, False))
        for (gemm, shape), granularity, fast in table:
            is_gradient = gemm != "output" and granularity is Granularity.TENSORWISE
            name = f"{layer} {gemm} {'x'.join(map(str, shape))} {granularity.value} {'fast' if fast else 'promoted'}"
            yield scaled_case(
                name,
                (granularity, granularity),
                (E5M2 if is_gradient else E4M3FN, E4M3FN),
                (SAMPLED, SAMPLED, shape[2]),
                "normal",
                out_dtype=BFLOAT16,
                use_fast_accum=fast,
                sample=drawn_sample(*shape[:2], rng("sample", name)),
                family=Family.LAYERS,
            )

    yield from _live_decode()
    yield from _live_blocks()
    yield from _live_groups()


def _live_decode() -> Iterator[GemmCase]:
    granularities = Granularity.TENSORWISE, Granularity.ROWWISE
    for number, (m, (layer, (k, n))) in enumerate(product(DECODED_TOKENS, LAYERS.items())):
        granularity = granularities[(number + m) % 2]
        name = f"{layer} decode {m}x{n}x{k} {granularity.value}"
        yield _live(name, (granularity, granularity), (m, n, k), out_dtype=BFLOAT16, use_fast_accum=number % 4 < 2)


def _live_blocks() -> Iterator[GemmCase]:
    for pair, shape in product(BLOCK_PAIRS, BLOCK_LAYERS):
        name = f"{pair[0].value} x {pair[1].value} {'x'.join(map(str, shape))}"
        yield _live(name, pair, shape, out_dtype=BFLOAT16)


def _live(name: str, pair: Pair, shape: tuple[int, int, int], **fields: Any) -> GemmCase:
    sample = tiled_sample(*shape[:2], rng("sample", name))
    sizes = len(sample.rows), len(sample.cols), shape[2]
    return scaled_case(name, pair, (E4M3FN, E4M3FN), sizes, "normal", sample=sample, family=Family.LAYERS, **fields)


def _live_groups() -> Iterator[GemmCase]:
    # The sample has the first rows and the last row of each group.
    for ends, (n, k) in EXPERTS:
        name = f"{len(ends)} experts {ends[-1]}x{n}x{k}"
        starts = np.array([0, *ends[:-1]])
        rows = np.unique(np.concatenate([np.repeat(starts, np.diff(ends, prepend=0) > 0), np.array(ends) - 1]))
        sample = replace(tiled_sample(ends[-1], n, rng("sample", name)), rows=tuple(rows.tolist()), ends=ends)
        within = tuple(np.searchsorted(rows, ends).tolist())
        case = grouped_case(name, within, (len(sample.cols), k), "normal", rng(name), out_dtype=BFLOAT16)
        yield replace(case, sample=sample, family=Family.LAYERS)


CODE_DISTRIBUTIONS = ("bits", "normal", "same", "cancellation", "subnormals", "specials")
BF16_DISTRIBUTIONS = ("normal", "gradient", "blocks", "cancellation", "outlier", "specials")

# M, N, K: tails of a step (32), of a promotion (128), of everything. Few: to a compiler each is a program.
GEMM_SHAPES: dict[tuple[Format, Format], tuple[tuple[int, int, int], ...]] = {
    formats: (shape, (5, 7, 401)) if formats == HOPPER.format_pairs[0] else (shape,)
    for formats, shape in VALUE_SHAPES.items()
}
BLOCKWISE_SHAPES: tuple[tuple[int, int, int], ...] = ((128, 128, 384), (131, 37, 330))
# [CHAIN-3] (slices, K, fast): whole and rounded lengths, a last slice that is shorter, one that is empty
SPLITS: tuple[tuple[int, int, bool], ...] = ((2, 512, True), (3, 1024, False), (4, 1040, True), (4, 1040, False))
# The same of (slices, K) for each pair with block scales, in the order of the chip
BLOCKWISE_SPLITS: tuple[tuple[int, int], ...] = ((2, 640), (2, 1152), (3, 1664))
# M, N, K, slices
BF16_SHAPES: tuple[tuple[int, int, int, int], ...] = ((16, 32, 208, 1), (5, 7, 77, 1), (16, 16, 528, 3))
ALIGNED = HOPPER.size_multiple  # the library takes multiples of this, blockwise of 128


def is_aligned(case: GemmCase) -> bool:
    """Whether the hardware's library takes a GEMM of this size."""
    multiple = 128 if case.mode is Mode.BLOCKWISE else ALIGNED
    return all(n > 0 and n % multiple == 0 for n in (case.a.shape[-2], case.output_shape[1], case.k))


@cache
def gemm_cases() -> tuple[GemmCase, ...]:
    """Generated GEMMs: every distribution with every pair of formats, both chainings, all modes, biases and outputs.

    And those families that are not for kernels alone: values of scales and of the bias.
    """
    return (*_dense(), *_blockwise(), *_split(), *_grouped(), *_bf16(), *value_cases())


def _dense() -> Iterator[GemmCase]:
    granularities = (Granularity.TENSORWISE, Granularity.ROWWISE)
    table = product(CODE_DISTRIBUTIONS, HOPPER.format_pairs, granularities, (True, False))
    for i, (distribution, formats, granularity, fast) in enumerate(table):
        for shape in GEMM_SHAPES[formats]:
            chain = "fast" if fast else "promoted"
            out_dtype = HIGH_PRECISION[i // 2 % 3]
            yield scaled_case(
                f"{granularity.value} {chain} {distribution} {formats[0].name} x {formats[1].name} {shape[0]}",
                (granularity, granularity),
                formats,
                shape,
                distribution,
                with_bias=i % 5 < 3 and out_dtype != FLOAT32,  # the library has no bias beside float32 output
                out_dtype=out_dtype,
                use_fast_accum=fast,
            )


def _blockwise() -> Iterator[GemmCase]:
    for i, (pair, shape) in enumerate(product(BLOCK_PAIRS, BLOCKWISE_SHAPES)):
        name = f"{pair[0].value} x {pair[1].value} {'x'.join(map(str, shape))}"
        yield scaled_case(name, pair, HOPPER.format_pairs[0], shape, "normal", out_dtype=HIGH_PRECISION[i % 2])


def _split() -> Iterator[GemmCase]:
    tensorwise, of_blocks = Granularity.TENSORWISE, zip(BLOCK_PAIRS, BLOCKWISE_SPLITS, strict=True)
    table: list[tuple[str, Pair, int, int, bool]] = [
        *(("fast" if fast else "promoted", (tensorwise, tensorwise), slices, k, fast) for slices, k, fast in SPLITS),
        *((f"{pair[0].value} x {pair[1].value}", pair, *split, False) for pair, split in of_blocks),
    ]
    for words, pair, slices, k, fast in table:
        name, options = f"split-K {slices} of {k} {words}", {"split_k": slices, "family": Family.SLICES}
        yield scaled_case(name, pair, HOPPER.format_pairs[0], (16, 16, k), "normal", use_fast_accum=fast, **options)


def _grouped() -> Iterator[GemmCase]:
    """[EPI-6] Groups of different sizes, one of them empty; then of every kind, in sizes that a GPU takes."""
    r = rng("grouped")
    for fast in (True, False):
        name = f"grouped {'fast' if fast else 'promoted'}"
        yield grouped_case(name, (16, 16, 48, 64), (32, 208), "normal", r, use_fast_accum=fast)
    for i, (kind, fast) in enumerate(product(GroupKind, (True, False))):
        distribution = CODE_DISTRIBUTIONS[i % len(CODE_DISTRIBUTIONS)]
        name = f"grouped {kind.name.lower()} {distribution} {'fast' if fast else 'promoted'}"
        ends, shape = ((16, 16, 48, 256), (32, 208)) if fast else ((128, 256, 256, 320), (48, 272))
        if kind is GroupKind.ROWS:  # to JAX another shape is another program
            ends, shape = (1, 16, 33, 64), (32, 208)
        yield grouped_case(name, ends, shape, distribution, rng(name), kind=kind, use_fast_accum=fast)


def _bf16() -> Iterator[GemmCase]:
    """The bfloat16 matmul [BF16-1], with split-K [BF16-2]."""
    for i, distribution in enumerate(BF16_DISTRIBUTIONS):
        m, n, k, slices = BF16_SHAPES[i % len(BF16_SHAPES)]
        name = f"bf16 {distribution}" + (f" split-K {slices}" if slices > 1 else "")
        yield bfloat16_case(name, (m, n, k), distribution, HIGH_PRECISION[i % 2], split_k=slices)
