"""Capture of training steps: every operand, scale and product of the layers, on the disk.

What is written is described in `f8emu.capture.record`; `f8emu replay` computes it again without a GPU, `f8emu diff`
compares two. A captured step copies all that it writes to the host, and takes its time. Nothing that goes wrong while
writing (a full disk, a limit) ends the training: it is listed in the capture, and a warning says it once a step.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from f8emu.capture.record import GemmRecord, StepHeader, TensorRecord
from f8emu.capture.session import LIMIT_BYTES, Handle, Session
from f8emu.capture.writer import Stored
from f8emu.environment import versions
from f8emu.spec.chips import CHIPS
from f8emu.split_k.plan import plans_of
from f8emu.torch.float8_layer import Float8Layer, float8_layers
from f8emu.torch.layer.observers import GemmSeen, Observation, TensorSeen
from f8emu.torch.layer.operands import Operand
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
    limit_bytes: int | None = LIMIT_BYTES,
    first_step: int = 1,
) -> "Capture":
    """Write every operand, scale and product of chosen training steps to `path`, one directory per step and rank.

    A step ends when an optimizer steps, or with `Capture.step()`. The layers carry taps during the chosen steps only
    (with a ring, during every step). Compiled code is compiled once more with the taps, and both versions stay cached.
    Between chosen steps the capture observes nothing, so it counts them by what ended the last observed step: the
    optimizer or the call.

    Args:
        model: a model with `Float8Linear` layers.
        path: the directory to write to; it is created. All ranks give the same.
        steps: the numbers of the steps to capture; by default the first.
        ring: instead of `steps`: keep this many steps in host memory, and write them when a NaN or an infinity
            appears in a layer's input, weight, gradient or product, or when `Capture.write()` is called. The step in
            progress is written too, once it ends; then the capture is over. Each rank watches its own tensors.
        layers: a regular expression that is searched in the names of the layers; None: all.
        tensors: also write the tensors before their casts, from which `f8emu replay` computes scales and codes.
        limit_bytes: the limit for all files that this rank writes, and for what a ring holds. Records beyond it are
            left out; a ring drops its oldest steps. The capture ends at the first step for which there is no room at
            all. None: no limit.
        first_step: the number of the next step.

    Raises:
        SpecError: both `steps` and `ring`, or numbers out of range.
        OperandError: no layer to capture.
        CaptureError: `path` cannot be created, or this rank has captured into it before.
    """
    chosen = float8_layers(model, layers, call=_CALL)
    made = _header(chosen)
    options: dict[str, Any] = {"steps": steps, "ring": ring, "limit_bytes": limit_bytes, "first_step": first_step}
    options |= {"rank": rank_of_process()[0], "header": lambda number, reason: made(step=number, reason=reason)}
    session = Session(_CALL, path, **options)
    return Capture(model, chosen, session, tensors)


class Capture(Handle):
    """A running capture, returned by `capture`; a context manager. A failing capture never stops the training."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Float8Layer], session: Session, tensors: bool) -> None:
        super().__init__(session)
        self._with_tensors = tensors
        self._sharded: dict[str, bool] = {}
        self._has_seen = False
        self._ended_by: Callable[[], object] = lambda: None
        hook = register_optimizer_step_post_hook(not_compiled(lambda optimizer, *_: self._end(optimizer)))
        self._observation = Observation(model, layers, self, hook)
        self._observation.turn(session.is_wanted)

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
                    self._observation.turn(self._session.is_wanted)

    def write(self, reason: str = "asked for") -> None:
        """Write the steps that the ring holds, and the step in progress once it ends. Without a ring, do nothing."""
        with self._session.lock:
            self._session.write(reason)

    def close(self) -> None:
        """End the capture. A step in progress is written as far as it got. Safe to call twice."""
        with self._session.lock:
            if not self.is_done:
                self._observation.remove()
                self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an exception the steps of the ring are written, and the step in progress stays unfinished."""
        if error is None:
            return self.close()
        with self._session.lock:
            if not self.is_done:
                self._observation.remove()
                self._session.abandon(error)

    def tensor(self, seen: TensorSeen) -> None:
        """Record a tensor before its casts; called by the layers' taps."""
        with self._session.lock:
            self._has_seen = True
            if not self._session.is_wanted:
                return
            self._look(seen.value, f"the {seen.tensor} of {seen.layer}")
            if not self._with_tensors:
                return
            numbers = self._session.next(seen.layer, seen.tensor)
            record = TensorRecord(layer=seen.layer, tensor=seen.tensor, dtype=_name(seen.value.dtype), **numbers)
            self._session.add(record, seen.value.nbytes, lambda: {"value": _stored(seen.value)})

    def gemm(self, seen: GemmSeen) -> None:
        """Record a GEMM; called by the layers' taps."""
        with self._session.lock:
            self._has_seen = True
            if not self._session.is_wanted:
                return
            self._look(seen.product, f"{seen.gemm} of {seen.layer}")
            tensors = {**_operand("a", seen.a), **_operand("b", seen.b), "product": seen.product}
            size = sum(tensor.nbytes for tensor in tensors.values())
            self._session.add(self._record(seen), size, lambda: {name: _stored(x) for name, x in tensors.items()})

    def _record(self, seen: GemmSeen) -> GemmRecord:
        (m, k), n = seen.a.codes.shape, seen.b.codes.shape[0]
        return GemmRecord(
            **self._session.next(seen.layer, seen.gemm),
            layer=seen.layer,
            gemm=seen.gemm,
            m=m,
            n=n,
            k=k,
            a_format=_name(seen.a.codes.dtype),
            b_format=_name(seen.b.codes.dtype),
            granularity_a=seen.spec.a.granularity.value,
            granularity_b=seen.spec.b.granularity.value,
            out_dtype=_name(seen.product.dtype),
            use_fast_accum=seen.spec.use_fast_accum,
            engine=seen.engine,
            chip=seen.recipe.chip,
            split_k=seen.split_k,
            split_k_source=seen.split_source,
            recipe=seen.recipe.content_hash,
            is_sharded=self._is_sharded(seen),
        )

    def _is_sharded(self, seen: GemmSeen) -> bool:
        """Tensor parallelism: asked in the forward pass, in which FSDP2 has whole weights."""
        if seen.gemm == "output":
            self._sharded[seen.layer] = is_dtensor(self._observation.layers[seen.layer].weight)
        return self._sharded.get(seen.layer, True)

    def _look(self, x: Tensor, what: str) -> None:
        """A ring is written when something is not finite."""
        if not self._session.looks or not x.numel():
            return
        try:
            lowest, highest = (float(one) for one in torch.aminmax(x))  # NaN if one is; a mask would be as large as x
        except RuntimeError:  # no memory: this one is not looked at
            return
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            kind = "NaN" if math.isnan(lowest) else "infinity"
            self._session.write(f"{kind} in {what} at step {self.number}")


def _header(layers: Mapping[str, Float8Layer]) -> Any:
    """What all steps share, as a function of the rest."""
    device = next((p.device for layer in layers.values() for p in layer.parameters()), torch.device("cpu"))
    rank, world_size = rank_of_process()
    shared: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "framework": "torch",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
        "plan": plans_of(CHIPS[layer.recipe.chip] for layer in layers.values()),
        "recipes": {layer.recipe.content_hash: layer.recipe for layer in layers.values()},
    }
    return lambda **own: StepHeader(**shared, **own)


def _stored(x: Tensor) -> Stored:
    """A copy on the host, also of what is there already."""
    try:
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        copy.copy_(x.detach())
    except RuntimeError as error:  # torch has no other for memory of the host
        raise MemoryError(str(error)) from None
    return Stored(_DTYPES.get(x.dtype, "U8"), tuple(x.shape), copy.reshape(-1).view(torch.uint8).numpy().data)


def _operand(side: str, operand: Operand) -> dict[str, Tensor]:
    codes = {f"{side}.codes": operand.codes}
    return codes if operand.scale is None else codes | {f"{side}.scale": operand.scale}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
