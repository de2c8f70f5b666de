"""The feed-forward block of a mixture's experts: grouped linear layers, with SiLU and product fused into the casts.

    output = down(hidden)        hidden = silu(gate) * up        gate, up = gate_up(input)

The input is cast once for gate and up. One kernel reads `gate` and `up` and finds the amaxes of `hidden`, another casts
it; under delayed scaling one does both. The backward pass does the same with the gradients of gate and up, and casts
`hidden^T` in the same reading, so the forward pass saves gate and up, the codes of `input^T`, and nothing of hidden.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.names import EngineName
from f8emu.spec.recipe import ROWWISE, TENSORS, Recipe
from f8emu.spec.scaling import Granularity
from f8emu.torch.casts.delayed_state import DelayedBuffers
from f8emu.torch.casts.operand import DelayedStates, Operand
from f8emu.torch.casts.placements import own_experts, own_groups
from f8emu.torch.fused import grouped
from f8emu.torch.fused import operators as fused
from f8emu.torch.gemm.engine import check_engine
from f8emu.torch.layer.delayed_update import UpdateGroup, load_with_weights
from f8emu.torch.layer.float8_layer import DELAYED_KEY, Scaled, leaf_call
from f8emu.torch.layer.grouped_linear import (
    SAVED_OF_WEIGHT,
    GroupedLinear,
    GroupedPlan,
    Groups,
    Source,
    WeightOperands,
    cast_tokens,
    cast_weight,
    cast_weight_again,
    check_grouped,
    current_weight,
    grouped_recipe,
    kept_weight,
    multiply_over_rows,
    multiply_rows,
    require_groups,
    saved_of_weight,
    weight_of_saved,
)
from f8emu.torch.layer.split_backward import part_of_backward
from f8emu.torch.layer.traced import recipe_text, stateless
from f8emu.torch.library import differentiable_once, is_exporting, operator
from f8emu.torch.recipes import RecipeLike, resolve_recipe
from f8emu.torch.torch_internals import (
    Function,
    is_dtensor,
    release,
    top_saved_tensors_hooks,
)
from f8emu.torch.weights.sharded_weight import ShardedWeight

States = tuple[DelayedStates, ...]  # of gate_up, or of w1 and w3, and of down
_DYNAMIC: DelayedStates = (None, None, None)


class ExpertsPlan(NamedTuple):
    """The settings of a call."""

    grouped: GroupedPlan
    states: States | None
    kept: tuple[WeightOperands, ...] | None  # of the weights, cast before


def float8_experts(
    input: Tensor,
    gate_up: Tensor | Sequence[Tensor],
    down: Tensor,
    offs: Tensor,
    *,
    recipe: RecipeLike = ROWWISE,
    engine: EngineName = "auto",
    delayed: States | None = None,
) -> Tensor:
    """`down(silu(gate) * up)` for every group of rows, with its gradients, under a float8 recipe.

    `gate_up` is one weight, gate's rows first, or the pair of gate's and up's. One weight is one operand: a row of the
    gradients of gate and up, and a column of both weights, share a scale. A pair has the scales of two layers, as
    torchao's grouped GEMMs give them, for one more GEMM in the backward pass.

    Shapes:
        input [T, D], sorted by group; gate_up [G, 2H, D], or a pair of [G, H, D]; down [G, D, H]; offs int32 [G], the
        end of each group -> [T, D]. D and H are multiples of 16, of 32 under mxfp8.

    Exactness: the outputs and gradients of `grouped_linear` and of `torch.nn.functional.silu` in eager torch. On a GPU
    the kernels repeat aten's arithmetic (see `fused.silu`). Autograd adds the two gradients of the input.

    Args:
        input: the tokens.
        gate_up: the first weights.
        down: the last weights.
        offs: the ends of the groups, `sizes.cumsum(0).to(torch.int32)`.
        recipe: as for `grouped_linear`, or delayed with `delayed`.
        engine: as for `scaled_mm`.
        delayed: the states of delayed scaling of each weight, as `Float8Experts` has them; without them, every cast
            under a delayed recipe uses its own amax.

    Raises:
        OperandError: wrong dtypes, shapes or sizes.
        UnsupportedError: as `grouped_linear`; delayed scaling of some tensors alone, or in another dtype than bfloat16.
    """
    chosen = grouped_recipe("float8_experts", recipe, engine)
    ups = (gate_up,) if isinstance(gate_up, Tensor) else tuple(gate_up)
    return experts_of(input, ups, down, offs, chosen, engine, delayed, None)


def experts_of(
    input: Tensor,
    ups: tuple[Tensor, ...],
    down: Tensor,
    offs: Tensor,
    recipe: Recipe,
    engine: str,
    delayed: States | None,
    kept: tuple[WeightOperands, ...] | None,
    *,
    in_graph: bool = False,
) -> Tensor:
    """`float8_experts` under a recipe that groups have; `kept` are operands that were cast before."""
    call = "float8_experts"
    for weight in ups:
        check_grouped(call, input, weight, offs, recipe)
    height = sum(weight.shape[1] for weight in ups)
    if len(ups) > 2 or down.ndim != 3 or 2 * down.shape[2] != height or down.shape[1] != input.shape[1]:
        raise OperandError(
            f"{call}: gate_up must be [G, 2H, D] or a pair of [G, H, D], and down [G, D, H]; got "
            f"{[list(weight.shape) for weight in ups]} and {list(down.shape)}"
        )
    if is_exporting() and not in_graph:  # `kept` has the bits of the weights
        return traced_experts.overload(input, list(ups), down, offs, recipe_text(recipe), engine)
    groups = Groups.of(offs, input.shape[0], recipe)
    needs_grad = torch.is_grad_enabled()
    plan = GroupedPlan(recipe, engine, needs_grad and any([weight.requires_grad for weight in ups]))
    if can_fuse(input, recipe):
        return FusedExperts.apply(input, groups.tiles, ExpertsPlan(plan, delayed, kept), down, *ups)
    if delayed is not None:
        raise UnsupportedError(
            f"{call}: delayed scaling of experts is of all three tensors, all cast to float8, in bfloat16; got "
            f"{input.dtype} and recipe {recipe.label!r}; choose another recipe, or autocast to bfloat16"
        )
    products = [GroupedLinear.apply(input, weight, groups.tiles, plan) for weight in ups]
    gate, up = products if len(products) == 2 else products[0].chunk(2, dim=1)
    plan = plan._replace(keeps_input=needs_grad and down.requires_grad)
    return GroupedLinear.apply(silu(gate) * up, down, groups.tiles, plan)


@operator(opaque=False, differentiable=True)
def traced_experts(
    input: Tensor, ups: Sequence[Tensor], down: Tensor, offs: Tensor, recipe: str, engine: str
) -> Tensor:
    """`float8_experts` in a graph, as `traced.linear`."""

    def run(chosen: Recipe) -> Tensor:
        return experts_of(input, tuple(ups), down, offs, chosen, engine, None, None, in_graph=True)

    return stateless(recipe, run, input, down, *ups)


def can_fuse(input: Tensor, recipe: Recipe) -> bool:
    """Whether SiLU and product are computed in the casts: in bfloat16, with scales of one kind in all GEMMs."""
    if input.dtype is not torch.bfloat16:
        return False
    kinds = [kind for plans in recipe.cast_plans for kind in plans.both.granularities]
    is_plain = kinds[0] is Granularity.TENSORWISE or kinds[0] is Granularity.ROWWISE
    return is_plain and all([kind is kinds[0] for kind in kinds])


class FusedExperts(Function):
    """`float8_experts` of checked operands."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, tiles: Tensor, plan: ExpertsPlan, down: Tensor, *ups: Tensor) -> Tensor:
        (settings, states, known), groups = plan, Groups(tiles, down.shape[0])
        recipe, dtype = settings.recipe, input.dtype
        rule, number = recipe.scale_rule, groups.number
        of_ups, of_down = ([_DYNAMIC] * len(ups), _DYNAMIC) if states is None else (states[:-1], states[-1])
        needs_input, needs_down = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        with torch.no_grad():
            # 1. The products of gate and up. Under delayed scaling each weight has a scale of the input.
            products: list[Tensor] = []
            kept: list[Operand | None] = []
            weights: list[Any] = []
            x = None
            for i, (weight, state) in enumerate(zip(ups, of_ups, strict=True)):
                if x is None or states is not None:
                    cast_plan = recipe.cast_plans.input.wanted(rows=True, cols=settings.keeps_input)
                    x, x_transposed = cast_tokens(input.detach(), groups, cast_plan, state[0])
                    kept.append(x_transposed)
                assert x is not None, "it was requested"
                if known is None:
                    w = cast_weight(weight.detach(), recipe, needs_input, state[1])
                else:
                    w = current_weight(weight, known[i])
                products.append(multiply_rows(x, w.output, recipe.output, groups, settings, dtype))
                weights += saved_of_weight(weight, w)
            x = w = None  # frees the codes of rows
            # 2. hidden: its amaxes or scales, and its codes.
            gate, up = products if len(products) == 2 else (products[0], None)
            source = _source_of_hidden(gate, up, groups, recipe, of_down)
            row, by_group = (source.inv_scale, True) if source.inv_scale is not None else (source.rows, False)
            fmt, amax = _name(recipe.output.a), None if of_down[0] is None else of_down[0].amax
            assert row is not None, "found above"
            codes, scale = grouped.cast_hidden(gate, up, tiles, number, fmt, row, by_group, rule.amax_floor, amax)
            hidden = Operand(codes, source.scale if by_group else scale)
            # 3. The output.
            if known is None:
                w = cast_weight(down.detach(), recipe, True, of_down[1])
            else:
                w = current_weight(down, known[-1])
            output = multiply_rows(hidden, w.output, recipe.output, groups, settings, dtype)
        of_hidden = source[1:] if needs_down else (None,) * 3
        transposed_inputs = [x for operand in kept for x in operand or (None, None)]
        ctx.save_for_backward(tiles, *products, *transposed_inputs, *of_hidden, *saved_of_weight(down, w), *weights)
        ctx.plan, ctx.ups = plan, len(ups)
        ctx.is_own = not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is None
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # 1. What was saved.
        saved, n, (settings, states, known) = list(ctx.saved_tensors), ctx.ups, ctx.plan
        recipe, dtype = settings.recipe, grads[0].dtype
        groups = Groups(saved[0], saved[-SAVED_OF_WEIGHT].shape[0])
        products, number = saved[1 : n + 1], groups.number
        gate, up = products if n == 2 else (products[0], None)
        at, count = n + 1, n if states is not None else 1
        kept: list[Any] = [Operand(*saved[at + 2 * i : at + 2 * i + 2]) for i in range(count)]
        at += 2 * count
        hidden = Source(None, *saved[at : at + 3])
        parts = [saved[i : i + SAVED_OF_WEIGHT] for i in range(at + 3, len(saved), SAVED_OF_WEIGHT)]
        (down, w_down), *ups = [weight_of_saved(part) for part in parts]
        saved = parts = None
        of_ups, of_down = ([_DYNAMIC] * n, _DYNAMIC) if states is None else (states[:-1], states[-1])
        (needs_input, _, _, needs_down, *needs_ups), of_grads = part_of_backward(
            ctx, grads, tuple([state[2] for state in (*of_ups, of_down)])
        )
        # 2. The gradient of hidden.
        cast_plan = recipe.cast_plans.grad_output.wanted(rows=True, cols=needs_down)
        rule, fmt = recipe.scale_rule, _name(recipe.grad_input.a)
        g, g_transposed = cast_tokens(grads[0].contiguous(), groups, cast_plan, of_grads[-1])
        assert g is not None, "it was requested"
        operand = cast_weight_again(down, w_down, recipe, g.codes)
        grad_hidden = multiply_rows(g, operand, recipe.grad_input, groups, settings, dtype)
        if ctx.is_own and known is None and w_down.grad_input is not None:
            release([w_down.grad_input.codes])
        g = operand = w_down = None
        # 3. The operands of the gradients of gate and up, and of hidden^T.
        sources = _sources_of_gradients(grad_hidden, gate, up, groups, recipe, of_grads[:-1])
        by_group = sources[0].inv_scale is not None
        of_gate, of_up = (*[source.inv_scale if by_group else source.rows for source in sources], None)[:2]
        of_hidden = hidden.inv_scale if by_group else hidden.cols
        amaxes = [None if grad is None else grad.amax for grad in of_grads[:-1]]
        gate_amax, up_amax = (*amaxes, None)[:2]
        wanted = needs_input, any(needs_ups), needs_down
        names = fmt, _name(recipe.grad_weight.b)
        sources_of = of_gate, of_up, of_gate if of_hidden is None else of_hidden
        settings_of = *wanted, by_group, rule.amax_floor, gate_amax, up_amax
        results = grouped.cast_gradients(grad_hidden, gate, up, groups.tiles, number, *names, *sources_of, *settings_of)
        grad_hidden = gate = up = None
        if ctx.is_own:
            release(products)
        scales = [source.scale for source in sources]
        rows = [Operand(results[4 * i], scales[i] if by_group else results[4 * i + 1]) for i in range(n)]
        transposed = [Operand(results[4 * i + 2], scales[i] if by_group else results[4 * i + 3]) for i in range(n)]
        hidden_transposed = Operand(results[8], hidden.scale if by_group else results[9])
        results = None
        # 4. The gradients of the input and the weights.
        d_input = d_down = None
        if needs_input:
            for i, (weight, w) in enumerate(ups):
                operand = cast_weight_again(weight, w, recipe, rows[i].codes)
                product = multiply_rows(rows[i], operand, recipe.grad_input, groups, settings, dtype)
                d_input = product if d_input is None else d_input + product
                if ctx.is_own and known is None and w.grad_input is not None:
                    release([w.grad_input.codes])
                operand = product = None
        rows = []
        d_ups: list[Tensor | None] = [None] * n
        for i in range(n):
            if needs_ups[i]:
                x = kept[i if count > 1 else 0]
                d_ups[i] = multiply_over_rows(transposed[i], x, recipe.grad_weight, groups, settings, dtype)
        if ctx.is_own:
            release([x.codes for x in kept if x.codes is not None])
        transposed, kept = [], []
        if g_transposed is not None:
            d_down = multiply_over_rows(g_transposed, hidden_transposed, recipe.grad_weight, groups, settings, dtype)
        return d_input, None, None, d_down, *d_ups


