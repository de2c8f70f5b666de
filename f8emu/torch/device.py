"""What a device can do."""

from functools import cache

import torch

from f8emu.spec.errors import UnsupportedError

_FLOAT8_CAPABILITY = (8, 9)


@cache
def has_float8_hardware(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on the tensor cores of `device`."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


def require_hopper(call: str, device: torch.device) -> None:
    """Raise UnsupportedError unless `device` is a Hopper GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise UnsupportedError(
            f"{call}: torch has it for Hopper only, compute capability 9.0; {torch.cuda.get_device_name(device)} has "
            f"{major}.{minor}; pass engine='emulated'"
        )
