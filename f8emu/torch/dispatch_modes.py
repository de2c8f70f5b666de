"""What dispatch modes see of our GEMMs and amaxes, `aten.mm` and `aten.max`, and a policy for selective checkpointing.

Policies of selective checkpointing and flop counters know these operators, but not ours. So if a dispatch
mode is active, `aten.mm` is called on stand-ins: tensors without data, with the shapes, dtype and device of a GEMM.
When all modes have handled the call, `_StandIn.__torch_dispatch__` runs the real computation in its place.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from f8emu.torch.library import has_dispatch_mode

_Run = Callable[[], Tensor]


class _StandIn(Tensor):
    """A tensor without data, and the function that runs when an operator is called on it."""

    run: _Run

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, run: _Run) -> "_StandIn":
        found = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # pyright: ignore[reportAttributeAccessIssue]
        found.run = run
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self = args[0]
        if func is torch.ops.aten.detach.default:  # called by modes that save results
            return cls(tuple(self.shape), self.dtype, self.device, self.run)
        assert func in (torch.ops.aten.mm.default, torch.ops.aten.max.default), f"{func} on a stand-in"
        return self.run()


def seen_as_mm(a: Tensor, b: Tensor, dtype: torch.dtype, run: _Run) -> Tensor:
    """`run()`, a product of a [M, K] and b [K, N] of dtype, which dispatch modes see as `aten.mm`."""
    if not has_dispatch_mode():
        return run()
    (m, k), n = a.shape, b.shape[1]
    with torch.autocast(a.device.type, enabled=False):  # it would cast the stand-ins
        return torch.mm(_StandIn((m, k), dtype, a.device, run), _StandIn((k, n), dtype, a.device, run))


def seen_as_max(x: Tensor, run: _Run) -> Tensor:
    """`run()`, the amaxes of x, which dispatch modes see as `aten.max`."""
    if not has_dispatch_mode():
        return run()
    return torch.max(_StandIn(tuple(x.shape), x.dtype, x.device, run))


def saved_ops() -> tuple[OpOverload, ...]:
    """What is worth keeping: GEMMs, amaxes and scales."""
    # GEMMs are expensive to recompute for the memory they take. Each of the others reads a whole tensor and gives a few
    # numbers. Casts are left out: their float8 results take memory that checkpointing is meant to free, and recomputing
    # them takes one pass over the tensor.
    ours = torch.ops.f8emu
    return torch.ops.aten.mm.default, torch.ops.aten.max.default, ours.row_amax.default, ours.scales.default


def float8_checkpoint_policy(also: Collection[OpOverload] = ()) -> Callable[..., CheckpointPolicy]:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: keep GEMMs, amaxes and scales.

    Full checkpointing (`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`) needs no policy.

    Args:
        also: further operators to keep, such as `torch.ops.aten._scaled_dot_product_flash_attention.default`.
    """
    saved = frozenset(saved_ops()) | frozenset(also)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
