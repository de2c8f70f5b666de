"""S, the number of slices of K, of an emulated GEMM whose caller gives none: the library's on a Hopper GPU, else the
plan's.
"""

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.gemm_call import GemmCall
from f8emu.spec.recipe import Gemm
from f8emu.split_k.ask import known_split_k, split_of
from f8emu.split_k.gemm import Source, Split, of_call, of_layer
from f8emu.torch.device import is_device_of
from f8emu.torch.dtypes import CHIP, name_of

_CALLER = "f8emu.torch"


def split_k_of(gemm: GemmCall, a: Tensor, b: Tensor) -> int:
    """S of a GEMM."""
    return known_split_k(_CALLER, of_call(gemm, _layout(a, b)), gemm.chip, lambda: is_device_of(gemm.chip, a.device))


def layer_split_k(spec: Gemm, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, chip: Chip) -> Split:
    """S of a GEMM of a layer, `a @ b^T`, as it runs: zero-padded.

    Shapes:
        a [M, K], b [N, K], before padding; only sizes, strides and dtypes are read.
    """
    if 0 in a.shape or 0 in b.shape:
        return Split(1, Source.RECORDED)
    pad_k, pad_n = -a.shape[1] % CHIP.size_multiple, -b.shape[0] % CHIP.size_multiple
    layout = _layout(_padded(a, 0, pad_k), _padded(b, pad_n, pad_k).t())
    asked = of_layer(spec, (a.shape[0], b.shape[0], a.shape[1]), name_of(out_dtype), layout)
    return split_of(_CALLER, asked, chip, lambda: is_device_of(chip, a.device))


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` as padding leaves it, in memory of its own if there is any; without values."""
    if not rows and not columns:
        return x
    return torch.empty((x.shape[0] + rows, x.shape[1] + columns), dtype=x.dtype, device="meta")


def _layout(a: Tensor, b: Tensor) -> str:
    """The layout of `a @ b` as cuBLAS names it. Torch copies a matrix that is contiguous in no direction."""
    return "".join("t" if x.stride(1) != 1 and x.stride(0) == 1 else "n" for x in (b, a))
