"""Conversions between high-precision values and float8 codes: decode, cast, quantize, dequantize.

Operations that XLA fuses with their neighbours. The verbs refuse to be differentiated: codes have no gradient.

The product of a value and its inv_scale is the one float32 operation that decides bits. It is safe on every backend:
- The value is read from its stored bits, so that no rounding before it is skipped (`bits.value_bits`).
- XLA flushes subnormal factors to zero on a CPU. `_scaled` hands it none.
- A flushed product has the code of the exact one: it is below 2^-126, and what is below 2^-18 rounds to zero in every
  format; flushing keeps the sign. No sum follows that could become a fused multiply-add.
"""

from __future__ import annotations  # short signatures in `help`

import functools

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.jax import bits
from f8emu.jax.bits import FLOAT8_NAMES, FormatLike, float8_format, format_of, output_format
from f8emu.jax.compiling import without_gradient
from f8emu.jax.scale import Block, checked_scales, spread
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import BFLOAT16, E8M0FNU, FLOAT16, FLOAT32, Format, Overflow, overflow_by_name
from f8emu.spec.names import GranularityName, OverflowName
from f8emu.spec.scaling import Granularity

_DECODABLE = (*FLOAT8_NAMES, E8M0FNU.name, BFLOAT16.name, FLOAT16.name)


def decode(x: jax.Array) -> jax.Array:
    """The values of float8, bfloat16 or float16 codes as float32.

    Shapes:
        any -> float32 of the same shape.

    Exactness: exact; every NaN becomes 0x7fffffff, because XLA's payloads differ between formats.

    Raises:
        OperandError: wrong dtype.
        UnsupportedError: a derivative.
    """
    source = format_of("decode", "x", x, _DECODABLE)
    return _decode(without_gradient("decode", jnp.asarray(x)), source)


def cast(x: jax.Array, format: FormatLike, *, overflow: Overflow | OverflowName = Overflow.SATURATE) -> jax.Array:
    """Values rounded to the nearest float8, ties to even.

    SATURATE gives `+-max` for everything that rounds beyond it, infinities included. NONFINITE gives `+-inf` if the
    format has it, and NaN if not. NaN becomes `format.nan_code` under both.

    Shapes:
        float32, bfloat16 or float16 of any shape -> the float8 dtype, same shape.

    Exactness: bit-exact to `f8ref.numpy.cast`: every test run compares all 65,536 bfloat16 and float16 inputs.

    Raises:
        OperandError: wrong dtype (float64 would be rounded twice).
        SpecError: unknown format.
        UnsupportedError: a derivative.
    """
    format_of("cast", "x", x)
    target = float8_format("cast", format)
    return _cast(without_gradient("cast", jnp.asarray(x)), target, overflow_by_name("cast", overflow))


def quantize(
    x: jax.Array,
    inv_scale: jax.Array | float,
    format: FormatLike,
    granularity: Granularity | GranularityName = Granularity.TENSORWISE,
) -> jax.Array:
    """`cast(float32(x) * inv_scale, SATURATE)`, one rounded float32 product per element.

    Shapes:
        x [..., K], inv_scale float32 `granularity.scale_shape(rows, K)`, where rows is the product of the leading
        dimensions; a number that float32 holds is a tensorwise inv_scale -> float8 of x's shape.

    Exactness: bit-exact to `f8ref.numpy.quantize`, for every float32 inv_scale.

    Raises:
        OperandError: wrong dtype or rank, or scales of another shape.
        SpecError: unknown format or granularity.
        UnsupportedError: a derivative.
    """
    format_of("quantize", "x", x)
    target = float8_format("quantize", format)
    granularity, matrix, factors = checked_scales("quantize", x, "x", inv_scale, "inv_scale", granularity)
    return quantize_blocks(matrix, factors, target, granularity.block).reshape(x.shape)


def dequantize(
    codes: jax.Array,
    scale: jax.Array | float,
    granularity: Granularity | GranularityName = Granularity.TENSORWISE,
    *,
    out_dtype: FormatLike = FLOAT32,
) -> jax.Array:
    """`decode(codes) * scale`, in `out_dtype`.

    Shapes:
        codes float8 [..., K], scale as the inv_scale of `quantize`, or E8M0 -> out_dtype of the codes' shape.

    Exactness: one rounded float32 product per element, rounded on integers, subnormals included; NaN is 0x7fffffff.
    For bfloat16 and float16 the product is rounded again, to nearest, ties to even.

    Raises:
        OperandError, SpecError, UnsupportedError: as for `quantize`.
    """
    source = format_of("dequantize", "codes", codes, FLOAT8_NAMES)
    target = output_format("dequantize", out_dtype, refusal=OperandError)
    if not isinstance(scale, int | float) and str(getattr(scale, "dtype", "")) == E8M0FNU.name:
        scale = decode(scale)
    granularity, matrix, factors = checked_scales("dequantize", codes, "codes", scale, "scale", granularity)
    return _dequantize(matrix, factors, source, target, granularity.block).reshape(codes.shape)


