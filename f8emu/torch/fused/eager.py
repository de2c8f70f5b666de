"""The fused casts in terms of the verbs, which the engine computes on CPUs: what the kernels compute.

They run where the kernels do not: on a CPU, on a GPU without float8, without Triton, and for empty tensors.
"""

import torch
from torch import Tensor

from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch import cpu_casts
from f8emu.torch.cast import quantize
from f8emu.torch.fused.fused_cast import CODES
from f8emu.torch.scale import amax, scale_from_amax


def tensor_amax(x: Tensor) -> Tensor:
    """The amax of `x` of any shape, [1, 1]."""
    return amax(x.reshape(1, x.numel()))


def row_amax(x: Tensor) -> Tensor:
    """The amaxes of the rows, [M, 1]."""
    return amax(x, Granularity.ROWWISE)


def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The amaxes of the rows, [M, 1], and of the columns, [N, 1]."""
    return row_amax(x), row_amax(x.t())


def amaxes_of_tiles(x: Tensor) -> Tensor:
    """The amaxes of the rows of every tile, [tiles, M], then those of its columns, [tiles, N], in one vector."""
    return torch.cat([amax(side, Granularity.BLOCKWISE_1X128).t().flatten() for side in (x, x.t())])


def raise_amax(amax: Tensor, x: Tensor) -> None:
    """Update `amax` to the maximum of itself and the amax of `x`; an integer maximum, which keeps NaN."""
    bits = tensor_amax(x).view(torch.int32).reshape(amax.shape)
    amax.copy_(torch.maximum(amax.view(torch.int32), bits).view(torch.float32))


def cast_by_own(x: Tensor, fmt: Format, granularity: Granularity, rule: ScaleRule) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amaxes of `x`, scaled by its own amaxes; 1x128 scales are column-major."""
    if cpu_casts.takes(x):
        return cpu_casts.cast(x, granularity, fmt, rule)
    largest = amax(x, granularity)
    inv_scale, scale = scale_from_amax(largest, fmt, rule)
    scale = _row_major(scale.t()).t() if granularity is Granularity.BLOCKWISE_1X128 else scale
    return _row_major(quantize(x, inv_scale, fmt, granularity)), scale, largest


def cast_rows_by(x: Tensor, fmt: Format, amax: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x` by given amaxes: one, one a row, [1, any number], or [any number, M, 1].

    Of any number the largest counts.
    """
    amax = amax.float()
    if amax.ndim == 3:
        amax = row_amax(amax.squeeze(2).t())
    elif amax.ndim == 2 and amax.shape[0] == 1:
        amax = row_amax(amax)
    inv_scale, scale = scale_from_amax(amax, fmt, rule)
    return cast_by(x, fmt, inv_scale), scale


def cast_by(x: Tensor, fmt: Format, inv_scale: Tensor) -> Tensor:
    """The codes of `x` under given inv_scales: one, or one per row."""
    granularity = Granularity.TENSORWISE if inv_scale.numel() == 1 else Granularity.ROWWISE
    if cpu_casts.takes(x):
        codes = x.new_empty(x.shape, dtype=CODES[fmt.name])
        return cpu_casts.quantize(x, inv_scale.reshape(-1, 1), fmt, granularity, codes)
    return _row_major(quantize(x, inv_scale, fmt, granularity))


def cast_sides_by(x: Tensor, fmt: Format, inv_scale: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
    """The codes of `x` if `rows`, and of `x^T` if `cols`, under one inv_scale."""
    row = cast_by(x, fmt, inv_scale) if rows else nothing(x, fmt)[0]
    return row, cast_by(x.t(), fmt, inv_scale) if cols else nothing(x, fmt)[0]


def nothing(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes and scales that were not requested."""
    return x.new_empty((0, 0), dtype=CODES[fmt.name]), x.new_empty((0, 0), dtype=torch.float32)


def _row_major(x: Tensor) -> Tensor:
    # Strides of a new contiguous tensor, also for dimensions of size 1, as the kernels' results have them.
    return x.contiguous().flatten().view(x.shape)
