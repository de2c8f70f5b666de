"""The statistics of a matrix, of its values, its cast and its codes, and the error of a GEMM, in plain torch.

What is computed are numbers on the matrix's device, so that nobody waits for it while a model trains; the statistics
are made of them on the host, when they are read.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from f8emu.spec.formats import Format
from f8emu.spec.gemm import error_parts
from f8emu.spec.recipe import Cast
from f8emu.spec.scaling import BLOCK, Granularity
from f8emu.torch.cast import decode, dequantize, quantize
from f8emu.torch.casts.operand import Operand
from f8emu.torch.layer.matmul import gemm
from f8emu.torch.layer.observers import GemmSeen
from f8emu.torch.scale import reciprocal, spread_scale

COUNTED = ("amax", "nan", "inf", "zero")
SUMMED = ("total", "magnitudes", "squares")
CAST = ("underflows", "saturations", "signal", "noise")
"""Numbers, in the order in which the kernels have them."""


def _decibels(signal: float, noise: float) -> float:
    ratio = signal / noise if noise else math.inf if signal > 0 else math.nan
    return 10 * math.log10(ratio) if ratio else -math.inf


_MADE_OF: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "mean": (("total",), lambda count, total: total / count),
    "l1_norm": (("magnitudes",), lambda _, magnitudes: magnitudes),
    "l2_norm": (("squares",), lambda _, squares: math.sqrt(squares)),
    "underflow": (("underflows",), lambda count, underflows: underflows / count),
    "saturation": (("saturations",), lambda count, saturations: saturations / count),
    "sqnr": (("signal", "noise"), lambda _, signal, noise: _decibels(signal, noise)),
    "mse": (("noise",), lambda count, noise: noise / count),
}
"""Statistic -> its numbers, and the formula of them and of how many values there are. Any other is a number itself."""


class Reading(NamedTuple):
    """Numbers on their device, and what the host makes of them."""

    numbers: Tensor
    """Any shape and dtype; memory that nobody writes to again."""
    names: tuple[str, ...]
    wanted: Collection[str]
    """Statistics."""
    elements: int = 1
    """How many values there are."""

    def meaning(self, numbers: Sequence[float]) -> dict[str, float]:
        number = dict(zip(self.names, numbers, strict=True))
        statistics = {name: value for name, value in number.items() if name in self.wanted}
        for name, (needs, formula) in _MADE_OF.items():
            if name in self.wanted and number.keys() >= set(needs):
                statistics[name] = formula(self.elements, *(number[need] for need in needs))
        return statistics


Statistics = list[Reading]


def needed(wanted: Collection[str]) -> set[str]:
    """The numbers of these statistics."""
    return {need for name in wanted for need in _MADE_OF.get(name, ((name,),))[0]}


def stacked(values: Mapping[str, Tensor], wanted: Collection[str], count: int = 1) -> Statistics:
    """Numbers without dimensions, as one tensor."""
    if not values:
        return []
    return [Reading(torch.stack([value.double() for value in values.values()]), tuple(values), wanted, count)]


_OF_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.abs().amax(),
    "nan": lambda x: x.isnan().sum(),
    "inf": lambda x: x.isinf().sum(),
    "zero": lambda x: (x == 0).sum(),
    "total": lambda x: x.sum(dtype=torch.float64),
    # torch gives NaN for one element too, with a warning.
    "std": lambda x: x.double().std() if x.numel() > 1 else x.new_full((), math.nan, dtype=torch.float64),
    "magnitudes": lambda x: x.abs().sum(dtype=torch.float64),
    "squares": lambda x: _norm(x).square(),
    "dynamic_range": lambda x: _range(x.abs().reshape(1, -1)).max(),
}


def value_numbers(x: Tensor, numbers: Collection[str]) -> dict[str, Tensor]:
    """Numbers of a matrix in high precision.

    NaN and infinity take no part in dynamic_range; in the others they do as torch has it.
    """
    return {name: number(x) for name, number in _OF_VALUES.items() if name in numbers}


def cast_numbers(
    x: Tensor, inv_scale: Tensor, format: Format, granularity: Granularity, numbers: Collection[str]
) -> dict[str, Tensor]:
    """Numbers of the cast of `x` [rows, K].

    Shapes:
        inv_scale: `granularity.scale_shape(rows, K)`.
    """
    results: dict[str, Tensor] = {}
    codes = quantize(x, inv_scale, format, granularity)
    if "underflows" in numbers:
        results["underflows"] = (((codes.view(torch.uint8) & 0x7F) == 0) & (x != 0)).sum()
    if "saturations" in numbers:
        scaled = x.float() * spread_scale("inspect", "inv_scale", inv_scale, x, granularity)
        results["saturations"] = (scaled.abs() > tie_of(format)).sum()
    if "noise" in numbers:
        # [rows, K] float64: of a value that was clamped, the difference is not a float32.
        decoded = dequantize(codes, reciprocal(inv_scale), granularity).double()
        results["signal"], results["noise"] = _norm(x).square(), _norm(decoded.sub_(x)).square()
    return results


def code_numbers(codes: Tensor, format: Format, numbers: Collection[str]) -> dict[str, Tensor]:
    """How many codes are NaN, zero, and that of the format's largest value."""
    magnitude = codes.view(torch.uint8) & 0x7F
    largest = format.max_code if format.infinity_code is None else format.infinity_code
    masks = {"nan_codes": magnitude > largest, "zero_codes": magnitude == 0}
    masks["saturated_codes"] = magnitude == format.max_code
    return {name: mask.sum() for name, mask in masks.items() if name in numbers}


