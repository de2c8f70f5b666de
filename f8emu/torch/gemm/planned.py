"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the library's on a Hopper GPU, else the
plan's.
"""

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.recipe import Gemm
from f8emu.spec.scaling import Granularity
from f8emu.split_k.ask import split_k_at_hand
from f8emu.split_k.gemms import bfloat16_gemm, known_split_k, scaled_gemm
from f8emu.split_k.plan import PlannedGemm, Source, Split, is_planned, split_k
from f8emu.torch.device import is_device_of
from f8emu.torch.gemm.checks import SIZE_MULTIPLE

_CALLER = "f8emu.torch"


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
    gemm = _scaled_mm(a, b, granularities, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    return known_split_k(_CALLER, gemm, _split(gemm, a.device, chip), chip)


def mm_split_k(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, chip: Chip) -> int:
    """S of a bfloat16 `mm`."""
    if not _has_plan(a, b, chip):
        return 1
    gemm = _mm(a, b, out_dtype)
    return known_split_k(_CALLER, gemm, _split(gemm, a.device, chip), chip)


def layer_split_k(spec: Gemm, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, chip: Chip) -> Split:
    """S of a GEMM of a layer, `a @ b^T`, as it runs: zero-padded.

    Shapes:
        a [M, K], b [N, K], before padding; only sizes, strides and dtypes are read.
    """
    if not is_planned(_CALLER, chip):
        return Split(1, Source.UNKNOWN)
    if 0 in a.shape or 0 in b.shape:
        return Split(1, Source.RECORDED)
    pad_k, pad_n = -a.shape[1] % SIZE_MULTIPLE, -b.shape[0] % SIZE_MULTIPLE
    pair = None if spec.is_high_precision else spec.scaled_gemm_granularities
    padded_a, padded_b = _padded(a, 0, pad_k), _padded(b, pad_n, pad_k).t()  # of rows the plan knows that itself
    if pair is None:
        gemm = _mm(padded_a, padded_b, out_dtype)
    else:
        gemm = _scaled_mm(padded_a, padded_b, pair, out_dtype=out_dtype, use_fast_accum=spec.use_fast_accum)
    return _split(gemm, a.device, chip)


def _split(gemm: PlannedGemm, device: torch.device, chip: Chip) -> Split:
    return split_k_at_hand(gemm, chip) if is_device_of(chip, device) else split_k(gemm, chip=chip.plan)


def _has_plan(a: Tensor, b: Tensor, chip: Chip) -> bool:
    return 0 not in a.shape and 0 not in b.shape and is_planned(_CALLER, chip)


def _scaled_mm(
    a: Tensor, b: Tensor, pair: tuple[Granularity, Granularity], *, out_dtype: torch.dtype, use_fast_accum: bool
) -> PlannedGemm:
    sizes, dtypes = (a.shape[0], b.shape[1], a.shape[1]), (_name(out_dtype), _name(a.dtype), _name(b.dtype))
    return scaled_gemm(sizes, pair, dtypes, use_fast_accum=use_fast_accum)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> PlannedGemm:
    layout = ("t" if _is_transposed(b) else "n") + ("t" if _is_transposed(a) else "n")
    return bfloat16_gemm((a.shape[0], b.shape[1], a.shape[1]), layout, _name(out_dtype))


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` as padding leaves it, in memory of its own if there is any; without values."""
    if not rows and not columns:
        return x
    return torch.empty((x.shape[0] + rows, x.shape[1] + columns), dtype=x.dtype, device="meta")


def _is_transposed(x: Tensor) -> bool:
    """Whether torch hands `x` to the library as a transposed matrix; any other layout is copied, or row-major."""
    return x.stride(1) != 1 and x.stride(0) == 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
