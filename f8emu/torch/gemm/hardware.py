"""The GEMMs on the tensor cores, by torch's own operators.

Operands have passed the checks of `f8emu.torch.gemm.engine`. Torch further requires alignment and certain layouts of
block scales; where a tensor does not have them, it is copied here.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.nn.functional import scaled_mm as functional_scaled_mm

from f8emu.spec.chip import Chip
from f8emu.spec.formats import BFLOAT16
from f8emu.spec.gemm_call import GemmCall, GroupKind
from f8emu.spec.scaling import MX_BLOCK, Granularity
from f8emu.torch.chip import dtype_of, require_hopper
from f8emu.torch.fused.availability import kernels_for
from f8emu.torch.library import is_watched
from f8emu.torch.swizzle import swizzle_scales

_ALIGNMENT = 16  # the alignment of pointers and strides of operands, in bytes
_SCALING_TYPES = {
    Granularity.BLOCKWISE_1X128: ScalingType.BlockWise1x128,
    Granularity.BLOCKWISE_128X128: ScalingType.BlockWise128x128,
    Granularity.BLOCKWISE_1X32: ScalingType.BlockWise1x32,
}
_ROWS_PER_GROUP: dict[GroupKind | None, int] = {GroupKind.ROWS: 4096, GroupKind.INNER: 768}
"""Rows of a group, in the mean, up to which kernels of f8emu promote faster than the library's."""


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, gemm: GemmCall) -> Tensor:
    """`torch._scaled_mm`, or `torch.nn.functional.scaled_mm` for blockwise scales."""
    granularities, out_dtype = gemm.granularities, dtype_of(gemm.out)
    assert granularities is not None
    is_traced = is_watched(a)
    if is_traced or not _are_plainly_aligned(a, b, scale_a, scale_b):
        a, b = _aligned(a, is_traced), _aligned_columns(b, is_traced)
        # The library requires the alignment of scales too.
        scale_a, scale_b = (x if _starts_aligned(x, is_traced) else x.clone() for x in (scale_a, scale_b))
    if bias is not None and not (bias.is_contiguous() and _starts_aligned(bias, is_traced)):
        bias = bias.clone(memory_format=torch.contiguous_format)  # the library would read it at a misaligned address
    if not granularities[0].is_blockwise:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            a,
            b,
            scale_a,
            scale_b,
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=gemm.use_fast_accum,
        )
    if granularities[0].is_microscaled:
        _warn_unverified(gemm.chip)
        micro, layout = _SCALING_TYPES[granularities[0]], SwizzleType.SWIZZLE_32_4_4
        scales = swizzle_scales(scale_a), micro, swizzle_scales(scale_b.t()), micro
        return functional_scaled_mm(a, b, *scales, layout, layout, bias, output_dtype=out_dtype)
    require_hopper("scaled_mm with blockwise scales", a.device)
    return functional_scaled_mm(
        a,
        b,
        block_scales(scale_a, granularities[0]),
        _SCALING_TYPES[granularities[0]],
        block_scales(scale_b.t(), granularities[1]),
        _SCALING_TYPES[granularities[1]],
        output_dtype=out_dtype,
    )


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, gemm: GemmCall
) -> Tensor:
    """`torch._scaled_grouped_mm` [EPI-6], or the same bits by a kernel of f8emu's where groups are small."""
    is_traced = is_watched(a)
    a, b = _aligned(a, is_traced), _aligned(b.mT, is_traced).mT
    if scale_a.dtype is torch.float8_e8m0fnu:
        _warn_unverified(gemm.chip)
        assert offs is not None
        if b.ndim == 3:
            scale_a, scale_b = swizzle_scales(scale_a, ends=offs.tolist()).view(-1, 4), swizzle_scales(scale_b.mT)
        else:
            ends = [-(-end // MX_BLOCK) for end in offs.tolist()]
            scale_a, scale_b = (swizzle_scales(x, ends=ends, axis=1).view(-1, 4) for x in (scale_a, scale_b.t()))
    else:
        require_hopper("scaled_grouped_mm", a.device)
    if offs is not None and _promotes_small_groups(gemm) and (plans := kernels_for(a)) is not None:
        return promoted_groups(plans, a, b, scale_a, scale_b, offs, gemm)
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        a,
        b,
        scale_a,
        scale_b,
        offs=None if offs is None else offs.contiguous(),
        out_dtype=dtype_of(gemm.out),
        use_fast_accum=gemm.use_fast_accum,
    )


@cache
def _warn_unverified(chip: Chip) -> None:
    warnings.warn(
        f"f8emu.torch: the tensor cores of {chip} multiply E8M0 scales here. That they have the emulation's bits is "
        "unverified: f8emu was never run on one. This warning appears once",
        RuntimeWarning,
        stacklevel=2,
    )


def _promotes_small_groups(gemm: GemmCall) -> bool:
    assert gemm.granularities is not None
    if gemm.granularities[0].is_microscaled:
        return False
    # Rows of all groups: of a, or of both operands where K is divided.
    rows = gemm.sizes[0 if gemm.group_kind is GroupKind.ROWS else 2]
    return not gemm.use_fast_accum and rows <= gemm.groups * _ROWS_PER_GROUP.get(gemm.group_kind, -1)


def promoted_groups(
    plans: Any, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, gemm: GemmCall
) -> Tensor:
    """A GEMM of groups of rows, or along K, by `grouped_gemm_kernels`."""
    (m, n, k), groups, b = gemm.sizes, gemm.groups, b.mT
    if gemm.group_kind is GroupKind.ROWS:
        plan = plans.gemm_of_rows(m, n, k, groups, a.stride(0), b.stride(1), b.stride(0))
    else:
        plan = plans.gemm_of_inner(m, n, groups, a.stride(0), b.stride(0))
    out = a.new_empty(gemm.out_shape, dtype=torch.bfloat16)
    plan(a, b, scale_a.contiguous(), scale_b.contiguous(), offs.contiguous(), out)
    return out


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """`torch._grouped_mm` of bfloat16 operands; rows behind the last group are zeros."""
    require_hopper("grouped_mm", a.device)
    out = torch._grouped_mm(a, b, offs=offs)  # pyright: ignore[reportPrivateImportUsage]
    return zeros_beyond(out, offs) if b.ndim == 3 else out


def zeros_beyond(out: Tensor, offs: Tensor) -> Tensor:
    """`out` [T, N] with zeros in the rows behind the last group, which the library leaves as they are."""
    if (plans := kernels_for(out)) is not None:
        plans.zeros_beyond(*out.shape, offs.shape[0])(out, offs)
        return out
    is_beyond = torch.arange(out.shape[0], device=out.device) >= offs[-1]
    return out.masked_fill_(is_beyond.unsqueeze(1), 0)


def mm(a: Tensor, b: Tensor, gemm: GemmCall) -> Tensor:
    """`torch.mm` of bfloat16 matrices [BF16-1]; a float16 output is the float32 one, rounded.

    A matrix that is not aligned to 16 bytes is copied: the library would choose a kernel with other rules for it.
    Autocast is disabled, because it would convert the operands to its own dtype.
    """
    a, b = _readable(a), _readable(b)
    with torch.autocast(a.device.type, enabled=False):
        if gemm.out == BFLOAT16:
            return torch.mm(a, b)
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype_of(gemm.out))


