"""Single float32 numbers on a GPU: the amaxes and scales of whole tensors.

Torch needs 2 us to allocate a number and 7 us for a zero, on the host of an H200; a layer's step has nine of them, and
launches each of its kernels in 5. So plain eager code cuts them from a row of zeros, each used once. They lie in memory
that others share, each with a version counter of its own.

CUDA graphs need memory of their own: what is captured clears it in each replay, and compiled code checks where the
results of its operators lie.
"""

import torch
from torch import Tensor

from f8emu.torch.library import is_in_dispatcher

_COUNT = 256
_APART = 4
"""Floats: kernels and GEMMs take numbers that lie at multiples of 16 bytes."""
_unused: dict[tuple[int, int], list[Tensor]] = {}
"""(device, stream) -> zeros that the stream has written."""


def new_zero(x: Tensor) -> Tensor:
    """A float32 zero [1, 1] on the device of `x`, for an amax that a kernel of the current stream raises."""
    found = _from_row(x)
    return x.new_zeros((1, 1), dtype=torch.float32) if found is None else found


def new_number(x: Tensor) -> Tensor:
    """Any float32 [1, 1] on the device of `x`, for a scale that a kernel of the current stream writes."""
    found = _from_row(x)
    return x.new_empty((1, 1), dtype=torch.float32) if found is None else found


def _from_row(x: Tensor) -> Tensor | None:
    if not x.is_cuda or is_in_dispatcher() or torch.cuda.is_current_stream_capturing():
        return None
    index = x.get_device()
    key = index, torch._C._cuda_getCurrentRawStream(index)
    try:
        return _unused[key].pop()
    except (KeyError, IndexError):
        zeros = row_of_zeros(x.device)
        found = zeros.pop()
        _unused[key] = zeros
        return found


def row_of_zeros(device: torch.device) -> list[Tensor]:
    """Zeros, each [1, 1]."""
    with torch.inference_mode(False), torch.no_grad():  # autograd saves no tensor that was made in inference mode
        row = torch.zeros((_COUNT, _APART), dtype=torch.float32, device=device)
        return list(torch.unsafe_split(row[:, :1], 1))  # unsafe: each with a version counter of its own