def encode(values: jax.Array, format: Format, overflow: Overflow = Overflow.SATURATE) -> jax.Array:
    """Codes (uint8) of float32 values; the conversion itself is XLA's."""
    # 1. Within +-max all versions of XLA round alike. Step 3 sets the code of NaN, whatever the clamp makes of it.
    clamped = lax.clamp(jnp.float32(-format.max), values, jnp.float32(format.max))
    codes = bits.bits_of(clamped.astype(jnp.dtype(format.name)))
    value_bits = bits.bits_of(values)
    # 2. Overflow: values more than half a unit in the last place above max round beyond it. The tie itself goes to the
    #    even code: max, or the one after it.
    if overflow is Overflow.NONFINITE:
        tie = format.max + 2.0 ** (format.max_exponent - format.fraction_bits - 1)
        least = bits.bits_of(jnp.float32(tie)) + (0 if format.max_code & 1 else 1)
        beyond = (value_bits & bits.MAGNITUDE) >= least
        if format.infinity_code is None:
            codes = jnp.where(beyond, jnp.uint8(format.nan_code), codes)
        else:
            codes = jnp.where(beyond, jnp.uint8(format.infinity_code) | (codes & format.sign_mask), codes)
    # 3. One NaN code: XLA's differs between backends.
    return jnp.where(bits.is_nan(value_bits), jnp.uint8(format.nan_code), codes)


def scaled(x: jax.Array, inv_scale: jax.Array) -> jax.Array:
    """`float32(x) * inv_scale` rounded once, whether or not the backend flushes subnormals; see the module.

    A product below 2^-126 may be a zero of its sign; every other one is exact to IEEE 754, a NaN may be any.

    Shapes:
        x [M, N] of a high-precision dtype, inv_scale float32 that broadcasts against it -> float32 [M, N].
    """
    codes, scale = bits.value_bits(x), bits.bits_of(inv_scale)
    # 1. A subnormal inv_scale, `fraction * 2^-149`, in two factors: 2^-100, which is exact where it matters, and a
    #    normal rest. Such products are below 4.
    sign, magnitude = bits.sign_of(scale), scale & bits.MAGNITUDE
    is_small = (magnitude < bits.HIDDEN) & (magnitude != 0)
    rest = bits.bits_of(magnitude.astype(jnp.int32).astype(jnp.float32)) - jnp.uint32(49 << 23)
    first = jnp.where(is_small, jnp.float32(2.0**-100), jnp.float32(1))
    second = bits.float32_of(jnp.where(is_small, sign | rest, scale))
    value = bits.float32_of(codes) * first
    if x.dtype == jnp.float16:  # has no subnormals of float32
        return value * second
    # 2. A subnormal value, `fraction * 2^-149`: the fraction is a normal float32, and the power of two goes to the
    #    inv_scale. Under an inv_scale below 2^64 the product rounds to zero in every format.
    fraction = bits.bits_of((codes & bits.FRACTION).astype(jnp.int32).astype(jnp.float32)) | bits.sign_of(codes)
    lowered = jnp.where(magnitude < ((64 + FLOAT32.bias) << 23), sign, scale - jnp.uint32(149 << 23))
    third = bits.float32_of(jnp.where(magnitude >= bits.INFINITY, scale, lowered))
    is_subnormal = (codes & bits.INFINITY) == 0
    return jnp.where(is_subnormal, bits.float32_of(fraction), value) * jnp.where(is_subnormal, third, second)


@functools.partial(jax.jit, static_argnames=("format", "block"))
def quantize_blocks(x: jax.Array, inv_scale: jax.Array, format: Format, block: Block) -> jax.Array:
    """`quantize` for any blocks of a matrix, one inv_scale each."""
    return bits.typed(encode(scaled(x, spread(inv_scale, block, x.shape)), format), format)


@functools.partial(jax.jit, static_argnames="format")
def _decode(x: jax.Array, format: Format) -> jax.Array:
    return bits.float32_of(bits.float32_bits(bits.bits_of(x), format))


@functools.partial(jax.jit, static_argnames=("format", "overflow"))
def _cast(x: jax.Array, format: Format, overflow: Overflow) -> jax.Array:
    return bits.typed(encode(bits.float32_of(bits.value_bits(x)), format, overflow), format)


@functools.partial(jax.jit, static_argnames=("source", "target", "block"))
def _dequantize(codes: jax.Array, scale: jax.Array, source: Format, target: Format, block: Block) -> jax.Array:
    factor = spread(scale, block, codes.shape)
    product = _product_bits(bits.float32_bits(bits.bits_of(codes), source), bits.bits_of(factor))
    if target == FLOAT32:
        return bits.float32_of(product)
    narrow = bits.bits_of(bits.float32_of(product).astype(jnp.dtype(target.name)))
    return bits.typed(jnp.where(bits.is_nan(product), jnp.asarray(target.nan_code, narrow.dtype), narrow), target)


def _product_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    # `a`, a value of float8, times `b`, rounded to nearest even; from and to bit patterns, since XLA would flush a
    # subnormal product on a CPU.
    exp_a, sig_a = bits.unpacked(a)
    exp_b, sig_b = bits.unpacked(b)
    # 1. Four bits of `a` times 24 are 27 or 28.
    product = (sig_a >> 20) * sig_b
    is_long = product >= 1 << 27
    rounded = bits.rounded(exp_a + exp_b + is_long, jnp.where(is_long, product, product << 1), 28)
    # 2. Zeros, infinities and NaN.
    mag_a, mag_b = a & bits.MAGNITUDE, b & bits.MAGNITUDE
    is_zero = (mag_a == 0) | (mag_b == 0)
    is_infinite = (mag_a == bits.INFINITY) | (mag_b == bits.INFINITY)
    rounded = jnp.where(is_zero, jnp.uint32(0), jnp.where(is_infinite, jnp.uint32(bits.INFINITY), rounded))
    nan = bits.is_nan(a) | bits.is_nan(b) | (is_zero & is_infinite)
    return jnp.where(nan, jnp.uint32(bits.NAN), rounded | bits.sign_of(a ^ b))
