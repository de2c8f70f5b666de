"""The state of delayed scaling of one layer.

Between two updates each tensor keeps the maximum of the amaxes of all its casts (gradient accumulation). The update
(`delayed_sync`) shifts the histories and sets the scales of the next step, by the rule of `f8emu.spec.DelayedScaling`.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from f8emu.spec.errors import F8Error, OperandError
from f8emu.spec.recipe import TENSORS, Recipe
from f8emu.spec.trace import Scales
from f8emu.torch.scale import reciprocal
from f8emu.torch.training.autograd import Delayed


class DelayedScalingError(F8Error, RuntimeError):
    """The optimizer took a step, and the scales were not updated."""


class DelayedBuffers(nn.Module):
    """The state of one layer: the `DelayedState` of each of TENSORS, stacked, and the amaxes of the current step.

    Its buffers follow the layer from device to device, stay float32 when the layer's dtype changes, and are not entries
    of the state dict: the layer writes them into its metadata, so that the keys stay those of `nn.Linear`.
    """

    amax_history: Tensor
    """[3, history_length]."""
    inv_scale: Tensor
    """[3]."""
    initialized: Tensor
    """[3] bool."""
    skipped: Tensor
    """[3] int64: the number of updates whose amax was zero or not finite."""
    amax_input: Tensor
    """[1, 1], as the next two: the maximum since the last update. Separate buffers: a cast updates one in place."""
    amax_weight: Tensor
    amax_grad_output: Tensor
    scale_input: Tensor
    """[1, 1], `1 / inv_scale`, as the next two. Separate buffers: a GEMM needs its scale aligned to 16 bytes."""
    scale_weight: Tensor
    scale_grad_output: Tensor

    def __init__(self, recipe: Recipe, device: torch.device | str | None = None) -> None:
        super().__init__()
        assert recipe.delayed is not None, "only such a recipe has a state"
        self.recipe = recipe
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "amax_history": ((3, recipe.delayed.history_length), torch.float32),
            "inv_scale": ((3,), torch.float32),
            "initialized": ((3,), torch.bool),
            "skipped": ((3,), torch.int64),
            **{f"{name}_{tensor}": ((1, 1), torch.float32) for name in ("amax", "scale") for tensor in TENSORS},
        }
        for name, (shape, dtype) in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device), persistent=False)
        self.is_initialized = (False, False, False)
        self.updates = 0
        self.has_reported = False
        self._seen: tuple[int, int] | None = None
        self._watch: tuple[Any, Any] | None = None
        self.reset()

    def reset(self) -> None:
        """The state before the first step."""
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.zero_()
            self.inv_scale.fill_(1)
            for scale in self.scales:
                scale.fill_(1)
        self.is_initialized = (False, False, False)
        self.has_reported = False
        self._seen = None

    def of_tensors(self) -> tuple[Delayed, Delayed, Delayed]:
        """What the casts of a call read and update: of input, weight and grad_output."""
        return self._of(0, self.amax_input), self._of(1, self.amax_weight), self._of(2, self.amax_grad_output)

    def _of(self, i: int, amax: Tensor) -> Delayed:
        if not self.is_initialized[i]:
            return Delayed(None, amax)
        return Delayed(Scales(self.inv_scale[i : i + 1], self.scales[i]), amax)

    @property
    def amaxes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The amax buffers, which the casts update."""
        return self.amax_input, self.amax_weight, self.amax_grad_output

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        """The scales that decode the codes of the current step."""
        return self.scale_input, self.scale_weight, self.scale_grad_output

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the state, and the amaxes of the current step."""
        return {
            "amax_history": self.amax_history,
            "inv_scale": self.inv_scale,
            "initialized": self.initialized,
            "skipped": self.skipped,
            "amax": torch.cat(self.amaxes).reshape(3),
        }

    def load(self, call: str, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned.

        Raises:
            OperandError: the state of another recipe, or a missing or malformed entry.
        """
        for name, mine in self.state().items():
            found = state.get(name)
            if found is None or found.shape != mine.shape or found.dtype is not mine.dtype:
                got = "nothing" if found is None else f"{found.dtype} of shape {list(found.shape)}"
                raise OperandError(
                    f"{call}: delayed state {name!r} must be {mine.dtype} of shape {list(mine.shape)} under recipe "
                    f"{self.recipe.name!r}; got {got}; load a checkpoint of the same recipe, or one without its state"
                )
        with torch.no_grad():
            for name in ("amax_history", "inv_scale", "initialized", "skipped"):
                getattr(self, name).copy_(state[name])
            for mine, found in zip(self.amaxes, state["amax"], strict=True):
                mine.copy_(found.reshape(1, 1))
            for scale, found in zip(self.scales, reciprocal(self.inv_scale), strict=True):
                scale.copy_(found)
        self.has_reported = False
        self._seen = None
        self.read_initialized()

    def read_initialized(self) -> None:
        """Copy the buffer `initialized` into the host's flags, which the casts go by; waits for the device."""
        if not self.initialized.is_meta:
            first, second, third = self.initialized.tolist()
            self.is_initialized = (first, second, third)

    def watch(self, weight: nn.Parameter) -> None:
        """Register a hook on `weight` that calls `check_step` whenever its gradient is complete.

        The hook runs outside of compiled code. It belongs to the parameter, so a new parameter needs a new hook.
        """
        if self._watch is not None:
            if self._watch[0]() is weight:
                return
            self._watch[1].remove()
            self._watch = None
        if not weight.requires_grad or not weight.is_leaf:
            return
        reference = weakref.ref(self)

        def check(parameter: Tensor) -> None:
            if (buffers := reference()) is not None:
                buffers.check_step(parameter)

        self._watch = (weakref.ref(weight), weight.register_post_accumulate_grad_hook(check))

    def check_step(self, weight: Tensor) -> None:
        """Raise DelayedScalingError if `weight` changed since the last backward pass and its scales did not."""
        now = (weight._version, self.updates)
        if self._seen is not None and now[0] != self._seen[0] and now[1] == self._seen[1]:
            raise DelayedScalingError(
                f"Float8Linear: under recipe {self.recipe.name!r} the scales are updated once a step; the weight of "
                f"shape {list(weight.shape)} has changed since the last backward pass and its scales have not; call "
                "f8emu.torch.sync_float8_amax_and_scale_history(model) after every backward pass, before or after "
                "optimizer.step()"
            )
        self._seen = now

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device, never to another dtype; reset if the values were not copied (`to_empty`)."""
        is_lost = False
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
        if is_lost:
            self.reset()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without the hook: it belongs to the parameter, and a copy of the layer watches its own."""
        return self.__dict__ | {"_watch": None, "_seen": None}
