"""The error of one GEMM, in the parts that only an oracle can tell apart.

Of sampled rows of `a` and of `b`, in float64, with `hp` the operands before their casts and `dq` what their codes mean:

    quantisation = dq - hp              each term exact, their sums rounded to float64's 53 bits
    accumulation = float32 - dq         the emulated tensor core, scales applied, not yet rounded to the output's dtype
    rounding     = product - float32
    total        = product - hp         the three together

Each is the norm over the sample, divided by the norm of `hp`. The tensor core cuts K into the slices of the whole GEMM.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from f8emu.spec.recipe import Cast
from f8emu.spec.scaling import Granularity
from f8emu.torch.inspection.statistics import Statistics, exact_values, stacked
from f8emu.torch.layer.gemm import gemm
from f8emu.torch.layer.observers import GemmSeen
from f8emu.torch.layer.operands import Operand


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
        first = turn % -(-rows // 128) * 128
        rows = min(128, rows - first)
    count = min(count, rows)
    places = first + torch.arange(count, device=x.device) * rows // count
    return Sample(places, x.detach().index_select(0, places))


def gemm_error(seen: GemmSeen, a: Sample, b: Sample) -> Statistics:
    """The parts above as error_quantisation and so on; and error_bits, the share of outputs with the emulated bits.

    Raises:
        MissingExtraError: the emulation without jax.
    """
    sampled_a = _rows(seen.a, seen.spec.a.granularity, a.places)
    sampled_b = _rows(seen.b, seen.spec.b.granularity, b.places)
    found = seen.product.index_select(0, a.places).index_select(1, b.places)
    # 1. In float64: what is rounded in adding up is far below the parts.
    high_precision = a.values.double() @ b.values.double().t()
    dequantised = _exact(sampled_a, seen.spec.a) @ _exact(sampled_b, seen.spec.b).t()
    # 2. The tensor core, up to float32.
    float32 = gemm(sampled_a, sampled_b, seen.spec, torch.float32, "emulated", seen.recipe.chip, split_k=seen.split_k)
    accumulated, product = float32.double(), found.double()
    # 3. The parts, and whether the output has the emulated bits.
    parts = {
        "quantisation": dequantised - high_precision,
        "accumulation": accumulated - dequantised,
        "rounding": product - accumulated,
        "total": product - high_precision,
    }
    size, norm = torch.linalg.vector_norm(high_precision), torch.linalg.vector_norm
    result = {f"error_{name}": norm(part) / size for name, part in parts.items()}
    rounded = float32.to(found.dtype)
    result["error_bits"] = ((rounded == found) | (rounded.isnan() & found.isnan())).double().mean()
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
        scale = scale.index_select(0, places[:1] // 128)
    elif scale is not None and scale.shape[0] == codes.shape[0]:
        scale = scale.t().index_select(1, places).t()  # 1x128 scales stay column-major [EPI-5]
    return Operand(chosen, scale)
