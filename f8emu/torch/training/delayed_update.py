"""The update of delayed scaling: all layers of a model at once, without a read on the host.

1. The amaxes of all layers move into one tensor, and are marked as not called.
2. One all-reduce takes the maximum over ranks, as integers, so that infinity and NaN count as the largest.
3. Histories, inv_scales and counts of all layers are updated in one launch. If no layer was called, nothing changes, so
   a second update in a step does nothing.
4. The counts of infinite amaxes are copied to the host, and read at a later update, when the copy has arrived.
"""

import sys
import warnings
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from f8emu.spec.recipe import TENSORS, Recipe
from f8emu.spec.scaling import AmaxHistoryReduction
from f8emu.torch.fused.delayed import take_amaxes, update_delayed
from f8emu.torch.training.delayed import DelayedBuffers, DelayedScalingError
from f8emu.torch.training.torch_internals import own_buffers, to_list


class StateOf(NamedTuple):
    """The state of a layer, with its weight, which tells over which ranks the layer is distributed."""

    buffers: DelayedBuffers
    weight: Tensor | None


class ReductionGroup:
    """A process group that stays what it is when its model is copied; a pickle forgets it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "ReductionGroup":
        return self

    def __reduce__(self) -> Any:
        return ReductionGroup, (None,)


@torch.no_grad()
def update_states(states: Sequence[StateOf]) -> None:
    """Update layers; all ranks of their process groups must call it with the same layers."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        _read_arrived()
    together: dict[tuple[Any, ...], list[list[DelayedBuffers]]] = {}
    for buffers, weight in states:
        key = (buffers.amaxes[0].device, *_groups(buffers, weight))
        of_recipes = together.setdefault(key, [])
        for found in of_recipes:
            if found[0].recipe is buffers.recipe:
                found.append(buffers)
                break
        else:
            of_recipes.append([buffers])
        notes = buffers.notes
        notes.has_updated, notes.is_loaded = True, False
        notes.has_weight_scale |= notes.is_weight_cast
    for (_, *groups), of_recipes in together.items():
        taken = take_amaxes([amax for found in of_recipes for buffers in found for amax in buffers.amaxes])
        for group in groups:
            if not is_compiling:
                names = tuple([buffers.notes.name for found in of_recipes for buffers in found])
                _require_same_layers(names, group, taken.device)
            _reduce_max(taken, group)
        begin = 0
        for found in of_recipes:
            report = _update(taken[begin : begin + 3 * len(found)], found[0].recipe, found)
            begin += 3 * len(found)
            if not is_compiling:
                _copy_to_host(report, found)
                for buffers in found:
                    if buffers.notes.is_sharded:
                        buffers.are_set()  # compiled code does not ask


def _update(taken: Tensor, recipe: Recipe, found: list[DelayedBuffers]) -> Tensor:
    delayed, rule = recipe.delayed, recipe.scale_rule
    assert delayed is not None, "only such a recipe has a state"
    return update_delayed(
        taken,
        [_tensor(buffers, "amax_history") for buffers in found],
        [inv_scale for buffers in found for inv_scale in buffers.inv_scales],
        [_tensor(buffers, "counts") for buffers in found],
        found[0].formats,
        rule.power_of_two,
        rule.amax_floor,
        delayed.margin,
        delayed.reduction is AmaxHistoryReduction.MOST_RECENT,
    )


def _tensor(buffers: DelayedBuffers, name: str) -> Tensor:
    found = own_buffers(buffers)[name]
    assert found is not None, "all are there"
    return found


def _reduce_max(x: Tensor, group: Any) -> None:
    dist.all_reduce(x, dist.ReduceOp.MAX, group)  # pyright: ignore[reportUnknownMemberType]


def _groups(buffers: DelayedBuffers, weight: Tensor | None) -> tuple[Any, ...]:
    """The process groups whose ranks share the scales of a layer.

    The user's; or those of the mesh over which the weight is distributed; or all ranks.
    """
    chosen = buffers.notes.group
    if chosen is not None and chosen.group is not None:
        return () if chosen.group is False else (chosen.group,)
    if not dist.is_available() or not dist.is_initialized():
        return ()
    if is_dtensor(weight):
        mesh: Any = getattr(weight, "device_mesh")  # noqa: B009
        return tuple(group for i, group in enumerate(mesh.get_all_groups()) if mesh.size(i) > 1)
    return (dist.group.WORLD,) if dist.get_world_size() > 1 else ()


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor, without importing what only distributed programs have loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


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


class _Report(NamedTuple):
    """Counts of infinite amaxes, copied to the host."""

    arrival: Any
    not_finite: Tensor
    layers: list["weakref.ref[DelayedBuffers]"]


_reports: dict[tuple[int, ...], _Report] = {}
_under_way: set[tuple[int, ...]] = set()
_MOST_REPORTS = 64


def _copy_to_host(report: Tensor, found: list[DelayedBuffers]) -> None:
    if report.device.type != "cuda":
        _tell(report, [weakref.ref(buffers) for buffers in found])
        return
    key = tuple(map(id, found))
    if torch.cuda.is_current_stream_capturing() or key in _under_way:
        return  # counts only grow: the next update that copies them tells
    known = _reports.get(key)
    if known is None or any(layer() is not buffers for layer, buffers in zip(known.layers, found, strict=True)):
        if len(_reports) >= _MOST_REPORTS:
            _reports.clear()
            _under_way.clear()
        on_host = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True)
        known = _reports[key] = _Report(torch.cuda.Event(), on_host, [weakref.ref(buffers) for buffers in found])
    known.not_finite.copy_(report, non_blocking=True)
    known.arrival.record()
    _under_way.add(key)


def _read_arrived() -> None:
    if not _under_way or torch.cuda.is_current_stream_capturing():
        return
    for key in [key for key in _under_way if _reports[key].arrival.query()]:
        _under_way.remove(key)
        _tell(_reports[key].not_finite, _reports[key].layers)


def _tell(not_finite: Tensor, layers: Sequence["weakref.ref[DelayedBuffers]"]) -> None:
    """Warn of every tensor's first amax that was infinite or NaN, by the name of its layer."""
    if not not_finite.any():
        return
    names: list[str] = []
    for layer, counts in zip(layers, to_list(not_finite), strict=True):
        buffers = layer()
        if buffers is None:
            continue
        for i, count in enumerate(counts):
            if count and i not in buffers.notes.reported:
                buffers.notes.reported.add(i)
                names.append(f"{TENSORS[i]} of {buffers.notes.name or 'a layer without a name'}")
    if names:
        warnings.warn(
            f"f8emu.torch: under delayed scaling the amax was infinite or NaN of: {', '.join(names)}; the scale stays "
            "as it was. Further ones are counted in the layer's delayed.counts, and not reported again",
            RuntimeWarning,
            stacklevel=2,
        )
