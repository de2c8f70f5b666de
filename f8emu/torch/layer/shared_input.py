"""Layers with the same input (q, k, v; w1, w3) share its casts.

Eager code keeps the operands of the last input until another input is cast or the tensor is freed. Only tensors with a
`grad_fn` are kept: those are new in every step, whereas a buffer that numpy or a replayed CUDA graph overwrites stays
the same tensor with the same version. In compiled code nothing is kept: there the compiler merges equal casts. It does
not merge collectives, so a module whose input is gathered has a `TracedInput`.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from f8emu.torch.layer.casts import InputOperands
from f8emu.torch.torch_internals import top_saved_tensors_hooks


class TracedInput:
    """The last input that a layer of one module has cast, in a compiler's trace of the module's forward pass.

    Hooks of the module begin and end it, so that nothing of it is left when the trace ends. A compiler that is asked to
    compile this very module traces the hooks apart; then nothing is shared.
    """

    def __init__(self) -> None:
        torch.compiler.assume_constant_result(trace_number)  # pyright: ignore[reportUnknownMemberType]
        self.trace = 0
        self.input: Tensor | None = None
        self.key: Any = None
        self.operands: InputOperands | None = None

    def begin(self, *_: Any) -> None:
        """A forward pre-hook."""
        self.trace = trace_number() if torch.compiler.is_compiling() else 0

    def end(self, *_: Any) -> None:
        """A forward hook."""
        self.trace = 0
        self.input = self.key = self.operands = None

    def find(self, input: Tensor, key: Any) -> InputOperands | None:
        """The operands that another layer cast from this very tensor under an equal key: dtype and plan."""
        return self.operands if self.input is input and self.key == key else None

    def keep(self, input: Tensor, key: Any, operands: InputOperands) -> None:
        """Keep the operands for the next layer."""
        if self.trace == trace_number():
            self.input, self.key, self.operands = input, key, operands


class LastInput(threading.local):
    """The last input that eager code has cast on this thread: one at most, so that float8 copies are freed soon."""

    input: Any = None
    key: Any = None
    region: Any = None
    operands: InputOperands | None = None

    def find(self, input: Tensor, key: Any) -> InputOperands | None:
        """The operands that another layer cast from this very tensor, unmodified since, under an equal key."""
        if self.input is None or self.input() is not input:
            return None
        region = checkpointed_region()
        is_same = self.region is None if region is None else self.region is not None and self.region() is region
        return self.operands if is_same and self.key == (input._version, key) else None

    def keep(self, input: Tensor, key: Any, operands: InputOperands) -> None:
        """Keep the operands for the next layer."""
        if input.grad_fn is None:
            return
        region = checkpointed_region()
        # If another thread frees the tensor, that thread's cache is cleared; here the reference is dead, and no match.
        self.input = weakref.ref(input, self._clear)
        self.key, self.operands = (input._version, key), operands
        self.region = None if region is None else weakref.ref(region)

    def _clear(self, _: object) -> None:
        self.input = self.key = self.region = self.operands = None


last_input = LastInput()


def trace_number() -> int:
    """The number of the trace that a compiler is making; 0 outside of a trace."""
    found: object = TracingContext.try_get()
    return 0 if found is None else id(found)


def checkpointed_region() -> Any:
    """The activation checkpoint that this call is in, or None.

    A checkpointed region is recomputed as a whole, so it must not share casts with code outside of it.
    """
    hooks = top_saved_tensors_hooks(True)
    return None if hooks is None else hooks[0]
