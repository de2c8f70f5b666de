"""One implementation, in numpy, of every rule: amaxes, scales, codes and values of a matrix.

A matrix is worked through in bands of rows, so that what lies between x and its codes stays in the cache.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from f8emu.dialects import rules
from f8emu.dialects.rules import Arithmetic, Block, CodeForm, CodeRule, Dialect, Division, PowerOfTwo, ScaleForm
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import E4M3FN, E8M0FNU, FLOAT32, FORMATS, Format

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Cast = Callable[[Float32], NDArray[np.uint8]]
"""Values -> their codes."""
_Slices = tuple[slice, slice]
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in FORMATS}
E4M3, E8M0, _FLOAT32 = (DTYPES[one.name] for one in (E4M3FN, E8M0FNU, FLOAT32))
_BAND = 1 << 18
"""Elements of a band: a megabyte of float32."""


_HALF = 0x8000 + 16
"""Half the distance of bfloat16 numbers, as bits of float32, and a little: the inverse of a stored scale is rounded."""


class Factors(NamedTuple):
    """The factors of a grid of blocks."""

    stored: Array
    """What the stack keeps, in its dtype."""
    scale: Float32
    """s."""
    multiplier: Float32
    """t. Where s comes first, it is 448 / amax, or 1/s of a power of two."""


def grid_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """The number of blocks of a matrix `[rows, K]` in each direction; the last ones may be partial."""
    height, width = extent(shape, block)
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
    """The factors of blocks with these amaxes in a matrix of `dtype`; any shape."""
    if dialect.scale is None:
        raise OperandError(
            f"factors_from_amax: {dialect.name} must have a rule for its scales; they are given there, by a "
            "calibration or a checkpoint; pass them to quantize as scale"
        )
    with np.errstate(all="ignore"):
        scale, multiplier = _scales(amax, dialect.scale, dtype)
        kept = multiplier if dialect.stored.is_multiplier else scale
        return Factors(kept.astype(DTYPES.get(dialect.stored.dtype, dtype), copy=False), scale, multiplier)


def factors_from_stored(stored: Array, dialect: Dialect) -> Factors:
    """The factors of stored scales; an s or t that is not stored is the inverse of the other, rounded."""
    factors = stored.astype(np.float32)
    with np.errstate(all="ignore"):
        inverse = np.float32(1.0) / factors
    return Factors(stored, inverse, factors) if dialect.stored.is_multiplier else Factors(stored, factors, inverse)


def encode(x: Array, factors: Factors, form: CodeForm, block: Block, cast: Cast | None = None) -> Array:
    """The codes of a matrix with given factors, of `form.format`; by another `cast` than the right one, if given."""
    codes, cast = (
        np.empty(x.shape, DTYPES[form.format.name]),
        cast or functools.partial(_cast, _code_table(form.format, form.nan)),
    )
    with np.errstate(all="ignore"):
        factor = _code_factor(form, factors, x.dtype)[:, None, :, None]
        operate = np.divide if form.rule is CodeRule.QUOTIENT else np.multiply
        for part, grid, shape in _pieces(x.shape, block):
            values = x[part].astype(np.float32).reshape(shape)
            operate(values, factor[grid[0], :, grid[1]], out=values)
            if form.arithmetic is Arithmetic.INPUT:
                values = _rounded(values, x.dtype)
            codes[part] = cast(values).reshape(codes[part].shape).view(codes.dtype)
    return codes


def codes_of_other(x: Array, amax: Float32, codes: Array, scale: Array, dialect: Dialect, block: Block) -> int:
    """How many codes `x` does not give, if they and their scales are those of the other of a weight and its copy.

    The other of a float32 `x` is its bfloat16 copy. Those of a bfloat16 `x` are the float32 values of which it is the
    copy: the codes may be those of any. 0 if they are not. `amax` is that of the blocks of `x`, `scale` decodes.
    """
    # 1. The other, or what bounds it.
    codes_there, decoding = codes.view(np.uint8), scale.astype(np.float32)
    with np.errstate(all="ignore"):
        stored = Factors(decoding, decoding, np.float32(1) / decoding)
    if x.dtype == np.float32:
        ends = [(x.astype(DTYPES["bfloat16"]), amax.astype(DTYPES["bfloat16"]).astype(np.float32))]
    else:
        ends = [(_moved(x.astype(np.float32), by), _moved(amax, by)) for by in (-_HALF, _HALF)]
    # 2. Its scales, and its codes: those of one sign are ordered as their magnitudes; a zero may have either sign.
    factors = [factors_from_amax(largest, dialect, values.dtype) for values, largest in ends]
    scales = [one.scale if dialect.stored.is_multiplier else one.stored for one in factors]
    low, *_, high = [one.astype(scale.dtype).astype(np.float32) for one in (scales[0], scales[-1])]
    if not np.all((low <= decoding) & (decoding <= high)):
        return 0
    used = factors if len(ends) == 1 else [stored] * 2
    made = [encode(ends[i][0], used[i], dialect.code, block).view(np.uint8) for i in range(len(ends))]
    if np.any(((codes_there < made[0]) | (made[-1] < codes_there)) & (((codes_there | made[-1]) & 0x7F) != 0)):
        return 0
    return int(
        np.count_nonzero(encode(x.astype(np.float32), stored, dialect.code, block).view(np.uint8) != codes_there)
    )


def _moved(x: Float32, by: int) -> Float32:
    bits = x.view(np.int32)
    magnitude = np.maximum((bits & 0x7FFFFFFF) + np.int32(by), 0)
    return (magnitude | (bits & np.int32(-0x80000000))).view(np.float32)


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
    dtypes = {Arithmetic.FLOAT32: _FLOAT32, Arithmetic.FLOAT64: np.dtype(np.float64), Arithmetic.INPUT: dtype}
    narrow, limits = dtypes[form.arithmetic], ml_dtypes.finfo(dtype)
    working = np.promote_types(narrow, np.float32)

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
    a, largest = np.maximum(a, fl(form.amax_floor)), form.largest
    # 2. The division.
    if form.division is Division.EXPONENT:
        bits = a.astype(np.float32).view(np.int32).astype(np.int64)
        return _powers((bits + form.carry >> 23) + 1 - math.frexp(largest)[1], np.isnan(a), form)
    if form.is_multiplier:
        by_reciprocal = form.division is Division.MULTIPLIER_BY_RECIPROCAL
        t = fl(fl(1.0 / a) * largest if by_reciprocal else largest / a).astype(np.float32)
        if form.largest_multiplier is not None:
            t = np.where(np.isinf(t), np.float32(ml_dtypes.finfo(dtypes[form.largest_multiplier]).max), t)
        if form.power_of_two is PowerOfTwo.DOWN:
            t = (t.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        elif form.power_of_two is PowerOfTwo.DOWN_LOG2:
            t = np.exp2(np.floor(_log2(t)))
        s = np.float32(1.0) / t
    else:
        s = fl(a / largest if form.division is Division.QUOTIENT else a * reciprocal(largest)).astype(np.float32)
        t = (np.float32(largest) / a.astype(np.float32)).astype(np.float32)
    # 3. The scale that counts, and its power of two.
    if form.small_scale is not None:
        known = {rules.Limit.EPSILON: float(limits.eps), rules.Limit.ROOT_OF_TINY: float(limits.tiny) ** 0.5}
        limit, instead = (known[one] if isinstance(one, rules.Limit) else one for one in form.small_scale)
        is_small = s < limit if form.small_scale[0] is rules.Limit.ROOT_OF_TINY else s <= limit
        s = np.where(is_small, np.float32(instead), s)
    s = np.maximum(s, fl(form.scale_floor).astype(np.float32))
    match form.power_of_two:
        case PowerOfTwo.UP:
            bits = s.view(np.int32)
            # 2^-127, whose biased exponent is 0, is a subnormal float32.
            exponent = np.where(bits < 1 << 23, bits > 1 << 22, (bits >> 23) + (bits & 0x7FFFFF != 0))
        case PowerOfTwo.UP_LOG2:
            exponent = np.ceil(_log2(s)) + 127
        case PowerOfTwo.UP_LN:
            ln = fl(np.log(s.astype(np.float64)))
            exponent = np.ceil(fl(ln * reciprocal(float(fl(math.log(2)))))) + 127
        case _:
            return s, t
    return _powers(exponent, np.isnan(s), form)


def _log2(x: Float32) -> Float32:
    """Correctly rounded: float64 has 29 bits more."""
    return np.log2(x.astype(np.float64)).astype(np.float32)


def _powers(exponent: Array, is_nan: NDArray[np.bool], form: ScaleForm) -> tuple[Float32, Float32]:
    """The powers of two with these biased exponents, and their inverses."""
    codes = np.where(is_nan, 255, np.clip(exponent, *form.exponents)).astype(np.uint8)
    s = codes.view(E8M0).astype(np.float32)
    return s, np.float32(1.0) / s


# 2 Codes


def _code_factor(form: CodeForm, factors: Factors, dtype: np.dtype[Any]) -> Float32:
    """The factor that values are multiplied or divided by."""
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


def _cast(table: NDArray[np.uint8], values: Float32) -> NDArray[np.uint8]:
    # Rounded to odd: the upper half of the float32, its last bit set where the lower half is not 0. Its nearest float8
    # is that of the float32: of the 8 bits that are left, 4 are more than one too many for every tie.
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    odd = bits & 0xFFFF
    odd += 0xFFFF  # carries into the upper half unless the lower one is 0
    odd |= bits
    odd >>= 16
    return np.take(table, odd, mode="wrap")


@functools.cache
def _code_table(format: Format, nan: rules.NanCode) -> NDArray[np.uint8]:
    """The code of every bfloat16, saturating."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, -format.max, format.max).astype(DTYPES[format.name]).view(np.uint8)
    codes[np.isnan(values)] = nan_code(format, nan)
    return codes


