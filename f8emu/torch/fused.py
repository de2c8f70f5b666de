"""Fused casts as torch.library operators: on a GPU the Triton kernels of `kernels`, elsewhere the torch of `twins`.

A linear layer needs each matrix `x` [M, N] as two operands: `x` itself, summed over N ("rows"), and `x^T`, summed over
M ("cols"), both row-major. Each operator reads `x` once and writes what was asked for; what was not asked for is an
empty tensor. An `x` that is not contiguous is copied first.

Shapes: `row_*` belong to `x` [M, N] and `col_*` to `x^T` [N, M]; a scale or amax has the `Granularity.scale_shape` of
its operand. All are contiguous, but for 1x128 scales, whose transposes are: the GEMM wants those [EPI-5].

Exactness: kernels and twins give the same bits, those of the verbs `amax`, `scale_from_amax` and `quantize`; a NaN
scale equals any NaN. The operators are opaque to a compiler, so that an amax is that of the values as they are stored
and a division the one written here (NUMERICS 6), eager and compiled alike.

Raises: OperandError for a wrong dtype, rank, shape or device, SpecError for an unknown format or a floor out of range.

The kernels run on a CUDA device of compute capability 8.9 or newer with Triton. Without Triton the twins run there too,
which is said once, by a warning that names the remedy.
"""

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.scaling import ScaleRule
from f8emu.torch import twins
from f8emu.torch.cast_operands import block_granularity, check_amax, empty_blocks, empty_pair, new_codes, new_floats
from f8emu.torch.dtypes import float8_format, require_values
from f8emu.torch.engine import has_float8_hardware


