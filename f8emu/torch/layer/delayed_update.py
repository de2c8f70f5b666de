"""The update of delayed scaling of all layers of a model at once, and its state for checkpoints.

The end of every backward pass updates the scales of the models that took part in it. The first cast of a gradient asks
autograd for a call at that end. Where autograd makes none (compiled autograd, a pass that raised an error), the next
pass begins with the update. A CUDA graph, whose replays run no host code, has an update at the begin of each captured
forward pass: it changes nothing where nothing was cast.
"""

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from f8emu.spec.errors import OperandError
from f8emu.spec.scaling import AmaxHistoryReduction
from f8emu.torch import torch_internals as internals
from f8emu.torch.casts.delayed_state import DelayedBuffers, Report, report_of, stacked
from f8emu.torch.fused.delayed import amaxes_of, owners, update_delayed
from f8emu.torch.layer.delayed_ranks import Announcement, Ranks, announce, note_stage, ranks_of, reduce_max
from f8emu.torch.layer.float8_layer import Scaled
from f8emu.torch.weights.float8_weight import refill


class UpdateGroup:
    """Layers that are updated together: those that one call converted. A copy of a model has its own group."""

    # Their casts tell it that they run (`fused.delayed.tell_owner`).

    def __init__(self, ranks: Any = None) -> None:
        self.ranks = ranks  # a process group over which amaxes are reduced; False for none; None chooses
        self.number = next(_numbers)
        owners[self.number] = self
        # In the order in which they were added, which all ranks share.
        self.layers: weakref.WeakValueDictionary[int, Scaled] = weakref.WeakValueDictionary()
        self.is_pending = False  # whether a gradient was cast since the last update
        self.is_captured = False  # whether the CUDA graph that is captured has an update already
        self.end = -1  # the backward pass at whose end the group is updated; -1 while there is none
        self.is_begun = False  # whether a forward pass began since the last update
        self.replicas: Ranks | None = None  # of a pipeline's stage: see `note_stage`
        self.before_trial: list[Tensor] | None = None  # during a stage's trial: the amaxes, of which it changes nothing
        self.is_announced = False  # whether other ranks know the layers
        self.announcement: Announcement | None = None  # until the first collective

    def add(self, layer: Scaled) -> None:
        assert layer.delayed is not None
        self.layers[id(layer)] = layer
        layer.delayed.belong_to(self.number)

    def begin_pass(self, is_cuda: bool) -> None:
        """Update before the first cast of a forward pass, if no backward pass could do it."""
        if internals.is_in_backward_pass():  # what checkpointing computes again has the scales of the first time
            self._update_at_end()
            return
        self.end = -1  # a pass that an error ended has no end
        if not self.is_begun:  # no trial comes between a step's passes
            stage, is_trial = internals.pipeline_stage() or (None, False)
            if stage is not None and self.replicas is None:
                return self._apart(stage).begin_pass(is_cuda)
            if is_trial:
                self.before_trial = self.before_trial or [amax.clone() for amax in self._amaxes()]
                return
        self._end_trial()
        if is_cuda and torch.cuda.is_current_stream_capturing():
            if not self.is_captured:
                self.is_captured = True
                _Groups([self]).update()
        else:
            self.is_captured = False
            if self.is_pending:
                _Groups([self]).update()
            if not self.is_announced:
                self.is_announced, self.announcement = True, announce([*self.layers.values()], self.ranks)
        self.is_begun = True

    def note_gradient(self) -> None:
        if self.before_trial is not None:
            internals.call_at_end_of_backward(self._end_trial)
            return
        self.is_pending, self.is_captured = True, False
        self._update_at_end()

    def require_same_layers(self, groups: Ranks) -> None:
        """Raise DelayedScalingError, before the first collective, if the ranks of `groups` have different layers."""
        if self.announcement is not None and self.announcement.group in groups:
            self.announcement.require_same()
            self.announcement = None

    def _apart(self, stage: Any) -> "UpdateGroup":
        # The group of a pipeline's stage: the backward passes of others end apart, on this rank as on others.
        group = UpdateGroup(self.ranks)
        group.is_pending = self.is_pending
        for layer in internals.modules_of(stage.submod):
            if isinstance(layer, Scaled) and layer.update_group is self:
                layer.update_with(group)
        group.replicas = note_stage(stage, [*group.layers.values()], self.ranks is not None)
        return group

    def _end_trial(self) -> None:
        # At the end of its backward pass, since compiled code writes the amaxes of a forward pass at its end; a first
        # stage has none: its trial reads the first batch.
        if self.before_trial is not None:
            with torch.no_grad():
                internals.foreach_copy(self._amaxes(), self.before_trial)
            self.before_trial = None

    def _amaxes(self) -> list[Tensor]:
        return [x for layer in self.layers.values() if layer.delayed is not None for x in layer.delayed.amaxes]

    def _update_at_end(self) -> None:
        # At the end of the outer pass, where reentrant checkpointing runs one within another.
        if self.end != -1 or self.before_trial is not None or (number := internals.backward_pass()) == -1:
            return
        self.end = number
        with _lock:  # several GPUs have a thread each
            groups = _passes.get(number)
            if groups is None:
                groups = _passes[number] = _Groups()
                internals.call_at_end_of_backward(groups.update)
        groups.append(self)

    def __deepcopy__(self, memo: Any) -> "UpdateGroup":
        copied = UpdateGroup(self.ranks)
        copied.is_pending = self.is_pending
        return copied

    def __reduce__(self) -> Any:
        return UpdateGroup, (), {"is_pending": self.is_pending}


