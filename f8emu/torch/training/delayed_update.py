"""The update of delayed scaling: when it runs, and what it does to all layers of a model at once.

The end of every backward pass updates the scales of the models that took part in it. The first cast of a gradient asks
autograd for a call at that end. Where autograd makes none (compiled autograd, a pass that raised an error), the next
pass begins with the update. A CUDA graph, whose replays run no host code, has an update at the begin of each captured
forward pass: it changes nothing where nothing was cast.

An update waits for no value of the device:
1. The amaxes of all layers move into one tensor, and are marked as not called.
2. One all-reduce takes the maximum over ranks, as integers, so that infinity and NaN count as the largest.
3. Histories, inv_scales and counts of all tensors that were cast are updated in one launch.
4. Infinite amaxes, as far as the host knows of them by now, are told (`delayed_report`).
"""

import itertools
import threading
import weakref
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from f8emu.spec.scaling import AmaxHistoryReduction
from f8emu.torch.fused.delayed import owners, take_amaxes, update_delayed
from f8emu.torch.training.delayed import DelayedBuffers, DelayedScalingError
from f8emu.torch.training.delayed_report import Report, report_of
from f8emu.torch.training.torch_internals import (
    backward_pass,
    call_at_end_of_backward,
    is_dtensor,
    is_in_backward_pass,
    own_buffers,
    own_parameters,
    to_list,
)

if TYPE_CHECKING:
    from f8emu.torch.training.float8_linear import Float8Linear


class UpdateGroup:
    """Layers that are updated together: those that one call converted. A copy of a model has a group of its own.

    An `Owner` of their inv_scales.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        owners[self.number] = self
        self.layers: weakref.WeakSet[Float8Linear] = weakref.WeakSet()
        self.is_pending = False
        """Whether a gradient was cast since the last update."""
        self.is_captured = False
        """Whether the CUDA graph that is captured has an update already."""
        self._pass = -1
        """The backward pass at whose end the group is updated."""

    def add(self, layer: "Float8Linear") -> None:
        """Update the layer with the others."""
        assert layer.delayed is not None, "only such a layer has a state"
        self.layers.add(layer)
        layer.delayed.belong_to(self.number)

    def begin_pass(self, is_cuda: bool) -> None:
        """Update before the first cast of a forward pass, if no backward pass could do it."""
        if is_in_backward_pass():  # what checkpointing computes again has the scales of the first time
            return
        if is_cuda and torch.cuda.is_current_stream_capturing():
            if not self.is_captured:
                self.is_captured = True
                _update_groups([self])
        else:
            self.is_captured = False
            if self.is_pending:
                _update_groups([self])

    def note_gradient(self) -> None:
        """Update at the end of the backward pass that runs now."""
        self.is_pending, self.is_captured = True, False
        number = backward_pass()
        if number in (-1, self._pass):
            return
        self._pass = number
        with _lock:
            known = _passes.get(number)
            if known is None:
                known = _passes[number] = _BackwardPass()
                call_at_end_of_backward(known.end)
        known.groups.append(self)

    def __deepcopy__(self, memo: Any) -> "UpdateGroup":
        return UpdateGroup()

    def __reduce__(self) -> Any:
        return UpdateGroup, ()


class _BackwardPass:
    """The groups that a backward pass updates at its end; autograd alone keeps it."""

    def __init__(self) -> None:
        self.groups: list[UpdateGroup] = []

    def end(self) -> None:
        _update_groups(self.groups)


_passes: "weakref.WeakValueDictionary[int, _BackwardPass]" = weakref.WeakValueDictionary()
_lock = threading.Lock()
_numbers = itertools.count(1)


def _update_groups(groups: Sequence[UpdateGroup]) -> None:
    for group in groups:
        group.is_pending = False
    layers = [layer for group in groups for layer in group.layers]
    update_states(sorted(layers, key=_number))  # ranks share this order


def _number(layer: "Float8Linear") -> int:
    return -1 if layer.delayed is None else layer.delayed.notes.number


class ReductionGroup:
    """A process group that stays what it is when its model is copied; a pickle forgets it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "ReductionGroup":
        return self

    def __reduce__(self) -> Any:
        return ReductionGroup, (None,)