def _name(cast: Any) -> str:
    return cast.format.name


def _is_rowwise(recipe: Recipe) -> bool:
    return recipe.output.a.granularity is Granularity.ROWWISE


def _source_of_hidden(gate: Tensor, up: Tensor | None, groups: Groups, recipe: Recipe, states: DelayedStates) -> Source:
    tiles, number, state, rule = groups.tiles, groups.number, states[0], recipe.scale_rule
    if _is_rowwise(recipe):
        amaxes, m = grouped.amaxes_of_hidden(gate, up, tiles, number, False), gate.shape[0]
        return Source(rows=amaxes[:m].unsqueeze(1), cols=amaxes[m:].unsqueeze(1))
    settings = _name(recipe.output.a), rule.power_of_two, rule.amax_floor
    if state is not None:
        tensors = [gate] if up is None else [gate, up]
        scales = grouped.scales_by_state(tensors, "hidden", tiles, number, state.inv_scale, *settings, *state[2:])
        return Source(None, None, *scales)
    return Source(None, None, *fused.scales(grouped.amaxes_of_hidden(gate, up, tiles, number, True), *settings, 0))


def _sources_of_gradients(
    grad_hidden: Tensor, gate: Tensor, up: Tensor | None, groups: Groups, recipe: Recipe, states: Sequence[Any]
) -> list[Source]:
    # Of gate and up, or of both as one matrix; under rowwise scales `rows` holds the amaxes of rows and of columns.
    tiles, number, rule = groups.tiles, groups.number, recipe.scale_rule
    settings = _name(recipe.grad_input.a), rule.power_of_two, rule.amax_floor
    if not _is_rowwise(recipe) and states[0] is not None:
        tensors = [grad_hidden, gate] if up is None else [grad_hidden, gate, up]
        sources: list[Source] = []
        for kind, state in zip(("grad_gate", "grad_up"), states, strict=False):
            by_state = state.inv_scale, *settings, *state[2:]
            sources.append(Source(None, None, *grouped.scales_by_state(tensors, kind, tiles, number, *by_state)))
        return sources
    amaxes = grouped.amaxes_of_gradients(grad_hidden, gate, up, tiles, number, not _is_rowwise(recipe))[: len(states)]
    if _is_rowwise(recipe):
        return [Source(rows=amax) for amax in amaxes]
    return [Source(None, None, *fused.scales(amax, *settings, 0)) for amax in amaxes]


