"""A weight that FSDP2 gathers as float8, from codes that are cast for each gather or that rest beside the master.

`fully_shard` keeps the rows of a weight spread over ranks, and asks a tensor with `fsdp_pre_all_gather` and
`fsdp_post_all_gather` what to gather. Here every rank casts its rows under the scales of the whole weight. At rest
(`float8_primary_weights`) it keeps the codes until the next write to the master, such as the optimizer's step.

Exactness: codes and scales are those of the whole weight on one device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch import torch_internals as internals
from f8emu.torch.casts.delayed_state import DelayedBuffers
from f8emu.torch.casts.sharded import Shards
from f8emu.torch.fused.fused_cast import CODES
from f8emu.torch.weights.coded_weight import (
    COPIES,
    EMPTIES,
    FILLED,
    MOVES,
    NEW,
    CodedWeight,
    GatherMemory,
    is_view,
    written,
)
from f8emu.torch.weights.codes import (
    LocalWeight,
    OwnRows,
    WeightCodes,
    WeightScales,
    cast_cols,
    cast_master,
    cast_rows,
    cast_rows_delayed,
    format_of,
    global_scales,
    has_one_scale,
)
from f8emu.torch.weights.weight_tensor import WeightTensor, require_own_call

# Weights with values of their own. Tensor parallelism pads unequal parts.
_OTHERS = COPIES | EMPTIES | NEW | {torch.ops.aten.constant_pad_nd.default}


@dataclass(slots=True)
class Resting:
    """The state of a weight that rests as float8: between two writes to its master, the same codes are multiplied."""

    delayed: DelayedBuffers | None  # the layer's
    is_split: bool = False  # whether it was split off a whole weight, to which a write to it would not go
    codes: WeightCodes | None = None  # of this rank's rows; None after a write to the master


@dataclass(slots=True)
class GatherState:
    """The scales and codes known of a weight's values. Views share it; a write to any of them forgets the scales."""

    precomputed: WeightScales | None = None  # by `precompute_float8_dynamic_scale_for_fsdp`, until the weight changes
    of_forward: WeightScales | None = None  # of the last forward pass, for the backward pass
    memory: GatherMemory | None = None  # of gathered codes, if those for `grad_input` are not those for `output`
    own: OwnRows | None = None  # what FSDP2 described at the first gather
    resting: Resting | None = None  # of a weight that rests as float8
    was: torch.dtype | None = None  # the dtype in which it was gathered, if that has changed since

    def of_another(self) -> "GatherState":
        """The state of a weight with values of its own."""
        return GatherState(resting=None if self.resting is None else Resting(self.resting.delayed))

    def of_padded(self) -> "GatherState":
        """The state of the tensor by which FSDP2 pads this one after a state dict was loaded: gathered in its place."""
        state = self.of_another()
        state.own, state.memory = self.own, self.memory
        return state

    def __deepcopy__(self, memo: Any) -> "GatherState":
        return self.of_another()


class Sent(NamedTuple):
    """From `fsdp_pre_all_gather` to `fsdp_post_all_gather`."""

    n: int  # rows, or experts, of the whole weight, without padding
    row_scale: Tensor
    col_scale: Tensor  # the same tensor where both operands have the same codes
    master_amax: Tensor | None = None  # as in `WeightCodes`


