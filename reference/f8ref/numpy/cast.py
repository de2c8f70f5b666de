"""Rounding float32 to a narrower format: the one rounding site of the oracle.

    0 | 10000101 | 011 1 0000000000000000000    float32 significand, E4M3 wanted
        exponent   FFF R SSS...                  F kept, R the first bit dropped, S the rest

Nearest-even: F goes up by one if R is set and so is any of S or the last bit of F. Adding `half - 1 + (last bit of F)`
before cutting does just that. A carry out of F moves into the exponent by itself, since codes of one sign are ordered
as their values are.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import FLOAT8_OPERANDS, FLOAT32, HIGH_PRECISION, Format, Overflow
from f8ref.numpy.codec import Array, as_float32, canonical_nan, codes_of, resolve_format, typed, typed_array

_CHUNK = 1 << 13
"""Elements rounded at a time: the temporaries stay in cache, and below what malloc gives back to the system."""


def cast(x: ArrayLike, format: Format | str, *, overflow: Overflow = Overflow.SATURATE) -> Array:
    """`x` rounded to float8, nearest-even.

    NaN gives `format.nan_code`. What rounds beyond the largest finite value, and infinity, gives +-max under
    SATURATE; under NONFINITE infinity of that sign (E5M2) or NaN (E4M3FN). Zero and what rounds to it keep the sign.

    Shapes: any; the result has the shape of `x`, and the dtype of `format`.
    Exactness: exact; the input is float32, or bfloat16 or float16, which are float32 numbers.

    Raises:
        OperandError: `x` is of another dtype, float64 among them: rounding it to float32 first would round twice.
        SpecError: `format` is not a float8 format that a tensor core multiplies.
    """
    target = resolve_format(format, FLOAT8_OPERANDS, "cast: format")
    array, _ = typed_array(x, HIGH_PRECISION, "cast: x")
    flat = array.reshape(-1)
    codes = np.empty(flat.shape, np.uint8)
    for start in range(0, flat.size, _CHUNK):
        chunk = as_float32(flat[start : start + _CHUNK], "cast: x")
        codes[start : start + _CHUNK] = _round(chunk, target, overflow)
    return typed(codes.reshape(array.shape), target)


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

    # 4. Overflow, infinity included: the code after the largest is that of infinity, or, where there is none, of NaN.
    is_nan = magnitude > FLOAT32.magnitude_mask - FLOAT32.fraction_mask
    match overflow:
        case Overflow.SATURATE:
            codes = np.minimum(codes, format.max_code)
        case Overflow.NONFINITE:
            codes = np.minimum(codes, format.max_code + 1)
            if format.infinity_code is None:
                is_nan |= codes > format.max_code

    # 5. The sign, which NaN does not keep.
    codes |= (bits >> FLOAT32.bits - 1) & format.sign_mask
    return np.where(is_nan, np.int32(format.nan_code), codes)