class GroupedState(Scaled):
    """The state of delayed scaling of a grouped weight, every group's its own.

    A state dict holds it in its metadata, as that of a `Float8Linear`.
    """

    def __init__(self, recipe: Recipe, groups: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.__dict__["delayed"] = DelayedBuffers(recipe, device, groups)  # no submodule: see DelayedBuffers
        self.update_with(UpdateGroup())

    def states(self, input: Tensor, weight: Tensor) -> DelayedStates | None:
        """The states that the casts of a call read and update; None in a pass without gradients, which changes none."""
        states = self.delayed_states(input, weight)
        assert self.delayed is not None, "set above"
        if states is None:
            return None
        # Every rank has the states of all experts, and an update reduces them over the ranks.
        if weight.shape[0] != self.delayed.groups:
            raise UnsupportedError(
                f"Float8Experts: with delayed scaling, weights must be of all {self.delayed.groups} experts, or "
                f"DTensors that ranks share; got those of {weight.shape[0]}; use another recipe, or ExpertParallel"
            )
        groups = own_groups(weight)
        if groups.stop - groups.start == weight.shape[0]:
            return states
        x, w, g = [state and state._replace(amax=state.amax[groups], first=groups.start) for state in states]
        return x, w, g

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # pyright: ignore[reportUnknownMemberType]
        assert self.delayed is not None, "set above"
        # The weights are the parent's: torch does not show here whether they were given.
        load_with_weights(self.delayed, prefix[:-1], local_metadata.get(DELAYED_KEY), True, rest[-1])


class Float8Experts(nn.Module):
    """The experts of a mixture under a float8 recipe: `float8_experts` with parameters.

    The parameters are those of transformers' mixtures: `gate_up_proj` [G, 2H, D], gate's rows first, and `down_proj`
    [G, D, H]. Under delayed scaling each expert has scales of its own, which the end of every backward pass updates.

    Shapes:
        input [T, D], sorted by expert; offs int32 [G], the end of each expert's rows -> [T, D].

    Exactness: as for `float8_experts`.

    Raises:
        UnsupportedError: a recipe that `float8_experts` refuses.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        recipe: RecipeLike = ROWWISE,
        engine: EngineName = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim, **options))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, **options))
        self.settings = ExpertsSettings(recipe, engine, num_experts, 2, self.down_proj.device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as three `nn.Linear`."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)

    def forward(self, input: Tensor, offs: Tensor) -> Tensor:
        """`down(silu(gate) * up)` of every expert's rows."""
        if (leaf := leaf_call(self, input, offs)) is not None:
            return leaf
        return self.settings(input, (self.gate_up_proj,), self.down_proj, offs)

    def precompute_weights(self) -> None:
        """Cast the weights once for all passes until they change, such as the microbatches of a step.

        Call it after every step of the optimizer. The codes take 2 bytes an element; a pass after a change of the
        weights without this call raises UnsupportedError, unless torch does not count it (`weight.data.mul_`).

        Raises:
            UnsupportedError: sharded weights, or delayed scaling.
        """
        self.settings.precompute(self.gate_up_proj, self.down_proj)

    def extra_repr(self) -> str:
        experts, height, dim = self.gate_up_proj.shape
        return f"{experts}, {dim}, {height // 2}"


class ExpertsSettings(nn.Module):
    """How a module of experts computes: the recipe, the engine, and the states and kept codes of its weights.

    `weights` is their number: one or two of gate and up, and down.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        engine: EngineName,
        groups: int,
        weights: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        call = "Float8Experts"
        self.recipe = resolve_recipe(call, recipe)
        self.engine: EngineName = engine
        check_engine(call, engine)
        require_groups(call, self.recipe)
        self.states = nn.ModuleList()
        if self.recipe.delayed is not None:
            if self.recipe.delayed.tensors != TENSORS:
                raise UnsupportedError(f"{call}: delayed scaling of experts is of all three tensors; leave tensors out")
            self.states = nn.ModuleList([GroupedState(self.recipe, groups, device) for _ in range(weights)])
        self._kept: tuple[WeightOperands, ...] | None = None

    def forward(self, input: Tensor, gate_up: Sequence[Tensor], down: Tensor, offs: Tensor) -> Tensor:
        whole = (*gate_up, down)
        modules: list[Any] = list(self.states)
        states = [state.states(input, weight) for state, weight in zip(modules, whole, strict=False)]
        delayed = None if not states or None in states else tuple(states)
        weights = tuple([own_experts("Float8Experts", weight) for weight in whole])
        return experts_of(input, weights[:-1], weights[-1], offs, self.recipe, self.engine, delayed, self._kept)

    @torch.no_grad()
    def precompute(self, *weights: Tensor) -> None:
        """Cast the weights, for all passes until they change: call it after every step of the optimizer."""
        if self.states or any(is_dtensor(weight) or isinstance(weight, ShardedWeight) for weight in weights):
            raise UnsupportedError(
                "Float8Experts.precompute_weights: weights must be whole tensors, under a recipe without delayed "
                "scaling; leave the call out"
            )
        self._kept = None  # frees the memory for the new ones
        self._kept = tuple([kept_weight(weight.detach(), self.recipe) for weight in weights])

    def extra_repr(self) -> str:
        return f"recipe={self.recipe.label}, engine={self.engine}"
