"""The statistics of one matrix: of its values, of a cast of it, of its codes.

All are tensors without dimensions on the matrix's device, float64, so that nobody waits for the device while a model
trains.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from f8emu.spec.recipe import Cast
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.torch.cast import decode, dequantize, quantize
from f8emu.torch.scale import amax, reciprocal, scale_from_amax, spread_scale
from f8emu.torch.training.operands import Operand

Statistics = dict[str, Tensor]


def value_statistics(x: Tensor, wanted: Collection[str]) -> Statistics:
    """Of a matrix in high precision, those of `VALUE_STATISTICS` that are wanted.

    NaN and infinity take no part in dynamic_range; in the others they do as torch has it.
    """
    found: Statistics = {}
    if x.numel() == 0:
        return found
    magnitude = x.detach().abs()
    if "amax" in wanted:
        found["amax"] = magnitude.amax()
    if "nan" in wanted:
        found["nan"] = x.isnan().sum()
    if "inf" in wanted:
        found["inf"] = x.isinf().sum()
    if "zero" in wanted:
        found["zero"] = (x == 0).sum()
    if "mean" in wanted:
        found["mean"] = x.mean(dtype=torch.float64)
    if "std" in wanted:
        found["std"] = x.double().std()
    if "l1_norm" in wanted:
        found["l1_norm"] = x.abs().sum(dtype=torch.float64)
    if "l2_norm" in wanted:
        found["l2_norm"] = _norm(x)
    if "dynamic_range" in wanted:
        found["dynamic_range"] = _range(magnitude.reshape(1, -1)).max()
    return {name: value.double() for name, value in found.items()}


def cast_statistics(
    x: Tensor, cast: Cast, rule: ScaleRule, wanted: Collection[str], inv_scale: Tensor | None
) -> Statistics:
    """Of the cast of `x` [rows, K], those of `CAST_STATISTICS` that are wanted; none of one in high precision.

    Shapes:
        inv_scale: [1, 1], that of delayed scaling; None takes that of the matrix's own amax.

    Exactness: codes and scales are those of the verbs, which a layer on one device uses. Of a matrix that is sharded by
    tensor parallelism the amax is that of this rank.
    """
    if cast.format is None or x.numel() == 0:
        return {}
    found: Statistics = {}
    if "dynamic_range_block" in wanted:
        k = x.shape[1] // 128 * 128
        blocks = x[:, :k].reshape(-1, 128) if k else x
        found["dynamic_range_block"] = _range(blocks.detach().abs()).max().double()
    if not {"underflow", "saturation", "sqnr", "mse"} & set(wanted):
        return found
    if inv_scale is None:
        used, scale = scale_from_amax(amax(x, cast.granularity), cast.format, rule)
    else:
        used, scale = inv_scale, reciprocal(inv_scale)
    codes = quantize(x, used, cast.format, cast.granularity)
    if "underflow" in wanted:
        is_lost = ((codes.view(torch.uint8) & 0x7F) == 0) & (x != 0)
        found["underflow"] = is_lost.sum() / x.numel()
    if "saturation" in wanted:
        scaled = x.float() * spread_scale("inspect", "inv_scale", used, x, cast.granularity)
        half_unit = 2.0 ** (cast.format.max_exponent - cast.format.fraction_bits - 1)
        found["saturation"] = (scaled.abs() > cast.format.max + half_unit).sum() / x.numel()
    if "sqnr" in wanted or "mse" in wanted:
        # [rows, K] float32: the norms add up in float64.
        noise = _norm(dequantize(codes, scale, cast.granularity) - x.float())
        if "mse" in wanted:
            found["mse"] = noise.square() / x.numel()
        if "sqnr" in wanted:
            found["sqnr"] = 20 * torch.log10(_norm(x) / noise)
    return {name: value.double() for name, value in found.items()}


def operand_statistics(operand: Operand, cast: Cast, wanted: Collection[str]) -> Statistics:
    """Of an operand as its GEMM got it, those of `OPERAND_STATISTICS` that are wanted; none in high precision."""
    found: Statistics = {}
    if cast.format is None or operand.scale is None or operand.codes.numel() == 0:
        return found
    if "scale_min" in wanted:
        found["scale_min"] = operand.scale.min()
    if "scale_max" in wanted:
        found["scale_max"] = operand.scale.max()
    magnitude = operand.codes.view(torch.uint8) & 0x7F
    if "nan_codes" in wanted:
        found["nan_codes"] = decode(operand.codes).isnan().sum()
    if "zero_codes" in wanted:
        found["zero_codes"] = (magnitude == 0).sum()
    if "saturated_codes" in wanted:
        found["saturated_codes"] = (magnitude == cast.format.max_code).sum()
    return {name: value.double() for name, value in found.items()}


def exact_values(codes: Tensor, scale: Tensor | None, granularity: Granularity) -> Tensor:
    """The values that codes [rows, K] stand for, in float64: a product of float8 and float32 has 28 bits."""
    if scale is None:
        return codes.double()
    return decode(codes).double() * spread_scale("inspect", "scale", scale, codes, granularity).double()


def _range(magnitude: Tensor) -> Tensor:
    """log2(largest / smallest that is not zero) of each row; 0 of a row without such values."""
    finite = torch.where(magnitude.isfinite(), magnitude, 0)
    largest = finite.amax(dim=1).double()
    smallest = torch.where(finite > 0, finite, torch.inf).amin(dim=1).double()
    return torch.where(largest > 0, torch.log2(largest) - torch.log2(smallest), 0.0)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64)