class ShardedWeight(WeightTensor):
    """A wrapper around a plain tensor, with the hooks of FSDP2; every operation is that of the tensor inside.

    Its dtype is that of the gradient; at rest the tensor inside, the master, is float32.
    """

    template = "plain"
    plain: Tensor
    recipe: Recipe
    state: GatherState
    is_moved: bool = False  # whether it is a copy on another device, which shares what is known of the values

    def __new__(
        cls,
        plain: Tensor,
        recipe: Recipe | None = None,
        state: GatherState | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> "ShardedWeight":
        require_own_call(cls, options)
        return internals.wrapper_of(cls, plain, dtype)

    def __init__(
        self, plain: Tensor, recipe: Recipe, state: GatherState | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.plain, self.recipe = plain, recipe
        self.state = GatherState() if state is None else state

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_write = internals.schema_of(func).is_mutable
        if func.namespace == "c10d":  # collectives write to their arguments, whatever their schemas say
            for x in internals.tree_leaves((args, kwargs)):
                if isinstance(x, ShardedWeight) and not (x.state.resting and x.state.resting.is_split):
                    x.forget()
        if is_write:
            for x in written(func, args, kwargs):
                if isinstance(x, ShardedWeight):
                    x._require_own_step(func, args)
                    x.forget()
        if func in FILLED and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": args[0].dtype}
        plain_args, plain_kwargs = internals.tree_map_only(ShardedWeight, lambda x: x.plain, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if is_write:
            return internals.with_aliases(func, args, kwargs, out)
        # A write to any view of a weight is a write to the weight.
        if func in MOVES or func in _OTHERS or (is_view(func) and func is not torch.ops.aten.view.dtype):
            first = next(x for x in internals.tree_leaves((args, kwargs)) if isinstance(x, ShardedWeight))
            if func in NEW and out.ndim != first.ndim:  # a number or a buffer
                return out
            dtype = kwargs.get("dtype") or first.dtype
            state = first._state_as(dtype)
            if func in _OTHERS and dtype == first.dtype:
                state = state.of_padded() if func in NEW else state.of_another()
            if state.resting is not None:  # another dtype rounds the values of the master, which stays float32
                out = internals.tree_map_only(Tensor, lambda x: x.to(first.plain.dtype), out)
            out = internals.tree_map_only(Tensor, lambda x: ShardedWeight(x, first.recipe, state, dtype), out)
            if func is torch.ops.aten._to_copy.default and dtype == first.dtype:
                out.is_moved = first.is_moved or out.device != first.device
            return internals.with_aliases(func, args, kwargs, out)
        return out

    @property
    def addressed(self) -> Tensor:
        return self.plain

    def become(self, value: Tensor) -> None:
        self.forget()
        new = value if isinstance(value, ShardedWeight) else self.with_values(value.detach(), value.dtype)
        internals.set_data(self, new)
        self.plain, self.state = new.plain, new.state

    def with_values(self, values: Tensor, dtype: torch.dtype) -> "ShardedWeight":
        """A weight in the place of this one."""
        inner = values if self.state.resting is None else values.to(self.plain.dtype)
        return ShardedWeight(inner, self.recipe, self._state_as(dtype), dtype)

    def _state_as(self, dtype: torch.dtype) -> GatherState:
        """The state of the same values, or of these rounded to another dtype."""
        if dtype == self.dtype:
            return self.state
        state = self.state.of_another()
        state.was = None if self.state.own is None else self.dtype
        return state

    def _require_own_step(self, func: Any, args: Any) -> None:
        # An optimizer over the weight itself would step the float32 master by gradients and moments of another dtype.
        is_other = self.plain.dtype != self.dtype and "copy" not in internals.schema_of(func).name
        plain = (x for x in internals.tree_leaves(args) if isinstance(x, Tensor) and not isinstance(x, ShardedWeight))
        if is_other and any(x.dtype == self.dtype for x in plain):
            raise UnsupportedError(
                f"{func}: the weight rests as float8 codes with a float32 master, and its gradients are {self.dtype}; "
                "step it with MasterWeights(params, torch.optim.AdamW, ...), or convert a model of float32 parameters "
                "(fully_shard's mp_policy computes in bfloat16)"
            )

    def forget(self) -> None:
        """After a write, or a change of the layer's scales: what was found from the values is no longer true."""
        if self.is_moved:  # it is no longer a copy
            self.is_moved, self.state = False, self.state.of_another()
        state = self.state
        state.precomputed = state.of_forward = None
        if state.resting is not None:
            if state.resting.is_split:
                raise UnsupportedError(
                    "Float8Weight: a part of a weight cannot be written to, since the weight is float8 codes with a "
                    "master; write whole values with weight.copy_(values) under torch.no_grad()"
                )
            state.resting.codes = None

    def local(self) -> LocalWeight:
        """This rank's rows, once FSDP2 or a layer has told whose the others are."""
        assert self.state.own is not None, "the first gather or call tells"
        return LocalWeight(self.plain.detach(), self.recipe, self.state.own)

    @property
    def master(self) -> Tensor:
        """This rank's part of the master of a weight at rest."""
        return self.plain

    def values(self) -> Tensor:
        """The master, for a state dict: a write to it is a write to the weight."""
        return ShardedWeight(self.plain.detach(), self.recipe, self.state, self.plain.dtype)

    @property
    def is_refilled_here(self) -> bool:
        """Whether codes are cast where the master is: not before the first pass, nor with offloaded masters."""
        resting = self.state.resting
        if self.state.own is None or resting is None:
            return False
        return resting.codes is None or resting.codes.rows.device == self.plain.device

    def refill(self, *, scales: WeightScales | None = None) -> WeightCodes:
        """Cast the master into the codes that rest, under `scales` if they are known."""
        x, recipe, own = self.local()
        resting = self.state.resting
        assert resting is not None, "only such a weight keeps codes"
        resting.codes = cast_master(x, recipe, resting.delayed, own, scales=scales)
        return resting.codes

    def rest_with(self, delayed: DelayedBuffers | None) -> None:
        """The layer's state of delayed scaling: a copy of the layer has its own."""
        if self.state.resting is not None:
            self.state.resting.delayed = delayed

    def codes_at_rest(self, own: OwnRows) -> WeightCodes | None:
        """The codes of this rank's rows, if the weight rests as float8."""
        state, resting = self.state, self.state.resting
        if resting is None:
            return None
        state.own = own if state.own is None else state.own
        resting.is_split, codes = False, resting.codes
        return self.refill() if codes is None or codes.rows.device != self.plain.device else codes

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], (self.recipe, self.state, self.dtype)

    @classmethod
    def __metadata_guard__(cls, mine: Any, other: Any) -> bool:
        """Whether code that was compiled for one weight is that of another: what is known of values does not count."""
        return mine[0] == other[0] and mine[2] == other[2]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ShardedWeight":
        return cls(inner["plain"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The shard of a checkpoint is a plain tensor, which any program can load, on any number of ranks.
        is_shard = not isinstance(self, nn.Parameter)
        return internals.pickled_as(self.plain, protocol) if is_shard else super().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.plain!r}, recipe={self.recipe.label})"

    @internals.with_known_signature
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The bytes to gather, [padded rows or experts of a rank, ...], and the metadata for the other hook."""
        x, state, recipe = self.plain, self.state, self.recipe
        if state.was is not None:
            raise UnsupportedError(
                f"Float8Linear: FSDP2 gathered the weight as {state.was}, now it is {self.dtype}; change the dtype of "
                "a model before its first pass"
            )
        if state.own is None:
            state.own = OwnRows.of(mesh, outer_size, module, x)
        own = state.own
        buffers: DelayedBuffers | None = getattr(module, "delayed", None)  # experts have none
        self.rest_with(buffers)
        if (rest := self.codes_at_rest(own)) is not None:
            return self._sent(rest.row_scale, rest.col_scale, rest.master_amax)
        # 1. Under delayed scaling the scale is that of earlier passes. An evaluated model has those of its weights.
        if buffers is not None and module.training:
            buffers.follow(x.device)
            groups = Shards(rows=own.groups, is_set=buffers.are_set()[1])
            delayed = buffers.of_tensors()[1]
            if delayed is not None:
                codes, scale = cast_rows_delayed(x, recipe, delayed, groups)
                return (own.pad(codes),), Sent(own.n, scale, scale)
        # 2. Otherwise those of the whole weight's amaxes; the backward pass has the scales of the forward pass.
        is_backward = internals.is_in_backward_pass()
        scales = state.of_forward if is_backward else state.precomputed
        if scales is None:
            (scales,) = global_scales([LocalWeight(x, recipe, own)])
        state.of_forward = scales
        return self._sent(scales.row_scale, scales.col_scale)

    def _sent(
        self, row_scale: Tensor, col_scale: Tensor, master_amax: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Sent]:
        # One set of codes, or those of the pass that begins.
        own, memory = self.state.own, self.state.memory
        assert own is not None, "fsdp_pre_all_gather"
        sent = Sent(own.n, row_scale, row_scale if has_one_scale(self.recipe) else col_scale, master_amax)
        if memory is None or sent.row_scale is sent.col_scale:
            return (self._own_codes(),), sent
        if internals.is_in_backward_pass():
            if memory.begin_backward(own.group):
                memory.gather(memory.rows, self._own_codes(), own.group)
            return (self._own_codes(cols=True),), sent
        if memory.begin_forward():
            memory.gather(memory.cols, self._own_codes(cols=True), own.group)
        return (self._own_codes(),), sent

    def _own_codes(self, *, cols: bool = False) -> Tensor:
        # This rank's rows, padded: for `output`, or for `grad_input`.
        own, scales, rest = self.state.own, self.state.of_forward, self.state.resting
        assert own is not None, "fsdp_pre_all_gather"
        if rest is not None and rest.codes is not None:
            return own.pad(rest.codes.cols if cols and rest.codes.cols is not None else rest.codes.rows)
        if rest is not None or scales is None:
            raise UnsupportedError(
                "Float8Linear: the weight was written to after FSDP2 had gathered it, and not gathered again; reshard "
                "the module before the optimizer's step (set_reshard_after_backward(True), or reshard())"
            )
        x, cast = self.plain, cast_cols if cols else cast_rows
        return own.pad(cast(x, self.recipe, scales, own.rows).view(x.shape))  # any layout: FSDP2 checks the shape

    def _gather(self, *, cols: bool) -> None:
        own, memory = self.state.own, self.state.memory
        assert own is not None and memory is not None, "fsdp_post_all_gather"
        there = self.to(memory.rows.device)  # FSDP2 may keep shards on the host
        assert isinstance(there, ShardedWeight)
        memory.gather(memory.cols if cols else memory.rows, there._own_codes(cols=cols), own.group)

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
            weight.row_scale, weight.col_scale, weight.master_amax = sent[1:]
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
            return CodedWeight(WeightCodes(rows, *sent[1:3], None, sent.master_amax), param_dtype), ()
        # 3. Two: those for `grad_input` are gathered here, since FSDP2 has gathered the others.
        memory = self.state.memory = GatherMemory.adopt(codes)
        self._gather(cols=True)
        rows, cols = (flat.view(codes.shape)[: sent.n].view(dtype) for flat in (memory.rows, memory.cols))
        if codes.ndim == 3:
            cols = cols.view(sent.n, codes.shape[2], codes.shape[1])
        weight = CodedWeight(WeightCodes(rows, sent.row_scale, sent.col_scale, cols), param_dtype)
        weight.memory, memory.operand, memory.gather_rows = memory, rows, self._gather_rows
        return weight, memory


def local_tensor(x: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor is itself."""
    return getattr(x, "_local_tensor", x)


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP2 gathers as float8, with one all-reduce for the model.

    Call it after the optimizer's step, on all ranks. Without it every weight has its own all-reduce in every
    forward pass. The scales hold until the weight changes: any write to it, also by `load_state_dict`, discards them.

    The call does nothing for weights that are gathered in high precision, for weights under delayed scaling (their
    scales come from the update of its state), and before the first forward pass.

    Exactness: codes and scales are the same with and without it.
    """
    weights: list[ShardedWeight] = []
    for weight in map(local_tensor, model.parameters()):  # each once
        if isinstance(weight, ShardedWeight) and weight.state.own is not None:
            is_here = weight.state.resting is None or weight.is_refilled_here
            if weight.recipe.delayed_scaling_of("weight") is None and is_here:
                weights.append(weight)
    for weight, scales in zip(weights, global_scales([weight.local() for weight in weights]), strict=True):
        if weight.state.resting is None:
            weight.state.precomputed = scales
        else:
            weight.refill(scales=scales)
