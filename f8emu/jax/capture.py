"""Capture of training steps in JAX: every operand, scale and product of named layers, on the disk.

As `f8emu.torch.capture`: the same files, which `f8emu replay` computes again and `f8emu diff` compares, also with those
of torch. JAX knows no layers, so each gets its name where its `dot_general` is made; a program that is traced with it
has callbacks, in every step, and stays as it is where a plain `dot_general` is used.

Callbacks are not ordered: XLA runs one as soon as its arrays are there. `order` and `turn` of a record, and the record
that a ring names, are therefore those in which the callbacks ran. Where a layer is called more than once a step, two
runs may number its calls differently.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np

from f8emu.capture.record import GemmRecord, StepHeader, TensorRecord
from f8emu.capture.session import LIMIT_BYTES, Handle, Session
from f8emu.capture.writer import Stored
from f8emu.environment import versions
from f8emu.jax.gemm.engine import engine_of
from f8emu.jax.gemm.planned import layer_split_k
from f8emu.jax.layer.dot_general import DelayedDotGeneral, DotGeneral
from f8emu.jax.layer.feed_forward import NAMES, DelayedFeedForward, FeedForward
from f8emu.jax.layer.matmul import LAYOUTS, Plan
from f8emu.jax.layer.operands import Operand
from f8emu.jax.layer.sharding import Divided
from f8emu.spec.chips import CHIPS
from f8emu.spec.recipe import Recipe
from f8emu.split_k.plan import plans_of

_CALL = "f8emu.jax.capture"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_Function = TypeVar("_Function", DotGeneral, DelayedDotGeneral, FeedForward, DelayedFeedForward)


def capture(
    path: str | Path,
    *,
    steps: Iterable[int] | None = None,
    ring: int | None = None,
    tensors: bool = True,
    limit_bytes: int | None = LIMIT_BYTES,
    first_step: int = 1,
) -> "Capture":
    """Write every operand, scale and product of chosen steps to `path`, one directory per step and process.

    A step ends with `Capture.step()`. The arguments are those of `f8emu.torch.capture`.

    Raises:
        SpecError: both `steps` and `ring`, or numbers out of range.
        CaptureError: `path` cannot be created, or this process has captured into it before.
    """
    recipes: dict[str, Recipe] = {}
    shared: dict[str, Any] = {
        "rank": jax.process_index(),
        "world_size": jax.process_count(),
        "framework": "jax",
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "recipes": recipes,
    }
    options: dict[str, Any] = {"steps": steps, "ring": ring, "limit_bytes": limit_bytes, "first_step": first_step}

    def header(number: int, reason: str) -> StepHeader:
        chips = [CHIPS[recipe.chip] for recipe in recipes.values()]
        return StepHeader(step=number, reason=reason, plan=plans_of(chips), **shared)

    options["header"] = header
    return Capture(Session(_CALL, path, rank=jax.process_index(), **options), recipes, tensors)


class Capture(Handle):
    """A running capture, returned by `capture`; a context manager."""

    def __init__(self, session: Session, recipes: dict[str, Recipe], tensors: bool) -> None:
        super().__init__(session)
        self._recipes, self._with_tensors = recipes, tensors

    @property
    def is_done(self) -> bool:
        """Whether the capture is over: it records nothing more."""
        return self._session.is_over

    def named(self, name: str, function: _Function) -> _Function:
        """`function` as the layer `name`. The function comes from `dot_general`, `feed_forward` or a delayed one, one
        per layer.

        The layers of a block are `name.w1`, `name.w2` and `name.w3`. A call that `jax.checkpoint` repeats is captured
        as another call, and so is every entry of a batch.
        """
        if isinstance(function, FeedForward | DelayedFeedForward):
            parts: Any = zip(NAMES, function.layers, strict=True)
            layers: Any = tuple(self.named(f"{name}.{part}", layer) for part, layer in parts)
            return dataclasses.replace(function, layers=layers)
        self._recipes[function.recipe.content_hash] = function.recipe
        return dataclasses.replace(function, tap=_Layer(name, self._session, self._with_tensors))

    def step(self) -> None:
        """End the current step, after waiting for the callbacks that still have something to show."""
        jax.effects_barrier()
        with self._session.lock:
            if not self.is_done:
                self._session.end()

    def write(self, reason: str = "asked for") -> None:
        """Write the steps that the ring holds, and the step in progress once it ends. Without a ring, do nothing."""
        jax.effects_barrier()
        with self._session.lock:
            self._session.write(reason)

    def close(self) -> None:
        """End the capture. A step in progress is written as far as it got. Safe to call twice."""
        jax.effects_barrier()
        with self._session.lock:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an exception the steps of the ring are written, and the step in progress stays unfinished."""
        if error is None:
            return self.close()
        with contextlib.suppress(Exception):  # a program that failed says so again
            jax.effects_barrier()
        with self._session.lock:
            self._session.abandon(error)


