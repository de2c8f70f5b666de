"""The casts of groups of rows to blocks of 32 along K with E8M0 scales: MXFP8's operands of a grouped GEMM.

Along rows a block never meets two groups. Of `x^T` each group starts anew: its rows are padded with zeros to whole
blocks, as the grouped GEMM over rows takes them, and the host waits for nothing.
"""

import torch
from torch import Tensor

from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.scaling import MX_BLOCK
from f8emu.torch.casts.operand import Both, Operand, cast_microscaled


def group_ends(offs: Tensor, rows: int) -> Tensor:
    """The ends of the groups in a matrix of `rows` rows, and where each has whole blocks, as `group_tiles` begins."""
    ends = offs.clamp(0, rows)
    sizes = ends.diff(prepend=ends.new_zeros(1)).clamp(min=0)
    return torch.cat([ends, (-(-sizes // MX_BLOCK) * MX_BLOCK).cumsum(0).to(torch.int32)])


def cast_groups(x: Tensor, ends: Tensor | None, number: int, plan: CastPlan) -> Both:
    """`x` [T, K], and `x^T` of every group, as operands; of a weight [G * N, K], without `ends`, as codes [G, K, N].

    `ends` are those of `group_ends`.

    Shapes:
        Of `x^T` codes [K, P] and scales [K, P / 32], P being `padded_rows`: the groups, padded, and what is left over.
    """
    assert plan.format is not None and plan.rule.e8m0 is not None, "it has such scales"
    rule, (row_kind, col_kind) = (plan.format.name, plan.rule.e8m0.value), plan.by_blocks
    row = None if row_kind is None else Operand(*cast_microscaled(x, *rule))
    if col_kind is None:
        return row, None
    if ends is not None:
        return row, Operand(*cast_microscaled(_with_padding(x, *ends.view(2, number)).t(), *rule))
    turned = x.view(number, -1, x.shape[1]).mT
    codes, scale = cast_microscaled(turned.flatten(0, 1), *rule)
    return row, Operand(codes.view(turned.shape), scale)


def padded_rows(rows: int, number: int) -> int:
    """Rows that hold `number` groups of `rows` rows, each padded to whole blocks."""
    return (-(-rows // MX_BLOCK) + number) * MX_BLOCK


def _with_padding(x: Tensor, ends: Tensor, after: Tensor) -> Tensor:
    # `x` [T, K], each group padded with zeros, and zeros behind the last.
    number = ends.shape[0]
    if x.shape[0] == 0:
        return x.new_zeros(padded_rows(0, number), x.shape[1])
    place = torch.arange(padded_rows(x.shape[0], number), device=x.device)
    group = torch.searchsorted(after, place, right=True).clamp(max=number - 1)
    before = torch.cat([after.new_zeros(1), after[:-1]])
    first = torch.cat([ends.new_zeros(1), ends[:-1]])
    row = place - before[group] + first[group]
    is_padding = (row >= ends[group]) | (place >= after[group])
    values = x.index_select(0, row.clamp(0, x.shape[0] - 1))
    return values.masked_fill(is_padding.unsqueeze(1), 0)