def nan_code(format: Format, nan: rules.NanCode) -> int:
    """The code of a NaN."""
    of_max = {rules.NanCode.MAX: format.max_code, rules.NanCode.MIN: format.max_code | format.sign_mask}
    return of_max.get(nan, format.nan_code)


_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
"""The value of every code."""


# 3 Bands


def extent(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The sizes of a block in numbers."""
    return tuple(max(1, min(size or most, most)) for size, most in zip(block, shape, strict=True))


def _pieces(shape: tuple[int, ...], block: Block) -> Iterator[tuple[_Slices, _Slices, tuple[int, ...]]]:
    """Parts of a matrix, their parts of the grid, and their shapes [blocks, rows of a block, blocks, K of a block].

    A part is a band of some rows, of whole blocks or of one row of them. Partial blocks are apart.
    """
    extents, bands = extent(shape, block), (max(1, _BAND // max(shape[1], 1)), max(1, shape[1]))
    for down, across in itertools.product(*map(_cut, shape, extents, bands)):
        (rows, of_rows), (columns, of_columns) = down[:2], across[:2]
        yield (rows, columns), (of_rows, of_columns), (*down[2], *across[2])


def _cut(size: int, extent: int, band: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """One direction in parts: where each is, its part of the grid, and (blocks, size of a block in it)."""
    step = max(1, band // extent) * extent
    starts = {at for first in range(0, size, step) for at in range(first, min(first + step, size), band)}
    for start, end in itertools.pairwise(sorted(starts | {size // extent * extent, size})):
        blocks = max(1, (end - start) // extent)
        of_grid = slice(start // extent, start // extent + blocks)
        yield slice(start, end), of_grid, (blocks, (end - start) // blocks)
