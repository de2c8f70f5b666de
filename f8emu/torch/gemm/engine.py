"""Which engine computes a GEMM: the device's tensor cores, or the emulation of Hopper's."""

from enum import Enum

import torch

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.torch.device import has_float8_hardware
from f8emu.torch.gemm import emulation


class Engine(Enum):
    """What computes a GEMM."""

    AUTO = "auto"
    """HARDWARE if the device has float8 tensor cores, otherwise EMULATED."""
    HARDWARE = "hardware"
    EMULATED = "emulated"


_NAMES = tuple(engine.value for engine in Engine)


def check_engine(call: str, engine: str) -> None:
    """Raise OperandError for an unknown engine."""
    if engine not in _NAMES:
        raise OperandError(f"{call}: engine must be one of {', '.join(_NAMES)}; got {engine!r}")


def resolve_engine(call: str, device: torch.device, engine: str) -> Engine:
    """HARDWARE or EMULATED, for tensors on `device`.

    Hardware means a CUDA device of compute capability 8.9 or newer. Only Hopper (9.0) was measured: other generations
    may give other bits, and there only `engine="emulated"` gives Hopper's.

    Raises:
        OperandError: an unknown engine.
        UnsupportedError: "hardware" on a device without float8 tensor cores.
    """
    check_engine(call, engine)
    if engine == Engine.EMULATED.value:
        return Engine.EMULATED
    if has_float8_hardware(device):
        return Engine.HARDWARE
    if engine == Engine.HARDWARE.value:
        raise UnsupportedError(
            f"{call}: engine='hardware' needs tensors on a CUDA device of compute capability 8.9 or newer; "
            f"got {device}; move the tensors to one, or pass engine='emulated' for Hopper's bits on any device"
        )
    return Engine.EMULATED


def engine_of(device: torch.device | str, engine: str = "auto") -> str:
    """What computes a GEMM of tensors on `device`, for reports; tells emulation and hardware apart.

    Raises:
        OperandError: an unknown engine.
        UnsupportedError: "hardware" on a device without float8 tensor cores.
        MissingExtraError: emulation, but jax is not installed.
    """
    device = torch.device(device)
    if resolve_engine("engine_of", device, engine) is Engine.HARDWARE:
        return f"torch._scaled_mm on {torch.cuda.get_device_name(device)}"
    return emulation.emulator_name(device)
