"""Between values and codes: decode, cast, quantize, dequantize."""

import functools

import jax
import jax.numpy as jnp

from f8emu.spec import FLOAT8, FLOAT32, FORMATS, Format, Granularity, Overflow, float8_format, granularity_by_name
from f8ref.jax import softfloat
from f8ref.jax.codec import codes, dtype_format, float32_bits, high_precision_format, round_to_code, typed
from f8ref.jax.scale import require_scales, spread

_DECODABLE = tuple(f.name for f in FORMATS.values() if f is not FLOAT32)


def decode(x: jax.Array) -> jax.Array:
    """The float32 value of every element: `(-1)^sign * significand * 2^(exponent - fraction_bits)` [OP-1].

    NaN becomes 0x7fffffff; an infinity stays one.

    Shapes: any.
    Exactness: exact; every finite value of these formats is a float32.

    Raises:
        OperandError: the dtype is not a float8 format, float16 or bfloat16.
    """
    format = dtype_format(x, "decode", "x", _DECODABLE)
    return _decode(jnp.asarray(x), format)


def cast(x: jax.Array, format: Format | str, *, overflow: Overflow = Overflow.SATURATE) -> jax.Array:
    """Every element rounded to the nearest code of `format`, ties to the even one.

    NaN gives `format.nan_code`, whatever its sign. Beyond the largest finite value, infinities included: `SATURATE`
    gives `+-max`; `NONFINITE` gives `+-inf` where the format has it, NaN where not. The sign of a zero is kept where
    the format has a -0.

    Shapes: any.
    Exactness: all bfloat16 and float16 inputs, and for the formats that Hopper multiplies all float32 inputs, equal
    ml_dtypes and torch once these are given clamped values (NUMERICS 6); no dependence on how XLA treats subnormals.

    Raises:
        OperandError: x is not float32, bfloat16 or float16.
        SpecError: format is not in FLOAT8.
    """
    target = float8_format("cast", format)
    source = high_precision_format(x, "cast", "x")
    return _cast(jnp.asarray(x), source, target, Overflow(overflow))


def quantize(
    x: jax.Array, inv_scale: jax.Array, format: Format | str, granularity: Granularity | str = Granularity.TENSORWISE
) -> jax.Array:
    """Codes of `cast(float32(x) * inv_scale)`, saturating; NaN stays NaN.

    Shapes: x [rows, K], inv_scale `granularity.scale_shape(rows, K)` -> [rows, K], of the format's dtype.
    Exactness: one float32 product rounded to nearest even, subnormals included, then one rounding to the format.

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: a format that is not in FLOAT8, or an unknown granularity.
    """
    target = float8_format("quantize", format)
    granularity = granularity_by_name("quantize", granularity)
    source = high_precision_format(x, "quantize", "x")
    require_scales(inv_scale, x, granularity, "quantize", "inv_scale", "x")
    return _quantize(jnp.asarray(x), jnp.asarray(inv_scale), granularity, source, target)


def dequantize(
    codes: jax.Array, scale: jax.Array, granularity: Granularity | str = Granularity.TENSORWISE
) -> jax.Array:
    """`decode(codes) * scale`, one float32 product rounded to nearest even, subnormals included.

    Shapes: codes [rows, K], scale `granularity.scale_shape(rows, K)` -> [rows, K], float32.

    Raises:
        OperandError: wrong dtype or shape.
        SpecError: an unknown granularity.
    """
    granularity = granularity_by_name("dequantize", granularity)
    source = dtype_format(codes, "dequantize", "codes", tuple(f.name for f in FLOAT8))
    require_scales(scale, codes, granularity, "dequantize", "scale", "codes")
    return _dequantize(jnp.asarray(codes), jnp.asarray(scale), granularity, source)


@functools.partial(jax.jit, static_argnames="format")
def _decode(x: jax.Array, format: Format) -> jax.Array:
    return softfloat.from_bits(float32_bits(codes(x, format), format))


@functools.partial(jax.jit, static_argnames=("source", "target", "overflow"))
def _cast(x: jax.Array, source: Format, target: Format, overflow: Overflow) -> jax.Array:
    return typed(round_to_code(float32_bits(codes(x, source), source), target, overflow), target)


@functools.partial(jax.jit, static_argnames=("granularity", "source", "target"))
def _quantize(
    x: jax.Array, inv_scale: jax.Array, granularity: Granularity, source: Format, target: Format
) -> jax.Array:
    factor = spread(inv_scale, granularity, *x.shape)
    product = softfloat.multiply(float32_bits(codes(x, source), source), softfloat.bits(factor))
    return typed(round_to_code(product, target, Overflow.SATURATE), target)


@functools.partial(jax.jit, static_argnames=("granularity", "source"))
def _dequantize(x: jax.Array, scale: jax.Array, granularity: Granularity, source: Format) -> jax.Array:
    factor = spread(scale, granularity, *x.shape)
    return softfloat.from_bits(softfloat.multiply(float32_bits(codes(x, source), source), softfloat.bits(factor)))
