"""What the host tells of amaxes that were infinite or NaN: each tensor's first, by the name of its layer.

The layers of one update share a report on the host, which the kernel of a GPU writes to directly: no copy, no event.
Its counts only grow, and each is written at once, so they may be read at any time. An update tells what has arrived,
without waiting; what arrives later is told at a later update.
"""

import warnings
from collections.abc import Sequence

import torch

from f8emu.spec.recipe import TENSORS
from f8emu.torch.training.delayed import DelayedBuffers


class Report:
    """Of layers that are updated together. One that is reset or loaded begins a new report."""

    __slots__ = ("_bytes", "_reported", "_seen", "not_finite")

    def __init__(self, layers: Sequence[DelayedBuffers], is_pinned: bool) -> None:
        with torch.inference_mode(False):  # also updates outside of it write to this
            not_finite = torch.zeros(len(layers), len(TENSORS), dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self.not_finite = not_finite
        """[L, 3]: how many amaxes were infinite or NaN so far."""
        self._bytes = not_finite.numpy().data.cast("B")
        self._seen = bytes(self._bytes)
        self._reported = [buffers.notes.reported for buffers in layers]
        """Kept, because a report is found by their identity."""

    def tell(self, layers: Sequence[DelayedBuffers]) -> None:
        """Warn of what has arrived since the last call."""
        seen = bytes(self._bytes)
        if seen == self._seen:
            return
        self._seen = seen
        names: list[str] = []
        for i, count in enumerate(memoryview(seen).cast("i")):
            layer, tensor = divmod(i, len(TENSORS))
            notes = layers[layer].notes
            if count and tensor not in notes.reported:
                notes.reported.add(tensor)
                names.append(f"{TENSORS[tensor]} of {notes.name or 'a layer without a name'}")
        if names:
            warnings.warn(
                f"f8emu.torch: under delayed scaling the amax was infinite or NaN of: {', '.join(names)}; the scale "
                "stays as it was. Further ones are counted in the layer's delayed.counts, and not reported again",
                RuntimeWarning,
                stacklevel=2,
            )


_reports: dict[tuple[torch.device, tuple[int, ...]], Report] = {}
_MOST_REPORTS = 1024
"""An optimizer for each layer makes as many."""


def report_of(layers: Sequence[DelayedBuffers], device: torch.device) -> Report | None:
    """The report of these layers, whose state is on `device`.

    None if it were to be allocated while a CUDA graph is captured, which may not be.
    """
    key = device, tuple([id(buffers.notes.reported) for buffers in layers])
    report = _reports.get(key)
    if report is None:
        is_cuda = device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if len(_reports) >= _MOST_REPORTS:
            _forget()
        report = _reports[key] = Report(layers, is_cuda)
    return report


def _forget() -> None:
    """Free all reports, when no kernel writes to them any more: torch does not know of it, and reuses the memory."""
    for device in {device for device, _ in _reports if device.type == "cuda"}:
        torch.cuda.synchronize(device)
    _reports.clear()