@cache
def _launches() -> ModuleType | None:
    """The kernels' launches; None, said once, where Triton is not installed."""
    try:
        from f8emu.torch import launch
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        warnings.warn(
            "f8emu.torch: Triton is not installed, so that casts to float8 run as plain torch operations: the same "
            "bits, several times slower; install it with: pip install triton",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return launch


def _is_device_fused(device: torch.device) -> bool:
    return has_float8_hardware(device)


def _kernels_for(x: Tensor) -> ModuleType | None:
    """What launches kernels on `x`; None where the twins run."""
    return _launches() if x.numel() > 0 and _is_device_fused(x.device) else None


@torch.library.custom_op("f8emu::tensor_amax", mutates_args=())
def tensor_amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` of any shape, [1, 1]."""
    require_values("tensor_amax", x)
    if (launch := _kernels_for(x)) is None:
        return twins.tensor_amax(x)
    amax = new_floats(x, 1, 1).zero_()
    launch.tensor_amax(x.contiguous(), amax)
    return amax


@tensor_amax.register_fake
def _(x: Tensor) -> Tensor:
    require_values("tensor_amax", x)
    return new_floats(x, 1, 1)


@torch.library.custom_op("f8emu::row_amax", mutates_args=())
def row_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row of `x` [M, N], [M, 1]."""
    require_values("row_amax", x, ndim=2)
    if (launch := _kernels_for(x)) is None:
        return twins.row_amax(x)
    amax = new_floats(x, x.shape[0], 1)
    launch.row_amax(x.contiguous(), amax)
    return amax


@row_amax.register_fake
def _(x: Tensor) -> Tensor:
    require_values("row_amax", x, ndim=2)
    return new_floats(x, x.shape[0], 1)


@torch.library.custom_op("f8emu::row_col_amax", mutates_args=())
def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows of `x` [M, N], [M, 1], and of its columns, [N, 1], in one pass."""
    require_values("row_col_amax", x, ndim=2)
    if (launch := _kernels_for(x)) is None:
        return twins.row_col_amax(x)
    rows, cols = new_floats(x, x.shape[0], 1).zero_(), new_floats(x, x.shape[1], 1).zero_()
    launch.row_col_amax(x.contiguous(), rows, cols)
    return rows, cols


@row_col_amax.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    require_values("row_col_amax", x, ndim=2)
    return new_floats(x, x.shape[0], 1), new_floats(x, x.shape[1], 1)


@torch.library.custom_op("f8emu::scales", mutates_args=())
def scales(amax: Tensor, fmt: str, power_of_two: bool, amax_floor: float, margin: int) -> tuple[Tensor, Tensor]:
    """(inv_scale, scale) of every amax, of any shape and high-precision dtype, as `scale_from_amax`."""
    require_values("scales", amax, name="amax")
    format, rule = float8_format("scales", fmt), ScaleRule(power_of_two=power_of_two, amax_floor=amax_floor)
    if (launch := _kernels_for(amax)) is None:
        return twins.scales(amax.float(), format, rule, margin)
    inv_scale, scale = new_floats(amax, *amax.shape), new_floats(amax, *amax.shape)
    launch.scales(amax.contiguous(), inv_scale, scale, format, rule, margin)
    return inv_scale, scale


@scales.register_fake
def _(amax: Tensor, fmt: str, power_of_two: bool, amax_floor: float, margin: int) -> tuple[Tensor, Tensor]:
    require_values("scales", amax, name="amax")
    return new_floats(amax, *amax.shape), new_floats(amax, *amax.shape)


@torch.library.custom_op("f8emu::cast_pair", mutates_args=())
def cast_pair(
    x: Tensor, fmt: str, row_inv_scale: Tensor | None, col_inv_scale: Tensor | None, with_amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of `x` [M, N] and of `x^T` [N, M], each with its own inv_scales: one, or one a row; None leaves it out.

    Returns:
        (row_codes, col_codes, amax [1, 1]); the amax of `x` is found in the same pass where `with_amax` asks for it.
    """
    amax = new_floats(x, 1, 1).zero_() if with_amax else None
    rows, cols = _cast_pair("cast_pair", x, fmt, row_inv_scale, col_inv_scale, amax)
    return rows, cols, new_floats(x, 0, 0) if amax is None else amax


@cast_pair.register_fake
def _(
    x: Tensor, fmt: str, row_inv_scale: Tensor | None, col_inv_scale: Tensor | None, with_amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = empty_pair("cast_pair", x, fmt, row_inv_scale, col_inv_scale)
    return rows, cols, new_floats(x, 1, 1) if with_amax else new_floats(x, 0, 0)


@torch.library.custom_op("f8emu::cast_pair_delayed", mutates_args={"amax"})
def cast_pair_delayed(
    x: Tensor, fmt: str, row_inv_scale: Tensor | None, col_inv_scale: Tensor | None, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """`cast_pair`, and `amax` (float32, one element, at least 0 or NaN) becomes the maximum of itself and that of `x`.

    In the same pass, and as integers, so that a NaN stays. For the backward pass of an autograd function, `amax` should
    be a tensor of its own (not part of a larger one) and an attribute of `ctx`: what `save_for_backward` keeps may not
    change until then, and other passes would change it.
    """
    check_amax("cast_pair_delayed", amax, x)
    return _cast_pair("cast_pair_delayed", x, fmt, row_inv_scale, col_inv_scale, amax)


@cast_pair_delayed.register_fake
def _(
    x: Tensor, fmt: str, row_inv_scale: Tensor | None, col_inv_scale: Tensor | None, amax: Tensor
) -> tuple[Tensor, Tensor]:
    check_amax("cast_pair_delayed", amax, x)
    return empty_pair("cast_pair_delayed", x, fmt, row_inv_scale, col_inv_scale)


@torch.library.custom_op("f8emu::cast_rows", mutates_args=())
def cast_rows(x: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rowwise amax, scale and codes of `x` [M, N], read once: (codes [M, N], scale [M, 1], amax [M, 1])."""
    require_values("cast_rows", x, ndim=2)
    format, rule = float8_format("cast_rows", fmt), ScaleRule(power_of_two=power_of_two, amax_floor=amax_floor)
    if (launch := _kernels_for(x)) is None:
        return twins.cast_rows(x, format, rule)
    codes, scale, amax = new_codes(x, format, *x.shape), new_floats(x, x.shape[0], 1), new_floats(x, x.shape[0], 1)
    launch.cast_rows(x.contiguous(), format, rule, codes, scale, amax)
    return codes, scale, amax


@cast_rows.register_fake
def _(x: Tensor, fmt: str, power_of_two: bool, amax_floor: float) -> tuple[Tensor, Tensor, Tensor]:
    require_values("cast_rows", x, ndim=2)
    codes = new_codes(x, float8_format("cast_rows", fmt), *x.shape)
    return codes, new_floats(x, x.shape[0], 1), new_floats(x, x.shape[0], 1)


@torch.library.custom_op("f8emu::cast_blocks", mutates_args=())
def cast_blocks(
    x: Tensor, fmt: str, square: bool, rows: bool, cols: bool, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blockwise amax, scales and codes of `x` [M, N] and `x^T` [N, M] in one pass: 128x128 where `square`, else 1x128.

    Returns:
        (row_codes, row_scale, col_codes, col_scale).
    """
    out = empty_blocks(x, fmt, square, rows, cols)
    format, rule = float8_format("cast_blocks", fmt), ScaleRule(power_of_two=power_of_two, amax_floor=amax_floor)
    if (launch := _kernels_for(x)) is None:
        row = twins.cast_blocks(x, format, block_granularity(square), rule) if rows else out[:2]
        col = twins.cast_blocks(x.t(), format, block_granularity(square), rule) if cols else out[2:]
        return *row, *col
    launch.cast_blocks(
        x.contiguous(), format, rule, out[:2] if rows else None, out[2:] if cols else None, is_square=square
    )
    return out


@cast_blocks.register_fake
def _(
    x: Tensor, fmt: str, square: bool, rows: bool, cols: bool, power_of_two: bool, amax_floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_blocks(x, fmt, square, rows, cols)


def _cast_pair(
    call: str,
    x: Tensor,
    fmt: str,
    row_inv_scale: Tensor | None,
    col_inv_scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, cols = empty_pair(call, x, fmt, row_inv_scale, col_inv_scale)
    format = float8_format(call, fmt)
    if (launch := _kernels_for(x)) is None:
        if amax is not None:
            twins.raise_amax(amax, x)
        row = rows if row_inv_scale is None else twins.cast_rows_by(x, format, row_inv_scale)
        col = cols if col_inv_scale is None else twins.cast_rows_by(x.t(), format, col_inv_scale)
        return row, col
    scales = [None if s is None else s.contiguous() for s in (row_inv_scale, col_inv_scale)]
    launch.cast_pair(x.contiguous(), format, *scales, rows, cols, amax)
    return rows, cols


def _no_backward(ctx: Any, *grads: Tensor) -> None:
    raise UnsupportedError(
        "f8emu.torch casts are not differentiable: a gradient through float8 codes has no meaning; differentiate the "
        "linear layer around them, or call under torch.no_grad()"
    )


for _op in (tensor_amax, row_amax, row_col_amax, scales, cast_pair, cast_rows, cast_blocks):
    _op.register_autograd(_no_backward)
