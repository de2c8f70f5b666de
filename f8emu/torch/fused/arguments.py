"""The fused casts' arguments and results: checks of the former, shapes of the latter, from shapes and dtypes alone."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.dtypes import CHIP, HIGH_PRECISION_DTYPES, operand_format, require_values

CODES: dict[str, torch.dtype] = {format.name: getattr(torch, format.name) for format in CHIP.operand_formats}
"""Format name -> the dtype of its codes."""
AMAX_TILE = 128
"""Rows and columns of a tile of which `row_col_amax` finds the amaxes at once."""


class Output(NamedTuple):
    """One result of a fused cast; the shape (0, 0) stands for a result that was not requested."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    side: int | None = None
    """Results of one side are computed if any of them is read; those without a side always."""
    is_transposed: bool = False
    """Whether it is column-major."""
    is_zeroed: bool = False
    """Whether it is zero before the kernels run."""

    def new(self, x: Tensor) -> Tensor:
        """The tensor, on the device of `x`."""
        if self.is_zeroed:
            return x.new_zeros(self.shape, dtype=self.dtype)
        if self.is_transposed:
            return x.new_empty(self.shape[::-1], dtype=self.dtype).t()
        return x.new_empty(self.shape, dtype=self.dtype)


def matrix(call: str, x: Tensor) -> tuple[int, int]:
    """Rows and columns of an argument that has to be a matrix in high precision."""
    require_values(call, x, ndim=2)
    return x.shape[0], x.shape[1]


def codes_of(fmt: str, rows: int, k: int, side: int | None = None, *, is_wanted: bool = True) -> Output:
    """Codes [rows, k] of a format."""
    return Output((rows, k) if is_wanted else (0, 0), CODES[fmt], side)


def side_of_blocks(fmt: str, square: bool, rows: int, k: int, side: int, is_wanted: bool) -> tuple[Output, Output]:
    """Codes and scales of an operand [rows, k] in blocks; 1x128 scales are column-major [EPI-5]."""
    shape = block_granularity(square).scale_shape(rows, k) if is_wanted else (0, 0)
    return codes_of(fmt, rows, k, side, is_wanted=is_wanted), Output(shape, side=side, is_transposed=not square)


def side_of_pair(
    name: str, x: Tensor, fmt: str, amax: Tensor | None, side: int, power_of_two: bool
) -> tuple[Output, Output]:
    """Codes and scales of one operand of `cast_pair`, its amax checked."""
    rows, k = x.shape if side == 0 else reversed(x.shape)
    if amax is None:
        return codes_of(fmt, 0, 0, side), Output((0, 0), side=side)
    is_of_tiles = power_of_two and amax.ndim == 3 and amax.shape[0] > 0 and tuple(amax.shape[1:]) == (rows, 1)
    is_vector = is_of_tiles or tuple(amax.shape) == (rows, 1)
    is_of_all = amax.numel() == 1 or (amax.ndim == 2 and amax.shape[0] == 1 and amax.shape[1] > 0)
    if amax.dtype not in HIGH_PRECISION_DTYPES or not (is_of_all or is_vector):
        raise OperandError(
            f"cast_pair: {name} must be float32, bfloat16 or float16, with one element, of shape [1, any number], "
            f"[{rows}, 1] or, for powers of two, [any number, {rows}, 1]; got {amax.dtype} of shape "
            f"{list(amax.shape)}; take it from tensor_amax() or row_col_amax() of the same x"
        )
    check_device("cast_pair", name, amax, x)
    if is_vector:
        shape = rows, 1
    else:
        shape = tuple(amax.shape) if amax.numel() == 1 and amax.ndim != 3 else (1, 1)
    return codes_of(fmt, rows, k, side), Output(shape, side=side)


def amax_count(shape: Sequence[int]) -> int:
    """How many amaxes of a whole tensor there are; 0 for a vector of one a row; -t for t such vectors."""
    if len(shape) == 3 and math.prod(shape) > 1:
        return -shape[0]
    return 0 if len(shape) == 2 and shape[0] > 1 else math.prod(shape)


def block_granularity(square: bool) -> Granularity:
    """The granularity that `square` stands for."""
    return Granularity.BLOCKWISE_128X128 if square else Granularity.BLOCKWISE_1X128


def amax_tiles(m: int, n: int) -> tuple[int, int]:
    """How many tiles there are along the rows, and along the columns, of a matrix [m, n]."""
    return -(-m // AMAX_TILE), -(-n // AMAX_TILE)


def tile_amaxes(m: int, n: int) -> tuple[int, int]:
    """How many amaxes all tiles of a matrix [m, n] have together: of their rows, and of their columns."""
    tiles_m, tiles_n = amax_tiles(m, n)
    return tiles_n * m, tiles_m * n


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
    check_device(call, name, value, x)


def check_device(call: str, name: str, value: Tensor, x: Tensor) -> None:
    """Check that an argument is on the device of `x`."""
    if value.device != x.device:
        raise OperandError(f"{call}: {name} is on {value.device} and x on {x.device}; move one to the other's device")
