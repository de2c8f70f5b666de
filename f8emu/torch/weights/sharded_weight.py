"""A weight that FSDP2 gathers as float8: high precision at rest, codes on the way.

`fully_shard` keeps the rows of a weight spread over ranks, and asks a tensor with `fsdp_pre_all_gather` and
`fsdp_post_all_gather` what to gather. Here every rank casts its rows under the scales of the whole weight:

1. The amaxes of the whole weight: those of the rank's rows, then one all-reduce;
   `precompute_float8_dynamic_scale_for_fsdp` does it for all weights of a model at once. Under delayed scaling the
   scale is that of earlier passes.
2. `fsdp_pre_all_gather`: the codes of the rank's rows, for `output`. If `grad_input` needs other codes (rowwise), the
   backward pass gathers those instead, and both where it recomputes `output`.
3. `fsdp_post_all_gather`: codes and scales as a `CodedWeight`, which `Float8Linear` multiplies without a cast. The
   first time it gathers the codes for `grad_input` itself: whether FSDP2 will gather again is not known before.

Exactness: codes and scales are those of the whole weight on one device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.fused.arguments import CODES
from f8emu.torch.layer.operands import Delayed
from f8emu.torch.parallel.sharding import Shards, global_delayed
from f8emu.torch.torch_internals import (
    is_in_backward_pass,
    pickled_as,
    with_aliases,
    with_known_signature,
    wrapper_of,
)
from f8emu.torch.weights.coded_weight import ALIASES, CodedWeight
from f8emu.torch.weights.codes import (
    WeightCodes,
    WeightScales,
    cast_cols,
    cast_rows,
    cast_rows_delayed,
    format_of,
    has_one_scale,
)
from f8emu.torch.weights.gather_memory import GatherMemory
from f8emu.torch.weights.scales import LocalWeight, OwnRows, global_scales, local_tensor

_aten = torch.ops.aten
_VIEWS = ALIASES | {
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
"""What FSDP2 and modules do to a parameter and still want a parameter of: the result has the values of the argument."""
_NEW = {_aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.new_empty.default}
"""The same, with values of their own."""


@dataclass(slots=True)
class GatherState:
    """What is known of the values of a weight; views of it share it, and a write to any of them forgets it."""

    precomputed: WeightScales | None = None
    """The scales from `precompute_float8_dynamic_scale_for_fsdp`, until the weight changes."""
    of_forward: WeightScales | None = None
    """The scales of the last forward pass, for the backward pass."""
    memory: GatherMemory | None = None
    """The memory of gathered codes, if those for `grad_input` are not those for `output`."""
    own: OwnRows | None = None
    """What FSDP2 described at the first gather."""


class Sent(NamedTuple):
    """From `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    n: int
    """Rows of the whole weight, without padding."""
    row_scale: Tensor
    col_scale: Tensor
    """The same tensor where both operands have the same codes."""


class ShardedWeight(Tensor):
    """A wrapper around a plain tensor, with the hooks of FSDP2; every operation is that of the tensor inside."""

    plain: Tensor
    recipe: Recipe
    state: GatherState

    def __new__(cls, plain: Tensor, recipe: Recipe, state: GatherState | None = None) -> "ShardedWeight":
        return wrapper_of(cls, plain)

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
            return with_aliases(func, args, kwargs, out)
        if func in _VIEWS or func in _NEW:
            first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedWeight))
            state = first.state if func in _VIEWS else None
            out = tree_map_only(Tensor, lambda x: ShardedWeight(x, first.recipe, state), out)
            return with_aliases(func, args, kwargs, out)
        return out

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], (self.recipe, self.state)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return cls(inner["plain"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The shard of a checkpoint is a plain tensor, which any program can load, on any number of ranks.
        is_shard = not isinstance(self, nn.Parameter)
        return pickled_as(self.plain, protocol) if is_shard else pickled_as(super(), protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.plain!r}, recipe={self.recipe.label})"

    @with_known_signature
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What to gather, [padded rows of a rank, K] as bytes, and what to pass to `fsdp_post_all_gather`."""
        x, state, recipe = self.plain, self.state, self.recipe
        if state.own is None:
            state.own = OwnRows.of(mesh, outer_size, module, x)
        own = state.own
        # 1. Under delayed scaling the scale is known. An evaluated model scales by the amaxes of its weights.
        delayed = delayed_state(module, x.device)
        if delayed is not None and module.training:
            groups = Shards(rows=own.groups, is_set=module.delayed.are_set()[1])
            delayed = global_delayed(x, recipe.output.b, recipe.scale_rule, delayed, groups)
            codes, scale = cast_rows_delayed(x, recipe, delayed)
            return (own.pad(codes),), Sent(own.n, scale, scale)
        # 2. Otherwise the backward pass has the scales of the forward pass.
        is_backward = is_in_backward_pass()
        scales = state.of_forward if is_backward else state.precomputed
        if scales is None:
            (scales,) = global_scales([LocalWeight(x, recipe, own)])
        state.of_forward = scales
        # 3. One set of codes, or those of the pass that begins.
        memory = state.memory
        if has_one_scale(recipe):
            return (self._own_rows(x),), Sent(own.n, scales.row_scale, scales.row_scale)
        sent = Sent(own.n, scales.row_scale, scales.col_scale)
        if memory is not None and is_backward:
            if memory.begin_backward(own.group):
                memory.gather(memory.rows, self._own_rows(x), own.group)
            return (self._own_cols(x),), sent
        if memory is not None and memory.begin_forward():
            memory.gather(memory.cols, self._own_cols(x), own.group)
        return (self._own_rows(x),), sent

    def _own_rows(self, x: Tensor) -> Tensor:
        """The codes for `output` of this rank's rows `x`, padded."""
        own, scales = self.state.own, self.state.of_forward
        assert own is not None and scales is not None, "fsdp_pre_all_gather"
        return own.pad(cast_rows(x, self.recipe, scales, own.rows))

    def _own_cols(self, x: Tensor) -> Tensor:
        """The codes for `grad_input` of this rank's rows `x`, padded."""
        own, scales = self.state.own, self.state.of_forward
        assert own is not None and scales is not None, "fsdp_pre_all_gather"
        return own.pad(cast_cols(x, self.recipe, scales))

    def _gather_rows(self) -> None:
        """Fills the codes for `output` after a pass that did not."""
        own, memory = self.state.own, self.state.memory
        assert own is not None and memory is not None, "they were gathered before"
        if self.state.of_forward is None:
            raise UnsupportedError(
                "Float8Linear: the weight was written to after FSDP2 had gathered it, and not gathered again; reshard "
                "the module before the optimizer's step (set_reshard_after_backward(True), or reshard())"
            )
        x = self.plain.to(memory.rows.device)  # FSDP2 may keep shards on the host
        memory.gather(memory.rows, self._own_rows(x), own.group)

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
        own = self.state.own
        assert own is not None, "fsdp_pre_all_gather"
        x = self.plain.to(memory.cols.device)  # FSDP2 may keep shards on the host
        memory.gather(memory.cols, self._own_cols(x), own.group)
        rows, cols = (flat.view(codes.shape)[: sent.n].view(dtype) for flat in (memory.rows, memory.cols))
        weight = CodedWeight(WeightCodes(rows, sent.row_scale, sent.col_scale, cols), param_dtype)
        weight.memory, memory.operand, memory.gather_rows = memory, rows, self._gather_rows
        return weight, memory


def delayed_state(module: Any, device: torch.device) -> Delayed | None:
    """The state of the weight of a layer under delayed scaling."""
    buffers = module.delayed
    if buffers is None:
        return None
    buffers.follow(device)
    return buffers.of_tensors()[1]


def _written(func: Any, args: Any, kwargs: Any) -> list[ShardedWeight]:
    """The weights that an operator writes to."""
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
    states: list[GatherState] = []
    weights: list[LocalWeight] = []
    for parameter in model.parameters():  # each once
        weight = local_tensor(parameter)
        if not isinstance(weight, ShardedWeight) or weight.state.own is None:
            continue
        if weight.recipe.delayed_scaling_of("weight") is None:
            states.append(weight.state)
            weights.append(LocalWeight(weight.plain.detach(), weight.recipe, weight.state.own))
    for state, scales in zip(states, global_scales(weights), strict=True):
        state.precomputed = scales
