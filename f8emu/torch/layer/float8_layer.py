"""The base class of a float8 layer, for rooms below it; the layers of a model by name; calls that no layer takes.

`Float8Linear`, defined above these rooms, is the one class of this kind.
"""
# pyright: reportPrivateUsage=false

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from f8emu.spec.names import EngineName
from f8emu.spec.recipe import Recipe
from f8emu.torch.library import constant_in_traces, is_exporting
from f8emu.torch.torch_internals import (
    has_functorch,
    has_tangent,
    has_tracing_mode,
    is_in_autograd_function,
    named_modules,
    torchscript_trace,
)

if TYPE_CHECKING:
    from f8emu.torch.casts.delayed_state import DelayedBuffers
    from f8emu.torch.casts.operand import DelayedStates
    from f8emu.torch.layer.delayed_update import UpdateGroup
    from f8emu.torch.layer.observers import Tap


def autocast_dtype(input: Tensor) -> torch.dtype:
    """The dtype in which a layer computes: autocast's, or that of its input."""
    device = input.device.type
    is_autocast = not input.is_meta and torch.is_autocast_enabled(device)  # meta has no autocast
    return torch.get_autocast_dtype(device) if is_autocast else input.dtype


@constant_in_traces  # so that a compiler that traces raises the error itself
def _refuse_state() -> NoReturn:
    raise UnsupportedError(
        "f8emu.torch: delayed scaling has a state that changes in every step, which an exported program cannot keep; "
        "convert with another recipe to train it, or export it under torch.no_grad() for inference"
    )


DELAYED_KEY = "f8emu_delayed"  # of a state of delayed scaling in the metadata of a state dict


class Scaled(nn.Module):
    """A module that may have a state of delayed scaling: a layer, or that of a grouped weight."""

    delayed: "DelayedBuffers | None"  # the state of delayed scaling; None under dynamic scaling
    update_group: "UpdateGroup | None"
    """The layers whose scales are updated with this one's; None under dynamic scaling."""

    def update_with(self, group: "UpdateGroup | None") -> None:
        """Update the scales together with those of the other layers of `group`."""
        if (old := self.__dict__.get("update_group")) is not None:
            old.layers.pop(id(self), None)
        self.update_group = group
        if group is not None:
            group.add(self)

    def delayed_states(self, input: Tensor, weight: Tensor) -> "DelayedStates | None":
        """The states that the casts of a call read and update; None if tensors are scaled by their own amaxes."""
        # Under delayed scaling that happens in passes through which no gradient flows back: they change no state.
        if self.delayed is None:
            return None
        is_traced = torch.compiler.is_compiling()
        if not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)):
            if is_traced or torch.is_grad_enabled() or not is_in_autograd_function():
                return None
        if has_tracing_mode() if not is_traced else is_exporting():
            _refuse_state()
        if not is_traced:
            self.delayed.notes.is_loaded = False
            self.delayed.follow(input.device)  # `fully_shard` moves parameters only
            assert self.update_group is not None, "it has a state"
            self.update_group.begin_pass(input.is_cuda)
        return self.delayed.of_tensors()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # pyright: ignore[reportUnknownMemberType]
        metadata = getattr(destination, "_metadata", None)
        if self.delayed is not None and metadata is not None:
            metadata.setdefault(prefix[:-1], {})[DELAYED_KEY] = self.delayed.tensors()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if self.delayed is not None:
            self.delayed._apply(fn, recurse)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        self.update_with(self.update_group)


class Float8Layer(Scaled, nn.Linear):
    """A linear layer that computes under a recipe."""

    recipe: Recipe
    engine: EngineName
    tap: "Tap | None" = None  # where observers watch the layer (`layer.observers`); None without observers


class LayersOfExperts(nn.Module):
    """A module that stands for one linear layer for each matrix of its experts."""

    def expert_layers(self) -> "dict[str, Float8Layer]":
        """The layers by names such as "gate_up_proj.0", for observers; the first call makes them."""
        raise NotImplementedError


_Layer = TypeVar("_Layer", bound=nn.Module)


