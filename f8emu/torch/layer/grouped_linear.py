"""A linear layer for every group of rows, such as the experts of a mixture: three grouped GEMMs, one function.

    output      = cast(input)         @ cast(weight)^T        rows of every group
    grad_input  = cast(grad_output)   @ cast(weight^T)^T      rows of every group
    grad_weight = cast(grad_output^T) @ cast(input^T)^T       over the rows of every group

Saved for the backward pass: the codes of `input^T` with their scales, the weight, and the amaxes of its columns. The
weight is cast in every pass, unless its codes are kept for a step (`kept_weight`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.spec.cast_plan import CastPlan
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.names import EngineName
from f8emu.spec.recipe import ROWWISE, Gemm, Recipe, recipe_by_name
from f8emu.spec.scaling import MX_BLOCK, Granularity
from f8emu.torch.casts.operand import Both, Delayed, Operand, weight_to_cast
from f8emu.torch.chip import CHIP, require_values
from f8emu.torch.fused import grouped
from f8emu.torch.fused import operators as fused
from f8emu.torch.gemm import operators
from f8emu.torch.gemm.engine import check_engine
from f8emu.torch.layer import microscaled_groups
from f8emu.torch.layer.split_backward import part_of_backward
from f8emu.torch.layer.traced import recipe_text, stateless
from f8emu.torch.library import differentiable_once, fake, is_exporting, operator
from f8emu.torch.recipes import RecipeLike, resolve_recipe
from f8emu.torch.torch_internals import Function
from f8emu.torch.weights.coded_weight import CodedWeight, require_gathered

_CAST_FROM = "_f8emu_cast_from"  # of a scale: the version and the place of the weight that was cast


class Groups(NamedTuple):
    """The groups of one call."""

    tiles: Tensor  # of `grouped.group_tiles` or `microscaled_groups.group_ends`
    number: int

    @property
    def ends(self) -> Tensor:
        return self.tiles[: self.number]

    @property
    def padded_ends(self) -> Tensor:
        return grouped.padded_offs(self.tiles, self.number)

    @classmethod
    def of(cls, offs: Tensor, rows: int, recipe: Recipe) -> "Groups":
        """Those of a matrix of `rows` rows, padded as the recipe's casts of `x^T` pad them."""
        begin = grouped.group_tiles if recipe.scale_rule.e8m0 is None else microscaled_groups.group_ends
        return cls(begin(offs, rows), offs.shape[0])


class GroupedPlan(NamedTuple):
    """The settings of a call, which do not depend on the values of its tensors."""

    recipe: Recipe
    engine: str
    keeps_input: bool  # for grad_weight


class Source(NamedTuple):
    """The source of a matrix's scales: amaxes, or inv_scales of the groups with their scales."""

    rows: Tensor | None = None  # amaxes [T, 1]
    cols: Tensor | None = None  # amaxes [G * K, 1]
    inv_scale: Tensor | None = None  # [G, 1]
    scale: Tensor | None = None  # [G, 1]


class WeightOperands(NamedTuple):
    """Both operands of a weight [G, N, K], or what the second is cast from in the backward pass."""

    output: Operand  # codes [G * N, K]
    grad_input: Operand | None = None  # codes [G * K, N]
    source: Source = Source()


def grouped_linear(
    input: Tensor, weight: Tensor, offs: Tensor, *, recipe: RecipeLike = ROWWISE, engine: EngineName = "auto"
) -> Tensor:
    """`input[group] @ weight[group]^T` for every group of rows, with its gradients, under a float8 recipe.

    Groups have any size, none included. Rows behind the last group are zeros, and so are their gradients. On a GPU the
    host does not wait for `offs`, except under recipes that cast gradients to E5M2: no library multiplies groups of
    that format, so their GEMMs run one by one.

    Shapes:
        input [T, K], sorted by group; weight [G, N, K] in its own dtype; offs int32 [G], the end of each group
        -> [T, N] in the dtype of input. K and N are multiples of 16, of 32 under mxfp8.

    Exactness: group by group the bits of a `Float8Linear` with the group's weight on its rows, so that scales of whole
    tensors are those of a group: `f8ref.numpy.grouped_linear`. GEMMs of E4M3 with a bfloat16 product are never
    split along K [CHAIN-3]. Where `acc * scale_a` overflows float32 and the output does not, it is infinite [EPI-6].

    Args:
        input: the tokens.
        weight: the experts' matrices.
        offs: their ends, `sizes.cumsum(0).to(torch.int32)`.
        recipe: rowwise, rowwise_with_gw_hp, tensorwise or mxfp8, or one like them.
        engine: as for `scaled_mm`.

    Raises:
        OperandError: wrong dtypes, shapes or sizes.
        UnsupportedError: blockwise or delayed scales; rowwise scales that are not powers of two; `engine="hardware"` on
            a device without it.
    """
    call, chosen = "grouped_linear", grouped_recipe("grouped_linear", recipe, engine)
    if chosen.delayed is not None:
        raise UnsupportedError(
            f"{call}: delayed scaling has a state, which belongs to a module; use Float8Experts, or another recipe"
        )
    check_grouped(call, input, weight, offs, chosen)
    if is_exporting():
        return traced_groups.overload(input, weight, offs, recipe_text(chosen), engine)
    return _of_groups(input, weight, offs, chosen, engine)


