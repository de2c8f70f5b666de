"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the plan's [PLAN-1..6]."""

from f8emu.jax.dtypes import CHIP as TARGET
from f8emu.spec.chip import Chip
from f8emu.spec.formats import Format
from f8emu.spec.plan import Source, Split, is_planned, split_k
from f8emu.spec.planned import bfloat16_gemm, planned_split_k, scaled_gemm
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity

_CALLER = "f8emu.jax"


def scaled_mm_split_k(
    sizes: tuple[int, int, int],
    formats: tuple[Format, Format],
    granularities: tuple[Granularity, Granularity],
    *,
    out_dtype: Format,
    use_fast_accum: bool,
    chip: Chip,
) -> int:
    """S of a `scaled_mm` of M, N and K."""
    if 0 in sizes or not is_planned(_CALLER, chip):
        return 1
    dtypes = out_dtype.name, formats[0].name, formats[1].name
    gemm = scaled_gemm(TARGET.padded_sizes(*sizes), granularities, dtypes, use_fast_accum=use_fast_accum)
    return planned_split_k(_CALLER, gemm)


def mm_split_k(sizes: tuple[int, int, int], layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm` of M, N and K; `layout` as cuBLAS names it (`f8emu.spec.plan.LAYOUTS`)."""
    if 0 in sizes or not is_planned(_CALLER, chip):
        return 1
    return planned_split_k(_CALLER, bfloat16_gemm(TARGET.padded_sizes(*sizes), layout, out_dtype.name))


def layer_split_k(
    spec: Gemm, sizes: tuple[int, int, int], layout: str, dtypes: tuple[str, str, str], *, chip: Chip
) -> Split:
    """The plan of a GEMM of a layer; `dtypes` are those of the product, a and b, `layout` counts in high precision."""
    if 0 in sizes:
        return Split(1, Source.RECORDED)
    if not is_planned(_CALLER, chip):
        return Split(1, Source.UNKNOWN)
    sizes = TARGET.padded_sizes(*sizes)
    if spec.is_high_precision:
        return split_k(bfloat16_gemm(sizes, layout, dtypes[0]))
    return split_k(scaled_gemm(sizes, spec.scaled_gemm_granularities, dtypes, use_fast_accum=spec.use_fast_accum))
