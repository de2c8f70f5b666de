"""Float8Linear: an `nn.Linear` that computes under a recipe."""
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.names import EngineName
from f8emu.spec.recipe import TENSORWISE
from f8emu.torch.casts.delayed_state import DelayedBuffers
from f8emu.torch.casts.operand import DelayedStates
from f8emu.torch.casts.placements import LocalCall, local_call
from f8emu.torch.casts.shared_input import TracedInput
from f8emu.torch.chip import require_values
from f8emu.torch.gemm.engine import check_engine
from f8emu.torch.layer.casts import LayerPlan, cast_input
from f8emu.torch.layer.delayed_update import UpdateGroup, load_with_weights
from f8emu.torch.layer.first_step import note_call
from f8emu.torch.layer.float8_layer import (
    DELAYED_KEY,
    Float8Layer,
    autocast_dtype,
    leaf_call,
    refuse_torchscript,
    require_known_class,
    require_no_transform,
)
from f8emu.torch.layer.matmul import add_bias, float8_matmul
from f8emu.torch.layer.observers import begin_call, show_tensor
from f8emu.torch.layer.traced import linear, recipe_text
from f8emu.torch.library import is_exporting
from f8emu.torch.recipes import RecipeLike, resolve_recipe
from f8emu.torch.torch_internals import (
    copied_attributes,
    is_dtensor,
    like_dtensor,
    own_parameters,
)
from f8emu.torch.weights.coded_weight import CodedWeight
from f8emu.torch.weights.float8_weight import Float8Weight, at_rest, refill, written_over
from f8emu.torch.weights.sharded_weight import ShardedWeight, local_tensor


class _Call(NamedTuple):
    """The tensors and settings of one call of a layer."""

    input: Tensor  # as it was given
    x: Tensor  # [M, K], of this rank
    weight: Tensor
    bias: Tensor | None
    plan: LayerPlan
    delayed: DelayedStates | None  # None if tensors are scaled by their own amaxes
    parts: LocalCall | None  # where the output lies, under tensor parallelism


