"""From accumulators to the output: scales, bias and the one rounding, [EPI-1] to [EPI-4]."""

import functools

import jax
import jax.numpy as jnp

from f8emu.spec import FORMATS, Format
from f8ref.jax import softfloat
from f8ref.jax.codec import codes, float32_bits, round_to_code, typed


@functools.partial(jax.jit, static_argnames=("out", "adds_zero"))
def finish(
    total: jax.Array,
    factors: tuple[jax.Array, ...],
    bias: jax.Array | None,
    out: Format,
    *,
    adds_zero: bool = False,
) -> jax.Array:
    """`((total * factors[0]) * ...) + bias`, each operation rounded to float32, then rounded to `out` [EPI-4].

    adds_zero: makes a product of -0 +0 before the bias [EPI-1].

    Shapes: total [...] float32 bit patterns; float32 factors that broadcast to it; bias [N], total being [M, N], of any
    high precision dtype; result as total, typed.
    """
    for factor in factors:
        total = softfloat.multiply(total, softfloat.bits(factor))
    if adds_zero:
        total = jnp.where(total == jnp.uint32(softfloat.NEGATIVE_ZERO), jnp.uint32(0), total)
    if bias is not None:  # [EPI-3] a rounding of its own
        format = FORMATS[str(bias.dtype)]
        total = softfloat.add(total, float32_bits(codes(bias[None, :], format), format))
    return typed(round_to_code(total, out), out)


@jax.jit
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x * y` in float32, rounded to nearest even."""
    return softfloat.from_bits(softfloat.multiply(softfloat.bits(x), softfloat.bits(y)))
