"""Which engine computes a GEMM: the device's tensor cores, or the emulation of a chip's."""

import warnings
from enum import Enum
from functools import cache

import torch

from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.torch.device import has_float8_hardware, is_device_of
from f8emu.torch.gemm import emulation


class Engine(Enum):
    """What computes a GEMM."""

    AUTO = "auto"
    """HARDWARE if the device is the chip whose bits are asked for, otherwise EMULATED."""
    HARDWARE = "hardware"
    EMULATED = "emulated"


def check_engine(call: str, engine: str) -> None:
    """Raise OperandError for an unknown engine."""
    known = [member.value for member in Engine]
    if engine not in known:
        raise OperandError(f"{call}: engine must be one of {', '.join(known)}; got {engine!r}")


def resolve_engine(call: str, device: torch.device, engine: str, chip: Chip = HOPPER) -> Engine:
    """HARDWARE or EMULATED, for tensors on `device` and the bits of `chip`.

    Hardware means a CUDA device that is that chip, by its compute capability: another one gives other bits.

    Raises:
        OperandError: an unknown engine.
        UnsupportedError: "hardware" on any other device.
    """
    check_engine(call, engine)
    if engine == Engine.EMULATED.value:
        return Engine.EMULATED
    if is_device_of(chip, device):
        return Engine.HARDWARE
    if engine == Engine.HARDWARE.value:
        raise UnsupportedError(f"{call}: {_no_hardware(device, chip)}")
    if has_float8_hardware(device):
        warn_of_idle_gpu(device, chip)
    return Engine.EMULATED


def engine_of(device: torch.device | str, engine: str = "auto", *, chip: Chip | str = HOPPER) -> str:
    """The engine that computes a GEMM of tensors on `device`, in words for a report: emulation or the hardware.

    Raises:
        OperandError: an unknown engine.
        SpecError: an unknown chip.
        UnsupportedError: "hardware" on a device that is not that chip.
        MissingExtraError: emulation on a GPU, or without the compiled engine, but jax is not installed.
    """
    device, chip = torch.device(device), chip_by_name("engine_of", chip)
    if resolve_engine("engine_of", device, engine, chip) is Engine.HARDWARE:
        return f"torch._scaled_mm on {torch.cuda.get_device_name(device)}"
    found = emulation.emulator_name(device)
    return found if chip == HOPPER else f"{chip} {found}"


def _no_hardware(device: torch.device, chip: Chip) -> str:
    if chip.capability is None:
        wanted = f"a device whose library has the bits of {chip}, and torch has no such device"
    else:
        major, minor = chip.capability
        wanted = f"tensors on a CUDA device of compute capability {major}.{minor}, {chip}"
    own = [c for c in CHIPS.values() if c != chip and is_device_of(c, device)]
    return (
        f"engine='hardware' needs {wanted}; got {device}; move the tensors to one, "
        + "".join(f"pass chip={c.name!r} for what the device is, " for c in own)
        + f"or pass engine='emulated' for the bits of {chip} on any device"
    )


@cache
def warn_of_idle_gpu(device: torch.device, chip: Chip) -> None:
    """A GPU that could multiply stands idle: that costs time, and must be seen."""
    own = [c for c in CHIPS.values() if is_device_of(c, device)]
    remedy = f"pass chip={own[0].name!r}" if own else "call torch._scaled_mm itself, since the GPU has no profile"
    warnings.warn(
        f"f8emu.torch: {device} multiplies float8 but is not {chip}, whose bits were requested, so GEMMs are emulated, "
        f"which is slow; for the GPU's own bits and speed {remedy}. This warning appears once per device and chip",
        RuntimeWarning,
        stacklevel=2,
    )