class Float8Linear(Float8Layer):
    """`input @ weight^T + bias`, with the three GEMMs of forward and backward under a float8 recipe.

    Parameters and state dict are those of `nn.Linear`. The bias is rounded to the dtype of the input and added to the
    rounded product. Under autocast the input is converted to autocast's dtype first. The weight is cast to float8 from
    its own dtype, under autocast too, unless the recipe has `cast_weight_from`. Sizes that are not multiples of 16 are
    zero-padded; results are bit-identical.

    The state of delayed scaling is stored in the metadata of the state dict. Loading a state dict without it resets
    delayed scaling.

    Shapes:
        input [..., in_features] -> [..., out_features], in the dtype of input.

    Exactness: every code, scale, product, output and gradient equals that of `f8ref.numpy.linear`.

    Raises:
        OperandError: an input of another dtype or size.
        UnsupportedError: `engine="hardware"` on a device without it.
    """

    recompute_casts: bool
    # Under tensor parallelism, the placements to which the layer reduces a partial sum (`Float8RowwiseParallel`).
    reduce_to: Sequence[Any] | None = None
    # The cast input that the layers of a module with `PrepareFloat8ModuleInput` share in compiled code.
    traced_input: TracedInput | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = TENSORWISE,
        engine: EngineName = "auto",
        recompute_casts: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_recipe(recipe, engine, recompute_casts)

    @classmethod
    def from_float(
        cls,
        module: nn.Linear,
        *,
        recipe: RecipeLike = TENSORWISE,
        engine: EngineName = "auto",
        recompute_casts: bool = False,
    ) -> Self:
        """A layer with the parameters, hooks and mode of `module`, which is not changed."""
        if isinstance(module, Float8Linear) or not issubclass(cls, type(module)):  # float8_subclass has other classes
            raise OperandError(
                f"Float8Linear.from_float: module must be an nn.Linear, not a subclass; got {type(module).__name__}"
                "; a subclass may compute something of its own: see subclasses of convert_to_float8_training"
            )
        if "forward" in module.__dict__:
            raise OperandError(
                "Float8Linear.from_float: module must have the forward of nn.Linear; got one of its own, which would "
                "go on computing in high precision; convert the model before a library replaces it"
            )
        if is_dtensor(module.weight):
            raise UnsupportedError(
                "Float8Linear.from_float: the weight of module must be a plain tensor; got a DTensor; convert the "
                "model first, then shard it"
            )
        layer = cls.__new__(cls)
        layer.__dict__.update(copied_attributes(module))
        layer._set_recipe(recipe, engine, recompute_casts)
        return layer

    def _set_recipe(self, recipe: RecipeLike, engine: EngineName, recompute_casts: bool) -> None:
        check_engine("Float8Linear", engine)
        self.recipe = resolve_recipe("Float8Linear", recipe)
        self.engine = engine
        self.recompute_casts = recompute_casts
        state = None if self.recipe.delayed is None else DelayedBuffers(self.recipe, self.weight.device)
        self.__dict__["delayed"] = state  # no submodule: see DelayedBuffers
        self.update_with(None if state is None else UpdateGroup())

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight^T + bias` under the recipe."""
        if (leaf := leaf_call(self, input)) is not None:
            return leaf
        if input.is_nested or input.layout is not torch.strided:
            return self._of_values(input)
        call = self._prepared(input)
        if is_exporting() and call.parts is None:
            output = linear.overload(
                call.x, call.weight, call.bias, recipe_text(self.recipe), self.engine, self.recompute_casts
            )
        else:
            output = self._multiplied(call)
        return self._finished(output, call)

    def _of_values(self, input: Any) -> Tensor:
        if input.layout is not torch.jagged or input.lengths() is not None:
            kind = "a nested one of " if input.is_nested else ""
            raise OperandError(
                "Float8Linear: input must be a dense tensor, or a nested one of layout torch.jagged without holes; got "
                f"{kind}layout {input.layout}; call to_dense(), or contiguous() of a nested one"
            )
        ragged = next(i for i, size in enumerate(input.shape) if not isinstance(size, int))
        return torch.nested.nested_tensor_from_jagged(self.forward(input.values()), input.offsets(), jagged_dim=ragged)

    def _prepared(self, input: Tensor) -> "_Call":
        require_no_transform("Float8Linear", self, input)
        note_call(self)
        if input.ndim == 0 or (input.shape[-1] != self.in_features and not is_dtensor(input)):
            raise OperandError(
                f"Float8Linear: input must be [..., in_features] with in_features = {self.in_features}; got shape "
                f"{list(input.shape)}"
            )
        bias: Tensor | None = self.bias
        x, weight, parts = input, self.weight, None
        delayed = self.delayed_states(x, weight)
        if is_dtensor(input) or is_dtensor(weight):
            is_set = (True, True, True) if self.delayed is None or delayed is None else self.delayed.are_set()
            parts = local_call("Float8Linear", input, weight, bias, self.recipe, self.reduce_to, is_set)
            x, weight, bias = parts.input, parts.weight, parts.bias
        if (dtype := autocast_dtype(input)) is not input.dtype:
            x = x.to(dtype)
        require_values("Float8Linear", x, name="input")
        if x.ndim == 1:
            x = x.unsqueeze(0)
        elif x.ndim != 2:
            x = x.flatten(0, -2)  # not reshape(-1, K), which an empty shard of K leaves undefined
        keeps_input = torch.is_grad_enabled() and weight.requires_grad
        shards = None if parts is None else parts.shards
        plan = LayerPlan(self.recipe, self.engine, keeps_input, self.recompute_casts, shards)
        return _Call(input, x, weight, bias, plan, delayed, parts)

    def _multiplied(self, call: "_Call") -> Tensor:
        x, plan, delayed = call.x, call.plan, call.delayed or (None, None, None)
        tap = None if self.tap is None else begin_call(self.tap, x)
        if tap is not None:
            for name, value in (("input", x), ("weight", call.weight)):
                show_tensor(tap, name, value.detach(), is_delayed=call.delayed is not None)
        # 1. The operands of the input.
        operands = cast_input(call.input, x, plan, delayed[0], self.traced_input)
        # 2. The GEMM; gradients go to the input, or through the gather of it.
        if isinstance(call.weight, CodedWeight):
            call.weight.note_call(delayed[1])
        elif isinstance(call.weight, ShardedWeight) and not torch.compiler.is_compiling():
            call.weight.rest_with(self.delayed)
        place = x if operands.gathered is None else operands.gathered
        output = float8_matmul(place, call.weight, operands, plan, delayed, tap)
        # 3. The bias.
        return output if call.bias is None else add_bias(output, call.bias)

    def _finished(self, output: Tensor, call: "_Call") -> Tensor:
        if call.parts is not None:
            return call.parts.as_dtensor(output.reshape(*call.parts.lead, output.shape[1]))
        return output if call.input.ndim == 2 else output.reshape(*call.input.shape[:-1], self.out_features)

    def __prepare_scriptable__(self) -> NoReturn:  # called by torch.jit.script
        refuse_torchscript("Float8Linear")

    def extra_repr(self) -> str:
        recompute = ", recompute_casts=True" if self.recompute_casts else ""
        return f"{super().extra_repr()}, recipe={self.recipe.label}, engine={self.engine}{recompute}"

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if (delayed := self.__dict__.get("delayed")) is not None:
            delayed.reset()
            refill(self.weight)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight" and param is not None:
            require_known_class("Float8Linear", param)
        super().register_parameter(name, param)
        # Tensor parallelism distributes the weight.
        if name == "weight" and is_dtensor(param) and (delayed := self.__dict__.get("delayed")) is not None:
            delayed.notes.is_sharded = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = own_parameters(self).get("weight")
        if (held := at_rest(weight)) is not None and not keep_vars:
            destination[f"{prefix}weight"] = like_dtensor(weight, held.values())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        old: Any = own_parameters(self).get("weight")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        held: Any = local_tensor(old)
        if isinstance(held, (Float8Weight, ShardedWeight)) and self.weight is not old:
            written_over(self, old, held)
        if self.delayed is None:
            return
        if self.delayed.amax_input.device != self.weight.device:  # the new parameter may be on another device
            self.delayed.to_empty(device=self.weight.device)
        has_weights = any(f"{prefix}{name}" in state_dict for name in own_parameters(self))
        place, entry, errors = prefix[:-1] or "the layer", local_metadata.get(DELAYED_KEY), rest[-1]
        if load_with_weights(self.delayed, place, entry, has_weights, errors):
            refill(self.weight)
