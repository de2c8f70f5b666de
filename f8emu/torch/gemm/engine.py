"""Which engine computes a GEMM: the tensor core of the device, or the emulation of Hopper's."""

from enum import Enum

import torch

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.torch.device import has_float8_hardware
from f8emu.torch.gemm import emulation


class Engine(Enum):
    """What computes a GEMM."""

    AUTO = "auto"
    """The hardware where it has float8, otherwise the emulation."""
    HARDWARE = "hardware"
    EMULATED = "emulated"


_NAMES = tuple(engine.value for engine in Engine)


def check_engine(call: str, engine: str) -> None:
    """Raise OperandError for an unknown engine."""
    if engine not in _NAMES:
        raise OperandError(f"{call}: engine must be one of {', '.join(_NAMES)}; got {engine!r}")


def resolve_engine(call: str, device: torch.device, engine: str) -> Engine:
    """HARDWARE or EMULATED, for tensors on `device`.

    The hardware is a CUDA device of compute capability 8.9 or newer. Only Hopper's (9.0) was measured: another
    generation's bits are its own, and only `engine="emulated"` gives Hopper's there.

    Raises:
        OperandError: an unknown engine.
        UnsupportedError: the hardware is asked for where there is none.
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
    """What computes a GEMM for tensors on `device`, for reports: never takes the emulation for the hardware.

    Raises:
        OperandError: an unknown engine.
        UnsupportedError: the hardware is asked for where there is none.
        MissingExtraError: the emulation without jax.
    """
    device = torch.device(device)
    if resolve_engine("engine_of", device, engine) is Engine.HARDWARE:
        return f"torch._scaled_mm on {torch.cuda.get_device_name(device)}"
    return emulation.emulator_name(device)
