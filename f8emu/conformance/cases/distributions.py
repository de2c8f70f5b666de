"""Seeded inputs, and GEMMs of them: each distribution is there to make one kind of mistake visible.

Values are drawn with numpy and ml_dtypes: only which inputs a case has depends on them, never what is expected.
"""

import math
import zlib
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.gemm import Family, GemmCase, Mode, Sample
from f8emu.spec import BFLOAT16, E4M3FN, FLOAT32, Format, Granularity
from f8emu.spec.gemm_call import GroupKind
from f8emu.spec.scaling import BLOCK

SAMPLED = 24  # rows and columns that are checked of a full-size GEMM


def rng(*key: object) -> np.random.Generator:
    """A generator that depends on the key alone: the same inputs on every machine."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def dtype_of(fmt: Format) -> np.dtype:
    """The numpy dtype of a format."""
    return np.dtype(getattr(ml_dtypes, fmt.name, fmt.name))


def codes_of(array: np.ndarray | np.generic) -> np.ndarray:
    """The bit patterns of an array, as unsigned integers."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def draw(distribution: str, shape: tuple[int, int], fmt: Format, seed: object) -> np.ndarray:
    """Values [rows, K] of a high precision format."""
    return VALUES[distribution](shape, rng(distribution, shape, seed)).astype(np.float32).astype(dtype_of(fmt))


def draw_codes(distribution: str, shape: tuple[int, int], fmt: Format, seed: object) -> np.ndarray:
    """Codes [rows, K] of a float8 format, typed; values are scaled so that the largest magnitude is the format's."""
    r = rng(distribution, shape, fmt.name, seed)
    if distribution in CODES:
        return CODES[distribution](shape, fmt, r).astype(np.uint8).view(dtype_of(fmt))
    values = VALUES[distribution](shape, r)
    return (values * (fmt.max / abs(values).max())).astype(np.float32).astype(dtype_of(fmt))


