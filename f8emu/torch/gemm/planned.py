"""S, the number of slices of K, of an emulated GEMM whose caller gives none: that of the plan [PLAN-1..6]."""

import warnings

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.plan import CHIP, LIBRARY, PlannedGemm, Source, is_planned, scaled_gemm_name, split_k
from f8emu.spec.scaling import Granularity

_SAID: set[str] = set()
"""Tables of which a missing plan was reported already."""


def scaled_mm_split_k(
    a: Tensor,
    b: Tensor,
    granularities: tuple[Granularity, Granularity],
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    chip: Chip,
) -> int:
    """S of a `scaled_mm`."""
    if 0 in a.shape or 0 in b.shape or not is_planned("f8emu.torch", chip):
        return 1
    return _split_k(
        PlannedGemm(
            m=a.shape[0],
            n=b.shape[1],
            k=a.shape[1],
            gemm=scaled_gemm_name(granularities),
            accumulation="fast" if use_fast_accum else "promoted",
            out_dtype=_name(out_dtype),
            a_dtype=_name(a.dtype),
            b_dtype=_name(b.dtype),
        )
    )


def mm_split_k(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, chip: Chip) -> int:
    """S of a bfloat16 `mm`."""
    if 0 in a.shape or 0 in b.shape or not is_planned("f8emu.torch", chip):
        return 1
    layout = ("t" if _is_transposed(b) else "n") + ("t" if _is_transposed(a) else "n")
    m, k = a.shape
    return _split_k(PlannedGemm(m=m, n=b.shape[1], k=k, gemm="bfloat16", layout=layout, out_dtype=_name(out_dtype)))


def _is_transposed(x: Tensor) -> bool:
    """Whether torch hands `x` to the library as a transposed matrix; any other layout is copied, or row-major."""
    return x.stride(1) != 1 and x.stride(0) == 1


def _split_k(gemm: PlannedGemm) -> int:
    split = split_k(gemm)
    if split.source is Source.UNKNOWN and gemm.table not in _SAID:
        _SAID.add(gemm.table)
        warnings.warn(
            f"f8emu.torch: into how many slices {LIBRARY} on {CHIP} cuts K of this GEMM is not known: {gemm}. It is "
            "emulated without a split; the hardware's bits are the same if it does not split K either. Pass split_k if "
            "you know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This is said once for a kind of GEMM",
            stacklevel=2,
        )
    return split.split_k


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
