"""S, the number of slices of K, of a GEMM whose caller gives none: the plan's [PLAN-1..7], for every backend."""

import warnings

from f8emu.spec.chip import Chip
from f8emu.spec.scaling import Granularity
from f8emu.split_k.plan import LIBRARY, PlannedGemm, Source, Split, scaled_gemm_name

_SAID: set[tuple[str, str]] = set()
"""Backends and tables whose missing plan was reported already."""


def scaled_gemm(
    sizes: tuple[int, int, int],
    granularities: tuple[Granularity, Granularity],
    dtypes: tuple[str, str, str],
    *,
    use_fast_accum: bool,
) -> PlannedGemm:
    """A `scaled_mm` of M, N and K, as the library sees them; `dtypes` are the names of output, a and b."""
    m, n, k = sizes
    return PlannedGemm(
        m=m,
        n=n,
        k=k,
        gemm=scaled_gemm_name(granularities),
        accumulation="fast" if use_fast_accum else "promoted",
        out_dtype=dtypes[0],
        a_dtype=dtypes[1],
        b_dtype=dtypes[2],
    )


def bfloat16_gemm(sizes: tuple[int, int, int], layout: str, out_dtype: str) -> PlannedGemm:
    """A bfloat16 `mm` of M, N and K; `layout` as cuBLAS names it (`f8emu.split_k.plan.LAYOUTS`)."""
    m, n, k = sizes
    return PlannedGemm(m=m, n=n, k=k, gemm="bfloat16", layout=layout, out_dtype=out_dtype)


def known_split_k(caller: str, gemm: PlannedGemm, split: Split, chip: Chip, *, stacklevel: int = 2) -> int:
    """S of a GEMM that `caller` emulates; a warning says once for a kind of GEMM that it is not known."""
    if split.source is Source.UNKNOWN and (caller, gemm.table) not in _SAID:
        _SAID.add((caller, gemm.table))
        warnings.warn(
            f"{caller}: the plan of {LIBRARY} on {chip.plan} has no split-K for this GEMM: {gemm}. It is emulated "
            "without split-K, and has the hardware's bits if the hardware does not split K either. Pass split_k if you "
            "know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This warning appears once per kind of GEMM",
            stacklevel=stacklevel,
        )
    return split.split_k
