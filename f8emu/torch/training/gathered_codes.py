"""The memory of a gathered weight whose two operands have codes of their own, and what each pass fills of it.

FSDP2 gathers a weight into one buffer, and frees it after the forward and after the backward pass. The forward pass
reads the codes for `output`, the backward pass those for `grad_input`, so the buffer takes turns: in the forward pass
it is the memory of the former, in the backward pass that of the latter. Each operand keeps a storage of its own, since
autograd saves tensors that refer to it.

A backward pass that recomputes `output` reads the codes for `output` too. They are gathered for it if a saved tensor
refers to their storage, or if none refers to that of `grad_input`: then the tensors are still to be saved, by a
checkpoint.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from f8emu.torch.training.torch_internals import base_of, keeping_version, references
from f8emu.torch.training.weight_scales import Shard, all_gather


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
    readers: tuple[Tensor, Tensor] | None = None
    """The operands of the layer, which autograd may have saved themselves."""
    idle: tuple[int, int] | None = None
    """References to the codes for `output` and for `grad_input` while nothing is saved."""
    stream: Any = None
    """The CUDA stream that computes with the weight."""

    def adopt(self, output: Tensor) -> None:
        """Takes what FSDP2 has gathered first, a view of its buffer, as the memory of `rows`."""
        if self.cols.is_cuda:
            self.stream = torch.cuda.current_stream()
            self.cols.record_stream(self.stream)  # it was allocated on the stream of FSDP2's copies
        self.buffer = base_of(output)
        self.rows = self.buffer.detach()

    def read_by(self, rows: Tensor, cols: Tensor) -> None:
        """What the layer multiplies from now on."""
        if self.readers is None or self.readers[0] is not rows:
            self.readers, self.idle = (rows, cols), None

    def begin_forward(self) -> None:
        """FSDP2 will fill `rows`."""
        self.beside.clear()
        if self.buffer is None or self.rows is None:
            return
        self._lay_buffer_in(self.rows)
        seen = self._references()
        self.idle = seen if self.idle is None else (min(seen[0], self.idle[0]), min(seen[1], self.idle[1]))

    def begin_backward(self) -> bool:
        """FSDP2 will fill `cols`; whether the pass reads `rows` too."""
        self.beside.clear()
        assert self.rows is not None, "a forward pass came before"
        of_rows, of_cols = self._references()
        self._lay_buffer_in(self.cols)
        return self.idle is None or of_rows > self.idle[0] or of_cols <= self.idle[1]

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

    def _references(self) -> tuple[int, int]:
        assert self.readers is not None, "known after the first gather"
        rows, cols = self.readers
        return references(rows), references(cols)
