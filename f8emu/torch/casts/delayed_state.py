"""The state of delayed scaling of one layer, on its device, and what the host learns of it.

Between two updates each tensor keeps the maximum of the amaxes of all its casts (gradient accumulation). The update
(`delayed_update`) shifts the histories and sets the scales of the next passes, as `f8emu.spec.DelayedScaling` says.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from f8emu.spec.errors import F8Error, OperandError
from f8emu.spec.recipe import TENSORS, Recipe
from f8emu.torch.casts.operand import Delayed, DelayedStates
from f8emu.torch.fused import delayed as fused
from f8emu.torch.torch_internals import own_buffers, to_list


class DelayedScalingError(F8Error, RuntimeError):
    """The ranks of a process group have different layers with delayed scaling."""


class HostNotes:
    """The host's knowledge of one layer. Not a module, because attributes of modules are slow."""

    def __init__(self) -> None:
        self.name = ""  # the layer's in its model; empty if it is not known
        self.mesh: Any = None  # of FSDP2 in a pipeline, where weights stay gathered between the passes
        self.is_sharded = False  # whether tensor parallelism distributed the weight, so that `are_set` is asked
        self.are_set: tuple[bool, bool, bool] = (False, False, False)  # see `DelayedBuffers.are_set`
        self.reported: set[str] = set()  # the tensors whose first infinity or NaN was reported
        self.is_loaded = False  # whether the state was loaded apart from the weights, and not used since
        self.has_own_entry = False  # whether checkpoints hold it separately (`DelayedScalingState`)