def block_scales(scale: Tensor, granularity: Granularity) -> Tensor:
    """The scales of an operand [rows, K] in the layout that `torch.nn.functional.scaled_mm` takes [EPI-5].

    1x128: `[rows, blocks]` with strides `(1, rows)`. 128x128: `[blocks padded to a multiple of 4, row blocks]` with
    strides `(1, padded)`.
    """
    rows, blocks = scale.shape
    if granularity is Granularity.BLOCKWISE_1X128:
        if scale.stride() == (1, rows) and _starts_aligned(scale, is_watched(scale)):
            return scale
        return torch.empty_strided((rows, blocks), (1, rows), dtype=scale.dtype, device=scale.device).copy_(scale)
    padded = -(-blocks // 4) * 4
    out = torch.empty_strided((padded, rows), (1, padded), dtype=scale.dtype, device=scale.device).zero_()
    out[:blocks].copy_(scale.t())
    return out


def _are_plainly_aligned(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    # Whether none of the functions below would copy, in a few calls.
    places = a.data_ptr() | b.data_ptr() | scale_a.data_ptr() | scale_b.data_ptr()
    return (places | a.stride(0) | b.stride(1)) % _ALIGNMENT == 0 and a.shape[0] > 1 and b.shape[1] > 1


def _aligned(x: Tensor, is_traced: bool) -> Tensor:
    # A row-major float8 matrix, or a stack of them; copied unless it is aligned as the tensor core needs. The stride of
    # a dimension of size 1 is never read, but the library checks it.
    is_canonical = x.shape[-2] > 1 or x.stride(-2) == x.shape[-1]
    is_aligned = _starts_aligned(x, is_traced) and not any([stride % _ALIGNMENT for stride in x.stride()[:-1]])
    return x if is_canonical and is_aligned else x.clone(memory_format=torch.contiguous_format)


def _aligned_columns(b: Tensor, is_traced: bool) -> Tensor:
    is_canonical = b.shape[1] > 1 or b.stride(1) == b.shape[0]
    is_aligned = _starts_aligned(b, is_traced) and b.stride(1) % _ALIGNMENT == 0
    return b if is_canonical and is_aligned else _aligned(b.t(), is_traced).t()


def _readable(x: Tensor) -> Tensor:
    is_canonical = 1 in x.stride() and all(s == 1 or s * x.element_size() % _ALIGNMENT == 0 for s in x.stride())
    return x if is_canonical and _starts_aligned(x, is_watched(x)) else x.clone(memory_format=torch.contiguous_format)


def _starts_aligned(x: Tensor, is_traced: bool) -> bool:
    # While a graph is traced, the storage offset decides: storages are aligned, and compiled code copies inputs that
    # are less aligned than the traced ones.
    if is_traced:
        return x.storage_offset() * x.element_size() % _ALIGNMENT == 0
    return x.data_ptr() % _ALIGNMENT == 0
