"""Selective activation checkpointing of converted models: which results of float8 layers are worth keeping.

Full checkpointing (`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`) needs nothing from here.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from f8emu.torch.fused import operators as fused

GEMM_OPS: tuple[OpOverload, ...] = (torch.ops.aten.mm.default,)
"""The GEMMs, as dispatch modes see them: expensive to recompute relative to the memory they take."""
SCALE_OPS: tuple[OpOverload, ...] = (
    torch.ops.aten.max.default,
    fused.row_amax.overload,
    fused.scales.overload,
)
"""Amaxes and scales: each reads a whole tensor and gives a few numbers. Casts are left out: their float8 results take
memory that checkpointing is meant to free, and recomputing them takes one pass over the tensor."""
SAVED_OPS = GEMM_OPS + SCALE_OPS


def float8_checkpoint_policy(
    also: Collection[OpOverload] = (),
) -> Callable[..., CheckpointPolicy]:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: keep `SAVED_OPS`, recompute the rest.

    Args:
        also: further operators to keep, such as `torch.ops.aten._scaled_dot_product_flash_attention.default`.
    """
    saved = frozenset(SAVED_OPS) | frozenset(also)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