def _of_groups(input: Tensor, weight: Tensor, offs: Tensor, recipe: Recipe, engine: str) -> Tensor:
    groups = Groups.of(offs, input.shape[0], recipe)
    plan = GroupedPlan(recipe, engine, torch.is_grad_enabled() and weight.requires_grad)
    return GroupedLinear.apply(input, weight, groups.tiles, plan)


@operator(opaque=False, differentiable=True)
def traced_groups(input: Tensor, weight: Tensor, offs: Tensor, recipe: str, engine: str) -> Tensor:
    """`grouped_linear` in a graph, as `traced.linear`."""
    return stateless(recipe, lambda chosen: _of_groups(input, weight, offs, chosen, engine), input, weight)


def grouped_recipe(call: str, recipe: RecipeLike, engine: str) -> Recipe:
    """The recipe, of which grouped GEMMs have all; Dynamo 2.11 cannot trace the checks, which are of constants."""
    if torch.compiler.is_compiling():
        return recipe if isinstance(recipe, Recipe) else recipe_by_name(str(recipe))
    chosen = resolve_recipe(call, recipe)
    check_engine(call, engine)
    require_groups(call, chosen)
    return chosen


def require_groups(call: str, recipe: Recipe) -> None:
    """Raise UnsupportedError for a recipe that grouped GEMMs do not have."""
    for name, _, cast in recipe.casts():
        if cast.format is not None and cast.granularity.is_blockwise and not cast.granularity.is_microscaled:
            raise UnsupportedError(
                f"{call}: {name} of recipe {recipe.label!r} has {cast.granularity.value} scales, which torch's grouped "
                "GEMMs do not take; choose rowwise"
            )
    for name, gemm in recipe.gemms.items():
        if (gemm.a.granularity, gemm.b.granularity) == (Granularity.TENSORWISE, Granularity.ROWWISE):
            raise UnsupportedError(
                f"{call}: {name} of recipe {recipe.label!r} has one scale for a and one a row for b, which no grouped "
                "GEMM takes; make both rowwise"
            )
    for name, _, cast in recipe.casts():
        if cast.scale_rule is not None:
            raise UnsupportedError(
                f"{call}: {name} of recipe {recipe.label!r} has a cast with a scale rule of its own, which grouped "
                "casts do not take; set scale_rule of the recipe"
            )
        is_rowwise = cast.format is not None and cast.granularity is Granularity.ROWWISE
        if is_rowwise and not recipe.scale_rule.power_of_two:
            raise UnsupportedError(
                f"{call}: rowwise scales must be powers of two, since grouped GEMMs multiply them in another order "
                f"[EPI-6]; recipe {recipe.label!r} has others; set scale_rule=ScaleRule(power_of_two=True)"
            )


