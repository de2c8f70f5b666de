"""What the device tells the host of delayed scaling: which inv_scales are set, and which amaxes were infinite or NaN.

The layers of one update share a report in memory of the host, which the kernel of a GPU writes to directly. Each of its
numbers is written at once and only grows, so an update reads what has arrived, without waiting.
"""

import warnings
from collections.abc import Sequence

import torch

from f8emu.spec.recipe import TENSORS
from f8emu.torch.delayed.state import DelayedBuffers
from f8emu.torch.fused.delayed import mark_set
from f8emu.torch.torch_internals import to_list


class Report:
    """The report of layers that are updated together. A layer that is reset or loaded begins a new one."""

    def __init__(self, layers: Sequence[DelayedBuffers], is_pinned: bool) -> None:
        with torch.inference_mode(False):  # also updates outside of it write to this
            numbers = torch.zeros(len(layers), len(TENSORS), dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self.numbers = numbers  # [L, 3], as `fused.delayed.update_delayed` writes them
        self._seen: list[list[int]] = []
        self._reported = [buffers.notes.reported for buffers in layers]  # kept: a report is found by their identity

    def read(self, layers: Sequence[DelayedBuffers]) -> None:
        """Note what has arrived since the last call; warn of each tensor's first infinity, by the name of its layer."""
        seen: list[list[int]] = to_list(self.numbers)
        if seen == self._seen:
            return
        self._seen, names = seen, list[str]()
        for layer, numbers in zip(layers, seen, strict=True):
            for tensor, inv_scale, number in zip(TENSORS, layer.inv_scales, numbers, strict=True):
                if number & 1:
                    mark_set(inv_scale, True)
                if number > 1 and tensor not in layer.notes.reported:
                    layer.notes.reported.add(tensor)
                    names.append(f"{tensor} of {layer.notes.name or 'a layer without a name'}")
        if names:
            warnings.warn(
                f"f8emu.torch: under delayed scaling the amax was infinite or NaN for: {', '.join(names)}; the scale "
                "stays as it was. Later ones are counted in the layer's delayed.counts, and not reported again",
                RuntimeWarning,
                stacklevel=2,
            )


_reports: dict[tuple[torch.device, tuple[int, ...]], Report] = {}
_MOST = 1024  # layers that are built one by one are updated together in ever other sets


def report_of(layers: Sequence[DelayedBuffers], device: torch.device) -> Report | None:
    """The report of these layers on a device; None if a CUDA graph is captured, while which none may be allocated."""
    key = device, tuple([id(buffers.notes.reported) for buffers in layers])
    if key not in _reports:
        is_cuda = device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if len(_reports) >= _MOST:  # kernels may write to them still, of which torch does not know
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            _reports.clear()
        _reports[key] = Report(layers, is_cuda)
    return _reports[key]


def warn_of_lost_state() -> None:
    """Warn that a layer was loaded without its state of delayed scaling."""
    warnings.warn(
        "Float8Linear: the state dict has no state of delayed scaling (it is in the metadata, which some checkpoint "
        "formats drop), so scaling starts anew; save and load it with the checkpoint: Hugging Face "
        "Trainer(..., callbacks=[f8emu.torch.integrations.huggingface.DelayedScalingCallback()]); "
        "accelerator.register_for_checkpointing(f8emu.torch.DelayedScalingState(model)); "
        'torch.distributed.checkpoint {..., "float8": f8emu.torch.DelayedScalingState(model)}; or '
        "f8emu.torch.delayed_state_dict(model) and load_delayed_state_dict(model, state)",
        RuntimeWarning,
        stacklevel=3,
    )
