"""A weight that its layer holds as float8 alone; its high-precision master belongs to the optimizer.

The parameter of the layer is codes and scales, which `Float8Linear` multiplies without a cast. Their master is on the
host until `MasterWeights` takes it: then in float32, on the device of the weight. Every write to the weight, by an
initialization, a state dict or a step, is a write to the master, from which the codes are cast again.

FSDP2 and tensor parallelism shard the master, in float32: a rank's part of it is a `ShardedWeight` at rest.

Exactness: codes and scales are those that a `Float8Linear` casts in its forward and backward pass from the master.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch import torch_internals as internals
from f8emu.torch.casts.delayed_state import DelayedBuffers
from f8emu.torch.weights.coded_weight import COPIES, EMPTIES, FILLED, NEW, CodedWeight, is_view, written
from f8emu.torch.weights.codes import LocalWeight, OwnRows, WeightCodes, WeightScales, cast_master, global_scales
from f8emu.torch.weights.sharded_weight import GatherState, Resting, ShardedWeight, local_tensor
from f8emu.torch.weights.weight_tensor import WeightTensor

_aten = torch.ops.aten


@dataclass(slots=True)
class MasterOf:
    """The master and the settings from which the codes of a weight are cast; its aliases share them."""

    recipe: Recipe
    delayed: DelayedBuffers | None  # the layer's
    master: Tensor
    is_taken: bool = False  # whether an optimizer steps the master


class Float8Weight(CodedWeight):
    """A weight [N, K] stored as float8 codes and scales; its dtype is that of its gradient."""

    origin: MasterOf | None  # None in compiled code, which reads only the codes
    refusal = (
        "the weight holds only float8 codes (float8_primary_weights=True), and only Float8Linear computes "
        "with them; step and decay it with MasterWeights(params, torch.optim.AdamW, ...); read weight.master, in "
        "high precision, or weight.dequantize(); write with weight.copy_(values), load_state_dict, or in place after "
        "optimizer.zero_grad(), to all of it; under DDP pass init_sync=False"
    )

    # Results are plain tensors: torch would make each a tensor of this class.
    __torch_function__ = internals.no_torch_function

    def __init__(self, codes: WeightCodes, dtype: torch.dtype, origin: MasterOf | None = None) -> None:
        super().__init__(codes, dtype)
        self.origin = origin

    @classmethod
    def of(cls, value: Tensor, recipe: Recipe, delayed: DelayedBuffers | None) -> "Float8Weight":
        """The codes of `value` [N, K], and `value` on the host as their master."""
        value = value.detach()
        origin = MasterOf(recipe, delayed, value if value.is_meta else value.to("cpu"))
        return cls(_cast(value, origin), value.dtype, origin)

    @property
    def master(self) -> Tensor:
        """The values from which the codes are cast: those before the conversion, then an optimizer's float32 values.

        Code that writes to it must call `refill` afterwards; a write to the weight itself does both.
        """
        return self._origin.master

    @property
    def recipe(self) -> Recipe:
        return self._origin.recipe

    @property
    def _origin(self) -> MasterOf:
        if self.origin is None:
            raise UnsupportedError(
                "Float8Weight: compiled code has only the codes of a weight; read or write its master outside"
            )
        return self.origin

    @property
    def addressed(self) -> Tensor | None:
        return None if self.origin is None else self.origin.master

    def parts(self) -> Iterator[Tensor]:
        yield from WeightTensor.parts(self)
        if self.origin is not None:
            yield self.origin.master

    def become(self, value: Tensor) -> None:
        """Write the values; the weight takes their dtype and device too, unless an optimizer has its master."""
        if (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device):
            with torch.no_grad():
                self.copy_(value)
            return
        if self._origin.is_taken or value.shape != self.shape:
            raise UnsupportedError(
                "Float8Weight: weight.data takes values of the weight's shape, dtype and device, since the weight is "
                f"float8 codes: {list(self.shape)}, {self.dtype} on {self.device}; got {list(value.shape)}, "
                f"{value.dtype} on {value.device}; change dtype and device before MasterWeights is made"
            )
        new = value if isinstance(value, Float8Weight) else Float8Weight.of(value, self.recipe, self._origin.delayed)
        internals.set_data(self, new)
        Float8Weight.__init__(self, new.held, new.dtype, new.origin)

    def dequantize(self) -> Tensor:
        """The values of the codes that the GEMM `output` multiplies, float32 [N, K]."""
        return self.rows.float() * self.row_scale

    @torch.no_grad()
    def refill(self, *, by_own_amax: bool = False, scales: WeightScales | None = None) -> None:
        """Cast the master into the codes, in place. Under delayed scaling use its state, or the master's own amax.

        `scales` are those of the master, if they are known.
        """
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "Float8Linear: with float8_primary_weights=True weights are cast outside of compiled code; compile the "
                "model, and call the optimizer's step outside"
            )
        new = _cast(self.master.to(self.device), self._origin, by_own_amax=by_own_amax, scales=scales)
        for mine, theirs in zip(self.held, new, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def values(self) -> Tensor:
        """The master, for a state dict."""
        return self.master.detach()

    def local(self) -> LocalWeight:
        """The master, whole, on the device of the weight."""
        return LocalWeight(self.master.detach().to(self.device), self.recipe, OwnRows(n=self.shape[0]))

    def take_master(self) -> Tensor:
        """Give the master to an optimizer: float32 and on the device of the weight from now on."""
        origin = self._origin
        if not origin.is_taken:
            origin.master, origin.is_taken = origin.master.to(self.device, torch.float32), True
        return origin.master

    def alias(self) -> "Float8Weight":
        same = Float8Weight(self.held, self.dtype, self.origin)
        same.parameter = self if isinstance(self, nn.Parameter) else self.parameter
        return same

    def result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of copies, of reads and of in-place operations; what is left, only float8 layers compute."""
        if args and args[0] is self:
            if func is _aten.split.Tensor or (func is _aten.new_zeros.default and len(args[1]) == 2):  # FSDP2, DTensor
                return func(self._sharded(is_split=func is _aten.split.Tensor), *args[1:], **kwargs)
            if func in FILLED:
                broadcast = self.held.rows.new_empty((1, 1), dtype=self.dtype).expand(self.shape)
                return func(broadcast, *args[1:], **{**kwargs, "memory_format": torch.contiguous_format})
            if func in NEW:
                return func(self.held.rows.new_empty((0,), dtype=self.dtype), *args[1:], **kwargs)
            if func in COPIES:
                return Float8Weight(self.held.map(Tensor.clone), self.dtype, copy.deepcopy(self.origin))
            if func in EMPTIES:
                return self._emptied(kwargs.get("device") or self.device)
            if func is _aten._to_copy.default:
                return self._moved(kwargs.get("device") or self.device, kwargs.get("dtype") or self.dtype, kwargs)
            if func is _aten._pin_memory.default:
                return Float8Weight(self.held.map(Tensor.pin_memory), self.dtype, self.origin)
            if func is _aten.is_pinned.default:
                return self.held.rows.is_pinned()
        return _by_masters(func, args, kwargs)

    def _sharded(self, *, is_split: bool) -> ShardedWeight:
        origin = self._origin
        if origin.is_taken:
            raise UnsupportedError(
                "Float8Weight: the weight is float8 codes, and an optimizer has its whole master; make MasterWeights "
                "after fully_shard and parallelize_module, and write whole values with weight.copy_(values); where "
                "accelerate prepares model and optimizer together, give it torch.optim.AdamW(model.parameters(), ...)"
            )
        master = origin.master.detach().to(self.device, torch.float32)
        return ShardedWeight(master, origin.recipe, GatherState(resting=Resting(origin.delayed, is_split)), self.dtype)

    def _moved(self, device: torch.device, dtype: torch.dtype, options: Any) -> "Float8Weight":
        # The master stays where it is, and is rounded to `dtype` unless an optimizer has it.
        origin = self._origin
        # A new dtype rounds the values, so that the codes are cast again: as those of a plain weight would be.
        if dtype != self.dtype and not origin.is_taken:
            origin = MasterOf(origin.recipe, origin.delayed, origin.master.to(dtype))
            return Float8Weight(_cast(origin.master.to(device), origin), dtype, origin)
        if device.type == "meta":
            origin = MasterOf(origin.recipe, origin.delayed, origin.master.to(device))
        is_async = bool(options.get("non_blocking"))
        return Float8Weight(self.held.map(lambda x: x.to(device, non_blocking=is_async)), dtype, origin)

    def _emptied(self, device: torch.device) -> "Float8Weight":
        old = self._origin
        master = torch.empty_like(old.master, device="meta" if device.type == "meta" else "cpu")
        codes = self.held.map(lambda x: torch.empty_like(x, device=device))
        return Float8Weight(codes, self.dtype, MasterOf(old.recipe, old.delayed, master))


