"""Capture of training steps in JAX: every operand, scale and product of named layers, on the disk.

As `f8emu.torch.capture`: the same files, which `f8emu replay` computes again and `f8emu diff` compares, also with those
of torch. JAX knows no layers, so each gets its name where its `dot_general` is made; a program that is traced with it
has callbacks, in every step, and stays as it is where a plain `dot_general` is used.

Callbacks are not ordered: XLA runs one as soon as its arrays are there. `order` and `turn` of a record, and the record
that a ring names, are therefore those in which the callbacks ran. Where a layer is called more than once a step, two
runs may number its calls differently.
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from f8emu.capture.handle import Handle, arrays_of, facts_of, session_of
from f8emu.capture.session import Session
from f8emu.capture.writer import Stored
from f8emu.jax.gemm.call import is_at_hand
from f8emu.jax.gemm.engine import engine_of
from f8emu.jax.layer.dot_general import DelayedDotGeneral, DotGeneral
from f8emu.jax.layer.matmul import LayerCall
from f8emu.jax.layer.operands import Operand
from f8emu.jax.layer.sharding import Divided
from f8emu.spec.chips import CHIPS
from f8emu.spec.formats import FORMATS
from f8emu.spec.gemm import LAYER_LAYOUTS
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.recipe import Recipe
from f8emu.split_k.ask import split_of

_CALL = "f8emu.jax.capture"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_Function = TypeVar("_Function", DotGeneral, DelayedDotGeneral)


def capture(
    path: str | Path,
    *,
    steps: Iterable[int] | None = None,
    ring: int | None = None,
    tensors: bool = True,
    first_step: int = 1,
) -> "Capture":
    """Write every operand, scale and product of chosen steps to `path`, one directory per step and process.

    A step ends with `Capture.step()`. The arguments are those of `f8emu.torch.capture`.

    Raises:
        SpecError: both `steps` and `ring`, or numbers out of range.
        CaptureError: `path` cannot be created, or this process has captured into it before.
    """
    recipes: dict[str, Recipe] = {}
    options: dict[str, Any] = {"steps": steps, "ring": ring, "first_step": first_step}
    device, ranks = jax.devices()[0].device_kind, (jax.process_index(), jax.process_count())
    return Capture(session_of(_CALL, path, "jax", device, ranks, recipes, **options), recipes, tensors)


class Capture(Handle):
    """A running capture, returned by `capture`; a context manager."""

    def __init__(self, session: Session, recipes: dict[str, Recipe], tensors: bool) -> None:
        super().__init__(session, tensors, _stored, _fault)
        self._recipes = recipes

    @property
    def is_done(self) -> bool:
        """Whether the capture is over: it records nothing more."""
        return self._session.is_over

    def named(self, name: str, function: _Function) -> _Function:
        """`function`, which `dot_general` or `delayed_dot_general` returned, as the layer `name`; one per layer.

        A call that `jax.checkpoint` repeats is captured as another call, and so is every entry of a batch.
        """
        self._recipes[function.recipe.content_hash] = function.recipe
        return dataclasses.replace(function, tap=_Layer(name, self))

    def step(self) -> None:
        """End the current step, after waiting for the callbacks that still have something to show."""
        self._wait()
        with self._session.lock:
            if not self.is_done:
                self._session.end()

    def _wait(self) -> None:
        jax.effects_barrier()


class _Layer:
    # The tap of one layer: equal to itself alone, so that programs of two layers are two.

    def __init__(self, name: str, capturing: Capture) -> None:
        self.name, self.capturing = name, capturing

    def tensor(self, tensor: str, value: jax.Array) -> None:
        """A matrix before its casts; also where only a ring looks whether it is finite."""
        if self.capturing._with_tensors or self.capturing._session.is_ring:
            jax.debug.callback(functools.partial(self.capturing._keep_tensor, self.name, tensor), value)

    def gemm(self, gemm: str, a: Operand, b: Operand, product: jax.Array, layer: LayerCall) -> None:
        """A GEMM and its product."""
        spec, chip = layer.recipe.gemms[gemm], CHIPS[layer.recipe.chip]
        sizes = product.shape[0], product.shape[1], a.codes.shape[1]
        call = layer_call(spec, sizes, FORMATS[product.dtype.name], chip)
        split = split_of(None, call, LAYER_LAYOUTS[gemm], at_hand=is_at_hand(chip))
        options: dict[str, Any] = {
            **facts_of(a, b, product, spec),
            "engine": "emulated" if engine_of(engine=layer.engine).startswith("emulated") else "hardware",
            "chip": chip.name,
            "split_k": split.split_k,
            "split_k_source": split.source.value,
            "recipe": layer.recipe.content_hash,
            "is_sharded": layer.divided != Divided(),
        }
        keep = functools.partial(self.capturing._keep_gemm, self.name, gemm, options=options)
        jax.debug.callback(keep, arrays_of(a, b, product))


def _fault(x: Any) -> str:
    values = np.asarray(x).astype(np.float32)
    return "" if np.isfinite(values).all() else "NaN" if np.isnan(values).any() else "infinity"


def _stored(x: Any) -> Stored:
    copy = np.array(x, order="C")
    return Stored(_DTYPES.get(copy.dtype.name, "U8"), copy.shape, copy.reshape(-1).view(np.uint8).data)
