"""Formats in JAX: as dtypes, with the first checks of arguments, and as bit patterns, which are integers.

XLA may keep a bfloat16 value in float32, flush subnormals, and lose NaN in a maximum (NUMERICS 6); integers it computes
as they are. So what decides a bit goes through here: values are read as the bits that are stored, magnitudes are
compared as integers, and every NaN is replaced by one. The checks raise OperandError for a wrong array, SpecError for
an unknown format.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from f8emu.spec import formats
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import F8Error, OperandError, SpecError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, FORMATS, HIGH_PRECISION, Format, Specials
from f8emu.spec.names import FormatName

FormatLike = Format | FormatName | np.dtype[Any] | type[Any]
"""A format, its name, or its dtype."""
CHIP = HOPPER
"""The chip whose GEMMs run or are emulated where no other is named."""
FLOAT8_NAMES: tuple[str, ...] = tuple(format.name for format in FLOAT8)
HIGH_PRECISION_NAMES: tuple[str, ...] = tuple(format.name for format in HIGH_PRECISION)
NAN = 0x7FFFFFFF
"""The one float32 NaN that f8emu emits [SPEC-1]."""
INFINITY = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
FRACTION = 0x007FFFFF
HIDDEN = 0x00800000


def _named(format: Any) -> Any:
    if isinstance(format, Format | str):
        return format
    try:
        return jnp.dtype(format).name
    except TypeError:
        return format


def float8_format(call: str, format: Any) -> Format:
    """The float8 format that `call` casts to; `format` is a Format, its name or its dtype."""
    return formats.float8_format(call, _named(format))


def output_format(
    call: str, out_dtype: Any, *, name: str = "out_dtype", refusal: type[F8Error] = UnsupportedError
) -> Format:
    """The format of an output, given as the argument `name`; raises `refusal` for one that no GEMM gives."""
    known, fmt = ", ".join(HIGH_PRECISION_NAMES), _named(out_dtype)
    if isinstance(fmt, str):
        if fmt not in FORMATS:
            raise SpecError(f"{call}: {name} must be one of {known}; got {fmt}; convert the result")
        fmt = FORMATS[fmt]
    if not isinstance(fmt, Format):
        raise OperandError(f"{call}: {name} must be a dtype, a Format or its name; got {out_dtype!r}")
    if fmt not in HIGH_PRECISION:
        raise refusal(
            f"{call}: {name} must be one of {known}; got {fmt}; quantize the result: float8 output is not modelled"
        )
    return fmt


def format_of(call: str, name: str, x: Any, allowed: tuple[str, ...] = HIGH_PRECISION_NAMES) -> Format:
    """The format of an array of JAX or numpy, one of `allowed`."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        raise OperandError(
            f"{call}: {name} must be a JAX array; got {type(x).__name__}; convert it first: jnp.asarray({name})"
        )
    if str(dtype) not in allowed:
        raise OperandError(f"{call}: {name} must be one of {', '.join(allowed)}; got {dtype}; convert it first")
    return FORMATS[str(dtype)]


def require_known_sizes(call: str, *operands: Any) -> None:
    """Raise UnsupportedError for the symbolic sizes of `jax.export`."""
    if any(is_symbolic_dim(size) for x in operands for size in x.shape):
        raise UnsupportedError(
            f"{call}: sizes decide how a GEMM is tiled and split along K, so jax.export must know them; got "
            f"{', '.join(str(x.shape) for x in operands)}; export a program for each batch size, padded with rows of "
            "zeros, or keep this layer in jax.lax.dot_general"
        )


def rows_of(call: str, x: Any, *, name: str = "x") -> tuple[int, int]:
    """Rows and K of `x` [..., K]: all leading dimensions count as rows."""
    if len(x.shape) < 2:
        raise OperandError(
            f"{call}: {name} must have 2 dimensions or more, [..., K]; got shape {list(x.shape)}; "
            f"one row is {name}.reshape(1, -1)"
        )
    return math.prod(x.shape[:-1]), x.shape[-1]