@torch.no_grad()
def update_states(layers: Sequence["Float8Linear"]) -> None:
    """Update layers with delayed scaling; all ranks of their process groups must call it with the same layers.

    Everything is looked up anew in every step, also which tensors there are and which groups share them: to make sure
    that nothing has changed since the last one takes as long.
    """
    is_compiling = torch.compiler.is_compiling()
    alike: dict[tuple[Any, ...], list[DelayedBuffers]] = {}
    sharded: list[DelayedBuffers] = []
    for layer, groups in zip(layers, _groups_of(layers), strict=True):
        buffers = layer.delayed
        assert buffers is not None, "only such a layer has a state"
        key = own_buffers(buffers)["amax_input"].device, groups, id(buffers.recipe)
        if (found := alike.get(key)) is None:
            found = alike[key] = []
        found.append(buffers)
        notes = buffers.notes
        notes.is_loaded = False
        if notes.is_weight_cast:
            notes.has_weight_scale = True
        if notes.is_sharded:
            sharded.append(buffers)
    together: dict[tuple[Any, ...], list[list[DelayedBuffers]]] = {}
    for (device, groups, _), found in alike.items():
        together.setdefault((device, groups), []).append(found)
    reports: list[tuple[Report, list[DelayedBuffers]]] = []
    for (device, groups), of_recipes in together.items():
        taken = _reduced([*chain(*of_recipes)], groups) if groups else None
        begin = 0
        for found in of_recipes:
            end = begin + 3 * len(found)
            own = None if taken is None else taken[begin:end]
            begin = end
            report = None if is_compiling else report_of(found, device)
            if report is None:
                nobody_reads = torch.empty(len(found), 3, dtype=torch.int32, device=device)
                _update(found, nobody_reads, own)
            else:
                _update(found, report.not_finite, own)
                reports.append((report, found))
    if not is_compiling:  # compiled code does not ask
        for buffers in sharded:
            buffers.are_set()
    for report, found in reports:  # last: a warning may be an error
        report.tell(found)


def _reduced(found: list[DelayedBuffers], groups: tuple[Any, ...]) -> Tensor:
    """The amaxes, maximum over the ranks of the groups; taken from the layers."""
    taken = take_amaxes(_states(found))
    for group in groups:
        if not torch.compiler.is_compiling():
            _require_same_layers(tuple([buffers.notes.name for buffers in found]), group, taken.device)
        _reduce_max(taken, group)
    return taken


def _update(found: list[DelayedBuffers], report: Tensor, taken: Tensor | None) -> None:
    recipe = found[0].recipe
    delayed, rule = recipe.delayed, recipe.scale_rule
    assert delayed is not None, "only such a recipe has a state"
    update_delayed(
        _states(found),
        report,
        taken,
        found[0].formats,
        rule.power_of_two,
        rule.amax_floor,
        delayed.margin,
        delayed.reduction is AmaxHistoryReduction.MOST_RECENT,
    )


def _states(found: list[DelayedBuffers]) -> list[Tensor]:
    states: list[Tensor] = []
    for buffers in found:
        states += own_buffers(buffers).values()  # in the order of STATE
    return states


def _reduce_max(x: Tensor, group: Any) -> None:
    dist.all_reduce(x, dist.ReduceOp.MAX, group)  # pyright: ignore[reportUnknownMemberType]


def _groups_of(layers: Sequence["Float8Linear"]) -> list[tuple[Any, ...]]:
    """For each layer the process groups whose ranks share its scales.

    The user's; or those of the mesh over which the weight is distributed; or all ranks.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    world = (dist.group.WORLD,) if is_distributed and dist.get_world_size() > 1 else ()
    found: list[tuple[Any, ...]] = []
    mesh: Any = None
    of_mesh: tuple[Any, ...] = ()
    for layer in layers:
        assert layer.delayed is not None, "as above"
        chosen = layer.delayed.notes.group
        if chosen is not None and chosen.group is not None:
            found.append(() if chosen.group is False else (chosen.group,))
        elif is_distributed and is_dtensor(weight := weight_of(layer)):
            its: Any = getattr(weight, "device_mesh")  # noqa: B009
            if its is not mesh:  # most layers have that of the layer before, and to ask for groups takes long
                mesh, groups = its, [group for i, group in enumerate(its.get_all_groups()) if its.size(i) > 1]
                of_mesh = tuple(groups)
            found.append(of_mesh)
        else:
            found.append(world)
    return found


def weight_of(layer: "Float8Linear") -> nn.Parameter | None:
    """The weight, or the first parameter that it is computed from: pruned, or with weight norm.

    None if there is none: FSDP1 holds the parameters.
    """
    own = own_parameters(layer).get("weight")
    if own is not None:
        return own
    return next((parameter for name, parameter in layer.named_parameters() if name != "bias"), None)


_checked: weakref.WeakKeyDictionary[Any, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def _require_same_layers(names: tuple[str, ...], group: Any, device: torch.device) -> None:
    """Once for the same names: all ranks of the group must have the same layers, or the all-reduce would mix them."""
    known = _checked.setdefault(group, set())
    if names in known or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    mine = torch.tensor([len(names), zlib.crc32("\n".join(names).encode())], dtype=torch.int64)
    both = torch.cat([mine, -mine]).to(device)
    _reduce_max(both, group)
    most, largest, least, smallest = to_list(both)
    if (most, largest) != (-least, -smallest):
        others = f"from {-least} to {most}" if most != -least else "as many, by other names"
        raise DelayedScalingError(
            "sync_float8_amax_and_scale_history: the ranks of a process group must have the same delayed layers; this "
            f"rank has {len(names)}, beginning with {names[0]!r}, others have {others}; name the ranks that train the "
            "same layers with f8emu.torch.set_amax_reduction_group(model, group)"
        )
    known.add(names)
