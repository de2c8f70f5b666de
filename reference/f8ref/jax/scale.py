"""Scales of an operand `[rows, K]`: amax and the scale rule."""

import functools
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
from f8ref.jax.codec import dtype_format, float32_bits, high_precision_format, narrow_codes
from f8ref.jax.tiles import padded


def amax(x: jax.Array, granularity: Granularity | str = Granularity.TENSORWISE) -> jax.Array:
    """Largest magnitude of each group of elements that share a scale; NaN if the group holds one, 0 for an empty group.

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

    Zero, infinite and NaN amaxes are treated as `ScaleRule` says.

    Shapes: any; both results have the shape of `amax`.
    Exactness: both quotients are rounded once to float32, by integer long division: XLA rewrites a division to a
    multiplication by a reciprocal, and divides approximately on a GPU (NUMERICS 6).

    Raises:
        OperandError: amax is not float32.
        SpecError: margin is not in 0..MAX_MARGIN, or format is not in FLOAT8.
    """
    target = float8_format("scale_from_amax", format)
    dtype_format(amax, "scale_from_amax", "amax", (FLOAT32.name,))
    if not 0 <= margin <= MAX_MARGIN:
        raise SpecError(f"scale_from_amax: margin must be in 0..{MAX_MARGIN}; got {margin}")
    return scales(jnp.asarray(amax), numbers_of(target, rule, margin))


@jax.jit
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
    shape = granularity.scale_shape(rows, k)
    if not granularity.is_blockwise:
        return scale.reshape(shape)
    for axis, (block, extent) in enumerate(zip(granularity.block, (rows, k), strict=True)):
        scale = jnp.repeat(scale, block or extent, axis=axis)
        scale = jax.lax.slice_in_dim(scale, 0, extent, axis=axis)
    return scale


@functools.partial(jax.jit, static_argnames=("source", "granularity"))
def _amax(x: jax.Array, source: Format, granularity: Granularity) -> jax.Array:
    groups_m, groups_k = granularity.scale_shape(*x.shape)
    block_m, block_k = (size or extent for size, extent in zip(granularity.block, x.shape, strict=True))
    magnitude = narrow_codes(x, source) & source.magnitude_mask
    magnitude = padded(magnitude, groups_m * block_m, groups_k * block_k)
    # Codes without a sign are ordered as what they mean, every NaN beyond infinity: the integer maximum propagates one.
    largest = jnp.max(magnitude.reshape(groups_m, block_m, groups_k, block_k), axis=(1, 3), initial=0)
    return softfloat.from_bits(float32_bits(largest.astype(jnp.uint32), source))


class Numbers(NamedTuple):
    """What a rule makes of amaxes."""

    numerator: np.uint32
    floored: np.uint32
    """The inv_scale of an amax below the floor."""
    first: np.uint32
    """The floor is a float64 and no float32: the first float32 that is not below it."""
    kept: np.uint32
    """The bits of an inv_scale that are kept."""


def numbers_of(target: Format, rule: ScaleRule, margin: int) -> Numbers:
    """The numbers of a format's scales, as float32 bit patterns."""
    numerator = target.max * 2.0**-margin
    return Numbers(
        numerator=np.uint32(_float32_bits(numerator)),
        floored=np.uint32(_float32_bits(numerator / rule.amax_floor)),
        first=np.uint32(_first_float32_from(rule.amax_floor)),
        kept=np.uint32(softfloat.INFINITY if rule.power_of_two else 0xFFFFFFFF),
    )


@jax.jit
def scales(amax: jax.Array, numbers: Numbers) -> Scales:
    """`scale_from_amax` by the numbers of a rule."""
    bits = softfloat.bits(amax)
    inv_scale = softfloat.divide(jnp.uint32(numbers.numerator), bits)
    magnitude = bits & 0x7FFFFFFF
    is_low = (magnitude < numbers.first) | (bits != magnitude)
    inv_scale = jnp.where(is_low & (magnitude <= softfloat.INFINITY), numbers.floored, inv_scale)
    # The mask alone would make an infinity of a NaN.
    inv_scale = jnp.where(inv_scale > softfloat.INFINITY, inv_scale, inv_scale & numbers.kept)
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
