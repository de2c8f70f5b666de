"""The GEMMs of a chip, float8 with scales and bfloat16: operands are checked here, and the parts put together."""

import functools

import jax
import jax.numpy as jnp

from f8emu.spec import (
    BFLOAT16,
    E8M0FNU,
    FLOAT8,
    FORMATS,
    HOPPER,
    MX_BLOCK,
    Chip,
    Format,
    Granularity,
    OperandError,
    output_format,
)
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.gemm_call import GroupKind, Shaped, mm_call, scaled_grouped_mm_call, scaled_mm_call
from f8ref.jax import softfloat
from f8ref.jax.chain import Chain
from f8ref.jax.codec import codes, dtype_format, float32_bits, narrow_codes, round_to_code, typed
from f8ref.jax.gemm import accumulators, blockwise_totals, grouped_accumulators, multiply_adds
from f8ref.jax.general import taken


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    *,
    granularity_a: Granularity | str = Granularity.TENSORWISE,
    granularity_b: Granularity | str = Granularity.TENSORWISE,
    bias: jax.Array | None = None,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    split_k: int = 1,
    chip: Chip = HOPPER,
) -> jax.Array:
    """`f8ref.numpy.scaled_mm`, which defines it, traceable: everything but the arrays is static.

    Exactness, Raises: as there.
    """
    # 1. What is refused: the same in every backend.
    gemm = scaled_mm_call(
        *_shaped(a, b, scale_a, scale_b),
        bias=None if bias is None else _shaped(bias)[0],
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=chip,
    )
    # 2. The operands as the steps take them [CHIP-1], [CHIP-2], and the static part of their sums.
    pair = gemm.granularities
    assert pair is not None, "a scaled_mm has scales"
    a, b, scale_a, scale_b = map(jnp.asarray, (a, b, scale_a, scale_b))
    addend = None if bias is None else jnp.asarray(bias)
    a, b, formats = taken(gemm.model, a, b, gemm.formats)
    chain = Chain(gemm.model, *formats, a.shape[1], split_k, scale_block_k=pair[0].block[1])
    # 3. Accumulators and epilogue: of block scales within the steps [MX-2] or the chain [EPI-5], else [EPI-1] or
    # [EPI-2] after it.
    if pair[0].is_microscaled:
        return finish(accumulators(a, b, chain, _scale_bytes(scale_a, scale_b)), (), addend, gemm.out)  # [MX-5]
    if pair[0].is_blockwise:
        return finish(blockwise_totals(a, b, scale_a, scale_b, chain, pair), (), addend, gemm.out)
    is_tensorwise = pair[0] is Granularity.TENSORWISE
    if is_tensorwise:
        factors = (product(scale_a.reshape(1, 1), scale_b.reshape(1, 1)),)
    else:
        factors = (scale_b, scale_a)
    return finish(accumulators(a, b, chain), factors, addend, gemm.out, adds_zero=is_tensorwise)


def scaled_grouped_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array | None = None,
    *,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip = HOPPER,
) -> jax.Array:
    """`f8ref.numpy.scaled_grouped_mm` that divides rows, traceable [EPI-6]; rows after the last group give zeros."""
    operands = (a, b, scale_a, scale_b) if offs is None else (a, b, scale_a, scale_b, offs)
    gemm = scaled_grouped_mm_call(*_shaped(*operands), out_dtype=out_dtype, use_fast_accum=use_fast_accum, chip=chip)
    if gemm.group_kind is not GroupKind.ROWS or offs is None:
        raise UnsupportedError(
            "scaled_grouped_mm: in JAX offs divides the rows of a; use jax.vmap of scaled_mm, or numpy"
        )
    a, b, scale_a, scale_b, offs = map(jnp.asarray, operands)
    a, b, formats = taken(gemm.model, a, b, gemm.formats)
    chain = Chain(gemm.model, *formats, a.shape[1])
    if gemm.granularities is not None and gemm.granularities[0].is_microscaled:
        chain = chain._replace(scale_block_k=MX_BLOCK)
        scales = _scale_bytes(scale_a, scale_b)
        return finish(grouped_accumulators(a, b, offs, chain, scales), (), None, gemm.out)
    totals = grouped_accumulators(a, b, offs, chain)
    # The scale of b that meets a row is that of the row's group [EPI-6].
    row = jnp.arange(a.shape[0], dtype=offs.dtype)[:, None]
    group = jnp.sum(row >= offs[None, :], axis=1, dtype=offs.dtype)
    # Rows of no group have no scale either: 0 * 0.
    scale_b_row = jnp.where((group < b.shape[0])[:, None], scale_b.at[group].get(mode="clip"), 0)
    scale_a_row = jnp.where(group < b.shape[0], scale_a, 0)[:, None]
    return finish(totals, (scale_a_row, scale_b_row), None, gemm.out)


