"""Capture of training steps: every operand, scale and product of the layers, on the disk.

What is written is described in `f8emu.capture.record`; `f8emu replay` computes it again without a GPU, `f8emu diff`
compares two. A captured step copies all that it writes to the host, and takes its time. Nothing that goes wrong while
writing (a full disk, a limit) ends the training: it is listed in the capture, and a warning says it once a step.
"""

import re
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from f8emu.capture import Budget, CaptureError, GemmRecord, LeftOut, StepHeader, StepWriter, Stored, TensorRecord
from f8emu.capture.record import Record
from f8emu.capture.writer import size_of
from f8emu.environment import versions
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.plan import CHIP as PLAN_CHIP
from f8emu.spec.plan import LIBRARY
from f8emu.spec.recipe import Recipe
from f8emu.torch.dtypes import CHIP
from f8emu.torch.training.float8_linear import Float8Linear
from f8emu.torch.training.observation import GemmSeen, TensorSeen, observe
from f8emu.torch.training.operands import Operand
from f8emu.torch.training.torch_internals import not_compiled

LIMIT_BYTES = 16 * 2**30
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of a name that say how a layer is run, not which one it is."""


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
    """Write every operand, scale and product of some steps of training to `path`, one directory for a step and rank.

    A step ends when an optimizer steps, or with `Capture.step()`. After the last one the layers are as before.

    Args:
        model: with `Float8Linear` layers.
        path: a directory; it is made. All ranks give the same.
        steps: the numbers of the steps; by default the first.
        ring: instead of `steps`: keep this many steps in host memory, and write them when a NaN or an infinity
            appears in a layer's input, weight, gradient or product, or when `Capture.write()` asks for them. The step
            that is under way is written too, to its end; then the capture is over. Each rank looks at its own tensors.
        layers: a regular expression that is searched in the names of the layers; None: all.
        tensors: also write the tensors before their casts, from which `f8emu replay` computes scales and codes.
        limit_bytes: of all steps that this rank writes, and of what a ring holds; what exceeds it is left out, of a
            ring its oldest steps. None: no limit.
        first_step: the number of the step that comes next.

    Raises:
        SpecError: both `steps` and `ring`, or numbers that make no sense.
        OperandError: no layer to capture.
        CaptureError: `path` cannot be made, or this rank has captured into it before.
    """
    numbers = {first_step} if steps is None else set(steps)
    if ring is not None and (steps is not None or ring < 1):
        raise SpecError(f"capture: give steps, or a ring of at least 1 step; got steps={steps!r} and ring={ring!r}")
    if not numbers or min(numbers) < first_step:
        raise SpecError(f"capture: steps must be {first_step} (first_step) or later, and some; got {sorted(numbers)}")
    if limit_bytes is not None and limit_bytes < 1:
        raise SpecError(f"capture: limit_bytes must be at least 1, or None for no limit; got {limit_bytes}")
    chosen = _layers(model, layers)
    root = Path(path)
    rank = _rank()[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError(f"capture: cannot make the directory {root}: {error.strerror}; give another path") from None
    if any(root.glob(f"step-*-rank-{rank:05d}*")):
        raise CaptureError(f"capture: {root} has captured steps of rank {rank} already; give another path")
    return Capture(model, root, chosen, None if ring is not None else numbers, ring, tensors, limit_bytes, first_step)


class Capture:
    """What `capture` gives; a context manager. Training goes on whatever happens to it."""

    def __init__(
        self,
        model: nn.Module,
        root: Path,
        layers: Mapping[str, Float8Linear],
        steps: set[int] | None,
        ring: int | None,
        tensors: bool,
        limit_bytes: int | None,
        first_step: int,
    ) -> None:
        self.path = root
        self.number = first_step
        """Of the step that is under way."""
        self.written: list[Path] = []
        """Directories of the steps that were finished."""
        self.left_out: list[LeftOut] = []
        """Of all steps: what was not written, and why."""
        self._steps, self._with_tensors = steps, tensors
        self._budget = Budget(limit_bytes)
        self._held: deque[_Held] = deque(maxlen=None if ring is None else ring)
        self._limit = limit_bytes
        self._versions = versions()
        self._device = _device(layers)
        self._lock = threading.RLock()  # backward passes have threads of their own
        self._current: StepWriter | _Held | None = None
        self._layers = dict(layers)
        self._sharded: dict[str, bool] = {}
        self._orders: dict[tuple[str, str], int] = {}
        self._order = 0
        self._has_seen = False
        self._reason = ""
        self._recipes: dict[str, Recipe] = {layer.recipe.content_hash: layer.recipe for layer in layers.values()}
        self._observation: Any = observe(model, self, layers)
        self._hook: Any = register_optimizer_step_post_hook(not_compiled(self._after_step))

    @property
    def is_done(self) -> bool:
        """Whether nothing more is captured."""
        return self._observation is None

    # What happens in training

    def tensor(self, seen: TensorSeen) -> None:
        """An observer's method."""
        with self._lock:
            self._has_seen = True
            if not self._is_wanted():
                return
            record = TensorRecord(
                order=self._order,
                layer=seen.layer,
                tensor=seen.tensor,
                turn=self._turn(seen.layer, seen.tensor),
                dtype=_name(seen.value.dtype),
            )
            self._look(seen.value, f"the {seen.tensor} of {seen.layer}")
            if self._with_tensors:
                self._add(record, {"value": seen.value})

    def gemm(self, seen: GemmSeen) -> None:
        """An observer's method."""
        with self._lock:
            self._has_seen = True
            if not self._is_wanted():
                return
            (m, k), n = seen.a.codes.shape, seen.b.codes.shape[0]
            record = GemmRecord(
                order=self._order,
                layer=seen.layer,
                gemm=seen.gemm,
                turn=self._turn(seen.layer, seen.gemm),
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
                chip=getattr(seen.recipe, "chip", CHIP.name),
                split_k=seen.split_k,
                split_k_source=seen.split_source,
                recipe=seen.recipe.content_hash,
                is_sharded=self._is_sharded(seen),
            )
            self._look(seen.product, f"{seen.gemm} of {seen.layer}")
            self._add(record, {**_operand("a", seen.a), **_operand("b", seen.b), "product": seen.product})

    def step(self) -> None:
        """The step is over. Optimizers of torch.optim say so themselves; then this does nothing."""
        with self._lock:
            if not self._has_seen:
                return
            self._end()
            if self.is_done:
                return
            self.number += 1
            if (self._steps is not None and self.number > max(self._steps)) or self._reason:
                self.close()

    def write(self, reason: str = "asked for") -> None:
        """Write what the ring holds, and the step that is under way once it is over. Without a ring, nothing."""
        with self._lock:
            if self._steps is not None or self._reason or self.is_done:
                return
            self._reason = reason
            held = [*self._held, *([self._current] if isinstance(self._current, _Held) else [])]
            self._held.clear()
            self._current = None
            for one in held:
                writer = StepWriter(self.path, self._header(one.number), self._budget)
                for record, arrays in one.records:
                    writer.add(record, arrays)
                for left_out in one.left_out:
                    writer.leave_out(left_out)
                if one.number == self.number:
                    self._current = writer
                else:
                    self._finish(writer)

    def close(self) -> None:
        """End the capture; a step that is under way is finished as it is. May be called twice."""
        with self._lock:
            if self.is_done:
                return
            self._observation.remove()
            self._hook.remove()
            self._observation = self._hook = None
            self._end()
            self._held.clear()
            self._layers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What is kept

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step()

    def _is_wanted(self) -> bool:
        return not self.is_done and (self._steps is None or self.number in self._steps)

    def _is_sharded(self, seen: GemmSeen) -> bool:
        """Tensor parallelism, or a float8 all-gather: asked in the forward pass, in which FSDP2 has whole weights."""
        if seen.gemm == "output":
            weight = self._layers[seen.layer].weight
            self._sharded[seen.layer] = type(weight) not in (Tensor, nn.Parameter)
        return self._sharded.get(seen.layer, True)

    def _turn(self, layer: str, what: str) -> int:
        turn = self._orders[layer, what] = self._orders.get((layer, what), 0) + 1
        self._order += 1
        return turn

    def _look(self, x: Tensor, what: str) -> None:
        """A ring is written when something is not finite."""
        if self._steps is None and not self._reason and x.is_floating_point() and not bool(torch.isfinite(x).all()):
            kind = "NaN" if bool(torch.isnan(x).any()) else "infinity"
            self.write(f"{kind} in {what} at step {self.number}")

    def _add(self, record: Record, tensors: Mapping[str, Tensor]) -> None:
        if self._current is None:
            is_held = self._steps is None and not self._reason
            self._current = (
                _Held(self.number) if is_held else StepWriter(self.path, self._header(self.number), self._budget)
            )
        current = self._current
        try:
            arrays = {name: _stored(tensor) for name, tensor in tensors.items()}
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            current.leave_out(LeftOut(place=record.place, size=size, reason=f"no memory for a copy: {error!s:.80}"))
            return
        if isinstance(current, StepWriter):
            current.add(record, arrays)
            return
        size = size_of(arrays)
        while self._held and self._exceeds(size):
            self._held.popleft()
        if self._exceeds(size):
            current.leave_out(LeftOut(place=record.place, size=size, reason=f"limit_bytes={self._limit} in memory"))
        else:
            current.records.append((record, arrays))
            current.size += size

    def _exceeds(self, size: int) -> bool:
        assert isinstance(self._current, _Held), "what is written has a budget of its own"
        held = sum(one.size for one in self._held) + self._current.size
        return self._limit is not None and held + size > self._limit

    def _end(self) -> None:
        current, self._current = self._current, None
        self._orders, self._order, self._has_seen = {}, 0, False
        if isinstance(current, StepWriter):
            self._finish(current)
        elif current is not None:
            self._held.append(current)

    def _finish(self, writer: StepWriter) -> None:
        final = writer.close()
        self.left_out += writer.left_out
        if final is not None:
            self.written.append(final)
        if final is not None and not writer.left_out:
            return
        reason = writer.fault or writer.left_out[0].reason
        end = "is not finished" if final is None else f"lacks {len(writer.left_out)} records"
        warnings.warn(
            f"f8emu.torch.capture: {writer.name} {end}: {reason}; training goes on. Free some space, or capture "
            "fewer layers or steps, or without tensors",
            stacklevel=2,
        )

    def _header(self, number: int) -> StepHeader:
        rank, world_size = _rank()
        return StepHeader(
            step=number,
            rank=rank,
            world_size=world_size,
            framework="torch",
            device=self._device,
            versions=self._versions,
            plan=f"{LIBRARY} on {PLAN_CHIP}",
            recipes=self._recipes,
            reason=self._reason,
        )