class _Layer:
    """The tap of one layer: equal to itself alone, so that programs of two layers are two."""

    def __init__(self, name: str, session: Session, with_tensors: bool) -> None:
        self.name, self.session, self.with_tensors = name, session, with_tensors

    def tensor(self, tensor: str, value: jax.Array) -> None:
        """A matrix before its casts; also where only a ring looks whether it is finite."""
        if self.with_tensors or self.session.is_ring:
            jax.debug.callback(functools.partial(self._tensor, tensor), value)

    def gemm(self, gemm: str, a: Operand, b: Operand, product: jax.Array, plan: Plan) -> None:
        """A GEMM and its product."""
        spec = plan.recipe.gemms[gemm]
        sizes = product.shape[0], product.shape[1], a.codes.shape[1]
        dtypes = product.dtype.name, a.codes.dtype.name, b.codes.dtype.name
        split = layer_split_k(spec, sizes, LAYOUTS[gemm], dtypes, chip=CHIPS[plan.recipe.chip])
        options: dict[str, Any] = {
            "layer": self.name,
            "gemm": gemm,
            "m": sizes[0],
            "n": sizes[1],
            "k": sizes[2],
            "a_format": dtypes[1],
            "b_format": dtypes[2],
            "granularity_a": spec.a.granularity.value,
            "granularity_b": spec.b.granularity.value,
            "out_dtype": dtypes[0],
            "use_fast_accum": spec.use_fast_accum,
            "engine": "emulated" if engine_of(engine=plan.engine).startswith("emulated") else "hardware",
            "chip": plan.recipe.chip,
            "split_k": split.split_k,
            "split_k_source": split.source.value,
            "recipe": plan.recipe.content_hash,
            "is_sharded": plan.divided != Divided(),
        }
        arrays = {"a.codes": a.codes, "b.codes": b.codes, "product": product}
        arrays |= {f"{side}.scale": one.scale for side, one in (("a", a), ("b", b)) if one.scale is not None}
        jax.debug.callback(functools.partial(self._gemm, options), arrays)

    def _tensor(self, tensor: str, value: Any) -> None:
        with self.session.lock:
            if self.session.is_wanted:
                self._look(value, f"the {tensor} of {self.name}")
                if not self.with_tensors:
                    return
                numbers = self.session.next(self.name, tensor)
                record = TensorRecord(layer=self.name, tensor=tensor, dtype=value.dtype.name, **numbers)
                self.session.add(record, value.nbytes, lambda: {"value": _stored(value)})

    def _gemm(self, options: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        with self.session.lock:
            if self.session.is_wanted:
                self._look(arrays["product"], f"{options['gemm']} of {self.name}")
                record = GemmRecord(**self.session.next(self.name, options["gemm"]), **options)
                size = sum(array.nbytes for array in arrays.values())
                self.session.add(record, size, lambda: {name: _stored(x) for name, x in arrays.items()})

    def _look(self, x: Any, what: str) -> None:
        """A ring is written when something is not finite."""
        if self.session.looks:
            values = np.asarray(x).astype(np.float32)
            if not np.isfinite(values).all():
                kind = "NaN" if np.isnan(values).any() else "infinity"
                self.session.write(f"{kind} in {what} at step {self.session.number}")


def _stored(x: Any) -> Stored:
    """A copy."""
    copy = np.array(x, order="C")
    return Stored(_DTYPES.get(copy.dtype.name, "U8"), copy.shape, copy.reshape(-1).view(np.uint8).data)
