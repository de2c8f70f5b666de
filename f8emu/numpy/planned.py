"""S, the number of slices of K, of a GEMM whose caller gives none: that of the plan [PLAN-1..6]."""

import warnings

from f8emu.numpy.dtypes import Array
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import Format
from f8emu.spec.plan import CHIP, LIBRARY, PlannedGemm, Source, is_planned, scaled_gemm_name, split_k
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
    if 0 in sizes or not is_planned("f8emu.numpy", chip):
        return 1
    m, n, k = sizes
    return _said(
        PlannedGemm(
            m=m,
            n=_rounded_up(n),
            k=_rounded_up(k),
            gemm=scaled_gemm_name(granularities),
            accumulation="fast" if use_fast_accum else "promoted",
            out_dtype=out_dtype.name,
            a_dtype=formats[0].name,
            b_dtype=formats[1].name,
        )
    )


def mm_split_k(sizes: tuple[int, int, int], layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm` of M, N and K; `layout` as cuBLAS names it (`f8emu.spec.plan.LAYOUTS`)."""
    if 0 in sizes or not is_planned("f8emu.numpy", chip):
        return 1
    m, n, k = sizes
    gemm = PlannedGemm(
        m=m, n=_rounded_up(n), k=_rounded_up(k), gemm="bfloat16", layout=layout, out_dtype=out_dtype.name
    )
    return _said(gemm)


def layout_of(a: Array, b: Array) -> str:
    """The layout of a bfloat16 `mm`, as cuBLAS names it: of two matrices in row-major order "nn"."""
    return "".join("t" if x.strides[1] != x.itemsize and x.strides[0] == x.itemsize else "n" for x in (b, a))


def _rounded_up(size: int) -> int:
    """N or K as the library sees it: operands are zero-padded. The plan itself rounds up the rows."""
    return size + -size % HOPPER.size_multiple


def _said(gemm: PlannedGemm) -> int:
    """S; a warning says once for a kind of GEMM that it is not known."""
    split = split_k(gemm)
    if split.source is Source.UNKNOWN and gemm.table not in _SAID:
        _SAID.add(gemm.table)
        warnings.warn(
            f"f8emu.numpy: the plan of {LIBRARY} on {CHIP} has no split-K for this GEMM: {gemm}. It is emulated "
            "without split-K, and has the hardware's bits if the hardware does not split K either. Pass split_k if you "
            "know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This warning appears once per kind of GEMM",
            stacklevel=4,
        )
    return split.split_k