class _Held:
    """A step in memory."""

    def __init__(self, number: int) -> None:
        self.number, self.size = number, 0
        self.records: list[tuple[Record, Mapping[str, Stored]]] = []
        self.left_out: list[LeftOut] = []

    def leave_out(self, record: LeftOut) -> None:
        self.left_out.append(record)


def _layers(model: nn.Module, pattern: str | None) -> dict[str, Float8Linear]:
    """The layers to capture, by the names that they have in the model as it was before it was wrapped."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    found = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear)
    }
    try:
        chosen = {name: layer for name, layer in found.items() if pattern is None or re.search(pattern, name)}
    except re.error as error:
        raise SpecError(f"capture: layers must be a regular expression; got {pattern!r}: {error}") from None
    if not chosen:
        wanted = "" if pattern is None else f" whose name has {pattern!r}"
        known = f": {', '.join(list(found)[:8])}" if found else ""
        raise OperandError(
            f"capture: expected a Float8Linear in the model{wanted}; found {len(found)} in all{known}; convert the "
            "model first, with convert_to_float8_training, or give other layers"
        )
    return chosen


def _stored(x: Tensor) -> Stored:
    """A copy on the host, also of what is there already."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    copy.copy_(x.detach())
    data = copy.reshape(-1).view(torch.uint8).numpy().data
    return Stored(_DTYPES.get(x.dtype, "U8"), tuple(x.shape), data)


def _operand(side: str, operand: Operand) -> dict[str, Tensor]:
    codes = {f"{side}.codes": operand.codes}
    return codes if operand.scale is None else codes | {f"{side}.scale": operand.scale}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rank() -> tuple[int, int]:
    """(rank, number of ranks)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _device(layers: Mapping[str, Float8Linear]) -> str:
    device = next((p.device for layer in layers.values() for p in layer.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
