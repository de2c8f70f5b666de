"""Between codes and float32 bit patterns, for any format of the spec: integer arithmetic only."""

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import FLOAT32, FORMATS, Format, OperandError, Specials
from f8ref.jax import softfloat


def dtype_format(x: object, call: str, name: str, allowed: tuple[str, ...]) -> Format:
    """The format of an array's dtype; OperandError if it is not among `allowed`."""
    dtype = str(getattr(x, "dtype", f"a {type(x).__name__} without a dtype"))
    if dtype not in allowed:
        raise OperandError(
            f"{call}: {name} must be an array of {', '.join(allowed)}; got {dtype}. "
            f"Convert it first, for example with jnp.asarray({name}).astype(jnp.{allowed[0]})"
        )
    return FORMATS[dtype]


def narrow_codes(x: jax.Array, format: Format) -> jax.Array:
    """The bit patterns of a typed array, as unsigned integers of the format's own width.

    Behind a barrier: a constant that is transposed, and then goes into a program within, XLA would fold as if its
    layout did not matter (JAX 0.10, on a CPU), which puts codes into the wrong places.
    """
    return lax.bitcast_convert_type(lax.optimization_barrier(x), jnp.dtype(f"uint{format.bits}"))


def codes(x: jax.Array, format: Format) -> jax.Array:
    """The bit patterns of a typed array as uint32."""
    return narrow_codes(x, format).astype(jnp.uint32)


def typed(code: jax.Array, format: Format) -> jax.Array:
    """The typed array with these bit patterns, given as any unsigned integers."""
    return lax.bitcast_convert_type(code.astype(jnp.dtype(f"uint{format.bits}")), jnp.dtype(format.name))


def float32_bits(code: jax.Array, format: Format) -> jax.Array:
    """Float32 bit pattern of the value of each code; NaN becomes 0x7fffffff."""
    # 1. The fraction moves up, and the exponent gets float32's bias.
    sign = code >> (format.bits - 1) << 31
    magnitude = code & format.magnitude_mask
    shift = FLOAT32.fraction_bits - format.fraction_bits
    rebias = FLOAT32.bias - format.bias
    wide = (magnitude << shift) + (rebias << FLOAT32.fraction_bits)
    if rebias:
        # A subnormal of a narrower exponent range is normal in float32: move its leading bit to the hidden place.
        zeros = jnp.minimum(lax.clz(magnitude) - (31 - format.fraction_bits), jnp.uint32(format.fraction_bits))
        normalised = (magnitude << (shift + zeros)) + ((rebias - zeros) << FLOAT32.fraction_bits)
        wide = jnp.where(magnitude <= format.fraction_mask, normalised, wide)
        wide = jnp.where(magnitude == 0, jnp.uint32(0), wide)
    # 2. Infinity, and every NaN as one [SPEC-1].
    if format.infinity_code is not None:
        wide = jnp.where(magnitude == format.infinity_code, jnp.uint32(softfloat.INFINITY), wide)
    return jnp.where(is_nan(code, format), jnp.uint32(softfloat.NAN), sign | wide)


def is_nan(code: jax.Array, format: Format) -> jax.Array:
    """Whether each code is NaN."""
    if format.specials is Specials.NAN_NEGATIVE_ZERO:
        return code == format.nan_code
    largest = format.infinity_code if format.infinity_code is not None else format.max_code
    return (code & format.magnitude_mask) > largest


def is_finite(code: jax.Array, format: Format) -> jax.Array:
    """Whether each code is a finite number."""
    if format.specials is Specials.NAN_NEGATIVE_ZERO:
        return ~is_nan(code, format)
    return (code & format.magnitude_mask) <= format.max_code


def round_to_code(bits: jax.Array, format: Format) -> jax.Array:
    """Codes (uint32) of float32 bit patterns rounded to nearest even; NaN becomes `format.nan_code`.

    `max_code` is the limit after rounding: what rounds beyond it is infinite, or NaN in a format without infinities.
    """
    if format == FLOAT32:
        return jnp.where((bits & 0x7FFFFFFF) > softfloat.INFINITY, jnp.uint32(format.nan_code), bits)
    sign = (bits >> 31) << (format.bits - 1)
    magnitude = bits & 0x7FFFFFFF

    # 1. Significand, and exponent field in the target format (which may be zero or negative).
    field_32 = (magnitude >> FLOAT32.fraction_bits).astype(jnp.int32)
    hidden = (field_32 != 0).astype(jnp.uint32) << FLOAT32.fraction_bits
    sig = (magnitude & FLOAT32.fraction_mask) | hidden
    field = jnp.maximum(field_32, 1) + (format.bias - FLOAT32.bias)

    # 2. Cut to the fraction, one place more for each exponent below the normal range, to nearest even. From 25 places
    #    on nothing of a 24-bit significand is left, and less than half of the last place was cut.
    places = FLOAT32.fraction_bits - format.fraction_bits + jnp.maximum(1 - field, 0)
    places = jnp.minimum(places, 25).astype(jnp.uint32)
    half = jnp.uint32(1) << (places - 1)
    rounded = (sig + (half - 1) + ((sig >> places) & 1)) >> places

    # 3. The hidden bit, or a carry into it, adds one to the exponent field.
    field = (jnp.maximum(field, 1) - 1).astype(jnp.uint32)
    code = (field << format.fraction_bits) + rounded

    # 4. Overflow.
    nan = magnitude > softfloat.INFINITY
    if format.infinity_code is not None:
        code = jnp.minimum(code, format.infinity_code)
    else:
        nan = nan | (code > format.max_code)

    # 5. The sign, which NaN does not keep, nor a zero that has none.
    signed = sign | code
    if not format.has_negative_zero:
        signed = jnp.where(code == 0, jnp.uint32(0), signed)
    return jnp.where(nan, jnp.uint32(format.nan_code), signed)
