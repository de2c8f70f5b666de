"""The update of delayed scaling: all layers of a model at once, without a read on the host.

1. The amaxes of all layers move into one tensor, and are marked as not called.
2. One all-reduce takes the maximum over ranks, as integers, so that infinity and NaN count as the largest.
3. Histories, inv_scales and counts of all layers are updated in one launch. If no layer was called, nothing changes, so
   a second update in a step does nothing.
4. The counts of infinite amaxes are copied to the host, and read at a later update, when the copy has arrived.
5. Weights that are kept as float8 are cast again, by their new scales.
"""

import warnings
import weakref
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from f8emu.spec.recipe import TENSORS, Recipe
from f8emu.spec.scaling import AmaxHistoryReduction
from f8emu.torch.fused.delayed import take_amaxes, update_delayed
from f8emu.torch.training.delayed import AMAXES, INV_SCALES, DelayedBuffers, DelayedScalingError
from f8emu.torch.training.float8_weight import refill
from f8emu.torch.training.torch_internals import is_dtensor, own_buffers, own_parameters, to_list

if TYPE_CHECKING:
    from f8emu.torch.training.float8_linear import Float8Linear


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
    if not is_compiling:
        _read_arrived()
    alike: dict[tuple[Any, ...], list[DelayedBuffers]] = {}
    sharded: list[DelayedBuffers] = []
    for layer, groups in zip(layers, _groups_of(layers), strict=True):
        buffers = layer.delayed
        assert buffers is not None, "only such a layer has a state"
        key = (own_buffers(buffers)["amax_input"].device, groups, id(buffers.recipe))
        alike.setdefault(key, []).append(buffers)
        notes = buffers.notes
        notes.has_updated, notes.is_loaded = True, False
        if notes.is_weight_cast:
            notes.has_weight_scale = True
        if notes.is_sharded:
            sharded.append(buffers)
    together: dict[tuple[Any, ...], list[list[DelayedBuffers]]] = {}
    for (device, groups, _), found in alike.items():
        together.setdefault((device, groups), []).append(found)
    for (_, groups), of_recipes in together.items():
        taken = take_amaxes([own[name] for own in map(own_buffers, chain(*of_recipes)) for name in AMAXES])
        for group in groups:
            if not is_compiling:
                names = tuple([buffers.notes.name for buffers in chain(*of_recipes)])
                _require_same_layers(names, group, taken.device)
            _reduce_max(taken, group)
        begin = 0
        for found in of_recipes:
            report = _update(taken[begin : begin + 3 * len(found)], found[0].recipe, found)
            begin += 3 * len(found)
            if not is_compiling:
                _copy_to_host(report, found)
    if not is_compiling:  # compiled code does not ask
        for buffers in sharded:
            buffers.are_set()
    for layer in layers:
        refill(own_parameters(layer).get("weight"))


def _update(taken: Tensor, recipe: Recipe, found: list[DelayedBuffers]) -> Tensor:
    delayed, rule = recipe.delayed, recipe.scale_rule
    assert delayed is not None, "only such a recipe has a state"
    owns = [own_buffers(buffers) for buffers in found]
    return update_delayed(
        taken,
        [own["amax_history"] for own in owns],
        [own[name] for own in owns for name in INV_SCALES],
        [own["counts"] for own in owns],
        found[0].formats,
        rule.power_of_two,
        rule.amax_floor,
        delayed.margin,
        delayed.reduction is AmaxHistoryReduction.MOST_RECENT,
    )


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
    if known is None or [layer() for layer in known.layers] != found:
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
