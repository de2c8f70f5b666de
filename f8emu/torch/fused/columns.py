"""What a gathered weight needs besides the fused casts: codes scaled by column, and codes transposed.

The shards of a weight are rows of it, and are gathered as rows. So codes of `x^T` travel in the layout of `x`, and are
transposed where they arrive.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.torch.fused import eager
from f8emu.torch.fused.arguments import CODES, Output, codes_of, matrix, named_format
from f8emu.torch.fused.fused_cast import FusedCast


def _columns_outputs(x: Tensor, fmt: str, inv_scale: Tensor) -> tuple[Output, ...]:
    m, n = matrix("cast_columns", x)
    named_format("cast_columns", fmt)
    if inv_scale.dtype is not torch.float32 or tuple(inv_scale.shape) != (n, 1):
        raise OperandError(
            f"cast_columns: inv_scale must be float32 of shape [{n}, 1]; got {inv_scale.dtype} of shape "
            f"{list(inv_scale.shape)}; take it from scale_from_amax() of the column amaxes"
        )
    return (codes_of(fmt, m, n),)


@FusedCast(
    outputs=_columns_outputs,
    launch=lambda on, out, x, fmt, inv_scale: on.run(
        on.plans.cast_columns(*on.shape(x), fmt), x, on.contiguous(inv_scale), *out
    ),
)
def cast_columns(x: Tensor, fmt: str, inv_scale: Tensor) -> Tensor:
    """Codes of `x` [M, N] in its layout, by the inv_scale [N, 1] of each column.

    Exactness: those of `quantize(x^T, inv_scale)`, transposed.
    """
    codes = eager.cast_by(x.t(), named_format("cast_columns", fmt), inv_scale).t()
    return x.new_empty(x.shape, dtype=codes.dtype).copy_(codes)


def _transposed_outputs(codes: Tensor, after: Tensor) -> tuple[Output, ...]:
    if codes.ndim != 2 or codes.dtype not in (torch.uint8, *CODES.values()):
        raise OperandError(
            f"transpose_codes: codes must be float8 [M, N]; got {codes.dtype} of shape {list(codes.shape)}"
        )
    return (Output((codes.shape[1], codes.shape[0]), codes.dtype),)


@FusedCast(
    outputs=_transposed_outputs,
    launch=lambda on, out, codes, after: on.run(on.plans.transpose_codes(*on.shape(codes)), codes, *out),
)
def transpose_codes(codes: Tensor, after: Tensor) -> Tensor:
    """Codes [M, N], or their bytes, as a new tensor [N, M], row-major.

    `after` is not read. A compiler sees that the transpose needs it, and does not move it into the forward pass, where
    the result would be kept for the backward pass and the codes may not have been gathered yet.
    """
    rows, columns = codes.shape
    out = codes.new_empty(columns, rows)
    return out.copy_(codes.view(torch.uint8).t().view(codes.dtype)) if codes.numel() else out
