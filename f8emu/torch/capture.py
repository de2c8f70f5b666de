"""Capture of training steps: every operand, scale and product of the layers, on the disk.

What is written is described in `f8emu.capture.record`; `f8emu replay` computes it again without a GPU, `f8emu diff`
compares two. A captured step copies all that it writes to the host, and takes its time. Nothing that goes wrong while
writing (a full disk, a limit) ends the training: it is listed in the capture, and a warning says it once a step.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from f8emu.capture.handle import Handle, arrays_of, facts_of, session_of
from f8emu.capture.record import ForeignRecord
from f8emu.capture.session import Session
from f8emu.capture.writer import Stored
from f8emu.torch.foreign_layers import ForeignWatch, foreign_layers
from f8emu.torch.layer.float8_layer import Float8Layer, all_float8_layers, chosen_layers
from f8emu.torch.layer.observers import GemmSeen, Observation, TensorSeen
from f8emu.torch.torch_internals import is_dtensor, not_compiled, rank_of_process

_CALL = "f8emu.torch.capture"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def capture(
    model: nn.Module,
    path: str | Path,
    *,
    steps: Iterable[int] | None = None,
    ring: int | None = None,
    layers: str | None = None,
    tensors: bool = True,
    first_step: int = 1,
) -> "Capture":
    """Write every operand, scale and product of chosen training steps to `path`, one directory per step and rank.

    A step ends when an optimizer steps, or with `Capture.step()`. The layers carry taps during the chosen steps only
    (with a ring, during every step). Compiled code is compiled once more with the taps, and both versions stay cached.
    Between chosen steps the capture observes nothing, so it counts them by what ended the last observed step: the
    optimizer or the call.

    Float8 linear layers of other stacks are captured too, in their forward passes and as far as they show themselves
    (`f8emu.capture.ForeignRecord`): transformers' FP8Linear, torchao's Float8Linear, and layers with a float8 `weight`
    and a `weight_scale` or `weight_scale_inv`, as vLLM has them. A server ends a step with `Capture.step()`, or with
    the capture.

    Args:
        model: a model with `Float8Linear` layers, or with another stack's.
        path: the directory to write to; it is created. All ranks give the same.
        steps: the numbers of the steps to capture; by default the first.
        ring: instead of `steps`: keep this many steps in host memory, and write them when a NaN or an infinity
            appears in a layer's input, weight, gradient or product, or when `Capture.write()` is called. The step in
            progress is written too, once it ends; then the capture is over. Each rank watches its own tensors.
        layers: a regular expression that is searched in the names of the layers; None: all.
        tensors: also write the tensors before their casts, from which `f8emu replay` computes scales and codes.
        first_step: the number of the next step.

    Raises:
        SpecError: both `steps` and `ring`, or numbers out of range.
        OperandError: no layer to capture.
        CaptureError: `path` cannot be created, or this rank has captured into it before.
    """
    every = chosen_layers({**all_float8_layers(model), **foreign_layers(model)}, layers, call=_CALL)
    chosen = {name: layer for name, layer in every.items() if isinstance(layer, Float8Layer)}
    others = {name: layer for name, layer in every.items() if name not in chosen}
    device = next((p.device for layer in every.values() for p in layer.parameters()), torch.device("cpu"))
    recipes = {layer.recipe.content_hash: layer.recipe for layer in chosen.values()}
    options: dict[str, Any] = {"steps": steps, "ring": ring, "first_step": first_step}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    session = session_of(_CALL, path, "torch", name, rank_of_process(), recipes, **options)
    return Capture(model, chosen, others, session, tensors)


class Capture(Handle):
    """A running capture, returned by `capture`; a context manager. A failing capture never stops the training."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Float8Layer],
        others: Mapping[str, nn.Module],
        session: Session,
        tensors: bool,
    ) -> None:
        super().__init__(session, tensors, _stored, _fault)
        self._sharded: dict[str, bool] = {}
        self._has_seen = False
        self._ended_by: Callable[[], object] = lambda: None
        hook = register_optimizer_step_post_hook(not_compiled(lambda optimizer, *_: self._end(optimizer)))
        self._observation = Observation(model, layers, self, hook)
        self._others = ForeignWatch(others, self._foreign)
        self._turn(session.is_wanted)

    @property
    def is_done(self) -> bool:
        """Whether the capture is over: it records nothing more."""
        return self._observation.hook is None

    def step(self) -> None:
        """End the current step. Optimizers of torch.optim do this by themselves; then this call does nothing."""
        self._end(self)

    def _end(self, source: object) -> None:
        with self._session.lock:
            is_end = self._has_seen if self._observation.is_on else self._ended_by() in (None, source)
            if is_end and not self.is_done:
                self._ended_by = weakref.ref(source)
                self._has_seen = False
                self._session.end()
                if self._session.is_over:
                    self.close()
                else:
                    self._turn(self._session.is_wanted)

    def _turn(self, on: bool) -> None:
        self._observation.turn(on)
        self._others.turn(on)

    def _detach(self) -> None:
        self._observation.remove()
        self._others.turn(False)

    def tensor(self, seen: TensorSeen) -> None:
        """Record a tensor before its casts; called by the layers' taps."""
        self._has_seen = True
        self._keep_tensor(seen.layer, seen.tensor, seen.value)

    def gemm(self, seen: GemmSeen) -> None:
        """Record a GEMM; called by the layers' taps."""
        self._has_seen = True
        # Tensor parallelism: told in the forward pass, in which FSDP2 has whole weights.
        if seen.gemm == "output":
            self._sharded[seen.layer] = is_dtensor(self._observation.layers[seen.layer].weight)
        options: dict[str, Any] = {
            **facts_of(seen.a, seen.b, seen.product, seen.spec),
            "engine": seen.engine,
            "chip": seen.recipe.chip,
            "split_k": seen.split_k,
            "split_k_source": seen.split_source,
            "recipe": seen.recipe.content_hash,
            "is_sharded": self._sharded.get(seen.layer, True),
        }
        self._keep_gemm(seen.layer, seen.gemm, arrays_of(seen.a, seen.b, seen.product), options)

    def _foreign(
        self, layer: str, tensors: Mapping[str, Tensor], arrays: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> None:
        self._has_seen = True
        for tensor, value in tensors.items():
            self._keep_tensor(layer, tensor, value)
        self._keep_gemm(layer, "output", arrays, facts, ForeignRecord)


def _fault(x: Tensor) -> str:
    try:
        # NaN if one is; a mask would be as large as x
        lowest, highest = (float(bound) for bound in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    except RuntimeError:  # no memory: this one is not looked at
        return ""
    return "" if math.isfinite(lowest) and math.isfinite(highest) else "NaN" if math.isnan(lowest) else "infinity"


def _stored(x: Tensor) -> Stored:
    # A copy on the host, also of what is there already.
    try:
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        copy.copy_(x.detach())
    except RuntimeError as error:  # torch has no other for memory of the host
        raise MemoryError(str(error)) from None
    return Stored(_DTYPES.get(x.dtype, "U8"), tuple(x.shape), copy.reshape(-1).view(torch.uint8).numpy().data)
