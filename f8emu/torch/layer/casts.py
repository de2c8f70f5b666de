"""The casts of one call of a layer: of its input, its weight and its grad_output, whole or sharded over ranks.

Both casts of the input are made in the forward pass, both casts of `grad_output` in the backward pass, each pair from
one reading. The weight is cast before each of its two GEMMs: no float8 copy of it lives in between.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Scales
from f8emu.torch.casts.operand import (
    Both,
    Delayed,
    Operand,
    ScaleSource,
    cast_both,
    cast_matrix,
    cast_rows_first,
    weight_to_cast,
)
from f8emu.torch.casts.sharded import Gathered, LayerShards, Shards, cast_sharded, cast_sharded_weight, global_delayed
from f8emu.torch.casts.shared_input import LAST_INPUT, InputOperands, TracedInput
from f8emu.torch.fused.delayed import note_cast
from f8emu.torch.fused.operators import transpose_codes
from f8emu.torch.weights.coded_weight import CodedWeight, require_gathered
from f8emu.torch.weights.codes import OwnRows
from f8emu.torch.weights.sharded_weight import ShardedWeight


class LayerPlan(NamedTuple):
    """The settings of a call, which do not depend on the values of its tensors."""

    recipe: Recipe
    engine: str
    keeps_input: bool  # for `grad_weight`; if not, the input is cast only for `output` and nothing is saved
    # Compiled code may cast the input again in the backward pass: its codes are not saved.
    recompute_casts: bool = False
    shards: LayerShards | None = None  # how the matrices are sharded under tensor parallelism; None for whole matrices


class WeightSource(NamedTuple):
    """The scales, amaxes or codes from which the backward pass casts the weight's operand of `grad_input`."""

    amax: Tensor | None = None  # of the weight or of its columns, under dynamic scaling; None if the cast finds it
    inv_scale: Tensor | None = None
    scale: Tensor | None = None  # the scales of the first cast, under delayed scaling; or that of `codes`
    codes: Tensor | None = None  # in place of the weight: the codes that FSDP2 gathered, still to be transposed


def cast_input(
    input: Tensor, x: Tensor, plan: LayerPlan, delayed: Delayed | None, traced: TracedInput | None
) -> InputOperands:
    """The operands of `output` and `grad_weight` that a layer casts from its input, or that another layer has cast.

    `x` [M, K] is what is cast of the `input` that the layer was called with, which decides on sharing.
    """
    # 1. Under delayed scaling every layer has scales of its own, so none are shared.
    shared = None if delayed is not None else traced if torch.compiler.is_compiling() else LAST_INPUT
    key = x.dtype, plan
    if shared is not None and (operands := shared.find(input, key)) is not None:
        return operands
    # 2. Both casts. A gathered input gets its own place in the autograd graph.
    plans, shards = plan.recipe.cast_plans.input, None if plan.shards is None else plan.shards.input
    cast_plan = plans.both if plan.keeps_input else plans.rows
    with torch.no_grad():
        output, grad_weight = _cast(x.detach(), cast_plan, delayed, shards, plan.recompute_casts)
    assert output is not None, "it was requested"
    gathered = None if shards is None or shards.gather is None else Gathered.apply(x, shards.gather)
    operands = InputOperands(output, grad_weight, gathered)
    if shared is not None:
        shared.keep(input, key, operands)
    return operands


def cast_grad_output(
    grad_output: Tensor, plan: LayerPlan, state: Delayed | None, wants_input: bool, wants_weight: bool
) -> Both:
    """The operands of `grad_input` and `grad_weight` that a layer casts from its grad_output [M, N], where wanted."""
    cast_plan = plan.recipe.cast_plans.grad_output.wanted(rows=wants_input, cols=wants_weight)
    delayed = None if plan.recipe.delayed_scaling_of("grad_output") is None else state
    if state is not None and (delayed is None or cast_plan.format is None):
        note_cast(state.amax, state.inv_scale)  # no cast of the gradient tells that the pass has come here
    return _cast(grad_output, cast_plan, delayed, None if plan.shards is None else plan.shards.grad_output)


def cast_weight(weight: Tensor, plan: LayerPlan, delayed: Delayed | None) -> tuple[Operand, WeightSource]:
    """The operand of `output` that a layer casts from its weight [N, K], and the source of the other."""
    # At rest, where no FSDP2 gathers it. Compiled code casts the master, to the same codes.
    if plan.shards is not None and isinstance(weight, ShardedWeight) and not torch.compiler.is_compiling():
        groups = plan.shards.weight
        others = tuple((group, dim) for dim, of in enumerate((groups.rows, groups.cols)) for group in of)
        if (held := weight.codes_at_rest(OwnRows(n=weight.shape[0], others=others))) is not None:
            coded = weight = CodedWeight(held, weight.dtype)
            coded.note_call(delayed)
    if isinstance(weight, CodedWeight):
        codes, scale = weight.of_grad_input()
        return weight.of_output(), WeightSource(scale=scale, codes=codes)
    plans, weight = plan.recipe.cast_plans.weight, weight_to_cast(weight, plan.recipe)
    if plan.shards is None:
        operand, source = cast_rows_first(weight, plans, delayed)
    else:
        operand, source = cast_sharded_weight(weight, plans, delayed, plan.shards.weight)
    used: Any = (None, None) if source.used is None else source.used
    return operand, WeightSource(source.cols, *used)


def cast_weight_again(
    weight: Tensor | None, source: WeightSource, plan: LayerPlan, delayed: Delayed | None, like: Tensor
) -> Operand:
    """The operand of `grad_input`; `like` is a tensor of the backward pass."""
    cols = plan.recipe.cast_plans.weight.cols
    if source.codes is not None:
        require_gathered(source.codes)
        return Operand(transpose_codes(source.codes, like), source.scale)
    assert weight is not None, "it was saved"
    weight = weight_to_cast(weight, plan.recipe)
    if delayed is not None and source.scale is None:  # its first cast: that of `output` is in high precision
        if plan.shards is not None:
            delayed = global_delayed(weight, cols, delayed, plan.shards.weight)
        _, operand = cast_matrix(weight, cols, delayed)
    elif source.amax is None and source.scale is None:
        _, operand = cast_matrix(weight, cols)
    else:
        used = None if source.scale is None else Scales(source.inv_scale, source.scale)
        _, operand = cast_both(weight, cols, ScaleSource(cols=source.amax, used=used))
    assert operand is not None, "it was requested"
    return operand


def _cast(x: Tensor, plan: CastPlan, delayed: Delayed | None, shards: Shards | None, recompute: bool = False) -> Both:
    if shards is None:
        return cast_matrix(x, plan, delayed, recompute=recompute)
    return cast_sharded(x, plan, delayed, shards, recompute=recompute)
