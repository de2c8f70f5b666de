"""Records whose statistics are still on their device, and reading them, all at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from f8emu.torch.inspection.statistics import Statistics
from f8emu.torch.training.torch_internals import to_list


class Pending(NamedTuple):
    """A record whose statistics are on their way."""

    record: dict[str, Any]
    statistics: Statistics
    values: dict[str, Tensor]
    """First values of tensors."""


def numbers_of(pending: Sequence[Pending]) -> list[dict[str, float]]:
    """The statistics of each, read with one wait for each device."""
    flat = [value for item in pending for value in item.statistics.values()]
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(flat):
        by_device.setdefault(value.device, []).append(i)
    numbers = [0.0] * len(flat)
    for places in by_device.values():
        for i, number in zip(places, to_list(torch.stack([flat[i] for i in places]).cpu()), strict=True):
            numbers[i] = number
    unread = iter(numbers)
    return [{name: next(unread) for name in item.statistics} for item in pending]


def listed(values: Tensor) -> list[Any]:
    """Numbers; codes as hexadecimal digits."""
    found = to_list(values)
    return [f"{code:02x}" for code in found] if values.dtype is torch.uint8 else found