def tie_of(format: Format) -> float:
    """The largest magnitude that does not round beyond the format's largest value."""
    return format.max + 2.0 ** (format.max_exponent - format.fraction_bits - 1)


def block_range(x: Tensor) -> Tensor:
    """The largest dynamic range within 128 neighbours of a row of `x` [rows, K]."""
    k = x.shape[1] // BLOCK * BLOCK
    return _range((x[:, :k].reshape(-1, BLOCK) if k else x).abs()).max()


def exact_values(codes: Tensor, scale: Tensor | None, granularity: Granularity) -> Tensor:
    """The values that codes [rows, K] stand for, in float64: a product of float8 and float32 has 28 bits."""
    if scale is None:
        return codes.double()
    return decode(codes).double() * spread_scale("inspect", "scale", scale.float(), codes, granularity).double()


def _range(magnitude: Tensor) -> Tensor:
    # log2(largest / smallest that is not zero) of each row; 0 of a row without such values.
    finite = torch.where(magnitude.isfinite(), magnitude, 0)
    largest = finite.amax(dim=1).double()
    smallest = torch.where(finite > 0, finite, torch.inf).amin(dim=1).double()
    return torch.where(largest > 0, torch.log2(largest) - torch.log2(smallest), 0.0)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


# The error of one GEMM


class Sample(NamedTuple):
    """Some rows of an operand before its cast."""

    places: Tensor
    """[count] int64."""
    values: Tensor
    """[count, K], in the dtype of the matrix."""


def sample_of(x: Tensor, cast: Cast, count: int, turn: int) -> Sample:
    """`count` rows of `x` [rows, K]: spread evenly, or within one block where 128 rows share scales, another each turn.

    The rows are copied: compiled code uses the memory of `x` again.
    """
    rows, first = x.shape[0], 0
    if cast.granularity is Granularity.BLOCKWISE_128X128:
        first = turn % -(-rows // BLOCK) * BLOCK
        rows = min(BLOCK, rows - first)
    count = min(count, rows)
    places = first + torch.arange(count, device=x.device) * rows // count
    return Sample(places, x.detach().index_select(0, places))


def gemm_error(seen: GemmSeen, a: Sample, b: Sample) -> Statistics:
    """The error of one GEMM, in the parts that only an oracle can tell apart, as error_quantization and so on.

    Of sampled rows of `a` and `b`, in float64, with `hp` the operands before their casts, `dq` what their codes mean:

        quantization = dq - hp              each term exact, their sums rounded to float64's 53 bits
        accumulation = float32 - dq         the emulated tensor core, scales applied, not yet rounded to the output
        rounding     = product - float32
        total        = product - hp         the three together

    Each is the norm over the sample, divided by the norm of `hp`. The tensor core cuts K into the slices of the whole
    GEMM. error_bits is the share of outputs with the emulated bits.
    """
    sampled_a = _rows(seen.a, seen.spec.a.granularity, a.places)
    sampled_b = _rows(seen.b, seen.spec.b.granularity, b.places)
    sampled = seen.product.index_select(0, a.places).index_select(1, b.places)
    # 1. In float64: what is rounded in adding up is far below the parts.
    high_precision = a.values.double() @ b.values.double().t()
    dequantized = _exact(sampled_a, seen.spec.a) @ _exact(sampled_b, seen.spec.b).t()
    # 2. The tensor core, up to float32.
    float32 = gemm(sampled_a, sampled_b, seen.spec, torch.float32, "emulated", seen.recipe.chip, split_k=seen.split_k)
    accumulated, product = float32.double(), sampled.double()
    # 3. The parts, and whether the output has the emulated bits.
    size, norm = torch.linalg.vector_norm(high_precision), torch.linalg.vector_norm
    parts = error_parts(high_precision, dequantized, accumulated, product)
    result = {name: norm(part) / size for name, part in parts.items()}
    rounded = float32.to(sampled.dtype)
    result["error_bits"] = ((rounded == sampled) | (rounded.isnan() & sampled.isnan())).double().mean()
    return stacked(result, result)


def _exact(operand: Operand, cast: Cast) -> Tensor:
    scale = operand.scale
    if cast.granularity is Granularity.BLOCKWISE_128X128 and scale is not None:
        scale = scale.expand(1, scale.shape[1])
    return exact_values(operand.codes, scale, cast.granularity)


def _rows(operand: Operand, granularity: Granularity, places: Tensor) -> Operand:
    codes, scale = operand
    if codes.dtype is torch.bfloat16:
        return Operand(codes.index_select(0, places), scale)
    chosen = codes.view(torch.uint8).index_select(0, places).view(codes.dtype)
    if scale is not None and granularity is Granularity.BLOCKWISE_128X128:
        scale = scale.index_select(0, places[:1] // BLOCK)
    elif scale is not None and scale.shape[0] == codes.shape[0]:
        scale = scale.t().index_select(1, places).t()  # 1x128 scales stay column-major [EPI-5]
    return Operand(chosen, scale)