def _normal(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    return r.standard_normal(shape)


def _outlier(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """One value in 256 is a thousand times larger: most codes of a tensorwise cast become subnormal."""
    return r.standard_normal(shape) * np.where(r.random(shape) < 1 / 256, 1000.0, 1.0)


def _gradient(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """Small, over many binades, as gradients are."""
    return r.standard_normal(shape) * np.exp2(np.floor(r.normal(-14, 4, shape)))


def _blocks(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """Another magnitude in every row and every 128 of K and of rows: equal scales cannot hide an index error."""
    rows, k = np.indices(shape)
    exponents = r.permutation(np.arange(-12, 13))
    square = exponents[(3 * (rows // BLOCK) + 5 * (k // BLOCK)) % exponents.size]
    row = exponents[(7 * rows + k // BLOCK) % exponents.size] / 4
    return r.uniform(0.5, 1, shape) * r.choice([-1, 1], shape) * np.exp2(square + row)


def _cancellation(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """Neighbours along K that nearly cancel beside small values: truncation toward zero is not a floor."""
    x = r.standard_normal(shape)
    x[:, 1::2] = -x[:, : x.shape[1] // 2 * 2 : 2] * (1 + np.exp2(-r.integers(3, 24, x[:, 1::2].shape).astype(float)))
    return x


def _subnormals(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """One large value a row; the others quantise to subnormal codes or to zero."""
    x = r.standard_normal(shape) * np.exp2(r.integers(-20, -12, shape).astype(float))
    x[:, :1] = 1.0
    return x


def _integers(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """Small integers times one power of two: float32 adds thousands of them without rounding, in any order."""
    return r.integers(-15, 16, shape) * 2.0**-10


def _specials(shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    """NaN in one row, infinity in another, rows of +0, -0 and float32 subnormals, normal values elsewhere."""
    x = r.standard_normal(shape)
    for row, value in enumerate((np.nan, np.inf, -np.inf)):
        x[row % shape[0], (7 * row) % max(shape[1], 1)] = value
    for row, value in enumerate((0.0, -0.0, 3e-40), start=3):
        if row < shape[0]:
            x[row] = value
    return x


_VALUES = (_normal, _outlier, _gradient, _blocks, _cancellation, _subnormals, _integers, _specials)
# Distributions of values by name
VALUES = {draw.__name__.removeprefix("_"): draw for draw in _VALUES}


def _code_bits(shape: tuple[int, int], fmt: Format, r: np.random.Generator) -> np.ndarray:
    """Every finite code with equal chance: exponents spread over the whole format."""
    return r.integers(0, fmt.max_code + 1, shape) | (r.integers(0, 2, shape) << 7)


def _code_normal(shape: tuple[int, int], fmt: Format, r: np.random.Generator) -> np.ndarray:
    values = np.clip(r.standard_normal(shape) * fmt.max / 4, -fmt.max, fmt.max)
    return codes_of(values.astype(np.float32).astype(dtype_of(fmt)))


def _code_same(shape: tuple[int, int], fmt: Format, r: np.random.Generator) -> np.ndarray:
    """Positive and of one binade: the accumulator outgrows the products, and every step drops bits."""
    one = fmt.bias << fmt.fraction_bits
    return one + r.integers(0, fmt.fraction_mask + 1, shape)


def _code_cancellation(shape: tuple[int, int], fmt: Format, r: np.random.Generator) -> np.ndarray:
    """Large codes in pairs, of opposite sign in half of the rows: where one operand's pairs have opposite signs and the
    other's have equal ones the large products cancel, and what the alignment kept of the small ones is left.
    """
    codes = _code_bits(shape, fmt, r)
    large = r.integers(fmt.max_code - 2 * (fmt.fraction_mask + 1), fmt.max_code + 1, codes[:, 0::4].shape)
    codes[:, 0::4] = large
    codes[:, 2::4] = large[:, : codes[:, 2::4].shape[1]] | (r.integers(0, 2, (shape[0], 1)) << 7)
    return codes


def _code_subnormals(shape: tuple[int, int], fmt: Format, r: np.random.Generator) -> np.ndarray:
    """[OP-1, OP-2] Rows of subnormal codes alone, and rows of every code.

    A product of the two has the largest exponent of its step and is itself small: normalising it would keep more bits.
    """
    codes = _code_bits(shape, fmt, r)
    codes[::2] &= 0x80 | fmt.fraction_mask
    return codes


def _code_specials(shape: tuple[int, int], fmt: Format, r: np.random.Generator) -> np.ndarray:
    """[SPEC-1] Rows with NaN, infinity (where there is one), both infinities, zeros of both signs; bits elsewhere."""
    codes = _code_bits(shape, fmt, r)
    infinity = fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code
    rows: tuple[tuple[int, ...], ...] = ((fmt.nan_code,), (infinity,), (infinity, infinity | 0x80), (infinity | 0x80,))
    for row, values in enumerate(rows):
        for i, value in enumerate(values):
            if shape[1]:
                codes[row % shape[0], (5 * row + 11 * i) % shape[1]] = value
    for row, value in enumerate((0x00, 0x80), start=4):
        if row < shape[0]:
            codes[row] = value
    return codes


_CODES = (_code_bits, _code_normal, _code_same, _code_cancellation, _code_subnormals, _code_specials)
# Distributions of float8 codes by name
CODES = {draw.__name__.removeprefix("_code_"): draw for draw in _CODES}


# GEMMs


def drawn_scales(granularity: Granularity, rows: int, k: int, *key: object) -> np.ndarray:
    """Scales of any significand, another one in every group."""
    shape = granularity.scale_shape(rows, k)
    r = rng("scale", granularity.value, rows, k, *key)
    return (r.uniform(1, 2, shape) * np.exp2(r.integers(-9, 5, shape).astype(float))).astype(np.float32)


def drawn_sample(m: int, n: int, r: np.random.Generator) -> Sample:
    """`SAMPLED` rows and columns of a full-size GEMM."""
    rows, cols = (tuple(sorted(r.choice(size, min(size, SAMPLED), replace=False).tolist())) for size in (m, n))
    return Sample(m=m, n=n, rows=rows, cols=cols)


def tiled_sample(m: int, n: int, r: np.random.Generator, **fields: Any) -> Sample:
    """Rows and columns of every tile of 128, its first and its last among them; `fields` are those of a Sample."""

    def places(size: int) -> tuple[int, ...]:
        if size <= SAMPLED:
            return tuple(range(size))
        first = np.arange(0, size, BLOCK)
        last = np.minimum(first + BLOCK, size) - 1
        chosen = first, last, r.integers(first, last + 1), r.choice(size, SAMPLED, replace=False)
        return tuple(np.unique(np.concatenate(chosen)).tolist())

    return Sample(m=m, n=n, rows=places(m), cols=places(n), **fields)


def scaled_case(
    name: str,
    pair: tuple[Granularity, Granularity],
    formats: tuple[Format, Format],
    shape: tuple[int, int, int],
    distribution: str,
    *,
    with_bias: bool = False,
    out_dtype: Format = FLOAT32,
    sample: Sample | None = None,
    **fields: Any,
) -> GemmCase:
    """A scaled GEMM with drawn codes and scales; `fields` are those of a GemmCase.

    `shape` is M, N, K; of a sampled one those of its sample, but for 128x128 scales, which are of the whole.
    """
    m, n, k = shape
    whole = (m, n) if sample is None else (sample.m, sample.n)
    of_a, of_b = (whole[side] if pair[side] is Granularity.BLOCKWISE_128X128 else shape[side] for side in range(2))
    return GemmCase(
        id=name,
        mode=Mode.BLOCKWISE if pair[0].is_blockwise else Mode(pair[0].value),
        a=draw_codes(distribution, (m, k), formats[0], name + "a"),
        b=draw_codes(distribution, (n, k), formats[1], name + "b"),
        scale_a=drawn_scales(pair[0], of_a, k, name, "a"),
        scale_b=drawn_scales(pair[1], of_b, k, name, "b").T,
        granularity_a=pair[0],
        granularity_b=pair[1],
        bias=draw("normal", (1, n), out_dtype, name)[0] if with_bias else None,
        out_dtype=out_dtype,
        sample=sample,
        distribution=distribution,
        **fields,
    )


def grouped_case(
    name: str,
    ends: tuple[int, ...],
    shape: tuple[int, int],
    distribution: str,
    r: np.random.Generator,
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
    kind: GroupKind = GroupKind.ROWS,
    **fields: Any,
) -> GemmCase:
    """A grouped GEMM [EPI-6] with drawn codes, and scales of `r`.

    `ends` are those of what is divided, and `shape` is the other two of M, N, K. A batch has as many groups, the N and
    K of `shape`, and about as many rows in all.
    """
    # 1. The sizes, and the shapes that they give.
    dims, divided = kind.value, kind.value.divided
    sizes = dict(zip("MNK".replace(divided or "M", ""), shape, strict=True), G=len(ends))
    sizes[divided or "M"] = ends[-1] if divided else -(-ends[-1] // len(ends))
    shape_a, (*stack, k, n), of_a, of_b = (
        tuple([math.prod(sizes[letter] for letter in dim.split("*")) for dim in side]) for side in dims[:4]
    )
    # 2. Codes are drawn as matrices [rows, K].
    b = draw_codes(distribution, (math.prod(stack) * n, k), formats[1], name + "b")
    return GemmCase(
        id=name,
        mode=Mode.GROUPED_ROWWISE,
        a=draw_codes(distribution, (math.prod(shape_a[:-1]), k), formats[0], name + "a").reshape(shape_a),
        b=b.reshape(*stack, n, k),
        scale_a=r.uniform(0.1, 9, of_a).astype(np.float32),
        scale_b=r.uniform(0.1, 9, of_b).astype(np.float32),
        offs=np.array(ends, np.int32) if divided else None,
        distribution=distribution,
        family=Family.GROUPS,
        **fields,
    )


def bfloat16_case(
    name: str, shape: tuple[int, int, int], distribution: str, out_dtype: Format, **fields: Any
) -> GemmCase:
    """A bfloat16 GEMM [BF16-1] with drawn values."""
    m, n, k = shape
    a, b = (draw(distribution, (rows, k), BFLOAT16, name + side) for rows, side in ((m, "a"), (n, "b")))
    return GemmCase(id=name, mode=Mode.BF16, a=a, b=b, out_dtype=out_dtype, distribution=distribution, **fields)
