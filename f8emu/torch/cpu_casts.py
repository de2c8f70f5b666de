"""Amaxes, scales and codes of CPU tensors by the engine, in one call where torch has several operations.

Exactness: the bits of the torch operations that they stand for, in `f8emu.torch.scale` and `f8emu.torch.cast`.
"""

import torch
from torch import Tensor

from f8emu.native import cast as native
from f8emu.native import library
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.library import is_watched

_E8M0 = torch.float8_e8m0fnu


def takes(x: Tensor) -> bool:
    """Whether the engine casts `x`: a CPU tensor with memory, and nothing watches torch's operations on it."""
    return (
        x.device.type == "cpu"
        and not is_watched(x)
        and x.numel() > 0
        and x.data_ptr() != 0  # a parameter may have been given a wrapper as its data
        and not x.is_neg()
        and library.library() is not None
    )


def amax(x: Tensor, granularity: Granularity) -> Tensor:
    """The amaxes of `x` [rows, K], `granularity.scale_shape(rows, K)`."""
    values, _ = _values(x)
    found = x.new_empty(Granularity.scale_shape(granularity, *x.shape), dtype=torch.float32)
    grid = native.Grid(found.data_ptr(), 0, 0, *found.stride())
    native.run(values, granularity, grid, None, None, native.Codes(), native.FIND, threads=torch.get_num_threads())
    return found


def scales(amax: Tensor, format: Format, rule: ScaleRule, margin: int) -> tuple[Tensor, Tensor]:
    """inv_scale and scale for each amax, of its shape."""
    amax = amax.contiguous()
    inv_scale, scale = torch.empty_like(amax), torch.empty_like(amax, dtype=_E8M0 if rule.e8m0 else torch.float32)
    native.scales(amax.data_ptr(), inv_scale.data_ptr(), scale.data_ptr(), amax.numel(), format, rule, margin=margin)
    return inv_scale, scale


def quantize(x: Tensor, inv_scale: Tensor, format: Format, granularity: Granularity, codes: Tensor) -> Tensor:
    """`codes`, filled with those of `x` [rows, K]; one of its strides is 1."""
    values, _keep = _values(x)
    grid = native.Grid(0, inv_scale.data_ptr(), 0, *inv_scale.stride())
    of_codes = native.Codes(codes.data_ptr(), *codes.stride())
    native.run(values, granularity, grid, format, None, of_codes, native.ENCODE, threads=torch.get_num_threads())
    return codes


def cast(
    x: Tensor, granularity: Granularity, format: Format, rule: ScaleRule, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, row-major, scales and amaxes of `x` [rows, K], from one reading; 1x128 scales are column-major.

    `amax` is the amax of a tensorwise cast, if it is known.
    """
    values, _keep = _values(x)
    shape = Granularity.scale_shape(granularity, *x.shape)
    inv_scale = _new_floats(x, shape, granularity)
    scale = torch.empty_like(inv_scale, dtype=_E8M0 if rule.e8m0 else torch.float32)  # of the same strides
    found = _new_floats(x, shape, granularity) if amax is None else amax
    codes = x.new_empty(x.shape, dtype=getattr(torch, format.name))
    grid = native.Grid(found.data_ptr(), inv_scale.data_ptr(), scale.data_ptr(), *scale.stride())
    of_codes = native.Codes(codes.data_ptr(), *codes.stride())
    stages = native.SCALE + native.ENCODE + (native.FIND if amax is None else 0)
    native.run(values, granularity, grid, format, rule, of_codes, stages, threads=torch.get_num_threads())
    return codes, scale, found


def _new_floats(x: Tensor, shape: tuple[int, int], granularity: Granularity) -> Tensor:
    if granularity is Granularity.BLOCKWISE_1X128:
        return x.new_empty(shape[::-1], dtype=torch.float32).t()
    return x.new_empty(shape, dtype=torch.float32)


def _values(x: Tensor) -> tuple[native.Values, Tensor]:
    # `x` [rows, K] for the engine, and the tensor whose memory that is.
    row_stride, k_stride = x.stride()
    if row_stride != 1 and k_stride != 1:
        x = x.contiguous()
        row_stride, k_stride = x.stride()
    rows, k = x.shape
    return native.Values(x.data_ptr(), rows, k, row_stride, k_stride, str(x.dtype).removeprefix("torch.")), x
