"""Kernels of torch's bfloat16 GEMMs, `aten::mm` and its like, that compute the bits of a chip [BF16-1], [BF16-2].

What has no recorded rule goes to the kernel that torch had before: other dtypes, and matrices whose rows do not begin
at multiples of 16 bytes, for which the library has kernels with other rules.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.chip import Chip
from f8emu.spec.errors import OperandError
from f8emu.spec.gemm_call import Shaped, mm_call
from f8emu.torch.chip import name_of
from f8emu.torch.gemm import emulation, operators

_MULTIPLE = 16  # of N and K of the GEMMs that f8emu multiplies; more is padded with zeros, which changes no bit
_ALIGNED = 8  # elements of 16 bytes
_ONE_CHAIN = 1  # grouped and batched GEMMs are never split along K

Original = Callable[..., Tensor]


def product(chip: Chip, a: Tensor, b: Tensor, split_k: int, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`a @ b` of bfloat16 matrices, of any size."""
    if 0 in (*a.shape, b.shape[1]):
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    lack_k, lack_n = -a.shape[1] % _MULTIPLE, -b.shape[1] % _MULTIPLE
    if lack_k or lack_n:
        padded = product(chip, pad(a, (0, lack_k)), pad(b, (0, lack_n, 0, lack_k)), split_k, out_dtype)
        return padded[:, : b.shape[1]].contiguous()
    return operators.run_mm.function(a, b, out_dtype, "emulated", split_k, chip.name)


def split_of(chip: Chip, a: Tensor, b: Tensor) -> int:
    """S of a GEMM of these sizes and layouts [CHAIN-3]."""
    if 0 in (*a.shape, b.shape[1]):
        return 1
    shaped = (Shaped(tuple(x.shape), name_of(x.dtype)) for x in (a, b))
    return emulation.split_of(mm_call(*shaped, chip=chip), a.device, emulation.layout_of(a, b)).split_k


def grouped_mm(
    chip: Chip,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten::_grouped_mm`: the GEMMs of all groups. What lies beyond the last group is zeros."""
    call = "torch._grouped_mm"
    if a.dtype is not torch.bfloat16 or b.dtype is not torch.bfloat16:
        raise OperandError(f"{call}: mat_a and mat_b must be bfloat16 on a Hopper GPU; got {a.dtype} and {b.dtype}")
    if bias is not None or out_dtype not in (None, torch.bfloat16):
        raise OperandError(f"{call}: torch takes no bias and gives bfloat16; got bias {bias} and out_dtype {out_dtype}")
    if (offs is None) != (a.ndim == b.ndim == 3) or a.shape[-1] != b.shape[-2]:
        raise OperandError(
            f"{call}: offs must be given unless every group has matrices of its own, and K must be equal; got "
            f"shapes {list(a.shape)} and {list(b.shape)}"
        )
    if offs is None:
        return torch.stack([product(chip, x, y, _ONE_CHAIN) for x, y in zip(a, b, strict=True)])
    ends = offs.tolist()
    runs = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.ndim == b.ndim:  # K is divided
        return torch.stack([product(chip, a[:, run], b[run], _ONE_CHAIN) for run in runs])
    out = a.new_zeros((a.shape[-2], b.shape[-1]))
    for group, run in enumerate(runs):
        if a.ndim == 2:
            out[run] = product(chip, a[run], b[group], _ONE_CHAIN)
        else:
            out[:, run] = product(chip, a[group], b[:, run], _ONE_CHAIN)
    return out


def is_recorded(a: Tensor, b: Tensor) -> bool:
    """Whether the rules of a GEMM of these matrices are recorded: bfloat16, every row at 16 bytes."""
    return (
        a.dtype is b.dtype is torch.bfloat16
        and b.shape[-1] % _ALIGNED == 0
        and all(1 in x.stride()[-2:] and sum(x.stride()[-2:]) % _ALIGNED == 1 for x in (a, b))
    )


def mm(chip: Chip, original: Original, a: Tensor, b: Tensor) -> Tensor:
    """`aten::mm`."""
    return product(chip, a, b, split_of(chip, a, b)) if is_recorded(a, b) else original(a, b)


def bmm(chip: Chip, original: Original, a: Tensor, b: Tensor) -> Tensor:
    """`aten::bmm`: a GEMM for each matrix of the batch."""
    if not is_recorded(a, b):
        return original(a, b)
    return torch.stack([product(chip, x, y, _ONE_CHAIN) for x, y in zip(a, b, strict=True)])


def addmm(
    chip: Chip, original: Original, addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`aten::addmm`: adds a bias [N] to the accumulator, a matrix too if K is split, else to the rounded product."""
    if not is_recorded(a, b) or addend.dtype is not torch.bfloat16 or (beta, alpha) != (1, 1):
        return original(addend, a, b, beta=beta, alpha=alpha)
    split_k = split_of(chip, a, b)
    if addend.ndim == 2 and split_k == 1:
        return product(chip, a, b, split_k) + addend
    return (product(chip, a, b, split_k, torch.float32) + addend.float()).to(torch.bfloat16)
