"""Bit patterns and what they mean: dtypes, and the tables of values and exponents.

Codes become numbers in integer arithmetic; ml_dtypes supplies dtypes and nothing else.
"""

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, FORMATS, Format, OperandError, Specials

Array = NDArray[Any]

_DTYPES: dict[Format, np.dtype[Any]] = {
    format: np.dtype(getattr(ml_dtypes, format.name, format.name)) for format in FORMATS.values()
}
_FORMATS: dict[np.dtype[Any], Format] = {dtype: format for format, dtype in _DTYPES.items()}
_CODE_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32)}

NAN = np.uint32(FLOAT32.nan_code).view(np.float32)
"""The one float32 NaN that the tensor core emits: 0x7fffffff [SPEC-1]."""
INFINITY = np.float32(np.inf)

ABSENT = -400
"""Exponent of a number that takes no part: plus another number's, below the exponent of every product and every
accumulator; and twice it is still an exponent of float64."""


def typed_array(x: ArrayLike, allowed: tuple[Format, ...], call: str) -> tuple[Array, Format]:
    """`x` as an array, and its format; OperandError if that is not one of `allowed`."""
    array = np.asarray(x)
    format = _FORMATS.get(array.dtype)
    if format is None or format not in allowed:
        known = ", ".join(f.name for f in allowed)
        raise OperandError(f"{call} must have dtype {known}; got {array.dtype}; convert it before the call")
    return array, format


def codes_of(x: Array, format: Format) -> Array:
    """The bit patterns of a typed array as unsigned integers, without a copy."""
    return x.view(_CODE_DTYPES[format.bits])


def typed(codes: Array, format: Format) -> Array:
    """Bit patterns, of any integer dtype, as an array of the format's dtype."""
    return codes.astype(_CODE_DTYPES[format.bits], copy=False).view(_DTYPES[format])


@lru_cache
def _decoded(format: Format) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Value and exponent of every code, of a format of at most 16 bits [OP-1].

    Exactness: exact; the one place of this package that says how a code becomes a number.
    """
    codes = np.arange(1 << format.bits, dtype=np.uint32)

    # 1. Fields.
    magnitude = (codes & format.magnitude_mask).astype(np.int32)
    fraction = magnitude & format.fraction_mask
    field = magnitude >> format.fraction_bits

    # 2. What is no number.
    is_infinite = magnitude == format.infinity_code
    if format.specials is Specials.NAN_NEGATIVE_ZERO:
        is_nan = codes == format.nan_code
    else:
        is_nan = (magnitude > format.max_code) & ~is_infinite

    # 3. A subnormal has the exponent of field 1 and no hidden bit: it is not normalised. Zero has no exponent.
    hidden = (field > 0) | (not format.has_subnormals)
    significand = np.where(hidden, fraction + (1 << format.fraction_bits), fraction)
    exponents = np.maximum(field - format.bias, format.min_exponent)
    exponents = np.where((significand == 0) | is_infinite | is_nan, np.int32(ABSENT), exponents)

    # 4. Exact: at most 11 significant bits, and every format here lies within float32 with its subnormals.
    values = np.ldexp(significand.astype(np.float32), exponents - format.fraction_bits)
    values = np.where(is_infinite, INFINITY, values)
    values = np.where(is_nan, NAN, np.where(codes & format.sign_mask, -values, values))
    exponents = exponents.astype(np.int16)
    values.flags.writeable = exponents.flags.writeable = False
    return values, exponents


def decode_table(format: Format) -> NDArray[np.float32]:
    """Code -> float32, of a format of at most 16 bits."""
    return _decoded(format)[0]


def exponent_table(format: Format) -> NDArray[np.int16]:
    """Code -> exponent, as the format writes it [OP-1], of a format of at most 16 bits; `ABSENT` of no number or 0."""
    return _decoded(format)[1]


def canonical_nan(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x` with every NaN replaced by 0x7fffffff [SPEC-1]."""
    return np.where(np.isnan(x), NAN, x)


def as_float32(x: ArrayLike, call: str) -> NDArray[np.float32]:
    """A float32, bfloat16 or float16 array as float32, which is exact; OperandError for others.

    Float64 is among these, since it would be rounded twice.
    """
    array, format = typed_array(x, (FLOAT32, BFLOAT16, FLOAT16), call)
    return array if format == FLOAT32 else np.asarray(decode_table(format)[codes_of(array, format)])
