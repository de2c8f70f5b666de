"""The GEMMs without a tensor core: emulated by `f8ref.jax`, which only this module may import.

They run on whatever backend they are lowered for, and give the bits of the chip there (NUMERICS 1 to 5, 11). Sizes are
not rounded up as for torch: under a trace they are static anyway, and eager GEMMs that are small share programs.
"""

import jax

import f8ref.jax
from f8emu.spec.chip import Chip
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity
from f8ref.jax import softfloat


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    granularities: tuple[Granularity, Granularity],
    *,
    bias: jax.Array | None,
    out_dtype: Format,
    use_fast_accum: bool,
    split_k: int,
    chip: Chip,
) -> jax.Array:
    """`f8ref.jax.scaled_mm`."""
    return f8ref.jax.scaled_mm(
        a,
        b,
        scale_a,
        scale_b,
        granularity_a=granularities[0],
        granularity_b=granularities[1],
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=chip,
    )


def scaled_grouped_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array,
    *,
    out_dtype: Format,
    use_fast_accum: bool,
    chip: Chip,
) -> jax.Array:
    """`f8ref.jax.scaled_grouped_mm`."""
    return f8ref.jax.scaled_grouped_mm(
        a, b, scale_a, scale_b, offs, out_dtype=out_dtype, use_fast_accum=use_fast_accum, chip=chip
    )


def mm(a: jax.Array, b: jax.Array, *, out_dtype: Format, split_k: int, chip: Chip) -> jax.Array:
    """`f8ref.jax.mm`."""
    return f8ref.jax.mm(a, b, out_dtype=out_dtype, split_k=split_k, chip=chip)


def promote(
    partial: jax.Array, scale_a: jax.Array, scale_b: jax.Array, total: jax.Array, *, scales_first: bool
) -> jax.Array:
    """[EPI-5] `fma(partial * scale_a, scale_b, total)`; with `scales_first` `fma(partial, scale_a * scale_b, total)`.

    All float32, on integers: XLA has no fused multiply-add of its own, and makes some where none was written.
    """
    p, s_a, s_b, tot = map(softfloat.bits, (partial, scale_a, scale_b, total))
    if scales_first:
        found = softfloat.fused_multiply_add(p, softfloat.multiply(s_a, s_b), tot)
    else:
        found = softfloat.fused_multiply_add(softfloat.multiply(p, s_a), s_b, tot)
    return softfloat.from_bits(found)
