"""Scales of an operand `[rows, K]`: amax and the scale rule."""

import struct

import jax
import jax.numpy as jnp

from f8emu.spec import (
    FLOAT32,
    MAX_MARGIN,
    Format,
    Granularity,
    OperandError,
    ScaleRule,
    Scales,
    SpecError,
    float8_format,
    granularity_by_name,
)
from f8ref.jax import softfloat
from f8ref.jax.codec import codes, dtype_format, float32_bits, high_precision_format
from f8ref.jax.compiling import program


def amax(x: jax.Array, granularity: Granularity | str = Granularity.TENSORWISE) -> jax.Array:
    """Largest magnitude of each group of elements that share a scale; NaN where the group holds one, 0 for no elements.

    Shapes: x [rows, K] -> `granularity.scale_shape(rows, K)`, float32.
    Exactness: exact, on integers: XLA's float maximum of 4096 elements and more loses NaN, and its comparisons flush
    subnormals (NUMERICS 6).

    Raises:
        OperandError: x is not a matrix of float32, bfloat16 or float16.
        SpecError: an unknown granularity.
    """
    granularity = granularity_by_name("amax", granularity)
    source = high_precision_format(x, "amax", "x")
    require_matrix(x, "amax", "x")
    return _amax(jnp.asarray(x), source, granularity)


def scale_from_amax(amax: jax.Array, format: Format | str, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """Scales of a format from amaxes: `inv_scale = max * 2^-margin / max(amax, amax_floor)`, `scale = 1 / inv_scale`.

    Zero, infinite and NaN amaxes as `ScaleRule` says.

    Shapes: any; both results have the shape of `amax`.
    Exactness: both quotients are rounded once to float32, by integer long division: XLA rewrites a division to a
    multiplication by a reciprocal, and divides approximately on a GPU (NUMERICS 6).

    Raises:
        OperandError: amax is not float32.
        SpecError: margin is not in 0..MAX_MARGIN, or format is none of FLOAT8.
    """
    target = float8_format("scale_from_amax", format)
    dtype_format(amax, "scale_from_amax", "amax", (FLOAT32.name,))
    if not 0 <= margin <= MAX_MARGIN:
        raise SpecError(f"scale_from_amax: margin must be in 0..{MAX_MARGIN}; got {margin}")
    return _scale_from_amax(jnp.asarray(amax), target, rule, margin)


@program()
def reciprocal(inv_scale: jax.Array) -> jax.Array:
    """`1 / inv_scale`, correctly rounded: the scale that belongs to it."""
    return softfloat.from_bits(softfloat.divide(jnp.uint32(softfloat.ONE), softfloat.bits(inv_scale)))


def require_matrix(x: jax.Array, call: str, name: str) -> tuple[int, int]:
    """The two extents of a matrix."""
    if len(x.shape) != 2:
        raise OperandError(f"{call}: {name} must be a matrix [rows, K]; got shape {tuple(x.shape)}. Reshape it first")
    return x.shape[0], x.shape[1]


def require_scales(scale: jax.Array, x: jax.Array, granularity: Granularity, call: str, name: str, of: str) -> None:
    """Refuse scales that are not float32 of the shape that the granularity gives for `x`."""
    rows, k = require_matrix(x, call, of)
    dtype_format(scale, call, name, (FLOAT32.name,))
    expected = granularity.scale_shape(rows, k)
    is_one = granularity is Granularity.TENSORWISE and scale.size == 1
    if tuple(scale.shape) != expected and not is_one:
        raise OperandError(
            f"{call}: {name} must have shape {expected} for {granularity.value} and {of} of shape "
            f"{(rows, k)}; got {tuple(scale.shape)}. amax with the same granularity gives that shape"
        )


def spread(scale: jax.Array, granularity: Granularity, rows: int, k: int) -> jax.Array:
    """The scale of every element, broadcastable to [rows, k], from scales of `granularity.scale_shape(rows, k)`."""
    if not granularity.is_blockwise:
        return scale.reshape(granularity.scale_shape(rows, k))
    block_rows, block_k = granularity.block
    for axis, (block, extent) in enumerate(((block_rows, rows), (block_k, k))):
        scale = jnp.repeat(scale, block, axis=axis)  # pyright: ignore[reportArgumentType] (a block has two extents)
        scale = scale[:extent] if axis == 0 else scale[:, :extent]
    return scale


@program("source", "granularity")
def _amax(x: jax.Array, source: Format, granularity: Granularity) -> jax.Array:
    rows, k = x.shape
    groups_m, groups_k = granularity.scale_shape(rows, k)
    block_m, block_k = granularity.block
    block_m, block_k = block_m or rows, block_k or k
    magnitude = float32_bits(codes(x, source), source) & 0x7FFFFFFF
    padding = ((0, groups_m * block_m - rows), (0, groups_k * block_k - k))
    blocks = jnp.pad(magnitude, padding).reshape(groups_m, block_m, groups_k, block_k)
    # Every NaN decodes to 0x7fffffff, the largest magnitude, so the integer maximum propagates it as it is.
    return softfloat.from_bits(jnp.max(blocks, axis=(1, 3), initial=0))


@program("target", "rule", "margin")
def _scale_from_amax(amax: jax.Array, target: Format, rule: ScaleRule, margin: int) -> Scales:
    numerator = target.max * 2.0**-margin
    bits = softfloat.bits(amax)
    inv_scale = softfloat.divide(jnp.uint32(_float32_bits(numerator)), bits)
    # The floor is a float64 and no float32: compare with the first float32 that is not below it.
    floored = jnp.uint32(_float32_bits(numerator / rule.amax_floor))
    magnitude = bits & 0x7FFFFFFF
    is_low = (magnitude < _first_float32_from(rule.amax_floor)) | (bits != magnitude)
    inv_scale = jnp.where(is_low & (magnitude <= softfloat.INFINITY), floored, inv_scale)
    if rule.power_of_two:
        # The mask alone would make an infinity of a NaN.
        exponent = inv_scale & softfloat.INFINITY
        inv_scale = jnp.where(inv_scale > softfloat.INFINITY, inv_scale, exponent)
    return Scales(softfloat.from_bits(inv_scale), reciprocal(softfloat.from_bits(inv_scale)))


def _float32_bits(value: float) -> int:
    """Bit pattern of a float64 rounded to float32."""
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return softfloat.INFINITY


def _first_float32_from(value: float) -> int:
    """Bit pattern of the smallest float32 that is not below a positive float64."""
    code = _float32_bits(value)
    (rounded,) = struct.unpack("<f", code.to_bytes(4, "little"))
    return code if rounded >= value else code + 1
