"""From accumulators to the output: scales, bias and the one rounding, [EPI-1] to [EPI-4]."""

import jax

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
) -> jax.Array:
    """`((total * factors[0]) * ...) + bias`, each operation rounded to float32, then rounded to `out` [EPI-4].

    Shapes: total [M, N] float32 bit patterns, or larger where `m` and `n` say what M and N are; float32 factors that
    broadcast to [M, N]; bias [N] of any high precision dtype; result [M, N], typed.
    """
    if m is not None and n is not None:
        total = within(total, m, n)
    return elementwise(_finished, total, *factors, *(() if bias is None else (bias,)), factors=len(factors), out=out)


@program("factors", "out")
def _finished(total: jax.Array, *operands: jax.Array, factors: int, out: Format) -> jax.Array:
    for factor in operands[:factors]:
        total = softfloat.multiply(total, softfloat.bits(factor))
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
