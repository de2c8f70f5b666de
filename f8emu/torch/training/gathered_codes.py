"""The memory of a gathered weight whose two operands have codes of their own, and what each pass fills of it.

FSDP2 gathers a weight into one buffer, and frees it after the forward and after the backward pass. The forward pass
reads the codes for `output`, the backward pass those for `grad_input`, so the buffer takes turns: in the forward pass
it is the memory of the former, in the backward pass that of the latter. Each operand keeps a storage of its own, since
autograd saves tensors that refer to it.

A backward pass that recomputes `output` reads the codes for `output` too. What will be recomputed is known of eager
code: what a checkpoint surrounds. Compiled code is taken to recompute all. All ranks must gather the same, so they
agree on it before the first backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from f8emu.torch.training.torch_internals import (
    base_of,
    is_in_backward_pass,
    keeping_version,
    top_saved_tensors_hooks,
)
from f8emu.torch.training.weight_scales import Shard, all_gather, reduce_max


@dataclass(slots=True)
class GatheredCodes:
    """All codes of a weight as bytes, flat, with the padding of the last ranks."""

    cols: Tensor
    """For `grad_input`."""
    rows: Tensor | None = None
    """For `output`; known once FSDP2 has its buffer."""
    buffer: Tensor | None = None
    """FSDP2's, which lies in the storage of `rows` or of `cols`."""
    beside: list[Tensor] = field(default_factory=list[Tensor])
    """What is gathered beside it; FSDP2 has this list, and frees what it finds there with its buffer."""
    gather_rows: Callable[[], None] | None = None
    """Fills `rows` if FSDP2 did not."""
    is_recomputed: bool = False
    """Whether the backward pass may read `rows` too; never taken back."""
    has_begun_backward: bool = False
    """Whether FSDP2 gathers for the backward pass too, as was seen there; the ranks agreed on `is_recomputed` then."""
    stream: Any = None
    """The CUDA stream that computes with the weight."""

    def adopt(self, output: Tensor) -> None:
        """Takes what FSDP2 has gathered first, a view of its buffer, as the memory of `rows`."""
        self.follow_stream()
        if self.cols.is_cuda:
            self.cols.record_stream(self.stream)  # it was allocated on the stream of FSDP2's copies
        self.buffer = base_of(output)
        self.rows = self.buffer.detach()

    def follow_stream(self) -> None:
        """Notes the current stream as the one that computes with the weight."""
        if self.cols.is_cuda:
            self.stream = torch.cuda.current_stream()

    def begin_forward(self) -> bool:
        """FSDP2 will fill `rows`; whether `cols` must be filled too, since no gather for the backward pass is known."""
        self.beside.clear()
        if self.rows is not None:
            self._lay_buffer_in(self.rows)
        return not self.has_begun_backward

    def begin_backward(self, shard: Shard) -> bool:
        """FSDP2 will fill `cols`; whether the pass may read `rows` too."""
        self.beside.clear()
        self._lay_buffer_in(self.cols)
        if not self.has_begun_backward:
            vote = torch.full((1,), float(self.is_recomputed), device=self.cols.device)
            reduce_max(vote, shard.group)
            self.is_recomputed, self.has_begun_backward = bool(vote.item()), True
        return self.is_recomputed

    def before_read(self, rows: Tensor, *, is_compiled: bool) -> None:
        """Called by a layer, or by compiled code, that is going to read `rows`.

        They are gathered now, by a collective of all ranks, if the last gather foresaw no reader: in a forward pass
        that follows a backward pass without resharding, or under a reentrant checkpoint.
        """
        # Compiled code turns gradients off around its own graphs, so nothing tells an evaluation from a training.
        if is_compiled or is_in_backward_pass() or top_saved_tensors_hooks(True) is not None:
            self.is_recomputed = True
        if is_freed(rows) and self.gather_rows is not None:
            self.gather_rows()

    def gather(self, codes: Tensor, own: Tensor, shard: Shard) -> None:
        """Gathers `rows` or `cols` beside FSDP2, from those of this rank."""
        self.beside.append(codes)
        self._allocate(codes)
        with keeping_version(codes):
            all_gather(codes, own.view(-1), shard.group)

    def _allocate(self, codes: Tensor) -> None:
        """Gives `rows` or `cols` their memory, if FSDP2 has freed it."""
        storage = codes.untyped_storage()
        if storage.size():
            return
        if self.stream is None:
            storage.resize_(codes.numel())
            return
        # From the memory of the stream that reads and frees it, as FSDP2's own: a kernel of that stream may still be
        # reading what was there before.
        with torch.cuda.stream(self.stream):
            storage.resize_(codes.numel())
        torch.cuda.current_stream().wait_stream(self.stream)

    def _lay_buffer_in(self, codes: Tensor) -> None:
        assert self.buffer is not None, "adopt"
        self.buffer.data = codes  # set_() does not take a storage that is freed


def is_freed(codes: Tensor) -> bool:
    """Whether FSDP2 holds no memory for these codes."""
    return codes.numel() > 0 and codes.untyped_storage().size() == 0
