"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the plan's [PLAN-1..6]."""

import warnings

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.plan import CHIP, LIBRARY, PlannedGemm, Source, Split, is_planned, scaled_gemm_name, split_k
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity
from f8emu.torch.gemm.checks import SIZE_MULTIPLE

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
    if not _has_plan(a, b, chip):
        return 1
    return _said(_scaled_mm(a, b, granularities, out_dtype=out_dtype, use_fast_accum=use_fast_accum))


def mm_split_k(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, chip: Chip) -> int:
    """S of a bfloat16 `mm`."""
    return _said(_mm(a, b, out_dtype)) if _has_plan(a, b, chip) else 1


def layer_split_k(spec: Gemm, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, chip: Chip) -> Split:
    """The plan of a GEMM of a layer, `a @ b^T`, as it runs: zero-padded.

    Shapes:
        a [M, K], b [N, K], before padding; only sizes, strides and dtypes are read.
    """
    if not is_planned("f8emu.torch", chip):
        return Split(1, Source.UNKNOWN)
    if 0 in a.shape or 0 in b.shape:
        return Split(1, Source.RECORDED)
    pad_k, pad_n = -a.shape[1] % SIZE_MULTIPLE, -b.shape[0] % SIZE_MULTIPLE
    pair = None if spec.is_high_precision else spec.scaled_gemm_granularities
    padded_a, padded_b = _padded(a, 0, pad_k), _padded(b, pad_n, pad_k).t()  # of rows the plan knows that itself
    if pair is None:
        return split_k(_mm(padded_a, padded_b, out_dtype))
    return split_k(_scaled_mm(padded_a, padded_b, pair, out_dtype=out_dtype, use_fast_accum=spec.use_fast_accum))


def _has_plan(a: Tensor, b: Tensor, chip: Chip) -> bool:
    return 0 not in a.shape and 0 not in b.shape and is_planned("f8emu.torch", chip)


def _scaled_mm(
    a: Tensor, b: Tensor, pair: tuple[Granularity, Granularity], *, out_dtype: torch.dtype, use_fast_accum: bool
) -> PlannedGemm:
    return PlannedGemm(
        m=a.shape[0],
        n=b.shape[1],
        k=a.shape[1],
        gemm=scaled_gemm_name(pair),
        accumulation="fast" if use_fast_accum else "promoted",
        out_dtype=_name(out_dtype),
        a_dtype=_name(a.dtype),
        b_dtype=_name(b.dtype),
    )


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> PlannedGemm:
    layout = ("t" if _is_transposed(b) else "n") + ("t" if _is_transposed(a) else "n")
    m, k = a.shape
    return PlannedGemm(m=m, n=b.shape[1], k=k, gemm="bfloat16", layout=layout, out_dtype=_name(out_dtype))


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` as padding leaves it, in memory of its own if there is any; without values."""
    if not rows and not columns:
        return x
    return torch.empty((x.shape[0] + rows, x.shape[1] + columns), dtype=x.dtype, device="meta")


def _is_transposed(x: Tensor) -> bool:
    """Whether torch hands `x` to the library as a transposed matrix; any other layout is copied, or row-major."""
    return x.stride(1) != 1 and x.stride(0) == 1


def _said(gemm: PlannedGemm) -> int:
    """S, and once for a kind of GEMM that it is not known."""
    split = split_k(gemm)
    if split.source is Source.UNKNOWN and gemm.table not in _SAID:
        _SAID.add(gemm.table)
        warnings.warn(
            f"f8emu.torch: the plan of {LIBRARY} on {CHIP} has no split-K for this GEMM: {gemm}. It is emulated "
            "without split-K, and has the hardware's bits if the hardware does not split K either. Pass split_k if you "
            "know it; `f8emu record OUT --plans IN.json` finds it on a GPU. This warning appears once per kind of GEMM",
            stacklevel=2,
        )
    return split.split_k


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
