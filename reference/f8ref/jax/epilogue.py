"""From accumulators to the output: scales, bias and the one rounding, [EPI-1] to [EPI-4]."""

import jax
import jax.numpy as jnp

from f8emu.spec import FORMATS, Format, Overflow
from f8ref.jax import softfloat
from f8ref.jax.codec import codes, float32_bits, round_to_code, typed
from f8ref.jax.compiling import program
from f8ref.jax.sharing import elementwise, within


def finish(
    total: jax.Array,
    factors: tuple[jax.Array, ...],
    bias: jax.Array | None,
    out: Format,
    *,
    m: int | None = None,
    n: int | None = None,
    adds_zero: bool = False,
) -> jax.Array:
    """`((total * factors[0]) * ...) + bias`, each operation rounded to float32, then rounded to `out` [EPI-4].

    adds_zero: makes a product of -0 +0 before the bias [EPI-1].

    Shapes: total [M, N] float32 bit patterns, or larger where `m` and `n` say what M and N are; float32 factors that
    broadcast to [M, N]; bias [N] of any high precision dtype; result [M, N], typed.
    """
    if m is not None and n is not None:
        total = within(total, m, n)
    operands = (*factors, *(() if bias is None else (bias,)))
    return elementwise(_finished, total, *operands, factors=len(factors), adds_zero=adds_zero, out=out)


@program("factors", "adds_zero", "out")
def _finished(total: jax.Array, *operands: jax.Array, factors: int, adds_zero: bool, out: Format) -> jax.Array:
    for factor in operands[:factors]:
        total = softfloat.multiply(total, softfloat.bits(factor))
    if adds_zero:
        total = jnp.where(total == jnp.uint32(softfloat.NEGATIVE_ZERO), jnp.uint32(0), total)
    for bias in operands[factors:]:  # [EPI-3] a rounding of its own
        format = FORMATS[str(bias.dtype)]
        total = softfloat.add(total, float32_bits(codes(bias, format), format))
    return typed(round_to_code(total, out, Overflow.NONFINITE), out)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x * y` in float32, rounded to nearest even."""
    return elementwise(_product, x, y)


@program()
def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return softfloat.from_bits(softfloat.multiply(softfloat.bits(x), softfloat.bits(y)))
