"""Activation checkpointing of a timed model: which of its results are kept, and which are computed again."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from f8emu.torch import float8_checkpoint_policy

CHECKPOINTING = ("none", "full", "selective")
_aten = torch.ops.aten
ATTENTION_OPS: tuple[torch._ops.OpOverload, ...] = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
BFLOAT16_OPS = (_aten.mm.default, _aten.addmm.default, *ATTENTION_OPS)
TORCHAO_OPS = (_aten._scaled_mm.default, _aten.max.default, *BFLOAT16_OPS)
"""With the maximum of a tensor, as torchtitan has it (its pull request 701): the amaxes of torchao's tensorwise."""


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, but for the results that `options` keep."""

    def __init__(self, block: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.block = block
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **self.options)


def checkpointed(subject: str, model: nn.Module, checkpointing: str) -> nn.Module:
    """The subject's model under one of `CHECKPOINTING`; selective keeps GEMMs, attention and amaxes."""
    if checkpointing == "none":
        return model
    if checkpointing == "full":
        return Checkpointed(model, {})
    library = subject.partition("/")[0]
    kept: Any = list(TORCHAO_OPS if library == "torchao" else BFLOAT16_OPS)
    if library == "f8emu":
        kept = float8_checkpoint_policy(also=ATTENTION_OPS)
    return Checkpointed(model, {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)})