def mm(
    a: jax.Array, b: jax.Array, *, out_dtype: Format | str = "bfloat16", split_k: int = 1, chip: Chip = HOPPER
) -> jax.Array:
    """`f8ref.numpy.mm`, traceable [BF16-1], [BF16-2].

    Exactness: as there. The recorded outputs hold neither float32 subnormals nor overflow; there, by the same rules, an
    accumulator cut to zero is +0, a subnormal one counts with exponent -126, and 2^128 is infinity.
    """
    gemm = mm_call(*_shaped(a, b), out_dtype=out_dtype, split_k=split_k, chip=chip)
    chain = Chain(gemm.model, *gemm.formats, gemm.sizes[2], split_k)
    return finish(accumulators(jnp.asarray(a), jnp.asarray(b), chain), (), None, gemm.out)


def mma(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    scale_a: jax.Array | None = None,
    scale_b: jax.Array | None = None,
    *,
    chip: Chip = HOPPER,
    out_dtype: Format | str = "float32",
) -> jax.Array:
    """`f8ref.numpy.mma`, traceable."""
    names = tuple(f.name for f in (BFLOAT16, *FLOAT8))
    formats = dtype_format(a, "mma", "a", names), dtype_format(b, "mma", "b", names)
    out = output_format("mma", out_dtype)
    pair = [x for x in (scale_a, scale_b) if x is not None]
    for x in pair:
        dtype_format(x, "mma", "scale", (E8M0FNU.name,))
    model = chip.instruction("mma", formats, out, is_microscaled=len(pair) == 2).model
    dtype_format(c, "mma", "c", (out.name,))
    a, b, c = map(jnp.asarray, (a, b, c))
    if a.ndim != 2 or b.shape != a.shape or c.shape != a.shape[:1]:
        raise OperandError(
            f"mma: a and b must be [cases, K] and c [cases]; got {a.shape}, {b.shape} and {c.shape}; reshape them"
        )
    expected = (a.shape[0], -(-a.shape[1] // MX_BLOCK))
    if len(pair) == 1 or any(jnp.shape(x) != expected for x in pair):
        raise OperandError(
            f"mma: scale_a and scale_b must both be {list(expected)}, or absent; got {[jnp.shape(x) for x in pair]}"
        )
    a, transposed, formats = taken(model, a, b.T, formats)
    chain = Chain(model, *formats, a.shape[1], scale_block_k=MX_BLOCK if pair else None, has_start=True)
    scales = _scale_bytes(*map(jnp.asarray, pair)) if pair else None
    return finish(multiply_adds(a, transposed.T, float32_bits(codes(c, out), out), chain, scales), (), None, out)


def _scale_bytes(scale_a: jax.Array, scale_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return narrow_codes(scale_a, E8M0FNU), narrow_codes(scale_b, E8M0FNU)


def _shaped(*arrays: jax.Array) -> list[Shaped]:
    return [Shaped(jnp.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in arrays]


@functools.partial(jax.jit, static_argnames=("out", "adds_zero"))
def finish(
    total: jax.Array, factors: tuple[jax.Array, ...], bias: jax.Array | None, out: Format, *, adds_zero: bool = False
) -> jax.Array:
    """`((total * factors[0]) * ...) + bias`, each operation rounded to float32, then rounded to `out` [EPI-4].

    adds_zero: makes a product of -0 +0 before the bias [EPI-1].

    Shapes: total [...] float32 bit patterns; float32 factors that broadcast to it; bias [N], total being [M, N], of any
    high precision dtype; result as total, typed.
    """
    # On bit patterns: XLA may contract, reassociate and flush float32 operations.
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