class DelayedBuffers(nn.Module):
    """The state of one layer, or of each group of a grouped one. Its tensors follow the layer and stay float32.

    The states of `groups` are stacked: [G, 3, history_length], [G, 3, 3] and [G, 1] in place of [1, 1].
    """

    # A module, so that compilers know its tensors as static, but no submodule of its layer: neither DDP's broadcast of
    # buffers nor an average of weights may reach it. The metadata of the layer's state dict holds its tensors, so that
    # the keys stay those of nn.Linear.
    amax_history: Tensor  # [3, history_length], of TENSORS
    counts: Tensor  # [3, 3] int64: updates whose amax was not usable, a row for each of `COUNTS`, a column a tensor
    # [1, 1] each: separate tensors, since a cast updates one and compiled code reads them apart.
    inv_scale_input: Tensor
    inv_scale_weight: Tensor
    inv_scale_grad_output: Tensor
    amax_input: Tensor  # the maximum since the last update
    amax_weight: Tensor
    amax_grad_output: Tensor

    def __init__(self, recipe: Recipe, device: torch.device | str | None = None, groups: int | None = None) -> None:
        super().__init__()
        assert recipe.delayed is not None, "only such a recipe has a state"
        self.recipe, self.groups = recipe, groups
        self.formats = _formats(recipe)
        self.notes = HostNotes()
        self._parts: tuple[Any, list[Tensor]] | None = None  # of groups, and where they lay
        self.owner = 0  # the number of the group that updates the state (`delayed_update.UpdateGroup`)
        shapes = {"amax_history": (3, recipe.delayed.history_length), "counts": (len(fused.COUNTS), 3)}
        lead = () if groups is None else (groups,)
        for name in fused.STATE:  # in this order
            dtype = torch.int64 if name == "counts" else torch.float32
            shape = (*lead, *shapes[name]) if name in shapes else (groups or 1, 1)
            buffer = torch.empty(shape, dtype=dtype, device=device)
            self.register_buffer(name, buffer, persistent=False)
        self.reset()

    def reset(self) -> None:
        """The state before the first pass."""
        with torch.no_grad():
            self.amax_history.zero_()
            self.counts.zero_()
            for inv_scale, amax in zip(self.inv_scales, self.amaxes, strict=True):
                inv_scale.fill_(fused.UNSET)
                amax.fill_(fused.UNCALLED)
        self._begin_anew((False, False, False))

    def follow(self, device: torch.device) -> None:
        """Move to `device`, without memory as before the first pass; tensors that were replaced keep their owner."""
        if self.amax_input.device != device:
            self.to_empty(device=device) if self.amax_input.is_meta else self.to(device)
        if None in [getattr(inv_scale, fused.OWNER, None) for inv_scale in self.inv_scales]:
            self.belong_to(self.owner)

    def belong_to(self, owner: int) -> None:
        """Tell the owner of that number of every cast from now on."""
        self.owner = owner
        for inv_scale, tensor in zip(self.inv_scales, TENSORS, strict=True):
            setattr(inv_scale, fused.OWNER, (owner, tensor == "grad_output"))

    def of_tensors(self) -> DelayedStates:
        """The states that the casts of input, weight and grad_output read and update; None with dynamic scales.

        The state of grad_output is never None: it tells an update of a backward pass.
        """
        assert self.recipe.delayed is not None, "as in __init__"
        margin, tensors = self.recipe.delayed.margin, self.recipe.delayed.tensors
        pairs = zip(self.inv_scales, self.amaxes, strict=True)
        x, w, g = [Delayed(inv_scale, amax, margin) for inv_scale, amax in pairs]
        return x if "input" in tensors else None, w if "weight" in tensors else None, g

    # By `own_buffers`: `nn.Module.__getattr__` takes longer than all else that the host does here.

    @property
    def amaxes(self) -> tuple[Tensor, ...]:
        return tuple([own_buffers(self)[name] for name in fused.AMAXES])

    @property
    def inv_scales(self) -> tuple[Tensor, ...]:
        """The inv_scales of TENSORS; `UNSET` before the first update."""
        return tuple([own_buffers(self)[name] for name in fused.INV_SCALES])

    @property
    def initialized(self) -> Tensor:  # [3] bool, of TENSORS
        return self.state()["initialized"]

    @property
    def inv_scale(self) -> Tensor:  # [3], of TENSORS; 1 where it is not initialized
        return self.state()["inv_scale"]

    def _begin_anew(self, is_set: Sequence[bool]) -> None:
        # Forget what was known of the old values; `is_set` of TENSORS are known to be set.
        _mark(self.inv_scales, is_set)
        self.notes.reported = set()
        self.notes.are_set = (False, False, False)

    def are_set(self) -> tuple[bool, bool, bool]:
        """Which inv_scales of TENSORS are set, alike on all ranks of a layer; eager code waits for those that were not.

        True for a tensor with dynamic scales. Compiled code is compiled again when it changes.
        """
        if not torch.compiler.is_compiling() and False in self.notes.are_set and not self.amax_input.is_meta:
            if not (self.amax_input.is_cuda and torch.cuda.is_current_stream_capturing()):
                values = zip(TENSORS, to_list(torch.cat(self.inv_scales, dim=1).amin(dim=0)), strict=True)
                x, w, g = [
                    value > fused.UNSET or self.recipe.delayed_scaling_of(tensor) is None for tensor, value in values
                ]
                self.notes.are_set = x, w, g
        return self.notes.are_set

    def state(self) -> dict[str, Tensor]:
        """The entries of a checkpoint: the `DelayedState` of each of TENSORS, stacked, counts, the step's amaxes."""
        return stacked(self.tensors())

    def parts(self) -> list[Tensor]:
        """The tensors of the state, or of each group's, in the order of `fused.STATE`."""
        tensors = list(own_buffers(self).values())
        if self.groups is None:
            return tensors
        places = tuple([x.data_ptr() for x in tensors])
        if self._parts is None or self._parts[0] != places:
            histories, counts, *numbers = tensors
            of_groups = zip(histories, counts, *[x.split(1) for x in numbers], strict=True)
            self._parts = places, [x for group in of_groups for x in group]
        return self._parts[1]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors themselves. The metadata of a state dict refers to them, as the state dict to the weights."""
        return dict(self.named_buffers())

    def load(self, call: str, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; OperandError for the state of another recipe, or a missing or malformed entry."""
        for name, mine in self.state().items():
            tensor = state.get(name)
            if tensor is None or tensor.shape != mine.shape or tensor.dtype is not mine.dtype:
                got = "nothing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
                raise OperandError(
                    f"{call}: delayed state {name!r} must be {mine.dtype} of shape {list(mine.shape)} under recipe "
                    f"{self.recipe.name!r}; got {got}; load a checkpoint of the same recipe, or one without its state"
                )
        initialized = state["initialized"]
        with torch.no_grad():
            self.amax_history.copy_(state["amax_history"])
            self.counts.copy_(state["counts"])
            inv_scale = torch.where(initialized, state["inv_scale"], torch.full_like(state["inv_scale"], fused.UNSET))
            for i in range(3):
                self.inv_scales[i].copy_(inv_scale[..., i : i + 1])
                self.amaxes[i].copy_(state["amax"][..., i : i + 1])
        is_set = initialized if self.groups is None else initialized.all(dim=0)
        self._begin_anew((False, False, False) if initialized.is_meta else to_list(is_set))
        owner = None if initialized.is_meta else fused.owners.get(self.owner)
        if owner is not None and not bool((self.amax_grad_output < 0).all()):  # UNCALLED; it may be NaN
            owner.is_pending = True  # it was saved before the update after a backward pass

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Move to another device, never to another dtype; reset if the values were not copied (`to_empty`).
        is_lost, known = False, [fused.is_known_set(inv_scale) for inv_scale in self.inv_scales]
        for name, buffer in self._buffers.items():
            assert buffer is not None, "all are there"
            # As integers: `Module.to(dtype)` converts floating-point buffers only.
            viewed = buffer.view(torch.int32) if buffer.dtype is torch.float32 else buffer
            moved = fn(viewed)
            if moved is viewed:
                continue
            if moved.dtype is not viewed.dtype:
                moved = viewed.to(moved.device)
            if not moved.is_meta:
                is_lost = is_lost or buffer.is_meta or not torch.equal(viewed, moved.to(viewed.device))
            self._buffers[name] = moved.view(buffer.dtype) if viewed is not buffer else moved
        _mark(self.inv_scales, known)
        if is_lost:
            self.reset()
        self.belong_to(self.owner)
        return self