def float8_layers(model: nn.Module, pattern: str | None, *, call: str = "f8emu.torch") -> dict[str, Float8Layer]:
    """The layers whose names match `pattern`, a regular expression that is searched, as in TransformerEngine.

    Names are those of the model before torch.compile, DistributedDataParallel, FSDP or activation checkpointing wrapped
    it. A layer with two names has the first. None: all.
    """
    return chosen_layers(all_float8_layers(model), pattern, call=call)


def chosen_layers(layers: dict[str, _Layer], pattern: str | None, *, call: str) -> dict[str, _Layer]:
    """The layers whose names match `pattern`, as `float8_layers` has it."""
    try:
        chosen = {name: layer for name, layer in layers.items() if pattern is None or re.search(pattern, name)}
    except (re.error, TypeError) as error:
        raise SpecError(
            f"{call}: layers must be a regular expression; got {pattern!r}: {error}; escape dots as \\."
        ) from None
    if not layers:
        raise OperandError(f"{call}: the model has no Float8Linear; convert it first, with convert_to_float8_training")
    if not chosen:
        names = ", ".join(list(layers)[:8])
        raise OperandError(
            f"{call}: no Float8Linear has a name that matches {pattern!r}; the model has {len(layers)}: {names}; give "
            "another pattern"
        )
    return chosen


def pattern_of(name: str) -> str:
    """The name with `*` for the number of a layer: "layers.*.up" of "layers.3.up"."""
    return re.sub(r"(^|[._])\d+(?=\.|$)", r"\1*", name)


def shortened(names: Iterable[str]) -> str:
    """Names in a line, those of a pattern as one: "lm_head, layers.*.up x32"."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(pattern_of(name), []).append(name or "the module")
    return ", ".join(members[0] if len(members) == 1 else f"{kind} x{len(members)}" for kind, members in kinds.items())


def all_float8_layers(model: nn.Module) -> dict[str, Float8Layer]:
    """Name, as `float8_layers` has it -> layer. The experts of a module are layers of their own."""
    layers: dict[str, Float8Layer] = {}
    for name, module in named_modules(model):
        if isinstance(module, Float8Layer):
            layers[name] = module
        elif isinstance(module, LayersOfExperts):
            layers |= {f"{name}.{part}".lstrip("."): layer for part, layer in module.expert_layers().items()}
    return layers


def leaf_call(module: nn.Module, *inputs: Any) -> Any:
    """The call of `module` as one node of the graph that torch.fx.symbolic_trace makes; None in any other call."""
    for x in inputs:
        if isinstance(x, fx.Proxy):
            tracer: Any = x.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})
    return None


def require_no_transform(call: str, module: nn.Module, input: Tensor) -> None:
    """Refuse a call of `module` that torch transforms or traces: there are no rules for it."""
    if has_functorch():
        raise UnsupportedError(
            f"{call}: torch.func's transforms (grad, vjp, jvp, vmap, jacrev, ...) are not supported for float8 layers; "
            "compute gradients with backward() or torch.autograd.grad, and batches as more rows, or convert the model "
            "back with dequantize_float8_training"
        )
    if torchscript_trace():
        refuse_torchscript(call)
    if has_tangent((input, *module.parameters())):
        raise UnsupportedError(
            f"{call}: forward-mode AD (torch.autograd.forward_ad, strategy='forward-mode') is not supported for "
            "float8 layers, since a rounding has no derivative; got an input or a parameter with a tangent; "
            "compute gradients with backward(), or convert the model back with dequantize_float8_training"
        )


def require_known_class(call: str, weight: Tensor) -> None:
    """Raise UnsupportedError for a weight whose operators another library computes: codes of its own, mostly."""
    kind: Any = type(weight)
    is_own = kind.__module__.partition(".")[0] in ("torch", "f8emu")
    if kind.__torch_dispatch__ is not cast("Any", Tensor).__torch_dispatch__ and not is_own:
        raise UnsupportedError(
            f"{call}: the weight must be a tensor of torch or f8emu; got a {kind.__module__}.{kind.__name__}; quantize "
            "the model after dequantize_float8_training(model), or leave float8 layers out of torchao's quantize_"
        )


def refuse_torchscript(call: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(
        f"{call}: torch.jit.trace and torch.jit.script are not supported for float8 layers; export the model with "
        "torch.export.export, compile it with torch.compile, or convert it back with dequantize_float8_training"
    )
