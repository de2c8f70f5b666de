"""A running capture as torch and JAX have it in common: what their layers show becomes records of a session."""

import contextlib
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, Self

from f8emu.capture.record import ForeignRecord, GemmRecord, LeftOut, StepHeader, TensorRecord
from f8emu.capture.session import Session
from f8emu.capture.writer import Stored
from f8emu.environment import versions
from f8emu.shown import screen
from f8emu.spec.chips import CHIPS
from f8emu.spec.recipe import Recipe
from f8emu.split_k.plan import plans_of


def session_of(
    call: str,
    path: str | Path,
    framework: str,
    device: str,
    ranks: tuple[int, int],
    recipes: Mapping[str, Recipe],
    **options: Any,
) -> Session:
    """The session of a process, `ranks` its rank and how many there are; `recipes` may grow until a step is written."""
    shared: dict[str, Any] = {"rank": ranks[0], "world_size": ranks[1], "framework": framework, "device": device}
    shared |= {"versions": versions(), "recipes": recipes}

    def header(number: int, reason: str) -> StepHeader:
        plan = plans_of(CHIPS[recipe.chip] for recipe in recipes.values())
        return StepHeader(step=number, reason=reason, plan=plan, **shared)

    return Session(call, path, header, rank=ranks[0], **options)


class Handle:
    """The part of a capture that torch and JAX share. A failing capture never stops the training."""

    def __init__(
        self, session: Session, tensors: bool, stored: Callable[[Any], Stored], fault: Callable[[Any], str]
    ) -> None:
        self._session, self._with_tensors = session, tensors
        self._stored = stored
        """A copy on the host, or a MemoryError."""
        self._fault = fault
        """`NaN`, `infinity` or nothing."""

    def __repr__(self) -> str:
        written = [f"  {path}" for path in self.written]
        left = [f"  left out: {record.place}: {record.reason}" for record in self.left_out]
        head = f"at step {self.number}, steps written: {len(written)}, records left out: {len(left)}"
        return screen([f"{type(self).__name__}: {head}", *written, *left])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    @property
    def number(self) -> int:
        """The number of the step in progress."""
        return self._session.number

    @property
    def written(self) -> tuple[Path, ...]:
        """The directories of the steps that were finished."""
        return tuple(self._session.written)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Records that were not written, and why, of all steps that were finished or given up."""
        return tuple(self._session.left_out)

    def write(self, reason: str = "asked for") -> None:
        """Write the steps that the ring holds, and the step in progress once it ends. Without a ring, do nothing."""
        self._wait()
        with self._session.lock:
            self._session.write(reason)

    def close(self) -> None:
        """End the capture. A step in progress is written as far as it got. Safe to call twice."""
        self._wait()
        with self._session.lock:
            self._detach()
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an exception the steps of the ring are written, and the step in progress stays unfinished."""
        if error is None:
            return self.close()
        with contextlib.suppress(Exception):  # a program that failed says so again
            self._wait()
        with self._session.lock:
            self._detach()
            self._session.abandon(error)

    def _wait(self) -> None:
        """For what still has something to show."""

    def _detach(self) -> None:
        """No longer observe."""

    def _keep_tensor(self, layer: str, tensor: str, value: Any) -> None:
        with self._session.lock:
            if self._session.is_wanted:
                # A ring looks at every tensor, also where none is kept.
                self._look(value, f"the {tensor} of {layer}")
                if self._with_tensors:
                    numbers = self._session.next(layer, tensor)
                    record = TensorRecord(layer=layer, tensor=tensor, dtype=name_of(value.dtype), **numbers)
                    self._session.add(record, value.nbytes, lambda: {"value": self._stored(value)})

    def _keep_gemm(
        self,
        layer: str,
        gemm: str,
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        kind: type[GemmRecord] | type[ForeignRecord] = GemmRecord,
    ) -> None:
        with self._session.lock:
            if self._session.is_wanted:
                self._look(arrays["product"], f"{gemm} of {layer}")
                record = kind(layer=layer, gemm=gemm, **self._session.next(layer, gemm), **options)
                size = sum(array.nbytes for array in arrays.values())
                self._session.add(record, size, lambda: {name: self._stored(x) for name, x in arrays.items()})

    def _look(self, x: Any, what: str) -> None:
        # A ring is written when something is not finite.
        if self._session.looks and (kind := self._fault(x)):
            self._session.write(f"{kind} in {what} at step {self.number}")


def name_of(dtype: object) -> str:
    """`bfloat16`, of a dtype of torch, numpy or JAX."""
    return str(dtype).removeprefix("torch.")


def facts_of(a: Any, b: Any, product: Any, spec: Any) -> dict[str, Any]:
    """The fields of a GemmRecord that operands, product and the recipe's GEMM tell."""
    return {
        "m": product.shape[0],
        "n": product.shape[1],
        "k": a.codes.shape[1],
        "a_format": name_of(a.codes.dtype),
        "b_format": name_of(b.codes.dtype),
        "granularity_a": spec.a.granularity.value,
        "granularity_b": spec.b.granularity.value,
        "out_dtype": name_of(product.dtype),
        "use_fast_accum": spec.use_fast_accum,
    }


def arrays_of(a: Any, b: Any, product: Any) -> dict[str, Any]:
    """Name in the file -> array of a GEMM; no scales in high precision."""
    scales = {f"{side}.scale": one.scale for side, one in (("a", a), ("b", b)) if one.scale is not None}
    return {"a.codes": a.codes, "b.codes": b.codes, "product": product, **scales}
