"""S, the number of slices of K, of an emulated GEMM whose caller gives none: that of the plan [PLAN-1..6]."""

import warnings

from f8emu.jax.dtypes import CHIP as TARGET
from f8emu.spec.chip import Chip
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
    m, n, k = sizes
    if 0 in sizes or not is_planned("f8emu.jax", chip):
        return 1
    pads_rows = granularities[0] is Granularity.BLOCKWISE_1X128
    return _split_k(
        PlannedGemm(
            m=_rounded_up(m, TARGET.vector_multiple if pads_rows else 1),
            n=_rounded_up(n, TARGET.size_multiple),
            k=_rounded_up(k, TARGET.size_multiple),
            gemm=scaled_gemm_name(granularities),
            accumulation="fast" if use_fast_accum else "promoted",
            out_dtype=out_dtype.name,
            a_dtype=formats[0].name,
            b_dtype=formats[1].name,
        )
    )


def mm_split_k(sizes: tuple[int, int, int], layout: str, *, out_dtype: Format, chip: Chip) -> int:
    """S of a bfloat16 `mm` of M, N and K; `layout` as cuBLAS names it (`f8emu.spec.plan.LAYOUTS`)."""
    m, n, k = sizes
    if 0 in sizes or not is_planned("f8emu.jax", chip):
        return 1
    n, k = _rounded_up(n, TARGET.size_multiple), _rounded_up(k, TARGET.size_multiple)
    return _split_k(PlannedGemm(m=m, n=n, k=k, gemm="bfloat16", layout=layout, out_dtype=out_dtype.name))


def _rounded_up(size: int, multiple: int) -> int:
    """The size that the library sees: operands are zero-padded."""
    return -(-size // multiple) * multiple


def _split_k(gemm: PlannedGemm) -> int:
    split = split_k(gemm)
    if split.source is Source.UNKNOWN and gemm.table not in _SAID:
        _SAID.add(gemm.table)
        warnings.warn(
            f"f8emu.jax: into how many slices {LIBRARY} on {CHIP} cuts K of this GEMM is not known: {gemm}. It is "
            "emulated without a split; the hardware's bits are the same if it does not split K either. Pass split_k if "
            "you know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This is said once for a kind of GEMM",
            stacklevel=2,
        )
    return split.split_k
