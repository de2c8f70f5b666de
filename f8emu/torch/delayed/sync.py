"""Delayed scaling of a whole model: the explicit update, and the state for checkpoints."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from f8emu.spec.errors import OperandError
from f8emu.torch.delayed.state import DelayedBuffers
from f8emu.torch.delayed.update import UpdateGroup, update_states
from f8emu.torch.float8_layer import Float8Layer
from f8emu.torch.torch_internals import named_modules
from f8emu.torch.weights.float8_weight import refill


def sync_float8_amax_and_scale_history(model: nn.Module, fp8_layers: Iterable[nn.Module] | None = None) -> None:
    """Update the state of delayed scaling in all layers of `model` that were called since their last update.

    A training loop needs no call, because every backward pass ends with an update. After one, this call changes
    nothing, and compiled code leaves it out. Call it before saving a state whose passes are replayed as CUDA graphs.

    An amax that is zero or not finite leaves the scale unchanged, and is counted in the layer's `delayed.counts`. With
    a process group, amaxes are the maximum over its ranks, in one all-reduce for all layers: over the group of
    `set_amax_reduction_group`, else over the mesh of DTensor weights, else over all ranks. All of them must call this.

    Exactness: every state equals that of `f8ref.numpy.update_delayed_state`.

    Raises:
        DelayedScalingError: the ranks of a group have different layers.
    """
    if torch.compiler.is_compiling():
        return
    parts = [model] if fp8_layers is None else fp8_layers
    update_states([layer for part in parts for _, layer, _ in _layers(part)])


def set_amax_reduction_group(model: nn.Module, group: Any) -> None:
    """Reduce the amaxes of delayed scaling over the ranks of `group`, a process group.

    False reduces over no ranks. None restores the default: the mesh over which a layer's weight is a DTensor, or all
    ranks. From now on the layers of `model` are updated together, apart from others that were converted with them.
    """
    chosen = UpdateGroup(group)
    for _, layer, _ in _layers(model):
        layer.update_with(chosen)


def delayed_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state of all layers, "layer.field" -> tensor, for checkpoints that drop a state dict's metadata."""
    return {
        f"{prefix}{name}": value.detach().clone()
        for prefix, _, buffers in _layers(model)
        for name, value in buffers.state().items()
    }


def load_delayed_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `delayed_state_dict` returned. Call it before or after `load_state_dict`, which resets a state in use.

    Raises:
        OperandError: missing or unknown keys (then no layer has changed), or the state of another recipe.
    """
    wanted = {f"{prefix}{name}" for prefix, _, buffers in _layers(model) for name in buffers.state()}
    if wanted != set(state):
        missing, unknown = sorted(wanted - set(state)), sorted(set(state) - wanted)
        raise OperandError(
            f"load_delayed_state_dict: the keys must be those of delayed_state_dict(model); missing {missing[:5]}, "
            f"unknown {unknown[:5]}; load the state of the same model, converted in the same way"
        )
    for prefix, layer, buffers in _layers(model):
        buffers.load("load_delayed_state_dict", {name: state[f"{prefix}{name}"] for name in buffers.state()})
        buffers.notes.is_loaded = True
        refill(layer.weight)


class DelayedScalingState:
    """A model's state of delayed scaling as an object, for checkpoints of DCP, accelerate and torchtitan."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for _, _, buffers in _layers(model):
            buffers.notes.has_own_entry = True

    def state_dict(self) -> dict[str, Any]:
        """`delayed_state_dict(model)`."""
        return dict(delayed_state_dict(self.model))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`load_delayed_state_dict(model, state_dict)`."""
        load_delayed_state_dict(self.model, state_dict)


def _layers(model: nn.Module) -> Iterator[tuple[str, Float8Layer, DelayedBuffers]]:
    """Prefix of keys, layer and state of each layer that has one, once. The keys do not depend on what wraps it."""
    for name, module in named_modules(model):
        if isinstance(module, Float8Layer) and module.delayed is not None:
            yield name and f"{name}.", module, module.delayed
