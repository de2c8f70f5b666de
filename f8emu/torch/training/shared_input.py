"""One input of several layers (q, k, v; w1, w3) is cast once.

The operands of the last input are kept until another is cast, or until that input is gone. Only of one that autograd
computed: such a tensor is new in every step, whereas a buffer that is filled again, by numpy or by a CUDA graph that is
replayed, is the same tensor with the same version. In compiled code nothing is kept: there the compiler merges equal
casts.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from f8emu.torch.training.autograd import InputOperands, Plan, checkpointed_region


class _Last(threading.local):
    """The last input of this thread; at most one, so that no float8 copy outlives its use for long."""

    input: Any = None
    key: Any = None
    region: Any = None
    operands: InputOperands | None = None

    def clear(self, _: object = None) -> None:
        self.input = self.key = self.region = self.operands = None


_last = _Last()


def find_operands(input: Tensor, dtype: torch.dtype, plan: Plan) -> InputOperands | None:
    """The operands that another layer made of this very tensor, unchanged, under the same plan."""
    if _last.input is None or _last.input() is not input:
        return None
    region = checkpointed_region()
    is_same_region = _last.region is None if region is None else _last.region is not None and _last.region() is region
    return _last.operands if is_same_region and _last.key == (input._version, dtype, plan) else None


def keep_operands(input: Tensor, dtype: torch.dtype, plan: Plan, operands: InputOperands) -> None:
    """Keep them for the next layer."""
    if input.grad_fn is None:
        return
    region = checkpointed_region()
    # The tensor may go in another thread, whose slot is not this one: then the slot here has a dead reference.
    _last.input = weakref.ref(input, _last.clear)
    _last.key = (input._version, dtype, plan)
    _last.region = None if region is None else weakref.ref(region)
    _last.operands = operands