def bits_of(x: jax.Array) -> jax.Array:
    """The bit patterns of `x`, as unsigned integers of its width.

    Those of float8 behind a barrier: a constant that is transposed, and then goes into a program within, XLA would fold
    as if its layout did not matter (JAX 0.10, on a CPU), which puts codes into the wrong places.
    """
    x = lax.optimization_barrier(x) if x.dtype.itemsize == 1 else x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def float32_of(bits: jax.Array) -> jax.Array:
    """The float32 values with these uint32 bit patterns."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def typed(codes: jax.Array, format: Format) -> jax.Array:
    """The values of a format with these bit patterns, given as any unsigned integers."""
    return lax.bitcast_convert_type(codes.astype(jnp.dtype(f"uint{format.bits}")), jnp.dtype(format.name))


def sign_of(bits: jax.Array) -> jax.Array:
    """The sign bits alone. Shifts: JAX reads the mask as an int32, for which it is too large."""
    return (bits >> 31) << 31


def one_nan(bits: jax.Array) -> jax.Array:
    """Float32 bit patterns with every NaN replaced by the canonical NaN [SPEC-1]."""
    return jnp.where(is_nan(bits), jnp.uint32(NAN), bits)


def is_nan(bits: jax.Array) -> jax.Array:
    """Whether each float32 bit pattern is a NaN."""
    return (bits & MAGNITUDE) > INFINITY


def float32_bits(codes: jax.Array, format: Format) -> jax.Array:
    """Float32 bit patterns of the values that codes of a format have; every NaN is 0x7fffffff.

    Shapes: any.
    Exactness: exact; every value of these formats is a float32.
    """
    codes = codes.astype(jnp.uint32)
    if format == FLOAT32:
        return one_nan(codes)
    if format == BFLOAT16:
        return one_nan(codes << 16)
    magnitude = codes & format.magnitude_mask
    shift, rebias = FLOAT32.fraction_bits - format.fraction_bits, FLOAT32.bias - format.bias
    bits = (magnitude << shift) + (rebias << FLOAT32.fraction_bits)
    if not format.has_subnormals:  # E8M0: field 0 is 2^-127, a subnormal of float32
        bits = jnp.where(magnitude == 0, jnp.uint32(HIDDEN >> 1), bits)
    else:
        # A subnormal is `magnitude` times the smallest one. The integer is exact as a float32, and its exponent moves
        # by a constant; 0 becomes a negative exponent and is put right.
        smallest = format.min_exponent - format.fraction_bits
        normal = bits_of(magnitude.astype(jnp.int32).astype(jnp.float32)) - jnp.uint32(-smallest << 23)
        bits = jnp.where(magnitude <= format.fraction_mask, jnp.where(magnitude == 0, jnp.uint32(0), normal), bits)
    if format.infinity_code is not None:
        bits = jnp.where(magnitude == format.infinity_code, jnp.uint32(INFINITY), bits)
    if format.signed:
        bits = bits | ((codes >> (format.bits - 1)) << 31)
    if format.specials is Specials.NAN_NEGATIVE_ZERO:
        nan = codes == format.nan_code
    else:
        nan = magnitude > (format.max_code if format.infinity_code is None else format.infinity_code)
    return jnp.where(nan, jnp.uint32(NAN), bits)


def value_bits(x: jax.Array) -> jax.Array:
    """Float32 bit patterns of float32, bfloat16 or float16 values as they are stored; a NaN may be any.

    A conversion to float32 would let XLA skip the rounding of what was computed before it in float32
    (`xla_allow_excess_precision`, on unless turned off).
    """
    if x.dtype == jnp.float16:
        return float32_bits(bits_of(x), FLOAT16)
    bits = bits_of(x).astype(jnp.uint32)
    return bits if x.dtype == jnp.float32 else bits << 16


def rounded(exp: jax.Array, significand: jax.Array, width: int, *, is_normal: bool = False) -> jax.Array:
    """Magnitude bits of the float32 nearest to `significand * 2^(exp - width + 1)`, ties to even.

    `significand` has exactly `width` bits, 26 to 28, of which the last may be sticky. Subnormal results are rounded
    where they end, and what rounds beyond the largest float32 is infinity; `is_normal` says that there are none.
    """
    # 1. 24 bits stay, and one less for each exponent below the normal range.
    drop, unit = width - 24, significand.dtype.type(1)
    if not is_normal:
        drop = (drop + jnp.clip(-126 - exp, 0, 25)).astype(significand.dtype)
        exp = jnp.clip(exp, -126, 128)
    half = unit << (drop - 1)
    kept = (significand + (half - 1) + ((significand >> drop) & 1)) >> drop
    # 2. The hidden bit, or a carry into it, adds one to the exponent field.
    bits = ((exp + 126).astype(jnp.uint32) << 23) + kept
    return bits if is_normal else jnp.minimum(bits, jnp.uint32(INFINITY))


def unpacked(code: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(exponent, significand in [2^23, 2^24)) of a finite float32 that is not 0; anything else gives harmless ones."""
    field, fraction = (code >> 23) & 0xFF, code & FRACTION
    shift = jnp.where(field == 0, jnp.minimum(lax.clz(fraction), jnp.uint32(31)) - 8, jnp.uint32(0))
    exp = jnp.maximum(field, 1).astype(jnp.int32) - shift.astype(jnp.int32) - FLOAT32.bias
    return exp, (fraction << shift) | HIDDEN


def magnitudes(x: jax.Array) -> jax.Array:
    """The bit patterns of `x` without the sign, in its own width.

    They are ordered like the magnitudes, with infinity and NaN above the rest: an integer maximum keeps NaN.
    """
    bits = bits_of(x)
    return bits & jnp.array((1 << (8 * x.dtype.itemsize - 1)) - 1, bits.dtype)


def amax_of(magnitude: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Magnitudes of a high-precision dtype as float32, every NaN as the canonical one [SPEC-1]."""
    return float32_of(one_nan(value_bits(lax.bitcast_convert_type(magnitude, dtype))))
