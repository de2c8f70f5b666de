"""Layers with the same input (q, k, v; w1, w3) share its casts.

The operands of the last input are cached until another input is cast or the tensor is freed. Only tensors with a
`grad_fn` are cached: those are new in every step, whereas a buffer that numpy or a replayed CUDA graph overwrites stays
the same tensor with the same version. In compiled code nothing is cached: there the compiler merges equal casts. It
does not merge collectives, so a module whose input is gathered has a `TracedInput`.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from f8emu.torch.layer.matmul import InputOperands, Plan, checkpointed_region


def trace_number() -> int:
    """The number of the trace that a compiler is making; 0 outside of a trace."""
    found: object = TracingContext.try_get()
    return 0 if found is None else id(found)


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

    def find(self, input: Tensor, dtype: torch.dtype, plan: Plan) -> InputOperands | None:
        """`find_operands` for this trace."""
        return self.operands if self.input is input and self.key == (dtype, plan) else None

    def keep(self, input: Tensor, dtype: torch.dtype, plan: Plan, operands: InputOperands) -> None:
        """`keep_operands` for this trace."""
        if self.trace == trace_number():
            self.input, self.key, self.operands = input, (dtype, plan), operands


class _Last(threading.local):
    """The cache of this thread: one input at most, so that float8 copies are freed soon."""

    input: Any = None
    key: Any = None
    region: Any = None
    operands: InputOperands | None = None

    def clear(self, _: object = None) -> None:
        self.input = self.key = self.region = self.operands = None


_last = _Last()


def find_operands(input: Tensor, dtype: torch.dtype, plan: Plan) -> InputOperands | None:
    """The operands that another layer cast from this very tensor, unmodified since, under the same plan."""
    if _last.input is None or _last.input() is not input:
        return None
    region = checkpointed_region()
    is_same_region = _last.region is None if region is None else _last.region is not None and _last.region() is region
    return _last.operands if is_same_region and _last.key == (input._version, dtype, plan) else None


def keep_operands(input: Tensor, dtype: torch.dtype, plan: Plan, operands: InputOperands) -> None:
    """Cache the operands for the next layer."""
    if input.grad_fn is None:
        return
    region = checkpointed_region()
    # If another thread frees the tensor, that thread's cache is cleared; here the reference is dead and never matches.
    _last.input = weakref.ref(input, _last.clear)
    _last.key = (input._version, dtype, plan)
    _last.region = None if region is None else weakref.ref(region)
    _last.operands = operands
