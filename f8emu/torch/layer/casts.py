"""The casts of one call of a layer: of its input, its weight and its grad_output, whole or sharded over ranks.

Both casts of the input are made in the forward pass, both casts of `grad_output` in the backward pass, each pair from
one reading. The weight is cast before each of its two GEMMs: no float8 copy of it lives in between.
"""

from typing import Any, NamedTuple

from torch import Tensor

from f8emu.spec.recipe import Cast, Recipe
from f8emu.spec.scaling import Granularity
from f8emu.spec.trace import Scales
from f8emu.torch.fused.columns import transpose_codes
from f8emu.torch.fused.delayed import note_cast
from f8emu.torch.layer.operands import (
    Delayed,
    Operand,
    ScaleSource,
    cast_both,
    cast_delayed,
    cast_rows_first,
    find_source,
    format_name,
)
from f8emu.torch.parallel.sharding import Layout, Shards, cast_sharded, cast_sharded_weight, global_delayed
from f8emu.torch.weights.coded_weight import CodedWeight, require_gathered


class LayerPlan(NamedTuple):
    """The settings of a call, which do not depend on the values of its tensors."""

    recipe: Recipe
    engine: str
    keeps_input: bool
    """Whether `grad_weight` will be computed; if not, the input is cast only for `output` and nothing is saved."""
    recompute_casts: bool = False
    """Whether compiled code may repeat the cast of the input in the backward pass instead of saving its codes."""
    layout: Layout | None = None
    """How the matrices are sharded under tensor parallelism; None for whole matrices."""


class InputOperands(NamedTuple):
    """Both casts of a layer's input; layers with the same input and plan share them."""

    output: Operand
    grad_weight: Operand | None
    gathered: Tensor | None = None
    """The place in the autograd graph of an input that was gathered as float8."""


class WeightSource(NamedTuple):
    """What the backward pass casts the weight's operand of `grad_input` from, besides the weight."""

    amax: Tensor | None = None
    """The amax of the weight or of its columns, under dynamic scaling; None if the cast finds it."""
    inv_scale: Tensor | None = None
    scale: Tensor | None = None
    """The scales of the first cast, under delayed scaling; or that of `codes`."""
    codes: Tensor | None = None
    """In place of the weight: the codes that FSDP2 gathered, still to be transposed."""


def cast_input(input: Tensor, plan: LayerPlan, delayed: Delayed | None = None) -> InputOperands:
    """The operands of `output` and `grad_weight` that a layer casts from its input [M, K]."""
    recipe = plan.recipe
    cols = recipe.grad_weight.b if plan.keeps_input else None
    shards = None if plan.layout is None else plan.layout.input
    output, grad_weight = _cast_matrix(input, recipe.output.a, cols, recipe, delayed, shards, plan.recompute_casts)
    assert output is not None, "it was requested"
    return InputOperands(output, grad_weight)


def cast_grad_output(
    grad_output: Tensor, plan: LayerPlan, state: Delayed | None, wants_input: bool, wants_weight: bool
) -> tuple[Operand | None, Operand | None]:
    """The operands of `grad_input` and `grad_weight` that a layer casts from its grad_output [M, N], where wanted."""
    recipe = plan.recipe
    rows = recipe.grad_input.a if wants_input else None
    cols = recipe.grad_weight.a if wants_weight else None
    delayed = None if recipe.delayed_scaling_of("grad_output") is None else state
    if state is not None and (delayed is None or format_name(rows, cols) is None):
        note_cast(state.amax, state.inv_scale)  # no cast of the gradient tells that the pass has come here
    shards = None if plan.layout is None else plan.layout.grad_output
    return _cast_matrix(grad_output, rows, cols, recipe, delayed, shards)


def cast_weight(weight: Tensor, plan: LayerPlan, delayed: Delayed | None) -> tuple[Operand, WeightSource]:
    """The operand of `output` that a layer casts from its weight [N, K], and the source of the other."""
    if isinstance(weight, CodedWeight):
        codes, scale = weight.of_grad_input()
        return weight.of_output(), WeightSource(scale=scale, codes=codes)
    rows, cols, rule = plan.recipe.output.b, plan.recipe.grad_input.b, plan.recipe.scale_rule
    if plan.layout is not None:
        operand, source = cast_sharded_weight(weight, rows, cols, rule, delayed, plan.layout.weight)
    elif delayed is not None:
        operand, _, source = cast_delayed(weight, rows, None, delayed, rule)
    else:
        operand, source = cast_rows_first(weight, rows, cols, rule)
    assert operand is not None, "it was requested"
    given: Any = (None, None) if source.given is None else source.given
    return operand, WeightSource(source.cols, *given)


def cast_weight_again(
    weight: Tensor | None, source: WeightSource, plan: LayerPlan, delayed: Delayed | None, like: Tensor
) -> Operand:
    """The operand of `grad_input`; `like` is a tensor of the backward pass."""
    cols, rule = plan.recipe.grad_input.b, plan.recipe.scale_rule
    if source.codes is not None:
        require_gathered(source.codes)
        return Operand(transpose_codes(source.codes, like), source.scale)
    assert weight is not None, "it was saved"
    if delayed is not None and source.scale is None:  # its first cast: that of `output` is in high precision
        if plan.layout is not None:
            delayed = global_delayed(weight, cols, rule, delayed, plan.layout.weight)
        _, operand, _ = cast_delayed(weight, None, cols, delayed, rule)
    else:
        has_scales = source.inv_scale is not None and source.scale is not None
        given = Scales(source.inv_scale, source.scale) if has_scales else None
        _, operand = cast_both(weight, None, cols, ScaleSource(cols=source.amax, given=given), rule)
    assert operand is not None, "it was requested"
    return operand


def _cast_matrix(
    x: Tensor,
    rows: Cast | None,
    cols: Cast | None,
    recipe: Recipe,
    delayed: Delayed | None,
    shards: Shards | None,
    recompute: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """Both casts of an activation or a gradient."""
    rule = recipe.scale_rule
    if shards is not None:
        return cast_sharded(x, rows, cols, rule, delayed, shards, recompute=recompute)
    if delayed is not None:
        row_operand, col_operand, _ = cast_delayed(x, rows, cols, delayed, rule)
        return row_operand, col_operand
    is_single = cols is None or cols.format is None
    if is_single and rows is not None and rows.format is not None and rows.granularity is Granularity.ROWWISE:
        operand, _ = cast_rows_first(x, rows, cols, rule)
        _, transposed = cast_both(x, None, cols, ScaleSource(), rule)
        return operand, transposed
    source = find_source(x, rows, cols, tiled=rule.power_of_two)
    return cast_both(x, rows, cols, source, rule, recompute=recompute)
