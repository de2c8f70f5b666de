"""The memory of a gathered weight whose two operands have codes of their own, and what each pass fills of it.

The rules, by which half of bfloat16's bytes travel in a pass:

1. FSDP2 gathers `rows` before a forward pass and `cols` before a backward pass. Each has a storage of its own, since
   autograd saves tensors that refer to it; FSDP2's one buffer is laid into the storage that it is to fill. After either
   pass FSDP2 frees both.
2. Before the first backward pass nobody knows whether FSDP2 will gather again: the first forward pass gathers `cols`
   too, beside FSDP2.
3. A backward pass that recomputes `output` reads `rows` too. In eager code it recomputes what a checkpoint surrounds:
   saved-tensor hooks are set when a layer reads `rows` in a forward pass. In compiled code it recomputes what autograd
   has saved: then something refers to the operand `rows` beside this module and the weight (reference counts).
4. All ranks must gather the same. They vote once, before the first backward pass: if any rank needs `rows` then, all
   gather `rows` in every backward pass.
5. A rank that needs `rows` later, although the vote was against it, keeps them from its forward pass (`__iter__`).
6. A reader whom the last gather did not foresee has `rows` gathered at once, by all ranks (`before_read`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from f8emu.torch.collectives import all_gather, reduce_max
from f8emu.torch.torch_internals import (
    base_of,
    is_in_backward_pass,
    keeping_version,
    references,
    top_saved_tensors_hooks,
)

_OF_IDLE_OPERAND = 3
"""Reference count of an operand that nothing else uses: `rows`, the weight, and the argument of `references`."""


@dataclass(slots=True)
class GatherMemory:
    """All codes of a weight as bytes, flat, with the padding of the last ranks."""

    cols: Tensor
    """For `grad_input`."""
    rows: Tensor
    """For `output`."""
    buffer: Tensor
    """FSDP2's, which lies in the storage of `rows` or of `cols` while it is filled, and has none otherwise."""
    operand: Tensor | None = None
    """The view of `rows` that layers read, and that compiled code may save."""
    gather_rows: Callable[[], None] | None = None
    """Fills `rows` if FSDP2 did not."""
    is_in_checkpoint: bool = False
    """Whether a checkpoint surrounds a reader of `rows` in the current step."""
    is_recomputed: bool | None = None
    """The vote of rule 4; None before it."""
    stream: Any = None
    """The CUDA stream that computes with the weight."""

    @classmethod
    def adopt(cls, output: Tensor) -> "GatherMemory":
        """What FSDP2 has gathered first, a view of its buffer, as `rows`, and memory for `cols`, still to be filled.

        Called in the stream that computes with the weight, as FSDP2 hands it out. Memory of another stream would stay
        with that stream for good, and as much of it as the host is ahead of the device: a whole model's, at worst.
        """
        buffer = base_of(output)
        memory = cls(cols=torch.empty_like(buffer), rows=buffer.detach(), buffer=buffer)
        memory.end_gather()
        return memory

    def begin_forward(self) -> bool:
        """FSDP2 will fill `rows`; whether `cols` must be filled too (rule 2)."""
        self.is_in_checkpoint = False
        self._lay_buffer_in(self.rows)
        return self.is_recomputed is None

    def begin_backward(self, group: Any) -> bool:
        """FSDP2 will fill `cols`; whether `rows` must be filled too (rule 4)."""
        self._lay_buffer_in(self.cols)
        if self.is_recomputed is None:
            vote = torch.full((1,), int(self._is_needed()), dtype=torch.int32, device=self.cols.device)
            self.is_recomputed = bool(reduce_max(vote, (group,)).item())
        return self.is_recomputed

    def end_gather(self) -> None:
        """FSDP2 has filled its buffer. It frees it after the pass, so from here on the buffer is nothing."""
        if self.cols.is_cuda:
            self.stream = torch.cuda.current_stream()
        self._lay_buffer_in(self.cols.new_empty(0))

    def __iter__(self) -> Iterator[Tensor]:
        """What FSDP2 may free now, after a pass; it asks when it does (rule 5)."""
        for codes in (self.cols, self.rows):
            is_kept = codes is self.rows and self.is_recomputed is False and self._is_needed()
            if not is_freed(codes) and not is_kept:
                yield codes

    def before_read(self, rows: Tensor) -> None:
        """Called by a layer, or by compiled code, that is going to read `rows` (rules 3 and 6).

        The last gather did not foresee a forward pass that follows a backward pass without resharding, or a reentrant
        checkpoint.
        """
        if not is_in_backward_pass() and top_saved_tensors_hooks(True) is not None:
            self.is_in_checkpoint = True
        if is_freed(rows) and self.gather_rows is not None:
            self.gather_rows()

    def _is_needed(self) -> bool:
        """Whether this rank's backward pass reads `rows` (rule 3).

        A reference to the operand that is left for another reason does no harm: more is gathered than needed.
        """
        return self.is_in_checkpoint or (self.operand is not None and references(self.operand) > _OF_IDLE_OPERAND)

    def gather(self, codes: Tensor, own: Tensor, group: Any) -> None:
        """Gathers `rows` or `cols` beside FSDP2, from those of this rank."""
        self._allocate(codes)
        with keeping_version(codes):
            all_gather(codes, own.view(-1), group)

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
        self.buffer.data = codes  # set_() does not take a storage that is freed


def is_freed(codes: Tensor) -> bool:
    """Whether FSDP2 holds no memory for these codes."""
    return codes.numel() > 0 and codes.untyped_storage().size() == 0
