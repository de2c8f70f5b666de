"""Layers with the same input (q, k, v; w1, w3) share its casts.

The operands of the last input are cached until another input is cast or the tensor is freed. Only tensors with a
`grad_fn` are cached: those are new in every step, whereas a buffer that numpy or a replayed CUDA graph overwrites stays
the same tensor with the same version. In compiled code nothing is cached: there the compiler merges equal casts. It
does not merge collectives, so a module whose input is gathered has `TracedInputs`.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from f8emu.torch.training.autograd import InputOperands, Plan, checkpointed_region


class TracedInputs:
    """The inputs that the layers of one module have cast so far, in a compiler's trace of the module's forward pass.

    Hooks of the module begin and end it, so that nothing of it is left when the trace ends.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.found: list[tuple[Tensor, torch.dtype, Plan, InputOperands]] = []

    def begin(self, *_: Any) -> None:
        """A forward pre-hook."""
        self.is_open, self.found = torch.compiler.is_compiling(), []

    def end(self, *_: Any) -> None:
        """A forward hook."""
        self.is_open, self.found = False, []

    def find(self, input: Tensor, dtype: torch.dtype, plan: Plan) -> InputOperands | None:
        """As `find_operands`."""
        for known, its_dtype, its_plan, operands in self.found:
            if known is input and its_dtype is dtype and its_plan == plan:
                return operands
        return None


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
