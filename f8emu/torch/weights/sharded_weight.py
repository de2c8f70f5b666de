"""A weight that FSDP2 gathers as float8: high precision at rest, codes on the way.

`fully_shard` keeps the rows of a weight spread over ranks, and asks a tensor with `fsdp_pre_all_gather` and
`fsdp_post_all_gather` what to gather. Here every rank casts its rows under the scales of the whole weight.

Exactness: codes and scales are those of the whole weight on one device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch import torch_internals as internals
from f8emu.torch.fused.fused_cast import CODES
from f8emu.torch.parallel.sharding import Shards, global_delayed
from f8emu.torch.weights.coded_weight import ALIASES, COPIES, EMPTIES, MOVES, NEW, PARTS, CodedWeight, GatherMemory
from f8emu.torch.weights.codes import (
    LocalWeight,
    OwnRows,
    WeightCodes,
    WeightScales,
    cast_cols,
    cast_rows,
    cast_rows_delayed,
    format_of,
    global_scales,
    has_one_scale,
)

_VIEWS = ALIASES | PARTS | MOVES  # weights with the values of the argument
_OTHERS = COPIES | EMPTIES | NEW  # weights with values of their own


@dataclass(slots=True)
class GatherState:
    """What is known of the values of a weight; views of it share it, and a write to any of them forgets the scales."""

    precomputed: WeightScales | None = None  # by `precompute_float8_dynamic_scale_for_fsdp`, until the weight changes
    of_forward: WeightScales | None = None  # of the last forward pass, for the backward pass
    memory: GatherMemory | None = None  # of gathered codes, if those for `grad_input` are not those for `output`
    own: OwnRows | None = None  # what FSDP2 described at the first gather


class Sent(NamedTuple):
    """From `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    n: int  # rows of the whole weight, without padding
    row_scale: Tensor
    col_scale: Tensor  # the same tensor where both operands have the same codes


class ShardedWeight(Tensor):
    """A wrapper around a plain tensor, with the hooks of FSDP2; every operation is that of the tensor inside."""

    plain: Tensor
    recipe: Recipe
    state: GatherState

    def __new__(cls, plain: Tensor, recipe: Recipe, state: GatherState | None = None) -> "ShardedWeight":
        return internals.wrapper_of(cls, plain)

    def __init__(self, plain: Tensor, recipe: Recipe, state: GatherState | None = None) -> None:
        self.plain, self.recipe = plain, recipe
        self.state = GatherState() if state is None else state

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_write = func._schema.is_mutable
        if is_write:
            for x in _written(func, args, kwargs):
                x.state.precomputed = x.state.of_forward = None
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda x: x.plain, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if is_write:
            return internals.with_aliases(func, args, kwargs, out)
        if func in _VIEWS or func in _OTHERS:
            first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedWeight))
            state = first.state if func in _VIEWS else None
            out = tree_map_only(Tensor, lambda x: ShardedWeight(x, first.recipe, state), out)
            return internals.with_aliases(func, args, kwargs, out)
        return out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], (self.recipe, self.state)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return cls(inner["plain"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The shard of a checkpoint is a plain tensor, which any program can load, on any number of ranks.
        is_shard = not isinstance(self, nn.Parameter)
        return internals.pickled_as(self.plain, protocol) if is_shard else internals.pickled_as(super(), protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.plain!r}, recipe={self.recipe.label})"

    @internals.with_known_signature
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What to gather, [padded rows of a rank, K] as bytes, and what to pass to `fsdp_post_all_gather`."""
        x, state, recipe = self.plain, self.state, self.recipe
        if state.own is None:
            state.own = OwnRows.of(mesh, outer_size, module, x)
        own = state.own
        # 1. Under delayed scaling the scale is that of earlier passes. An evaluated model has those of its weights.
        if module.delayed is not None and module.training:
            module.delayed.follow(x.device)
            groups = Shards(rows=own.groups, is_set=module.delayed.are_set()[1])
            delayed = module.delayed.of_tensors()[1]
            if delayed is not None:
                delayed = global_delayed(x, recipe.output.b, recipe.scale_rule, delayed, groups)
                codes, scale = cast_rows_delayed(x, recipe, delayed)
                return (own.pad(codes),), Sent(own.n, scale, scale)
        # 2. Otherwise those of the whole weight's amaxes; the backward pass has the scales of the forward pass.
        is_backward = internals.is_in_backward_pass()
        scales = state.of_forward if is_backward else state.precomputed
        if scales is None:
            (scales,) = global_scales([LocalWeight(x, recipe, own)])
        state.of_forward = scales
        # 3. One set of codes, or those of the pass that begins.
        memory = state.memory
        if has_one_scale(recipe):
            return (self._own_codes(x),), Sent(own.n, scales.row_scale, scales.row_scale)
        sent = Sent(own.n, scales.row_scale, scales.col_scale)
        if memory is not None and is_backward:
            if memory.begin_backward(own.group):
                memory.gather(memory.rows, self._own_codes(x), own.group)
            return (self._own_codes(x, cols=True),), sent
        if memory is not None and memory.begin_forward():
            memory.gather(memory.cols, self._own_codes(x, cols=True), own.group)
        return (self._own_codes(x),), sent

    def _own_codes(self, x: Tensor, *, cols: bool = False) -> Tensor:
        # This rank's rows `x`, padded: for `output`, or for `grad_input`.
        own, scales = self.state.own, self.state.of_forward
        assert own is not None and scales is not None, "fsdp_pre_all_gather"
        return own.pad(cast_cols(x, self.recipe, scales) if cols else cast_rows(x, self.recipe, scales, own.rows))

    def _gather(self, *, cols: bool) -> None:
        own, memory = self.state.own, self.state.memory
        assert own is not None and memory is not None, "fsdp_post_all_gather"
        if self.state.of_forward is None:
            raise UnsupportedError(
                "Float8Linear: the weight was written to after FSDP2 had gathered it, and not gathered again; reshard "
                "the module before the optimizer's step (set_reshard_after_backward(True), or reshard())"
            )
        x = self.plain.to(memory.rows.device)  # FSDP2 may keep shards on the host
        memory.gather(memory.cols if cols else memory.rows, self._own_codes(x, cols=cols), own.group)

    def _gather_rows(self) -> None:
        self._gather(cols=False)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered weight, and a list of what FSDP2 frees with it; with `out`, that has been filled again."""
        sent: Sent = metadata
        memory = self.state.memory
        # 1. Every time but the first.
        if out is not None:
            weight = local_tensor(out)
            assert isinstance(weight, CodedWeight), "it was returned below"
            weight.row_scale, weight.col_scale = sent.row_scale, sent.col_scale
            if memory is not weight.memory:
                raise UnsupportedError(
                    "Float8Linear: a weight that FSDP2 has gathered was replaced by another; load weights into it "
                    "(load_state_dict without assign=True), or replace them before the first pass"
                )
            if memory is not None:
                memory.end_gather()
                memory.gather_rows = self._gather_rows
            return None
        # 2. One set of codes.
        (codes,) = outputs
        dtype = CODES[format_of(self.recipe)]
        if sent.col_scale is sent.row_scale:
            rows = codes[: sent.n].view(dtype)
            return CodedWeight(WeightCodes(rows, sent.row_scale, sent.col_scale), param_dtype), ()
        # 3. Two: those for `grad_input` are gathered here, since FSDP2 has gathered the others.
        memory = self.state.memory = GatherMemory.adopt(codes)
        self._gather(cols=True)
        rows, cols = (flat.view(codes.shape)[: sent.n].view(dtype) for flat in (memory.rows, memory.cols))
        weight = CodedWeight(WeightCodes(rows, sent.row_scale, sent.col_scale, cols), param_dtype)
        weight.memory, memory.operand, memory.gather_rows = memory, rows, self._gather_rows
        return weight, memory


def local_tensor(x: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor is itself."""
    return getattr(x, "_local_tensor", x)


def _written(func: Any, args: Any, kwargs: Any) -> list[ShardedWeight]:
    found: list[ShardedWeight] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, ShardedWeight)]
    return found


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP2 gathers as float8, with one all-reduce for the model.

    Call it after the optimizer's step, on all ranks. Without it every weight has its own all-reduce in every
    forward pass. The scales hold until the weight changes: any write to it, also by `load_state_dict`, discards them.

    The call does nothing for weights that are gathered in high precision, for weights under delayed scaling (their
    scales come from the update of its state), and before the first forward pass.

    Exactness: codes and scales are the same with and without it.
    """
    found: list[tuple[ShardedWeight, LocalWeight]] = []
    for weight in map(local_tensor, model.parameters()):  # each once
        if isinstance(weight, ShardedWeight) and weight.state.own is not None:
            if weight.recipe.delayed_scaling_of("weight") is None:
                found.append((weight, LocalWeight(weight.plain.detach(), weight.recipe, weight.state.own)))
    for (weight, _), scales in zip(found, global_scales([local for _, local in found]), strict=True):
        weight.state.precomputed = scales
