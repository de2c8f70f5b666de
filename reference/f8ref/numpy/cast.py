"""Between values and codes: decode, the one rounding of the oracle, and the verbs made of the two.

Rounding float32 to a narrower format:

    0 | 10000101 | 011 1 0000000000000000000    float32 significand, E4M3 wanted
        exponent   FFF R SSS...                  F kept, R the first bit dropped, S the rest

Nearest-even: F goes up by one if R is set and so is any of S or the last bit of F. Adding `half - 1 + (last bit of F)`
before cutting does just that. A carry out of F moves into the exponent by itself, since codes of one sign are ordered
as their values are.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    BFLOAT16,
    E8M0FNU,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    HIGH_PRECISION,
    Format,
    Granularity,
    Overflow,
    float8_format,
    granularity_by_name,
    overflow_by_name,
)
from f8ref.numpy.codec import Array, as_float32, canonical_nan, codes_of, decode_table, typed, typed_array
from f8ref.numpy.scale import as_matrix, expand_scale

_CHUNK = 1 << 13
"""Elements rounded at a time: the temporaries stay in cache, and below what malloc gives back to the system."""


def decode(x: ArrayLike) -> NDArray[np.float32]:
    """The float32 value of every code of a float8, bfloat16 or float16 array.

    Shapes: any; the result has the shape of `x`.
    Exactness: exact, subnormals and signed zeros included; every NaN code gives 0x7fffffff.

    Raises:
        OperandError: another dtype.
    """
    array, format = typed_array(x, (*FLOAT8, E8M0FNU, BFLOAT16, FLOAT16), "decode: x")
    return np.asarray(decode_table(format)[codes_of(array, format)])


def cast(x: ArrayLike, format: Format | str, *, overflow: Overflow | str = Overflow.SATURATE) -> Array:
    """`x` rounded to float8, nearest-even.

    NaN gives `format.nan_code`. What rounds beyond the largest finite value, and infinity, gives +-max under
    SATURATE; under NONFINITE infinity of that sign where the format has one, else NaN. Zero and what rounds to it keep
    the sign where the format has a -0.

    Shapes: any; the result has the shape of `x`, and the dtype of `format`.
    Exactness: exact; the input is float32, or bfloat16 or float16, which are float32 numbers.

    Raises:
        OperandError: `x` is of another dtype, float64 among them: rounding it to float32 first would round twice.
        SpecError: `format` is not in FLOAT8.
    """
    target = float8_format("cast", format)
    policy = overflow_by_name("cast", overflow)
    array, _ = typed_array(x, HIGH_PRECISION, "cast: x")
    flat = array.reshape(-1)
    codes = np.empty(flat.shape, np.uint8)
    for start in range(0, flat.size, _CHUNK):
        chunk = as_float32(flat[start : start + _CHUNK], "cast: x")
        codes[start : start + _CHUNK] = _round(chunk, target, policy)
    return typed(codes.reshape(array.shape), target)


def quantize(
    x: ArrayLike, inv_scale: ArrayLike, format: Format | str, granularity: Granularity | str = Granularity.TENSORWISE
) -> Array:
    """`cast(float32(x) * inv_scale)`, saturating, with the factor of each element's group.

    Shapes: `x` [rows, K]; `inv_scale` is `granularity.scale_shape(rows, K)`; the result [rows, K], of `format`.
    Exactness: one float32 product, rounded nearest-even (infinity times 0 is NaN), then the exact cast.

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: a format that is not in FLOAT8, or an unknown granularity.
    """
    granularity = granularity_by_name("quantize", granularity)
    values = as_float32(as_matrix(x, "quantize: x"), "quantize: x")
    factors = expand_scale(inv_scale, granularity, values.shape, "quantize: inv_scale")
    with np.errstate(over="ignore", invalid="ignore"):
        return cast(values * factors, format)


def dequantize(
    codes: ArrayLike, scale: ArrayLike, granularity: Granularity | str = Granularity.TENSORWISE
) -> NDArray[np.float32]:
    """`decode(codes) * scale`, with the scale of each element's group.

    Shapes: `codes` [rows, K] of a float8 dtype; `scale` float32 or E8M0 `granularity.scale_shape(rows, K)`; the result
    is [rows, K].
    Exactness: one float32 product, rounded nearest-even.

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: an unknown granularity.
    """
    granularity = granularity_by_name("dequantize", granularity)
    array, _ = typed_array(as_matrix(codes, "dequantize: codes"), FLOAT8, "dequantize: codes")
    scales, scale_format = typed_array(scale, (FLOAT32, E8M0FNU), "dequantize: scale")
    scales = decode(scales) if scale_format == E8M0FNU else scales
    factors = expand_scale(scales, granularity, array.shape, "dequantize: scale")
    with np.errstate(over="ignore", invalid="ignore"):
        return canonical_nan(decode(array) * factors)


def convert(x: NDArray[np.float32], format: Format) -> Array:
    """Float32 rounded nearest-even to a high precision format; overflow gives infinity, NaN is all ones [EPI-4]."""
    return canonical_nan(x) if format == FLOAT32 else typed(_round(x, format, Overflow.NONFINITE), format)


def _round(x: NDArray[np.float32], format: Format, overflow: Overflow) -> Array:
    """Codes (int32) of float32 numbers in a format of fewer fraction bits and no wider exponent range."""
    bits = codes_of(x, FLOAT32).view(np.int32)
    magnitude = bits & FLOAT32.magnitude_mask

    # 1. Unpack. A float32 subnormal has no hidden bit, and the exponent of field 1.
    field = magnitude >> FLOAT32.fraction_bits
    significand = (magnitude & FLOAT32.fraction_mask) | (np.minimum(field, 1) << FLOAT32.fraction_bits)
    exponent = np.maximum(field, 1) - FLOAT32.bias

    # 2. Drop bits: a fixed number, and more below the smallest normal. Beyond 24 + 1 nothing is left to round up.
    below = np.maximum(format.min_exponent - exponent, 0)
    drop = np.minimum(FLOAT32.fraction_bits - format.fraction_bits + below, FLOAT32.fraction_bits + 2)
    last = (significand >> drop) & 1
    rounded = (significand + ((1 << (drop - 1)) - 1 + last)) >> drop

    # 3. The hidden bit in `rounded` adds one to the exponent field, as does a carry.
    codes = (np.maximum(exponent - format.min_exponent, 0) << format.fraction_bits) + rounded

    # 4. Overflow, infinity included: the code after the largest is that of infinity where there is one.
    is_nan = magnitude > FLOAT32.magnitude_mask - FLOAT32.fraction_mask
    match overflow:
        case Overflow.SATURATE:
            codes = np.minimum(codes, format.max_code)
        case Overflow.NONFINITE:
            codes = np.minimum(codes, format.max_code + 1)
            if format.infinity_code is None:
                is_nan |= codes > format.max_code

    # 5. The sign, which NaN does not keep, nor a zero that has none.
    sign = (bits >> FLOAT32.bits - 1) & format.sign_mask
    codes |= sign if format.has_negative_zero else np.where(codes == 0, 0, sign)
    return np.where(is_nan, np.int32(format.nan_code), codes)
