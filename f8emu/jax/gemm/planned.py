"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the plan's [PLAN-1..6]."""

import warnings

from f8emu.jax.dtypes import CHIP as TARGET
from f8emu.spec.chip import Chip
from f8emu.spec.formats import Format
from f8emu.spec.plan import CHIP, LIBRARY, PlannedGemm, Source, Split, is_planned, scaled_gemm_name, split_k
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity

_SAID: set[str] = set()
"""Tables of which a missing plan was reported already."""


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
    if 0 in sizes or not is_planned("f8emu.jax", chip):
        return 1
    names = out_dtype.name, formats[0].name, formats[1].name
    return _said(_scaled_mm(sizes, granularities, names, use_fast_accum=use_fast_accum))


def mm_split_k(sizes: tuple[int, int, int], layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm` of M, N and K; `layout` as cuBLAS names it (`f8emu.spec.plan.LAYOUTS`)."""
    return 1 if 0 in sizes or not is_planned("f8emu.jax", chip) else _said(_mm(sizes, layout, out_dtype.name))


def layer_split_k(
    spec: Gemm, sizes: tuple[int, int, int], layout: str, dtypes: tuple[str, str, str], *, chip: Chip
) -> Split:
    """The plan of a GEMM of a layer; `dtypes` are those of the product, a and b, `layout` counts in high precision."""
    if 0 in sizes:
        return Split(1, Source.RECORDED)
    if not is_planned("f8emu.jax", chip):
        return Split(1, Source.UNKNOWN)
    if spec.is_high_precision:
        return split_k(_mm(sizes, layout, dtypes[0]))
    pair = spec.scaled_gemm_granularities
    return split_k(_scaled_mm(sizes, pair, dtypes, use_fast_accum=spec.use_fast_accum))


def _scaled_mm(
    sizes: tuple[int, int, int],
    pair: tuple[Granularity, Granularity],
    dtypes: tuple[str, str, str],
    *,
    use_fast_accum: bool,
) -> PlannedGemm:
    m, n, k = sizes
    return PlannedGemm(
        m=m,
        n=_rounded_up(n),
        k=_rounded_up(k),
        gemm=scaled_gemm_name(pair),
        accumulation="fast" if use_fast_accum else "promoted",
        out_dtype=dtypes[0],
        a_dtype=dtypes[1],
        b_dtype=dtypes[2],
    )


def _mm(sizes: tuple[int, int, int], layout: str, out_dtype: str) -> PlannedGemm:
    m, n, k = sizes
    return PlannedGemm(m=m, n=_rounded_up(n), k=_rounded_up(k), gemm="bfloat16", layout=layout, out_dtype=out_dtype)


def _rounded_up(size: int) -> int:
    """N or K as the library sees it: operands are zero-padded. Of rows the plan knows that itself."""
    return size + -size % TARGET.size_multiple


def _said(gemm: PlannedGemm) -> int:
    """S, and once for a kind of GEMM that it is not known."""
    split = split_k(gemm)
    if split.source is Source.UNKNOWN and gemm.table not in _SAID:
        _SAID.add(gemm.table)
        warnings.warn(
            f"f8emu.jax: the plan of {LIBRARY} on {CHIP} has no split-K for this GEMM: {gemm}. It is emulated "
            "without split-K, and has the hardware's bits if the hardware does not split K either. Pass split_k if you "
            "know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This warning appears once per kind of GEMM",
            stacklevel=2,
        )
    return split.split_k