def check_grouped(call: str, input: Tensor, weight: Tensor, offs: Tensor, recipe: Recipe) -> None:
    """Raise OperandError for operands that do not fit."""
    require_values(call, input, ndim=2, name="input")
    require_values(call, weight, ndim=3, name="weight")
    if input.shape[1] != weight.shape[2] or offs.shape != weight.shape[:1] or offs.dtype is not torch.int32:
        raise OperandError(
            f"{call}: input must be [T, K], weight [G, N, K] and offs int32 [G]; got {list(input.shape)}, "
            f"{list(weight.shape)} and {offs.dtype} {list(offs.shape)}; flatten leading dimensions"
        )
    if input.device != weight.device or offs.device != weight.device:
        raise OperandError(
            f"{call}: all must be on one device; got input on {input.device}, weight on {weight.device} and offs on "
            f"{offs.device}; move one of them"
        )
    multiple = CHIP.size_multiple if recipe.scale_rule.e8m0 is None else MX_BLOCK
    if any(size % multiple for size in weight.shape[1:]):
        raise OperandError(
            f"{call}: N and K of weight must be multiples of {multiple}; got {list(weight.shape)}; pad them with zeros"
        )


# 1. Operands. A matrix of groups is cast as `casts.operand.cast_both` casts a matrix.


def cast_tokens(x: Tensor, groups: Groups, plan: CastPlan, state: Delayed | None = None) -> Both:
    """`x` [T, K] and, group by group, `x^T` as operands."""
    return _cast(x, groups.tiles, groups.number, plan, state)


def cast_weight(weight: Tensor, recipe: Recipe, wants_input: bool, state: Delayed | None = None) -> WeightOperands:
    """The operands of a weight [G, N, K]: that of `output`, and that of `grad_input` or its source.

    Under rowwise scales the amaxes of both come from the reading that casts the first, and the second is cast where it
    is needed: 6 bytes an element are moved, and none is kept. With one scale a group, one reading casts both.
    """
    if isinstance(weight, CodedWeight):
        return WeightOperands(Operand(weight.rows.flatten(0, 1), weight.row_scale))
    plans = recipe.cast_plans.weight
    plan = plans.wanted(rows=True, cols=wants_input)._replace(in_bfloat16=plans.rows.in_bfloat16)
    weight = weight_to_cast(weight, recipe)
    number, matrix = weight.shape[0], weight.flatten(0, 1)
    row_kind, col_kind = plan.by_amax
    if row_kind is Granularity.ROWWISE and plan.format is not None:
        if col_kind is Granularity.ROWWISE:
            name, floor = plan.format.name, plan.rule.amax_floor
            codes, scale, of_cols = grouped.cast_rows_of_groups(matrix, number, name, floor)
            return WeightOperands(Operand(codes, scale), source=Source(cols=of_cols))
        operand, _ = _cast(matrix, None, number, plans.rows, None)
        source = Source() if col_kind is None else _source(matrix, None, number, plans.cols, None)
        assert operand is not None, "it was requested"
        return WeightOperands(operand, source=source)
    both = _cast(matrix, None, number, plan, state)
    assert both[0] is not None, "it was requested"
    return WeightOperands(both[0], _stacked(both[1]))


def cast_weight_again(weight: Tensor, operands: WeightOperands, recipe: Recipe, after: Tensor) -> Operand:
    """The operand of `grad_input` of a weight; `after` is a tensor of the backward pass."""
    if operands.grad_input is not None:
        return operands.grad_input
    if isinstance(weight, CodedWeight):
        codes, scale = weight.of_grad_input()
        require_gathered(codes)
        if weight.cols is None or torch.compiler.is_compiling():  # a view of them could move to the forward pass
            codes = copied_experts(codes, after, weight.cols is None)
        return Operand(codes.flatten(0, 1), scale)
    plan, number = recipe.cast_plans.weight.cols, weight.shape[0]
    if plan.format is None:
        return Operand(weight.mT.to(torch.bfloat16).flatten(0, 1), None)
    matrix = weight_to_cast(weight, recipe).flatten(0, 1)
    operand = _stacked(_by_source(matrix, None, number, plan, operands.source, None)[1])
    assert operand is not None, "it was requested"
    return operand


@operator()
def copied_experts(codes: Tensor, after: Tensor, transposed: bool) -> Tensor:
    """Codes [E, N, K] as a new tensor, of this shape or [E, K, N]; `after` is as for `transpose_codes`."""
    as_bytes = codes.view(torch.uint8)
    return (as_bytes.mT.contiguous() if transposed else as_bytes.clone()).view(codes.dtype)


@fake(copied_experts)
def _(codes: Tensor, after: Tensor, transposed: bool) -> Tensor:
    return codes.new_empty(codes.mT.shape if transposed else codes.shape)


