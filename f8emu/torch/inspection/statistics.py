"""The statistics of one matrix: of its values, of a cast of it, of its codes, in plain torch.

What is computed are numbers on the matrix's device, so that nobody waits for it while a model trains; the statistics
are made of them on the host, when they are read.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from f8emu.spec.formats import Format
from f8emu.spec.recipe import Cast
from f8emu.spec.scaling import Granularity
from f8emu.torch.cast import decode, dequantize, quantize
from f8emu.torch.scale import reciprocal, spread_scale

NOISE_STATISTICS = ("underflow", "saturation", "sqnr", "mse")
"""The statistics of a cast that need its codes."""


class Found(NamedTuple):
    """Numbers on their device, and the statistics that the host makes of them."""

    numbers: Tensor
    """Any shape and dtype; memory that nobody writes to again."""
    meaning: Callable[[list[float]], dict[str, float]]


Statistics = list[Found]


def named(values: Mapping[str, Tensor]) -> Statistics:
    """Statistics that are numbers as they are, each without dimensions."""
    if not values:
        return []
    return [Found(torch.stack([value.double() for value in values.values()]), partial(by_name, tuple(values)))]


def by_name(names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    """The numbers by their names."""
    return dict(zip(names, numbers, strict=True))


def of_cast(names: tuple[str, ...], wanted: Collection[str], count: int, numbers: list[float]) -> dict[str, float]:
    """The requested NOISE_STATISTICS of `count` values, from the numbers that `cast_numbers` names."""
    number = dict(zip(names, numbers, strict=True))
    found = {name: number[name] / count for name in ("underflow", "saturation") if name in wanted}
    if "mse" in wanted:
        found["mse"] = number["noise"] / count
    if "sqnr" in wanted:
        found["sqnr"] = _decibels(number["signal"], number["noise"])
    return found


_OF_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.abs().amax(),
    "nan": lambda x: x.isnan().sum(),
    "inf": lambda x: x.isinf().sum(),
    "zero": lambda x: (x == 0).sum(),
    "mean": lambda x: x.mean(dtype=torch.float64),
    # torch gives NaN for one element too, with a warning.
    "std": lambda x: x.double().std() if x.numel() > 1 else x.new_full((), math.nan, dtype=torch.float64),
    "l1_norm": lambda x: x.abs().sum(dtype=torch.float64),
    "l2_norm": lambda x: _norm(x),
    "dynamic_range": lambda x: _range(x.abs().reshape(1, -1)).max(),
}


def value_statistics(x: Tensor, wanted: Collection[str]) -> Statistics:
    """The requested statistics of `VALUE_STATISTICS`, for a matrix in high precision.

    NaN and infinity take no part in dynamic_range; in the others they do as torch has it.
    """
    return named({name: statistic(x.detach()) for name, statistic in _OF_VALUES.items() if name in wanted})


def cast_statistics(
    x: Tensor, inv_scale: Tensor, format: Format, granularity: Granularity, wanted: Collection[str]
) -> Statistics:
    """The requested NOISE_STATISTICS of the cast of `x` [rows, K].

    Shapes:
        inv_scale: `granularity.scale_shape(rows, K)`.
    """
    found: dict[str, Tensor] = {}
    codes = quantize(x, inv_scale, format, granularity)
    if "underflow" in wanted:
        found["underflow"] = (((codes.view(torch.uint8) & 0x7F) == 0) & (x != 0)).sum()
    if "saturation" in wanted:
        scaled = x.float() * spread_scale("inspect", "inv_scale", inv_scale, x, granularity)
        found["saturation"] = (scaled.abs() > tie_of(format)).sum()
    if "sqnr" in wanted or "mse" in wanted:
        # [rows, K] float64: of a value that was clamped, the difference is not a float32.
        decoded = dequantize(codes, reciprocal(inv_scale), granularity).double()
        found["signal"], found["noise"] = _norm(x).square(), _norm(decoded.sub_(x)).square()
    meaning = partial(of_cast, tuple(found), wanted, x.numel())
    return [Found(torch.stack([value.double() for value in found.values()]), meaning)]


def tie_of(format: Format) -> float:
    """What is larger rounds beyond the format's largest value."""
    return format.max + 2.0 ** (format.max_exponent - format.fraction_bits - 1)


def block_statistics(x: Tensor) -> Statistics:
    """The largest dynamic range within 128 neighbours of a row of `x` [rows, K]."""
    k = x.shape[1] // 128 * 128
    blocks = x[:, :k].reshape(-1, 128) if k else x
    return named({"dynamic_range_block": _range(blocks.detach().abs()).max()})


def code_statistics(codes: Tensor, cast: Cast, wanted: Collection[str]) -> Statistics:
    """How many codes are NaN, zero, and that of the format's largest value, where it is wanted."""
    found: dict[str, Tensor] = {}
    magnitude = codes.view(torch.uint8) & 0x7F
    if "nan_codes" in wanted:
        found["nan_codes"] = decode(codes).isnan().sum()
    if "zero_codes" in wanted:
        found["zero_codes"] = (magnitude == 0).sum()
    if "saturated_codes" in wanted and cast.format is not None:
        found["saturated_codes"] = (magnitude == cast.format.max_code).sum()
    return named(found)


def exact_values(codes: Tensor, scale: Tensor | None, granularity: Granularity) -> Tensor:
    """The values that codes [rows, K] stand for, in float64: a product of float8 and float32 has 28 bits."""
    if scale is None:
        return codes.double()
    return decode(codes).double() * spread_scale("inspect", "scale", scale, codes, granularity).double()


def _decibels(signal: float, noise: float) -> float:
    ratio = signal / noise if noise else math.inf if signal > 0 else math.nan
    return 10 * math.log10(ratio) if ratio else -math.inf


def _range(magnitude: Tensor) -> Tensor:
    """log2(largest / smallest that is not zero) of each row; 0 of a row without such values."""
    finite = torch.where(magnitude.isfinite(), magnitude, 0)
    largest = finite.amax(dim=1).double()
    smallest = torch.where(finite > 0, finite, torch.inf).amin(dim=1).double()
    return torch.where(largest > 0, torch.log2(largest) - torch.log2(smallest), 0.0)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64)
