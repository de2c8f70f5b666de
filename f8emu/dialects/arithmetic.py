"""One implementation, in numpy, of every rule: amaxes, scales, codes and values of a matrix.

A matrix is worked through in bands of rows, so that what lies between x and its codes stays in the cache.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from f8emu.dialects.rules import (
    Arithmetic,
    Block,
    CodeForm,
    CodeRule,
    Dialect,
    Division,
    Limit,
    NanCode,
    PowerOfTwo,
    ScaleForm,
)
from f8emu.spec.errors import OperandError

Array = NDArray[Any]
Float32 = NDArray[np.float32]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_MAX = 448.0
_BAND = 1 << 19
"""Elements of a band: two megabytes of float32."""
_ROUNDED_UP = (PowerOfTwo.UP, PowerOfTwo.UP_LOG2, PowerOfTwo.UP_LN)


class Factors(NamedTuple):
    """The factors of a grid of blocks."""

    stored: Array
    """What the stack keeps, in its dtype."""
    scale: Float32
    """s."""
    multiplier: Float32
    """t. Where s comes first, it is 448 / amax, or 1/s of a power of two."""


_Piece = tuple[tuple[slice, slice], tuple[slice, slice], tuple[int, int, int, int]]
"""A part of a matrix, its part of the grid, and its shape [blocks, rows of a block, blocks, K of a block]."""


def grid_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """The number of blocks of a matrix `[rows, K]` in each direction; the last ones may be partial."""
    height, width = _extent(shape, block)
    return -(-shape[0] // height), -(-shape[1] // width)


def block_amax(x: Array, block: Block, *, ignores_nan: bool = False) -> Float32:
    """The largest magnitude of each block; a NaN makes it NaN or, with `ignores_nan`, counts as 0. Exact."""
    unsigned = np.uint32 if x.dtype.itemsize == 4 else np.uint16
    infinity = np.array(np.inf, x.dtype).view(unsigned)
    largest = np.zeros(grid_shape(x.shape, block), unsigned)
    for part, grid, (blocks, rows, groups, width) in _pieces(x.shape, block):
        # Magnitudes are ordered as their bits are, and NaN comes above infinity.
        bits = np.ascontiguousarray(x[part]).view(unsigned) & unsigned(np.iinfo(unsigned).max >> 1)
        if ignores_nan:
            bits[bits > infinity] = 0
        of_columns = bits.reshape(blocks, rows, -1).max(axis=1) if rows > 1 else bits
        np.maximum(largest[grid], of_columns.reshape(blocks, groups, width).max(axis=2), out=largest[grid])
    return largest.view(x.dtype).astype(np.float32)


def factors_from_amax(amax: Float32, dialect: Dialect, dtype: np.dtype[Any]) -> Factors:
    """The factors of blocks with these amaxes in a matrix of `dtype`; any shape.

    Raises:
        OperandError: the dialect's scales are given, not computed.
    """
    if dialect.scale is None:
        raise OperandError(
            f"factors_from_amax: {dialect.name} must have a rule for its scales; they are given there, by a "
            "calibration or a checkpoint; pass them to quantize as scale"
        )
    with np.errstate(all="ignore"):
        scale, multiplier = _scales(amax, dialect.scale, dtype)
        kept = multiplier if dialect.stored.is_multiplier else scale
        stored = {"input": dtype, "float8_e8m0fnu": E8M0}.get(dialect.stored.dtype, kept.dtype)
        return Factors(kept.astype(stored, copy=False), scale, multiplier)


def factors_from_stored(stored: Array, dialect: Dialect) -> Factors:
    """The factors of stored scales; an s or t that is not stored is the inverse of the other, rounded."""
    found = stored.astype(np.float32)
    with np.errstate(all="ignore"):
        inverse = np.float32(1.0) / found
    return Factors(stored, inverse, found) if dialect.stored.is_multiplier else Factors(stored, found, inverse)


def encode(x: Array, factors: Factors, dialect: Dialect, block: Block) -> Array:
    """The codes of a matrix with given factors, float8_e4m3fn."""
    codes, form, table = np.empty(x.shape, E4M3), dialect.code, _code_table(dialect.code.nan)
    with np.errstate(all="ignore"):
        factor = _code_factor(form, factors, x.dtype)[:, None, :, None]
        operate = np.divide if form.rule is CodeRule.QUOTIENT else np.multiply
        for part, grid, shape in _pieces(x.shape, block):
            values = x[part].astype(np.float32).reshape(shape)
            operate(values, factor[grid[0], :, grid[1]], out=values)
            if form.arithmetic is Arithmetic.INPUT:
                values = _rounded(values, x.dtype)
            codes[part] = _cast(values, table).reshape(codes[part].shape).view(E4M3)
    return codes


def decode(codes: Array, scale: Float32, block: Block, dtype: np.dtype[Any], *, rounds_scale: bool = False) -> Array:
    """`code * s`, rounded to float32 and then to `dtype`; with `rounds_scale`, s is rounded to `dtype` before."""
    values, factor = np.empty(codes.shape, dtype), (_rounded(scale, dtype) if rounds_scale else scale)[:, None, :, None]
    with np.errstate(all="ignore"):
        for part, grid, shape in _pieces(codes.shape, block):
            found = np.take(_VALUES, np.ascontiguousarray(codes[part]).view(np.uint8), mode="wrap").reshape(shape)
            found *= factor[grid[0], :, grid[1]]
            values[part] = found.reshape(values[part].shape).astype(dtype)
    return values


# 1 Scales


def _scales(amax: Float32, form: ScaleForm, dtype: np.dtype[Any]) -> tuple[Float32, Float32]:
    """S and t."""
    working = np.dtype(np.float64 if form.arithmetic is Arithmetic.FLOAT64 else np.float32)
    narrow = dtype if form.arithmetic is Arithmetic.INPUT else working

    def fl(x: Any) -> Array:
        return np.asarray(x, working).astype(narrow).astype(working)

    def reciprocal(x: float) -> np.float32:  # XLA converts bfloat16 to float32 before it takes one, float16 it does not
        return np.float32(np.float16(1.0 / x) if narrow == np.float16 else 1.0 / x)

    # 1. The amax that counts.
    a = amax.astype(working)
    if form.nan_amax is not None:
        a = np.where(np.isnan(a), fl(form.nan_amax), a)
    if form.infinite_amax is not None:
        a = np.where(np.isinf(a), fl(form.infinite_amax), a)
    if form.small_amax is not None:
        a = np.where(a <= form.small_amax[0], fl(form.small_amax[1]), a)
    if form.amax_floor:
        a = np.maximum(a, fl(form.amax_floor))
    # 2. The division.
    if form.division is Division.EXPONENT:
        bits = a.astype(np.float32).view(np.int32).astype(np.int64)
        s = _power((bits + form.carry >> 23) - 8, np.isnan(a), form)
        return s, np.float32(1.0) / s
    if form.is_multiplier:
        by_reciprocal = form.division is Division.MULTIPLIER_BY_RECIPROCAL
        t = fl(fl(1.0 / a) * _MAX if by_reciprocal else _MAX / a).astype(np.float32)
        if form.largest_multiplier is not None:
            of = dtype if form.largest_multiplier is Arithmetic.INPUT else np.float32
            t = np.where(np.isinf(t), np.float32(ml_dtypes.finfo(of).max), t)
        if form.power_of_two is PowerOfTwo.DOWN:
            t = (t.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        elif form.power_of_two is PowerOfTwo.DOWN_LOG2:
            t = np.exp2(np.floor(_log2(t)))
        s = fl(np.float32(1.0) / t).astype(np.float32)
    else:
        s = fl(a / _MAX if form.division is Division.QUOTIENT else a * reciprocal(_MAX)).astype(np.float32)
        t = (np.float32(_MAX) / a.astype(np.float32)).astype(np.float32)
    # 3. The scale that counts, and its power of two.
    if form.small_scale is not None:
        limit, instead = (_limit(one, dtype) for one in form.small_scale)
        is_small = s < limit if form.small_scale[0] is Limit.ROOT_OF_TINY else s <= limit
        s = np.where(is_small, np.float32(instead), s)
    if form.scale_floor:
        s = np.maximum(s, fl(form.scale_floor).astype(np.float32))
    if form.power_of_two in _ROUNDED_UP:
        exponent = _up(s)
        if form.power_of_two is PowerOfTwo.UP_LOG2:
            exponent = np.ceil(_log2(s)) + 127
        elif form.power_of_two is PowerOfTwo.UP_LN:
            ln = fl(np.log(s.astype(np.float64)))
            exponent = np.ceil(fl(ln * reciprocal(float(fl(math.log(2)))))) + 127
        s = _power(exponent, np.isnan(s), form)
        return s, np.float32(1.0) / s
    return s, t


def _up(s: Float32) -> Array:
    """The biased exponents of the powers of two at or above s; that of 2^-127 is 0."""
    bits = s.view(np.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    return np.where(bits < 1 << 23, bits > 1 << 22, exponent)


def _log2(x: Float32) -> Float32:
    """Correctly rounded: float64 has 29 bits more."""
    return np.log2(x.astype(np.float64)).astype(np.float32)


def _power(exponent: Array, is_nan: NDArray[np.bool], form: ScaleForm) -> Float32:
    """The powers of two with these biased exponents."""
    return np.where(is_nan, 255, np.clip(exponent, *form.exponents)).astype(np.uint8).view(E8M0).astype(np.float32)


def _limit(number: float | Limit, dtype: np.dtype[Any]) -> float:
    if not isinstance(number, Limit):
        return number
    limits = ml_dtypes.finfo(dtype)
    return float(limits.eps) if number is Limit.EPSILON else float(limits.tiny) ** 0.5


# 2 Codes


def _code_factor(form: CodeForm, factors: Factors, dtype: np.dtype[Any]) -> Float32:
    """What values are multiplied or divided by."""
    if form.rule is CodeRule.MULTIPLIER:
        return factors.multiplier
    s = _rounded(factors.scale, dtype) if form.is_scale_rounded else factors.scale
    s = np.maximum(s, np.float32(form.scale_floor)) if form.scale_floor else s
    if form.rule is CodeRule.QUOTIENT:
        return s
    return _rounded(np.float32(1.0) / s, dtype if form.arithmetic is Arithmetic.INPUT else s.dtype)


def _rounded(x: Array, dtype: np.dtype[Any]) -> Float32:
    """Rounded once more, to nearest, ties to even, and back; what torch and XLA do with 16-bit operands."""
    return x.astype(np.float32) if dtype == np.float32 else x.astype(dtype).astype(np.float32)


def _cast(values: Float32, table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    # Rounded to odd: the upper half of the float32, its last bit set where the lower half is not 0. Its nearest float8
    # is that of the float32: of the 8 bits that are left, 4 are more than one too many for every tie.
    halves = np.ascontiguousarray(values).reshape(-1).view(np.uint16).reshape(-1, 2)
    odd = np.bitwise_or(halves[:, 1], np.not_equal(halves[:, 0], 0).view(np.uint8))
    return np.take(table, odd, mode="wrap")


@functools.cache
def _code_table(nan: NanCode) -> NDArray[np.uint8]:
    """The code of every bfloat16, saturating."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, -_MAX, _MAX).astype(E4M3).view(np.uint8)
    codes[np.isnan(values)] = {NanCode.NAN: 0x7F, NanCode.MAX: 0x7E, NanCode.MIN: 0xFE}[nan]
    return codes


_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
"""The value of every code."""


# 3 Bands


def _extent(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """The sizes of a block in numbers."""
    return max(1, min(block[0] or shape[0], shape[0])), max(1, min(block[1] or shape[1], shape[1]))


def _pieces(shape: tuple[int, ...], block: Block) -> Iterator[_Piece]:
    """The matrix in pieces of whole blocks and of partial ones, each of some rows."""
    rows, k = shape
    height, width = _extent(shape, block)
    band = max(1, _BAND // max(k, 1))
    whole = k // width * width
    columns = [(slice(0, whole), slice(0, whole // width), width)]
    if whole < k:
        columns.append((slice(whole, k), slice(whole // width, whole // width + 1), k - whole))
    start = 0
    while start < rows and k:
        # Either some whole rows of blocks, or what is left of one.
        left = height - start % height
        count = min(max(band // height * height, min(left, band)) if left == height else min(left, band), rows - start)
        count = count // height * height or count
        blocks = max(1, count // height)
        for part, grid, group in columns:
            of_grid = slice(start // height, start // height + blocks), grid
            shape_of_piece = blocks, count // blocks, grid.stop - grid.start, group
            yield (slice(start, start + count), part), of_grid, shape_of_piece
        start += count
