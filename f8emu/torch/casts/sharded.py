"""Matrices that lie in shards on several ranks: whose amaxes count, and what is gathered as float8.

Every rank computes with its local tensors, under the scales of the whole matrices: an amax that spans a sharded
dimension is reduced over the ranks, as an integer, so that infinity and NaN count as the largest. Column-parallel
outputs are thus slices of the output of a single device, bit for bit; row-parallel partial products have its codes.

A matrix that is sharded along tokens, and of which the GEMMs need all, is cast on every rank and gathered as float8:
one byte an element, and the scales where rows have their own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from f8emu.spec.cast_plan import CastPlan, CastPlans
from f8emu.spec.scaling import Granularity
from f8emu.torch.casts.operand import (
    Both,
    Delayed,
    Operand,
    ScaleSource,
    cast_both,
    cast_cols_in_rows,
    cast_delayed,
    cast_rows_first,
    find_source,
)
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.delayed import UNSET, note_cast
from f8emu.torch.torch_internals import Function, collective, reduce_amax


class Tokens(NamedTuple):
    """How a group shards the tokens of an activation or gradient [before, size, after, features], along `size`."""

    group: str
    ranks: int
    before: int
    size: int
    after: int
    mine: int  # of `size`, on this rank: `per_rank`, but fewer on the last ranks, or none

    @classmethod
    def of(cls, shape: torch.Size, dim: int, group: str, ranks: int, rank: int) -> "Tokens":
        """The tokens of a tensor of this shape, [..., features], that is sharded along `dim`."""
        all_ranks = cls(group, ranks, shape[:dim].numel(), shape[dim], shape[dim + 1 : -1].numel(), 0)
        mine = min(all_ranks.per_rank, all_ranks.size - rank * all_ranks.per_rank)
        return all_ranks._replace(mine=max(0, mine))

    @property
    def per_rank(self) -> int:
        """The first rank's size."""
        return -(-self.size // self.ranks)

    @property
    def rows(self) -> int:
        return self.before * self.size * self.after


class Shards(NamedTuple):
    """The groups, by name, over whose ranks the rows and the columns of a matrix are spread."""

    rows: tuple[str, ...] = ()
    cols: tuple[str, ...] = ()
    gather: Tokens | None = None  # how to gather the rows before the GEMMs; None if those need only this rank's
    is_set: bool = True  # whether the scale of delayed scaling is known to be set; if not, the first cast needs an amax


class LayerShards(NamedTuple):
    """How the matrices of one call of a layer are sharded."""

    input: Shards = Shards()
    weight: Shards = Shards()
    grad_output: Shards = Shards()
    sum_over: tuple[str, ...] = ()  # the groups over which partial outputs are added, each rank receiving all
    scatter: Tokens | None = None  # the same, each rank receiving its tokens; `grad_output` is then gathered as float8

    def output_rows(self, rows: int) -> int:
        """The rows of this rank's output, from those of its GEMM."""
        return rows if self.scatter is None else self.scatter.before * self.scatter.mine * self.scatter.after


def arrived(x: Tensor) -> Tensor:
    """`x`, after the collective that computes it: torch's eager redistributions return before that."""
    wait: Any = getattr(x, "wait", None)
    return x if wait is None or torch.compiler.is_compiling() else wait()


def sum_products(product: Tensor, shards: LayerShards) -> Tensor:
    """The sum of the ranks' partial outputs, in their dtype: all of it, or the rows of this rank's tokens."""
    for group in shards.sum_over:
        product = collective("all_reduce", product, "sum", group)
    return product if shards.scatter is None else scatter_sum(product, shards.scatter)


def scatter_sum(x: Tensor, tokens: Tokens) -> Tensor:
    """The sum of `x` [tokens.rows, C] over the ranks, in its dtype: the rows of this rank's tokens."""
    # 1. The sharded dimension in the middle, padded to what all ranks have together.
    width = x.shape[1]
    last = tokens.after * width
    missing = tokens.per_rank * tokens.ranks - tokens.size
    whole = pad(x.reshape(tokens.before, tokens.size, last), (0, 0, 0, missing)) if missing else x
    # 2. The ranks first: the collective gives each rank one run of memory.
    parts = whole.reshape(tokens.before, tokens.ranks, tokens.per_rank * last).transpose(0, 1).contiguous()
    parts = parts.reshape(tokens.ranks * tokens.before, tokens.per_rank * last)
    mine = collective("reduce_scatter_tensor", parts, "sum", tokens.ranks, tokens.group)
    # 3. Without the padding.
    mine = mine.reshape(tokens.before, tokens.per_rank, last)[:, : tokens.mine]
    return mine.reshape(tokens.before * tokens.mine * tokens.after, width)


class Gathered(Function):
    """The place of a gathered input [tokens.rows, K] in the autograd graph, without its values."""

    # Its gradient is added up over the ranks, in its dtype, and each gets that of its tokens. Layers that share an
    # input share this place, so that their gradients are added before they travel.

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        return x.new_empty(1, 1).expand(tokens.rows, x.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_sum(arrived(grads[0]), ctx.tokens), None


def _gather_rows(x: Tensor, tokens: Tokens) -> Tensor:
    """The rows [tokens.rows, C] of all ranks from those of each, in the order of the tokens."""
    # 1. As bytes, since gloo has no float8, padded to the rows of the first rank.
    width = x.shape[1] * x.element_size()
    mine = x.view(torch.uint8).reshape(tokens.before, tokens.mine, tokens.after * width)
    missing = tokens.per_rank - tokens.mine
    mine = pad(mine, (0, 0, 0, missing)) if missing else mine
    gathered = collective("all_gather_into_tensor", mine, tokens.ranks, tokens.group)
    # 2. From rank-major to the order of the tokens; with one leading index these are the same.
    gathered = gathered.reshape(tokens.ranks, tokens.before, tokens.per_rank, tokens.after * width)
    if tokens.before > 1:
        gathered = gathered.transpose(0, 1).contiguous()
    gathered = gathered.reshape(tokens.before, tokens.ranks * tokens.per_rank, tokens.after * width)[:, : tokens.size]
    return gathered.reshape(tokens.rows, width).contiguous().view(x.dtype)


def find_sharded_source(x: Tensor, plan: CastPlan, shards: Shards, *, is_stored: bool = False) -> ScaleSource:
    """`find_source` for the whole matrix, of which `x` is this rank's part."""
    source = find_source(x, plan, is_stored=is_stored)
    # An amax of the tensor spans both dimensions, one of a row the ranks that share the row's columns. Both operands
    # share the amax of the tensor, and its reduction.
    of_tensor = None
    amaxes: list[Tensor | None] = []
    for kind, amax, across in zip(plan.by_amax, source[:2], (shards.cols, shards.rows), strict=True):
        if kind is None or amax is None:
            amaxes.append(None)
        elif kind is Granularity.ROWWISE:
            amaxes.append(reduce_amax(amax, across))
        else:
            if of_tensor is None:
                of_tensor = reduce_amax(amax.max().reshape(1, 1), (*shards.rows, *shards.cols))
            amaxes.append(of_tensor)
    return ScaleSource(rows=amaxes[0], cols=amaxes[1])


def global_delayed(x: Tensor, plan: CastPlan, delayed: Delayed, shards: Shards) -> Delayed:
    """The state whose inv_scale is set: where it was not, by the amax of the whole matrix."""
    every = (*shards.rows, *shards.cols)
    if shards.is_set or plan.format is None or not every:
        return delayed
    # The inv_scale below is another tensor, of which no owner is known: the state's own is told of the cast here.
    note_cast(delayed.amax, delayed.inv_scale)
    settings = plan.format.name, plan.rule.power_of_two, plan.rule.amax_floor, delayed.margin
    inv_scale, _ = fused.scales(reduce_amax(fused.tensor_amax(x), every), *settings)
    return delayed._replace(inv_scale=torch.where(delayed.inv_scale > UNSET, delayed.inv_scale, inv_scale))


def cast_sharded(
    x: Tensor, plan: CastPlan, delayed: Delayed | None, shards: Shards, *, recompute: bool = False
) -> Both:
    """Both operands of a matrix of which `x` is this rank's part, under the scales of the whole; gathered on request.

    Exactness: codes and scales are those of the whole matrix, or slices of them.
    """
    x, source = arrived(x), ScaleSource()
    if delayed is None:
        source = find_sharded_source(x, plan, shards)
    else:
        delayed = global_delayed(x, plan, delayed, shards)
    if shards.gather is not None:
        return _cast_and_gather(x, plan, source if delayed is None else delayed, shards.gather)
    if delayed is None:
        return cast_both(x, plan, source, recompute=recompute)
    return cast_delayed(x, plan, delayed)[:2]


def _cast_and_gather(x: Tensor, plan: CastPlan, scales: ScaleSource | Delayed, tokens: Tokens) -> Both:
    # 1. Casts of this rank's tokens, gathered: one for both operands, if they have the same scale.
    row_kind, col_kind = plan.by_amax
    row = col = None
    if isinstance(scales, Delayed):
        one = plan._replace(by_amax=(row_kind if row_kind is not None else col_kind, None))
        mine, _, _ = cast_delayed(x, one, scales)
        assert mine is not None, "it was requested"
        row = col = Operand(_gather_rows(mine.codes, tokens), mine.scale)
    else:
        mine, _ = cast_both(x, plan._replace(by_amax=(row_kind, None)), scales)
        if mine is not None:
            assert mine.scale is not None, "high precision is not gathered"
            scale = _gather_rows(mine.scale, tokens) if row_kind is Granularity.ROWWISE else mine.scale
            row = col = Operand(_gather_rows(mine.codes, tokens), scale)
        if col_kind is not None and (col_kind is Granularity.ROWWISE or col_kind is not row_kind):
            assert scales.cols is not None, "it was requested"
            mine = cast_cols_in_rows(x, plan, scales.cols)
            col = Operand(_gather_rows(mine.codes, tokens), mine.scale)  # a scale of all tokens is on every rank
    # 2. The GEMM reads the transpose of all tokens; with one scale, its codes are those of `x`.
    if col_kind is not None:
        assert col is not None, "it was requested"
        col = Operand(fused.transpose_codes(col.codes, col.codes), col.scale)
    return row if row_kind is not None else None, col if col_kind is not None else None


def cast_sharded_weight(
    weight: Tensor, plans: CastPlans, delayed: Delayed | None, shards: Shards
) -> tuple[Operand, ScaleSource]:
    """`cast_rows_first` of a weight of which this is the rank's part."""
    if delayed is not None:
        return cast_rows_first(weight, plans, global_delayed(weight, plans.rows, delayed, shards))
    source = find_sharded_source(weight, plans.both, shards, is_stored=True)
    operand, _ = cast_both(weight, plans.rows, source)
    assert operand is not None, "it was requested"
    return operand, ScaleSource(cols=source.cols)
