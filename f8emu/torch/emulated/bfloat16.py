"""Kernels of torch's bfloat16 GEMMs, `aten::mm` and its like, that compute the bits of a chip [BF16-1], [BF16-2].

What has no recorded rule goes to the kernel that torch had before: other dtypes, and matrices whose rows do not begin
at multiples of 16 bytes, for which the library has kernels with other rules. So does what torch refuses.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.errors import OperandError
from f8emu.spec.formats import BFLOAT16
from f8emu.spec.gemm_call import GemmCall, GroupKind, Shaped, group_parts, mm_call
from f8emu.torch.chip import name_of
from f8emu.torch.emulated.kernels import require_offs
from f8emu.torch.gemm import emulation, operators

_ALIGNED = 8  # elements of 16 bytes

Original = Callable[..., Tensor]


def product(chip: Chip, a: Tensor, b: Tensor, split_k: int, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`a @ b` of bfloat16 matrices, of any size."""
    columns = b.shape[1]
    if 0 in (*a.shape, columns):
        return a.new_zeros((a.shape[0], columns), dtype=out_dtype)
    # Zeros change no bit.
    lack_k, lack_n = -a.shape[1] % chip.size_multiple, -columns % chip.size_multiple
    a, b = operators.padded(a, 0, lack_k), operators.padded(b, lack_k, lack_n)
    out = operators.run_mm.function(a, b, out_dtype, "emulated", split_k, chip.name)
    return out[:, :columns].contiguous()


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
    require_offs(call, a, b, offs)
    return _products(call, chip, a, b, offs)


def _products(call: str, chip: Chip, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """The GEMM of every group, each one chain: groups and batches are never split along K."""
    kind, shapes = GroupKind.of(a.ndim, b.ndim), [*a.shape, *b.shape]
    dims = (*kind.value.a, *kind.value.b)
    sizes = dict(zip(dims, shapes, strict=True))
    if [sizes[dim] for dim in dims] != shapes:
        raise OperandError(
            f"{call}: a and b must be {list(kind.value.a)} and {list(kind.value.b)}; got {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    ends = None if offs is None else offs.tolist()
    gemm = GemmCall(
        call=call,
        sizes=(sizes["M"], sizes["N"], sizes["K"]),
        formats=(BFLOAT16, BFLOAT16),
        groups=sizes["G"] if ends is None else len(ends),
        group_kind=kind,
        chip=chip,
    )
    out = a.new_zeros(gemm.out_shape)
    for part in group_parts(gemm, ends):
        out[part.out] = product(chip, a[part.a], b[part.b], 1)
    return out


def is_recorded(a: Tensor, b: Tensor, dimensions: int) -> bool:
    """Whether the rules of a GEMM of these matrices are recorded: bfloat16, every row at 16 bytes."""
    return (
        a.dtype is b.dtype is torch.bfloat16
        and a.ndim == b.ndim == dimensions
        and (*a.shape[:-2], a.shape[-1]) == b.shape[:-1]
        and b.shape[-1] % _ALIGNED == 0
        and all(x.storage_offset() % _ALIGNED == 0 for x in (a, b))
        and all(1 in x.stride()[-2:] and sum(x.stride()[-2:]) % _ALIGNED == 1 for x in (a, b))
    )


def mm(chip: Chip, original: Original, a: Tensor, b: Tensor) -> Tensor:
    """`aten::mm`."""
    return product(chip, a, b, split_of(chip, a, b)) if is_recorded(a, b, 2) else original(a, b)


def bmm(chip: Chip, original: Original, a: Tensor, b: Tensor) -> Tensor:
    """`aten::bmm`: a GEMM for each matrix of the batch."""
    if not is_recorded(a, b, 3):
        return original(a, b)
    return _products("torch.bmm", chip, a, b, None)


def _is_expandable(x: Tensor, shape: tuple[int, int]) -> bool:
    return all(size in (1, wanted) for size, wanted in zip(x.shape[::-1], shape[::-1], strict=False))


def addmm(
    chip: Chip, original: Original, addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`aten::addmm`: adds a bias [N] to the accumulator, a matrix too if K is split, else to the rounded product."""
    is_plain = addend.dtype is torch.bfloat16 and (beta, alpha) == (1, 1) and addend.ndim in (1, 2)
    if not (is_plain and is_recorded(a, b, 2) and _is_expandable(addend, (a.shape[0], b.shape[1]))):
        return original(addend, a, b, beta=beta, alpha=alpha)
    split_k = split_of(chip, a, b)
    if addend.ndim == 2 and split_k == 1:
        return product(chip, a, b, split_k) + addend
    return (product(chip, a, b, split_k, torch.float32) + addend.float()).to(torch.bfloat16)