def kept_weight(weight: Tensor, recipe: Recipe) -> WeightOperands:
    """Both operands of a weight, for all passes until it changes."""
    first = cast_weight(weight, recipe, True)
    both = WeightOperands(first.output, cast_weight_again(weight, first, recipe, weight))
    assert both.output.scale is not None, "float8 has one"
    setattr(both.output.scale, _CAST_FROM, (weight._version, weight.data_ptr()))
    return both


def current_weight(weight: Tensor, kept: WeightOperands) -> WeightOperands:
    """The kept operands of a weight; UnsupportedError, when it runs, if the weight has changed since."""
    assert kept.output.scale is not None, "float8 has one"
    return kept._replace(output=Operand(kept.output.codes, checked_scale(kept.output.scale, weight)))


@operator()
def checked_scale(scale: Tensor, weight: Tensor) -> Tensor:
    """A copy of `scale`, which was found when `weight` was cast; an operator, so that compiled code checks it too."""
    if getattr(scale, _CAST_FROM, None) != (weight._version, weight.data_ptr()):
        raise UnsupportedError(
            "Float8Experts: a weight has changed since precompute_weights cast it; call precompute_weights after every "
            "step of the optimizer"
        )
    return scale.clone()


@fake(checked_scale)
def _(scale: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(scale)


def _stacked(operand: Operand | None) -> Operand | None:
    return None if operand is None else Operand(operand.codes.flatten(0, 1), operand.scale)


def _cast(x: Tensor, tiles: Tensor | None, number: int, plan: CastPlan, state: Delayed | None) -> Both:
    high = tuple([Operand(x.to(torch.bfloat16), None) if is_high else None for is_high in plan.in_bfloat16])
    if plan.format is None:
        return high[0], high[1]
    if plan.rule.e8m0 is not None:
        return microscaled_groups.cast_groups(x, tiles, number, plan)
    if plan.is_one_pass:
        codes, scale, _ = fused.cast_rows(x, plan.format.name, plan.rule.power_of_two, plan.rule.amax_floor)
        return Operand(codes, scale), high[1]
    source = _source(x, tiles, number, plan, state)
    row, col = _by_source(x, tiles, number, plan, source, None if state is None else state.amax)
    return high[0] or row, high[1] or col


def _source(x: Tensor, tiles: Tensor | None, number: int, plan: CastPlan, state: Delayed | None) -> Source:
    if plan.by_amax[0] is Granularity.ROWWISE or plan.by_amax[1] is Granularity.ROWWISE:
        amaxes, m = grouped.amaxes_of_groups(x, tiles, number, False), x.shape[0]
        return Source(rows=amaxes[:m].unsqueeze(1), cols=amaxes[m:].unsqueeze(1))
    assert plan.format is not None, "an operand has a scale"
    settings = plan.format.name, plan.rule.power_of_two, plan.rule.amax_floor
    if state is not None:
        scales = grouped.scales_by_state([x], "matrix", tiles, number, state.inv_scale, *settings, *state[2:])
    else:
        scales = fused.scales(grouped.amaxes_of_groups(x, tiles, number, True), *settings, 0)
    return Source(None, None, *scales)


def _by_source(
    x: Tensor, tiles: Tensor | None, number: int, plan: CastPlan, source: Source, amax: Tensor | None
) -> Both:
    assert plan.format is not None, "an operand has codes"
    by_group = source.inv_scale is not None
    wanted = [kind is not None for kind in plan.by_amax]
    row, col = (source.inv_scale, source.inv_scale) if by_group else (source.rows, source.cols)
    sides = row if wanted[0] else None, col if wanted[1] else None
    results = grouped.cast_groups(x, tiles, number, plan.format.name, *sides, by_group, plan.rule.amax_floor, amax)
    scales = (source.scale, source.scale) if by_group else (results[1], results[3])
    operands = Operand(results[0], scales[0]), Operand(results[2], scales[1])
    return operands[0] if wanted[0] else None, operands[1] if wanted[1] else None


# 2. GEMMs.


def multiply_rows(a: Operand, b: Operand, spec: Gemm, groups: Groups, plan: GroupedPlan, dtype: torch.dtype) -> Tensor:
    """`a` [T, K] @ `b` [G * N, K]^T of every group, [T, N]."""
    codes = b.codes.view(groups.number, -1, b.codes.shape[1])
    scale_a, scale_b = _scales(a, b, spec, groups.number, tuple(codes.shape[:2]))
    options = dtype, spec.use_fast_accum, plan.engine, plan.recipe.chip
    return operators.multiply_groups(a.codes, codes.mT, scale_a, scale_b, groups.ends, *options)


def multiply_over_rows(
    a: Operand, b: Operand, spec: Gemm, groups: Groups, plan: GroupedPlan, dtype: torch.dtype
) -> Tensor:
    """`a` [M, P] @ `b` [N, P]^T over the rows of every group, [G, M, N].

    In high precision `a` is [T, M] and `b` [T, N].
    """
    options = dtype, spec.use_fast_accum, plan.engine, plan.recipe.chip
    if spec.a.format is None:
        return operators.multiply_groups(a.codes.t(), b.codes, None, None, groups.ends, *options)
    scale_a, scale_b = _scales(a, b, spec, groups.number, (groups.number * b.codes.shape[0],))
    return operators.multiply_groups(a.codes, b.codes.t(), scale_a, scale_b, groups.padded_ends, *options)


def _scales(
    a: Operand, b: Operand, spec: Gemm, number: int, shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None]:
    # As the operator takes them: one a group, one a row of each operand, or one for each 32 of a row.
    if a.scale is None or b.scale is None:
        return None, None
    kinds = spec.a.granularity, spec.b.granularity
    if kinds[0] is Granularity.BLOCKWISE_1X32:
        return a.scale, b.scale.view(*shape, -1).mT if len(shape) == 2 else b.scale.t()
    if Granularity.ROWWISE not in kinds:
        return a.scale, b.scale
    of_b = b.scale if kinds[1] is Granularity.ROWWISE else b.scale.expand(number, shape[-1])
    return a.scale.flatten(), of_b.reshape(shape).contiguous()


# 3. The function.


class GroupedLinear(Function):
    """`grouped_linear` of checked operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, tiles: Tensor, plan: GroupedPlan) -> Tensor:
        groups, recipe = Groups(tiles, weight.shape[0]), plan.recipe
        with torch.no_grad():
            cast_plan = recipe.cast_plans.input.wanted(rows=True, cols=plan.keeps_input)
            x, kept = cast_tokens(input.detach(), groups, cast_plan)
            w = cast_weight(weight.detach(), recipe, ctx.needs_input_grad[0])
            assert x is not None, "it was requested"
            product = multiply_rows(x, w.output, recipe.output, groups, plan, input.dtype)
        ctx.save_for_backward(*(kept or (None, None)), tiles, *saved_of_weight(weight, w))
        ctx.plan, ctx.dtype = plan, input.dtype
        return product

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept, kept_scale, tiles, *of_weight = ctx.saved_tensors
        weight, w = weight_of_saved(of_weight)
        plan, recipe, groups = ctx.plan, ctx.plan.recipe, Groups(tiles, weight.shape[0])
        (for_input, for_weight, *_), _ = part_of_backward(ctx, grads, ())
        cast_plan = recipe.cast_plans.grad_output.wanted(rows=for_input, cols=for_weight and kept is not None)
        g, g_transposed = cast_tokens(grads[0].contiguous(), groups, cast_plan)
        d_input = d_weight = None
        if g is not None:
            operand = cast_weight_again(weight, w, recipe, g.codes)
            d_input = multiply_rows(g, operand, recipe.grad_input, groups, plan, ctx.dtype)
        if g_transposed is not None and kept is not None:
            x = Operand(kept, kept_scale)
            d_weight = multiply_over_rows(g_transposed, x, recipe.grad_weight, groups, plan, ctx.dtype)
        return d_input, d_weight, None, None


SAVED_OF_WEIGHT = 6


def saved_of_weight(weight: Tensor, operands: WeightOperands) -> tuple[Tensor | None, ...]:
    """The tensors that the backward pass needs of a weight: `SAVED_OF_WEIGHT` of them."""
    return weight, *(operands.grad_input or (None, None)), *operands.source[1:]


def weight_of_saved(saved: Any) -> tuple[Tensor, WeightOperands]:
    """The weight, and its operands without that of `output`."""
    weight, codes, scale, *source = saved
    operand = None if codes is None else Operand(codes, scale)
    return weight, WeightOperands(Operand(weight, None), operand, Source(None, *source))
