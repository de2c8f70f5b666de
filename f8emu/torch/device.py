"""What a device can do."""

from functools import cache

import torch

from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import UnsupportedError
from f8emu.torch.dtypes import CHIP

_FLOAT8_CAPABILITY = (8, 9)
_PAIRS_CAPABILITY = (9, 0)


@cache
def has_float8_hardware(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on the tensor cores of `device`."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


def is_device_of(chip: Chip, device: torch.device) -> bool:
    """Whether the library of `device` is the one whose bits the profile has; `HOPPER` is any Hopper GPU."""
    if not has_float8_hardware(device) or capability_of(device) != chip.capability:
        return False
    return chip.plan in ("", HOPPER.plan) or chip.plan == torch.cuda.get_device_name(device)


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@cache
def compares_pairs(device: torch.device) -> bool:
    """Whether `device` is a GPU that compares two pairs of 16-bit integers with one instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _PAIRS_CAPABILITY


def require_hopper(call: str, device: torch.device) -> None:
    """Raise UnsupportedError unless `device` is a Hopper GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != CHIP.capability:
        raise UnsupportedError(
            f"{call}: torch has it for {CHIP.name} only, compute capability 9.0; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; pass engine='emulated'"
        )
