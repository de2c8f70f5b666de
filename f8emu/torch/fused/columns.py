"""What a gathered weight needs besides the fused casts: codes scaled by column, and codes transposed.

The shards of a weight are rows of it, and are gathered as rows. So codes of `x^T` travel in the layout of `x`, and are
transposed where they arrive.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.torch.dtypes import require_values
from f8emu.torch.fused import eager
from f8emu.torch.fused.arguments import CODES, named_format
from f8emu.torch.fused.operators import fake_with_hooks, kernels_for
from f8emu.torch.library import operator


@operator()
def cast_columns(x: Tensor, fmt: str, inv_scale: Tensor) -> Tensor:
    """Codes of `x` [M, N] in its layout, by the inv_scale [N, 1] of each column.

    Exactness: those of `quantize(x^T, inv_scale)`, transposed.
    """
    codes = _empty_columns(x, fmt, inv_scale)
    if (launch := kernels_for(x)) is None:
        return codes.copy_(eager.cast_by(x.t(), named_format("cast_columns", fmt), inv_scale).t())
    launch.cast_columns(*x.shape, fmt)(x.contiguous(), inv_scale.contiguous(), codes)
    return codes


@fake_with_hooks(cast_columns)
def _(x: Tensor, fmt: str, inv_scale: Tensor) -> Tensor:
    return _empty_columns(x, fmt, inv_scale)


def _empty_columns(x: Tensor, fmt: str, inv_scale: Tensor) -> Tensor:
    require_values("cast_columns", x, ndim=2)
    format = named_format("cast_columns", fmt)
    if inv_scale.dtype is not torch.float32 or tuple(inv_scale.shape) != (x.shape[1], 1):
        raise OperandError(
            f"cast_columns: inv_scale must be float32 of shape [{x.shape[1]}, 1]; got {inv_scale.dtype} of shape "
            f"{list(inv_scale.shape)}; take it from scale_from_amax() of the column amaxes"
        )
    return x.new_empty(x.shape, dtype=CODES[format.name])


@operator()
def transpose_codes(codes: Tensor, after: Tensor) -> Tensor:
    """Codes [M, N], or their bytes, as a new tensor [N, M], row-major.

    `after` is not read. A compiler sees that the transpose needs it, and does not move it into the forward pass, where
    the result would be kept for the backward pass and the codes may not have been gathered yet.
    """
    out = _empty_transposed(codes)
    if (launch := kernels_for(codes)) is None:
        return out.copy_(codes.view(torch.uint8).t().view(codes.dtype)) if codes.numel() else out
    launch.transpose_codes(*codes.shape)(codes.contiguous(), out)
    return out


@fake_with_hooks(transpose_codes)
def _(codes: Tensor, after: Tensor) -> Tensor:
    return _empty_transposed(codes)


def _empty_transposed(codes: Tensor) -> Tensor:
    if codes.ndim != 2 or codes.dtype not in (torch.uint8, *CODES.values()):
        raise OperandError(
            f"transpose_codes: codes must be float8 [M, N]; got {codes.dtype} of shape {list(codes.shape)}"
        )
    return codes.new_empty(codes.shape[1], codes.shape[0])