class _Groups(list[UpdateGroup]):
    """Groups that are updated at once, in an order which all ranks share."""

    def update(self) -> None:
        for group in self:
            group.is_pending, group.is_begun, group.end = False, False, -1
        groups = {group.number: group for group in self}
        update_states([layer for number in sorted(groups) for layer in groups[number].layers.values()])


# Number of a backward pass -> the groups that it updates at its end; autograd alone keeps them.
_passes: "weakref.WeakValueDictionary[int, _Groups]" = weakref.WeakValueDictionary()
_lock = threading.Lock()
_numbers = itertools.count(1)


@torch.no_grad()
def update_states(layers: Sequence[Scaled]) -> None:
    """Update layers with delayed scaling; all ranks of their process groups must call it with the same layers."""
    # 1. Layers of one device, recipe and process groups are updated by one launch. Tensors and process groups are
    #    looked up anew: to make sure that nothing has changed takes as long.
    alike: dict[tuple[Any, ...], list[DelayedBuffers]] = {}
    of_meshes: dict[int, Ranks] = {}
    for layer in layers:
        groups, buffers = ranks_of(layer, of_meshes), layer.delayed
        assert buffers is not None and layer.update_group is not None, "only such a layer has a state"
        layer.update_group.require_same_layers(groups)
        key = internals.own_buffers(buffers)["amax_input"].device, groups, id(buffers.recipe)
        alike.setdefault(key, []).append(buffers)
        buffers.notes.is_loaded = False
    reports: list[tuple[Report, list[DelayedBuffers]]] = []
    for (device, groups, _), members in alike.items():
        # 2. The largest amaxes of all ranks.
        states = [x for buffers in members for x in buffers.parts()]
        taken = amaxes_of([amax for buffers in members for amax in buffers.amaxes])
        for group in groups:
            reduce_max(taken, group)
        # 3. The update, which tells the host in the report when the device gets there.
        report = report_of(members, device)
        numbers = taken.new_empty(taken.numel() // 3, 3) if report is None else report.numbers
        reports += [] if report is None else [(report, members)]
        delayed, rule = members[0].recipe.delayed, members[0].recipe.scale_rule
        assert delayed is not None, "only such a recipe has a state"
        is_most_recent = delayed.reduction is AmaxHistoryReduction.MOST_RECENT
        settings = (rule.power_of_two, rule.amax_floor, delayed.margin, is_most_recent)
        update_delayed(states, numbers, taken, members[0].formats, *settings)
    # 4. What the host learns. Warnings come last: one may be an error.
    for layer in layers:
        if layer.delayed is not None and layer.delayed.notes.is_sharded:
            layer.delayed.are_set()
    for report, members in reports:
        report.read(members)


def sync_float8_amax_and_scale_history(model: nn.Module, fp8_layers: Iterable[nn.Module] | None = None) -> None:
    """Update the state of delayed scaling in all layers of `model` that were called since their last update.

    A training loop needs no call: every backward pass ends with an update, after which this changes nothing, and
    compiled code leaves it out. Call it before saving a state whose passes are replayed as CUDA graphs.

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
        refill(internals.own_parameters(layer).get("weight"))


class DelayedScalingState:
    """Saves and loads delayed-scaling state through `state_dict()` and `load_state_dict()`, for checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for _, _, buffers in _layers(model):
            buffers.notes.has_own_entry = True

    def state_dict(self) -> dict[str, Any]:
        return dict(delayed_state_dict(self.model))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_delayed_state_dict(self.model, state_dict)


def _layers(model: nn.Module) -> Iterator[tuple[str, Scaled, DelayedBuffers]]:
    # Prefix of keys, layer and state of each layer that has one, once. The keys do not depend on what wraps it.
    for name, module in internals.named_modules(model):
        if isinstance(module, Scaled) and module.delayed is not None:
            yield name and f"{name}.", module, module.delayed


def load_with_weights(
    delayed: DelayedBuffers, place: str, entry: Mapping[str, Tensor] | None, has_weights: bool, errors: list[str]
) -> bool:
    """After a module's weights were loaded: load its state, or start anew where none is given; whether it changed."""
    if entry is None:
        if delayed.notes.is_loaded or not has_weights:
            return False  # the state came first; or what is loaded is of other modules, as adapters are
        delayed.reset()
        if not delayed.notes.has_own_entry:
            _warn_of_lost_state()
        return True
    try:
        delayed.load(f"load_state_dict: {place}", stacked(entry))
    except OperandError as error:
        errors.append(str(error))
        return False
    return True


def _warn_of_lost_state() -> None:
    warnings.warn(
        "Float8Linear: the state dict has no state of delayed scaling (it is in the metadata, which some checkpoint "
        "formats drop), so scaling starts anew; save and load it with the checkpoint: Hugging Face "
        "Trainer(..., callbacks=[f8emu.torch.integrations.huggingface.DelayedScalingCallback()]); "
        "accelerator.register_for_checkpointing(f8emu.torch.DelayedScalingState(model)); torchtitan "
        "f8emu.torch.integrations.torchtitan.checkpoint_delayed_scaling(trainer); "
        'torch.distributed.checkpoint {..., "float8": f8emu.torch.DelayedScalingState(model)}; or '
        "f8emu.torch.delayed_state_dict(model) and load_delayed_state_dict(model, state)",
        RuntimeWarning,
        stacklevel=4,
    )
