"""What the fused casts take and give: checks of arguments, and results still empty.

Both the operators and their fake implementations call these, which read shapes, dtypes and devices only.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity
from f8emu.torch.dtypes import float8_format, require_values


def empty_pair(
    call: str, x: Tensor, fmt: str, row_inv_scale: Tensor | None, col_inv_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row and column codes of `cast_pair`, its arguments checked."""
    require_values(call, x, ndim=2)
    m, n = x.shape
    _check_inv_scale(call, "row_inv_scale", row_inv_scale, x, m)
    _check_inv_scale(call, "col_inv_scale", col_inv_scale, x, n)
    rows, cols = (0, 0) if row_inv_scale is None else (m, n), (0, 0) if col_inv_scale is None else (n, m)
    format = float8_format(call, fmt)
    return new_codes(x, format, *rows), new_codes(x, format, *cols)


def empty_blocks(x: Tensor, fmt: str, square: bool, rows: bool, cols: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of the rows, then of the columns, of `cast_blocks`; its arguments checked."""
    require_values("cast_blocks", x, ndim=2)
    format, (m, n) = float8_format("cast_blocks", fmt), x.shape
    result: list[Tensor] = []
    for wanted, shape in ((rows, (m, n)), (cols, (n, m))):
        blocks = block_granularity(square).scale_shape(*shape) if wanted else (0, 0)
        scale = new_floats(x, *blocks) if square else new_floats(x, *reversed(blocks)).t()
        result += [new_codes(x, format, *(shape if wanted else (0, 0))), scale]
    return result[0], result[1], result[2], result[3]


def block_granularity(square: bool) -> Granularity:
    """What `square` stands for."""
    return Granularity.BLOCKWISE_128X128 if square else Granularity.BLOCKWISE_1X128


def new_floats(x: Tensor, *shape: int) -> Tensor:
    """A float32 tensor where `x` is, for scales or amaxes."""
    return x.new_empty(shape, dtype=torch.float32)


def new_codes(x: Tensor, format: Format, *shape: int) -> Tensor:
    """A tensor where `x` is, for codes."""
    return x.new_empty(shape, dtype=getattr(torch, format.name))


def check_amax(call: str, amax: Tensor, x: Tensor) -> None:
    """Check an amax that is raised to that of `x`."""
    if amax.dtype is not torch.float32 or amax.numel() != 1:
        raise OperandError(
            f"{call}: amax must be one float32; got {amax.dtype} of shape {list(amax.shape)}; convert it with "
            "amax.float()"
        )
    if amax.device != x.device:
        raise OperandError(f"{call}: amax is on {amax.device} and x on {x.device}; move one to the other's device")


def _check_inv_scale(call: str, name: str, inv_scale: Tensor | None, x: Tensor, rows: int) -> None:
    if inv_scale is None:
        return
    if inv_scale.dtype is not torch.float32 or (inv_scale.numel() != 1 and tuple(inv_scale.shape) != (rows, 1)):
        raise OperandError(
            f"{call}: {name} must be float32 with one element or of shape [{rows}, 1]; got {inv_scale.dtype} of shape "
            f"{list(inv_scale.shape)}; take it from scales() of the same x"
        )
    if inv_scale.device != x.device:
        raise OperandError(
            f"{call}: {name} is on {inv_scale.device} and x on {x.device}; move one to the other's device"
        )
