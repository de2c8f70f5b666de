"""A weight that its layer holds as float8 alone; its high-precision master belongs to the optimizer.

The parameter of the layer is codes and scales, which `Float8Linear` multiplies without a cast. Their master is on the
host until `MasterWeights` takes it: then in float32, on the device of the weight. Every write to the weight, by an
initialization, a state dict or a step, is a write to the master, from which the codes are cast again.

FSDP2 and tensor parallelism shard the master, in float32: a rank's part of it is a `ShardedWeight` at rest.

Exactness: codes and scales are those that a `Float8Linear` casts in its forward and backward pass from the master.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import Recipe
from f8emu.torch.layer.delayed_state import DelayedBuffers
from f8emu.torch.torch_internals import like_dtensor, no_torch_function
from f8emu.torch.weights.coded_weight import COPIES, EMPTIES, FILLED, NEW, CodedWeight
from f8emu.torch.weights.codes import LocalWeight, OwnRows, WeightCodes, WeightScales, cast_master, global_scales
from f8emu.torch.weights.sharded_weight import GatherState, Resting, ShardedWeight, local_tensor

_aten = torch.ops.aten


@dataclass(slots=True)
class MasterOf:
    """Where the codes of a weight come from; its aliases share it."""

    recipe: Recipe
    delayed: DelayedBuffers | None  # the layer's
    master: Tensor
    is_taken: bool = False  # whether an optimizer steps the master


class Float8Weight(CodedWeight):
    """[N, K] in the dtype of its gradient."""

    origin: MasterOf | None  # None in compiled code, which reads only the codes
    refusal = (
        "the weight holds only float8 codes (float8_primary_weights=True), and only Float8Linear computes "
        "with them; step and decay it with MasterWeights(params, torch.optim.AdamW, ...); read weight.master, in "
        "high precision, or weight.dequantize(); write with weight.copy_(values) or load_state_dict; under DDP "
        "pass init_sync=False; to merge adapters into it, convert without float8_primary_weights"
    )

    # Results are plain tensors: torch would make each a tensor of this class.
    __torch_function__ = no_torch_function

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
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight without its gradient history, like `detach`. It cannot be assigned."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise UnsupportedError(
            "Float8Weight: weight.data cannot be assigned, since the weight is float8 codes with a master; write "
            "values with weight.copy_(values) under torch.no_grad()"
        )

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
        for mine, found in zip(self.held, new, strict=True):
            if mine is not None and found is not None:
                mine.copy_(found)

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
        return Float8Weight(self.held, self.dtype, self.origin)

    def result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of copies and initializations; None for operators that need values."""
        if func is _aten.split.Tensor or (func is _aten.new_zeros.default and len(args[1]) == 2):  # for FSDP2, DTensor
            return func(self._sharded(is_split=func is _aten.split.Tensor), *args[1:], **kwargs)
        if func in FILLED:
            one = self.held.rows.new_empty((1, 1), dtype=self.dtype).expand(self.shape)
            return func(one, *args[1:], **{**kwargs, "memory_format": torch.contiguous_format})
        if func in NEW:
            return func(self.held.rows.new_empty((0,), dtype=self.dtype), *args[1:], **kwargs)
        if func in COPIES:
            return self._copied({})
        if func in EMPTIES:
            return self._emptied(kwargs.get("device") or self.device)
        if func is _aten._to_copy.default:
            return self._moved(kwargs.get("device") or self.device, kwargs.get("dtype") or self.dtype, kwargs)
        if func is _aten.copy_.default or self._is_initialized_by(func):
            return self._with_master(func, args[1:], kwargs)
        return None

    def _sharded(self, *, is_split: bool) -> ShardedWeight:
        origin = self._origin
        if origin.is_taken:
            raise UnsupportedError(
                "Float8Weight: the weight is float8 codes, and an optimizer has its whole master; make MasterWeights "
                "after fully_shard and parallelize_module, and write whole values with weight.copy_(values)"
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

    def _is_initialized_by(self, func: Any) -> bool:
        # Initializations run outside of autograd, before gradients and an optimizer. A view may be written to later,
        # unseen, so none is given away.
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        return not (is_view or self._origin.is_taken or self.grad is not None or torch.is_grad_enabled())

    def _with_master(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Apply an operator to the master, where the weight is: random numbers are those of any weight there.
        origin = self._origin
        args = [x.master if isinstance(x, Float8Weight) else x for x in args]
        if func is _aten.copy_.default and torch.promote_types(args[0].dtype, self.master.dtype) != self.master.dtype:
            origin.master = origin.master.float()  # float32 masters are loaded, and no optimizer is made yet
        value = self.master.to(self.device)
        out = func(value, *args, **kwargs)
        if not func._schema.is_mutable:
            return out
        if value is not self.master:
            self.master.copy_(value)
        self.refill(by_own_amax=True)  # values that were written need not fit the scale of earlier passes
        return self

    def _copied(self, memo: dict[int, Any]) -> "Float8Weight":
        return Float8Weight(self.held.map(Tensor.clone), self.dtype, copy.deepcopy(self.origin, memo))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                new = self._copied(memo)
                new = nn.Parameter(new, self.requires_grad) if isinstance(self, nn.Parameter) else new
            new.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = new
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes: torch pickles float8, but does not load it again outside of torch.save.
        codes = self.held.map(lambda x: x if x.dtype is torch.float32 else x.view(torch.uint8))
        kind = (isinstance(self, nn.Parameter), self.requires_grad)
        return _unpickled, (codes, self.rows.dtype, self.dtype, self.origin, *kind)


def _unpickled(
    codes: WeightCodes,
    format: torch.dtype,
    dtype: torch.dtype,
    origin: MasterOf | None,
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    new = Float8Weight(codes.map(lambda x: x if x.dtype is torch.float32 else x.view(format)), dtype, origin)
    return nn.Parameter(new, requires_grad) if is_parameter else new


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
    """After `load_state_dict(assign=True)` has replaced the parameter `old` of a layer: its values go into `old`."""
    value = layer.weight.detach()
    if not old.is_meta or value.is_meta:
        with torch.no_grad():
            old.copy_(value)
        layer.weight = old
        return
    if isinstance(held, Float8Weight):
        new: Tensor = Float8Weight.of(value, held.recipe, None if held.origin is None else held.origin.delayed)
    else:
        part = local_tensor(value).to(torch.float32)
        new = like_dtensor(value, ShardedWeight(part, held.recipe, held.state, held.dtype))
    layer.weight = nn.Parameter(new, old.requires_grad)
