"""Over which ranks the amaxes of delayed scaling are reduced, and the proof that those ranks have the same layers.

Ranks that differ (the stages of a pipeline) end their backward passes at different times, and one that waits for
another never sends what the other waits for. So a rank says in its first forward pass what it trains, and waits for
nobody; what the others said it reads before the first collective. By then they have begun their forward passes too.
"""

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from f8emu.torch import torch_internals as internals
from f8emu.torch.casts.delayed_state import DelayedScalingError
from f8emu.torch.layer.float8_layer import Scaled

Ranks = tuple[Any, ...]  # process groups
_REMEDY = "name the ranks that train the same layers with f8emu.torch.set_amax_reduction_group(model, group), False for"


def ranks_of(layer: Scaled, of_meshes: dict[int, Ranks]) -> Ranks:
    """The process groups whose ranks share its scales: chosen, of the weight's mesh, of its stage, or all ranks."""
    group = layer.update_group
    assert group is not None, "it has a state"
    if (chosen := group.ranks) is not None:
        return () if chosen is False else (chosen,)
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    if (mesh := _mesh_of(layer)) is None:
        return (dist.group.WORLD,) if group.replicas is None and dist.get_world_size() > 1 else group.replicas or ()
    if id(mesh) not in of_meshes:  # to ask for groups takes long
        of_meshes[id(mesh)] = tuple([group for i, group in enumerate(mesh.get_all_groups()) if mesh.size(i) > 1])
    return of_meshes[id(mesh)]


def _weight_of(layer: Scaled) -> Any:
    # Or the first parameter from which the weight is computed; there is none where FSDP1 holds the parameters.
    others = (x for name, x in layer.named_parameters() if name != "bias")
    weight: Any = internals.own_parameters(layer).get("weight")
    return next(others, None) if weight is None else weight


def _mesh_of(layer: Scaled) -> Any:
    weight = _weight_of(layer)
    if internals.is_dtensor(weight):
        return weight.device_mesh
    return None if layer.delayed is None else layer.delayed.notes.mesh


def note_stage(stage: Any, layers: Sequence[Scaled], is_chosen: bool) -> Ranks:
    """Note what is known of the ranks of a pipeline's stage: meshes of FSDP2. Returns DDP's process groups in it."""
    meshes = internals.meshes_of_fsdp2(stage.submod)
    for layer in layers:
        assert layer.delayed is not None, "only such a layer has a state"
        layer.delayed.notes.mesh = meshes.get(id(layer))
    parts: list[Any] = [x for x in internals.modules_of(stage.submod) if isinstance(x, DistributedDataParallel)]
    replicas = [replica.process_group for replica in parts]
    is_known = is_chosen or bool(replicas) or all(_mesh_of(layer) is not None for layer in layers)
    if not is_known and dist.get_world_size() > dist.get_world_size(stage.group):
        raise DelayedScalingError(
            f"delayed scaling: the ranks that train stage {stage.stage_index} of a pipeline must be known; its weights "
            f"are no DTensors, and there are {dist.get_world_size()} ranks, of which the pipeline has "
            f"{dist.get_world_size(stage.group)}; {_REMEDY} none, where model is the stage's module"
        )
    return tuple([group for group in dict.fromkeys(replicas) if dist.get_world_size(group) > 1])


_announced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # to a process group: how often


class Announcement:
    """The message of this rank to the others of a process group: the layers that it trains."""

    def __init__(self, layers: Sequence[Scaled], group: Any, has_weights: bool) -> None:
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.names = [layer.delayed.notes.name for layer in layers if layer.delayed is not None]
        self.digest = zlib.crc32(
            "\n".join(self.names).encode(), zlib.crc32(_first_bytes(layers) if has_weights else b"")
        )
        self.store, _announced[group] = internals.store_of(group), _announced.get(group, 0) + 1
        self.place = f"f8emu/{group.group_name}/{zlib.crc32(repr(self.ranks).encode())}/{_announced[group]}"
        self._tell("layers", str(self.digest))

    def require_same(self) -> None:
        """Wait until all ranks have come so far; raise if they have other layers."""
        of_ranks = zip(self.ranks, self._of_all("layers"), strict=True)
        if others := [rank for rank, digest in of_ranks if digest != str(self.digest).encode()]:
            raise _different_layers(self.names, f"and rank {others[0]} other ones, or other weights in them")
        # By this wait a collective that some ranks never begin is an error that says what to do.
        self._tell("ended", "")
        self._of_all("ended")

    def _tell(self, topic: str, value: str) -> None:
        self.store.set(f"{self.place}/{topic}/{dist.get_rank(self.group)}", value)

    def _of_all(self, topic: str) -> list[bytes]:
        try:
            return self.store.multi_get([f"{self.place}/{topic}/{i}" for i in range(len(self.ranks))])
        except RuntimeError as error:  # the store waits as long as a collective does
            raise _different_layers(self.names, "and another rank did not come so far in a pass") from error


def announce(layers: Sequence[Scaled], ranks: Any) -> Announcement | None:
    """Announce the layers that this rank trains; None if amaxes are reduced over a mesh, which needs no proof, or none.

    `ranks` as for `set_amax_reduction_group`: unless they are chosen, weights are announced too.
    """
    layers = [layer for layer in layers if ranks is not None or _mesh_of(layer) is None]
    group = next(iter(ranks_of(layers[0], {})), None) if layers else None
    return None if group is None or internals.store_of(group) is None else Announcement(layers, group, ranks is None)


def _first_bytes(layers: Sequence[Scaled]) -> bytes:
    # Of the weights: stages may have layers of the same names and shapes. Left out are wrapper classes, and parts of
    # weights, flat ones, that FSDP1 and ZeRO-3 keep between the passes.
    weights = [weight for layer in layers if type(weight := _weight_of(layer)) in (Tensor, nn.Parameter)]
    whole = [x.detach() for x in weights if x.ndim == 2 and x.numel() > 0 and not x.is_meta]
    parts = [x[0, :8].float() for x in whole if x.device == whole[0].device]
    return repr(internals.to_list(torch.cat(parts))).encode() if parts else b""


def _different_layers(names: Sequence[str], others: str) -> DelayedScalingError:
    return DelayedScalingError(
        "delayed scaling: the ranks of a process group must have the same delayed layers, by the same names; this "
        f"rank has {len(names)}, beginning with {names[0]!r}, {others}; {_REMEDY} none"
    )


def reduce_max(x: Tensor, group: Any) -> None:
    """Make `x` the maximum over the ranks of a process group, element by element."""
    dist.all_reduce(x, dist.ReduceOp.MAX, group)  # pyright: ignore[reportUnknownMemberType]