def _mark(inv_scales: Sequence[Tensor], is_set: Sequence[bool]) -> None:
    for inv_scale, known in zip(inv_scales, is_set, strict=True):
        fused.mark_set(inv_scale, known)


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`DelayedBuffers.state` of what `DelayedBuffers.tensors` returned."""
    inv_scale, amax = (torch.cat([tensors[x] for x in names], dim=1) for names in (fused.INV_SCALES, fused.AMAXES))
    if tensors["amax_history"].ndim == 2:
        inv_scale, amax = inv_scale.flatten(), amax.flatten()
    is_set = inv_scale > fused.UNSET
    return {
        "amax_history": tensors["amax_history"],
        "inv_scale": torch.where(is_set, inv_scale, torch.ones_like(inv_scale)),
        "initialized": is_set,
        "counts": tensors["counts"],
        "amax": amax,
    }


def _formats(recipe: Recipe) -> str:
    # The names of the three tensors' float8 formats, with commas; empty for one without delayed scales.
    formats = {tensor: recipe.cast_plans.of(tensor).both.format for tensor in recipe.delayed_tensors}
    return ",".join(str(formats.get(tensor, "")) for tensor in TENSORS)


class Report:
    """The device's messages on layers that are updated together: which scales are set, which amaxes were bad.

    The kernel of a GPU writes to its memory, which is the host's. Each number is written at once and only grows, so an
    update reads what has arrived, without waiting. A layer that is reset or loaded begins a new report.
    """

    def __init__(self, layers: Sequence[DelayedBuffers], is_pinned: bool) -> None:
        with torch.inference_mode(False):  # also updates outside of it write to this
            count = sum([buffers.groups or 1 for buffers in layers])
            numbers = torch.zeros(count, len(TENSORS), dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self.numbers = numbers  # [L, 3], groups as layers, as `fused.delayed.update_delayed` writes them
        self._seen: list[list[int]] = []
        self._reported = [buffers.notes.reported for buffers in layers]  # kept: a report is found by their identity

    def read(self, layers: Sequence[DelayedBuffers]) -> None:
        """Note what has arrived since the last call; warn of each tensor's first infinity, by the name of its layer."""
        seen: list[list[int]] = to_list(self.numbers)
        if seen == self._seen:
            return
        self._seen, rows = seen, iter(seen)
        names = list[str]()
        for layer in layers:
            of_layer = zip(*[next(rows) for _ in range(layer.groups or 1)], strict=True)
            for tensor, inv_scale, numbers in zip(TENSORS, layer.inv_scales, of_layer, strict=True):
                if all(number & 1 for number in numbers):
                    fused.mark_set(inv_scale, True)
                if max(numbers) > 1 and tensor not in layer.notes.reported:
                    layer.notes.reported.add(tensor)
                    names.append(f"{tensor} of {layer.notes.name or 'a layer without a name'}")
        if names:
            warnings.warn(
                f"f8emu.torch: under delayed scaling the amax was infinite or NaN for: {', '.join(names)}; the scale "
                "stays as it was. Later ones are counted in the layer's delayed.counts, and not reported again",
                RuntimeWarning,
                stacklevel=2,
            )


_reports: dict[tuple[torch.device, tuple[int, ...]], Report] = {}
_MOST = 1024  # layers that are built one by one are updated together in ever other sets


def report_of(layers: Sequence[DelayedBuffers], device: torch.device) -> Report | None:
    """The report of these layers on a device; None if a CUDA graph is captured, while which none may be allocated."""
    key = device, tuple([id(buffers.notes.reported) for buffers in layers])
    if key not in _reports:
        is_cuda = device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if len(_reports) >= _MOST:  # kernels may write to them still, of which torch does not know
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            _reports.clear()
        _reports[key] = Report(layers, is_cuda)
    return _reports[key]
