"""DeepGEMM's grouped GEMMs, asked for one GEMM with block scales: as a group among others, whose bits it must not take.

The neighbours multiply other codes, so that a wrong group, or an edge that is passed, shows.
"""

import importlib
from typing import TYPE_CHECKING, Any

from f8emu.spec.scaling import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

_Scaled = tuple["Tensor", "Tensor"]
"""Codes [R, K] of an operand, and its scales [groups of R, groups of K]."""


def contiguous(a: _Scaled, b: _Scaled, out: "Tensor") -> None:
    """The first rows are those of the second of four groups, the others, from a block on, those of the last."""
    groups = out.new_ones(len(out)).int()
    groups[len(out) // (2 * BLOCK) * BLOCK :] = 3
    _library().m_grouped_fp8_gemm_nt_contiguous(a, _with_others(b), out, groups)


def masked(a: _Scaled, b: _Scaled, out: "Tensor") -> None:
    """The first half of the rows is taken of the second of four groups, the others of the last; two have no rows."""
    import torch

    rows, outputs = len(out), out.new_empty(4, *out.shape)
    first = -(-rows // 2)
    counts = torch.tensor([0, first, 0, rows], dtype=torch.int32, device=out.device)
    codes = torch.stack([a[0].view(torch.uint8)] * 4).view(a[0].dtype)
    # The name that every version has.
    function = _library().fp8_m_grouped_gemm_nt_masked
    function((codes, torch.stack([a[1]] * 4)), _with_others(b), outputs, counts, rows)
    out[:first], out[first:] = outputs[1, :first], outputs[3, first:]


def inner(a: _Scaled, b: _Scaled, zeros: "Tensor") -> "Tensor":
    """K is the second of four groups: the first and last are its first block again, the third is empty."""
    import torch

    k = a[0].shape[1]
    sizes = [BLOCK, k, 0, BLOCK]
    total = zeros.new_zeros(len(sizes), *zeros.shape)

    def laid(codes: "Tensor", scales: "Tensor") -> _Scaled:
        whole, block = codes.view(torch.uint8), codes.view(torch.uint8)[:, :BLOCK]
        of_blocks = torch.cat([scales[:, :1], scales, scales[:, :1]], 1)
        # The matrices of the groups follow one another, each [R, K] by itself.
        flat = torch.cat([block.flatten(), whole.flatten(), block.flatten()])
        return flat.view(codes.dtype), of_blocks.t().contiguous().t()

    counts = torch.tensor(sizes, dtype=torch.int32, device=zeros.device)
    _library().k_grouped_fp8_gemm_nt_contiguous(laid(*a), laid(*b), total, sizes, counts, total)
    return total[1]


def _library() -> Any:
    return importlib.import_module("deep_gemm")


def _with_others(b: _Scaled) -> _Scaled:
    # Four groups: `b` second and last, its rows and its scales backwards first and third.
    import torch

    codes, scales = b[0].view(torch.uint8), b[1]
    stacked = torch.stack([codes.flip(0), codes] * 2).view(b[0].dtype)
    return stacked, torch.stack([scales.flip(0), scales] * 2)