def _by_masters(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator of the masters, where the weights are: random numbers are those of any weight there.

    Whoever writes by whatever route writes to the master, from which the codes are cast again.
    """
    # 1. Refused: a view, to which somebody may write later, unseen; a write where a gradient waits for an optimizer.
    changed = [x for x in written(func, args, kwargs) if isinstance(x, Float8Weight)]
    is_copy = func is _aten.copy_.default
    parameters = [x if x.parameter is None or isinstance(x, nn.Parameter) else x.parameter for x in changed]
    is_due = any(x.grad is not None for x in parameters)
    if func.namespace != "aten" or is_view(func) or (is_due and not is_copy):
        return NotImplemented
    if is_copy and changed and torch.promote_types(args[1].dtype, args[0].master.dtype) != args[0].master.dtype:
        args[0]._origin.master = args[0].master.float()  # float32 masters are loaded, and no optimizer is made yet
    # 2. Read and write.
    weights = [x for x in internals.tree_leaves((args, kwargs)) if isinstance(x, Float8Weight)]
    dtype = changed[0].master.dtype if changed else None
    values = {id(x): x.master.to(x.device, x.dtype if dtype is None else dtype) for x in weights}
    values |= {id(x): x.master.to(x.device) for x in changed}
    plain_args, plain_kwargs = internals.tree_map_only(Float8Weight, lambda x: values[id(x)], (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    for x in changed:
        if values[id(x)] is not x.master:
            x.master.copy_(values[id(x)])
        x.refill(by_own_amax=True)  # values that were written need not fit the scale of earlier passes
    if internals.schema_of(func).is_mutable:
        return internals.with_aliases(func, args, kwargs, out)
    # 3. Refused too: float8 would be left out of what autograd differentiates.
    is_in_graph = torch.is_grad_enabled() and any(isinstance(x, nn.Parameter) for x in weights)
    results = [x for x in internals.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
    return NotImplemented if is_in_graph and results else out


def _cast(x: Tensor, origin: MasterOf, *, by_own_amax: bool = False, scales: WeightScales | None = None) -> WeightCodes:
    own = OwnRows(n=x.shape[0])
    return cast_master(x, origin.recipe, origin.delayed, own, by_own_amax=by_own_amax, scales=scales)


def at_rest(weight: Tensor | None) -> Float8Weight | ShardedWeight | None:
    """The weight, or this rank's part of it, if it rests as float8."""
    local = None if weight is None else local_tensor(weight)
    if isinstance(local, ShardedWeight):
        return None if local.state.resting is None else local
    return local if isinstance(local, Float8Weight) else None


def refill_all(weights: Sequence[Float8Weight | ShardedWeight]) -> None:
    """`refill` of many weights: the scales of all take one reduction over the ranks, and one kernel."""
    known: list[Float8Weight | ShardedWeight] = []
    for weight in weights:
        if isinstance(weight, Float8Weight) or weight.is_refilled_here:
            known.append(weight)
        elif weight.state.own is not None:  # the next gather casts it, where it gathers
            weight.forget()
    dynamic = [weight for weight in known if weight.recipe.delayed_scaling_of("weight") is None]
    scales = dict(zip(map(id, dynamic), global_scales([weight.local() for weight in dynamic]), strict=True))
    for weight in known:
        weight.refill(scales=scales.get(id(weight)))


def refill(weight: Tensor | None) -> None:
    """Cast the master of a weight again, after the scales of its layer have changed; other weights have none."""
    if (held := at_rest(weight)) is not None:
        held.forget() if isinstance(held, ShardedWeight) else held.refill()


def written_over(layer: nn.Linear, old: Any, held: Float8Weight | ShardedWeight) -> None:
    """After `load_state_dict(assign=True)` has replaced the parameter `old` of a layer: its values go into `old`.

    A parameter without memory becomes one of the same class.
    """
    value = layer.weight.detach()
    if not old.is_meta or value.is_meta:
        with torch.no_grad():
            old.copy_(value)
        layer.weight = old
        return
    if isinstance(held, Float8Weight):
        new: Tensor = Float8Weight.of(value, held.recipe, None if held.origin is None else held.origin.delayed)
    else:
        part: Tensor = getattr(local_tensor(value), "plain", local_tensor(value))
        dtype = part.dtype if held.state.resting is None else held.dtype
        new = internals.like_dtensor(value, held.with_values(part, dtype))
    layer.weight = nn.Parameter(new, old.requires_grad)
