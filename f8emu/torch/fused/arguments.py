"""The fused casts' arguments and results: checks of the former, allocation of the latter.

The operators and their fake implementations both call these functions, which read only shapes, dtypes and devices.
"""

from functools import cache

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.dtypes import CHIP, HIGH_PRECISION_DTYPES, operand_format, require_values
from f8emu.torch.launch_sequence import note_empty, note_zeros
from f8emu.torch.library import is_watched

CODES: dict[str, torch.dtype] = {format.name: getattr(torch, format.name) for format in CHIP.operand_formats}
"""Format name -> the dtype of its codes."""


def empty_pair(
    x: Tensor, format: Format, row_amax: Tensor | None, col_amax: Tensor | None, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of the rows, then of the columns, of `cast_pair`; its arguments checked."""
    require_values("cast_pair", x, ndim=2)
    m, n = x.shape
    return (
        *_empty_side("row_amax", x, format, row_amax, m, n, power_of_two),
        *_empty_side("col_amax", x, format, col_amax, n, m, power_of_two),
    )


def empty_rows(x: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and amaxes of `cast_rows`, its argument checked."""
    require_values("cast_rows", x, ndim=2)
    m, n = x.shape
    return new_codes(x, format, m, n), new_floats(x, m, 1), new_floats(x, m, 1)


def empty_codes(call: str, x: Tensor, fmt: str, inv_scale: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
    """Row and column codes of `cast_pair_given`, its arguments checked."""
    require_values(call, x, ndim=2)
    check_one_float(call, "inv_scale", inv_scale, x)
    format, (m, n) = named_format(call, fmt), x.shape
    return (
        new_codes(x, format, m, n) if rows else absent(x, CODES[format.name]),
        new_codes(x, format, n, m) if cols else absent(x, CODES[format.name]),
    )


def empty_blocks(
    x: Tensor, format: Format, square: bool, rows: bool, cols: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of the rows, then of the columns, of `cast_blocks`; its arguments checked."""
    require_values("cast_blocks", x, ndim=2)
    m, n = x.shape
    result: list[Tensor] = []
    for wanted, shape in ((rows, (m, n)), (cols, (n, m))):
        blocks = block_granularity(square).scale_shape(*shape) if wanted else (0, 0)
        scale = new_floats(x, *blocks) if square else new_floats(x, *reversed(blocks)).t()
        result += [new_codes(x, format, *(shape if wanted else (0, 0))), scale]
    return result[0], result[1], result[2], result[3]


def block_granularity(square: bool) -> Granularity:
    """The granularity that `square` stands for."""
    return Granularity.BLOCKWISE_128X128 if square else Granularity.BLOCKWISE_1X128


AMAX_TILE = 128
"""Rows and columns of a tile of which `row_col_amax` finds the amaxes at once."""


def amax_tiles(m: int, n: int) -> tuple[int, int]:
    """How many tiles there are along the rows, and along the columns, of a matrix [m, n]."""
    return -(-m // AMAX_TILE), -(-n // AMAX_TILE)


def tile_amaxes(m: int, n: int) -> tuple[int, int]:
    """How many amaxes all tiles of a matrix [m, n] have together: of their rows, and of their columns."""
    tiles_m, tiles_n = amax_tiles(m, n)
    return tiles_n * m, tiles_m * n


def new_floats(x: Tensor, *shape: int) -> Tensor:
    """An uninitialised float32 tensor on the device of `x`, for scales or amaxes."""
    return note_empty(x.new_empty(shape, dtype=torch.float32))


def new_zeros(x: Tensor, *shape: int) -> Tensor:
    """A float32 tensor of zeros on the device of `x`, for amaxes that kernels update by a maximum."""
    return note_zeros(x.new_zeros(shape, dtype=torch.float32))


def new_codes(x: Tensor, format: Format, *shape: int) -> Tensor:
    """An uninitialised tensor on the device of `x`, for codes."""
    return note_empty(x.new_empty(shape, dtype=CODES[format.name]))


# Cached: these lookups, made in every call, cost more than an allocation.


@cache
def named_format(call: str, fmt: str) -> Format:
    """`operand_format` of a name."""
    return operand_format(call, fmt)


@cache
def named_rule(call: str, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Format, ScaleRule]:
    """The format and the rule that an operator's arguments stand for."""
    return operand_format(call, fmt), ScaleRule(power_of_two=power_of_two, amax_floor=amax_floor)


def check_one_float(call: str, name: str, value: Tensor, x: Tensor) -> None:
    """Check that an inv_scale, or an amax to update, is one float32 on the device of `x`."""
    if value.dtype is not torch.float32 or value.numel() != 1:
        raise OperandError(
            f"{call}: {name} must be one float32; got {value.dtype} of shape {list(value.shape)}; convert it with "
            f"{name}.float()"
        )
    _check_device(call, name, value, x)


def absent(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The empty tensor that is returned for a result that was not requested."""
    return x.new_empty((0, 0), dtype=dtype) if is_watched(x) else _nothing(x.device, dtype)


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # autograd accepts no tensor that was made in inference mode
        return torch.empty((0, 0), dtype=dtype, device=device)


def _check_device(call: str, name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise OperandError(f"{call}: {name} is on {value.device} and x on {x.device}; move one to the other's device")


def _empty_side(
    name: str, x: Tensor, format: Format, amax: Tensor | None, rows: int, k: int, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Codes [rows, k] and scales of one operand of `cast_pair`, its amax checked."""
    if amax is None:
        return absent(x, CODES[format.name]), absent(x, torch.float32)
    is_of_tiles = power_of_two and amax.ndim == 3 and amax.shape[0] > 0 and tuple(amax.shape[1:]) == (rows, 1)
    is_vector = is_of_tiles or tuple(amax.shape) == (rows, 1)
    is_of_all = amax.numel() == 1 or (amax.ndim == 2 and amax.shape[0] == 1 and amax.shape[1] > 0)
    if amax.dtype not in HIGH_PRECISION_DTYPES or not (is_of_all or is_vector):
        raise OperandError(
            f"cast_pair: {name} must be float32, bfloat16 or float16, with one element, of shape [1, any number], "
            f"[{rows}, 1] or, for powers of two, [any number, {rows}, 1]; got {amax.dtype} of shape "
            f"{list(amax.shape)}; take it from tensor_amax() or row_col_amax() of the same x"
        )
    _check_device("cast_pair", name, amax, x)
    if is_vector:
        shape = rows, 1
    else:
        shape = tuple(amax.shape) if amax.numel() == 1 and amax.ndim != 3 else (1, 1)
    return new_codes(x, format, rows, k), new_floats(x, *shape)
