"""Layers with the same input cast it once.

Layers with the same input (q, k, v; w1, w3) share its casts. Eager code keeps the operands of the last input until
another input is cast or the tensor is freed, has another version or another memory (`x.data = y`). Only tensors with a
`grad_fn` are kept: those are new in every step, whereas a buffer that numpy or a replayed CUDA graph overwrites stays
the same tensor with the same version. A write in between that torch does not count (`x.data.mul_`, a kernel that is no
operator of torch) is not seen: nothing but a reading of the whole input would show it. Such code calls
`torch.autograd.graph.increment_version(x)`; F8EMU_SHARE_CASTS=0 in the environment shares nothing. In compiled code
nothing is kept: there the compiler merges equal casts. It does not merge collectives, so a module whose input is
gathered has a `TracedInput`.
"""

import os
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.torch.casts.operand import Operand
from f8emu.torch.torch_internals import memory_of, top_saved_tensors_hooks, trace_number

_SHARES = os.environ.get("F8EMU_SHARE_CASTS") != "0"


class InputOperands(NamedTuple):
    """Both casts of a layer's input; layers with the same input and plan share them."""

    output: Operand
    grad_weight: Operand | None
    gathered: Tensor | None = None  # the place in the autograd graph of an input that was gathered as float8


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

    def begin(self, *_: Any) -> None:  # a forward pre-hook
        self.trace = trace_number() if torch.compiler.is_compiling() else 0

    def end(self, *_: Any) -> None:  # a forward hook
        self.trace = 0
        self.input = self.key = self.operands = None

    def find(self, input: Tensor, key: Any) -> InputOperands | None:
        """The operands that another layer cast from this very tensor under an equal key: dtype and plan."""
        return self.operands if self.input is input and self.key == key else None

    def keep(self, input: Tensor, key: Any, operands: InputOperands) -> None:
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
        return self.operands if is_same and self.key == (input._version, memory_of(input), key) else None

    def keep(self, input: Tensor, key: Any, operands: InputOperands) -> None:
        if input.grad_fn is None or not _SHARES:
            return
        region = checkpointed_region()
        # If another thread frees the tensor, that thread's cache is cleared; here the reference is dead, and no match.
        self.input = weakref.ref(input, self._clear)
        self.key, self.operands = (input._version, memory_of(input), key), operands
        self.region = None if region is None else weakref.ref(region)

    def _clear(self, _: object) -> None:
        self.input = self.key = self.region = self.operands = None


LAST_INPUT = LastInput()


def checkpointed_region() -> Any:
    """The activation checkpoint that this call is in, or None."""
    # A checkpointed region is recomputed as a whole, so it must not share casts with code outside of it.
    hooks = top_saved_tensors_hooks(True)
    return None if hooks is None else hooks[0]
