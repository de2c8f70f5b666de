"""`f8emu doctor`: what this machine has, which engine computes a GEMM here, and what to do next.

Everything is looked up on each call; a library that is not installed is reported, not an error.
"""

import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from f8emu import interop
from f8emu.environment import versions
from f8emu.native.library import unavailable, widths
from f8emu.spec import CHIPS, HOPPER, MissingExtraError
from f8emu.spec.exports import public

_T = TypeVar("_T")
_MISSING = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that torch or JAX sees."""

    library: str
    kind: str
    """The library's word: `cpu`, `cuda` (torch), `gpu` (JAX)."""
    name: str
    capability: str = ""
    """CUDA compute capability."""
    has_float8: bool = False
    """Whether `torch._scaled_mm` runs on its tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings of doctor."""

    system: str
    versions: dict[str, str]
    """Package or driver -> version, or `not installed`."""
    devices: list[Device]
    engines: dict[str, str]
    """Device of the operands -> the engine that computes `f8emu.torch.scaled_mm` there with `engine="auto"`."""
    problems: list[str]
    """What of an installed library fails, and how."""


def diagnose() -> Diagnosis:
    """Look up everything that this machine has."""
    installed = {name: diagnosis or _MISSING for name, diagnosis in versions().items()}
    diagnosis = Diagnosis(system=platform.platform(), versions=installed, devices=[], engines={}, problems=[])
    # torch first: JAX then knows that it must leave the GPU's memory to others
    for library, find in (("torch", _torch_devices), ("jax", _jax_devices)):
        if installed.get(library) != _MISSING:
            diagnosis.devices.extend(_tried(library, find, [], diagnosis.problems))
    for kind in (device.kind for device in diagnosis.devices if device.library == "torch"):
        name = f"engine for {kind}"
        diagnosis.engines[kind] = _tried(name, lambda k=kind: engine_of_torch(k), "none", diagnosis.problems)
    return diagnosis


def _tried(what: str, function: Callable[[], _T], otherwise: _T, problems: list[str]) -> _T:
    try:
        return function()
    except Exception as error:  # a broken driver or library is what a doctor is called for
        problems.append(f"{what}: {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
    return otherwise


def _torch_devices() -> list[Device]:
    torch = interop.require_torch("doctor")
    from f8emu.torch.chip import has_float8_hardware

    devices = [Device(library="torch", kind="cpu", name=torch.backends.cpu.get_cpu_capability())]
    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        has_float8 = has_float8_hardware(torch.device("cuda"))
        cuda = Device(library="torch", kind="cuda", name=name, capability=f"{major}.{minor}", has_float8=has_float8)
        devices.append(cuda)
    return devices


def _jax_devices() -> list[Device]:
    jax = interop.require_jax("doctor")
    kinds = dict.fromkeys(["cpu", *(device.platform for device in jax.devices())])
    return [Device(library="jax", kind=kind, name=jax.devices(kind)[0].device_kind) for kind in kinds]


def engine_of_torch(device: str) -> str:
    """The engine of `f8emu.torch.engine_of`, its vector width or why it is missing, and the chip of other GPUs."""
    import torch

    from f8emu.torch import engine_of
    from f8emu.torch.chip import is_device_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an idle GPU, or of no engine: the text says it
        try:
            text = engine_of(device)
        except MissingExtraError:  # the next steps name it
            return "none"
    # The recipe's chip runs on the hardware; another GPU may do so under its own profile.
    chips = [chip for chip in CHIPS.values() if is_device_of(chip, torch.device(device))]
    if HOPPER in chips:
        return f"hardware, {text}"
    if device == "cpu":
        return f"{text}; {unavailable() or f'vectors: {widths()[0]}'}"
    more = (f"; chip={chip.name!r} runs on the hardware; profile: {chip.evidence.value}" for chip in chips)
    return text + "".join(more)


def next_steps(diagnosis: Diagnosis) -> Iterator[str]:
    """One to three lines on what this machine can do now, and what it lacks."""
    # By what is missing and what the GPU can do: each machine is told its own next command.
    missing = [name for name in ("torch", "jax") if diagnosis.versions.get(name) == _MISSING]
    on_hardware = any(engine.startswith("hardware") for engine in diagnosis.engines.values())
    if len(missing) == 2:
        yield "f8emu.numpy works without more. `f8emu verify` proves its bits against recordings of an H200."
        yield "To train with torch: pip install 'f8emu[torch,jax]'. To train with JAX: pip install 'f8emu[jax]'."
        return
    if on_hardware:
        yield (
            "This GPU has the float8 tensor cores: f8emu.torch.convert_to_float8_training(model) trains on them. "
            "`f8emu verify torch` proves its bits."
        )
    elif missing == ["jax"] and "none" in diagnosis.engines.values():
        yield "There is no float8 hardware here, no compiled engine, and no JAX, with which torch would emulate GEMMs:"
        yield "pip install 'f8emu[jax]'. f8emu.numpy works without it."
    else:
        yield (
            "GEMMs are emulated here, with the bits of an H200. `f8emu verify` proves it; "
            "`f8emu verify FILE.py:FUNCTION` checks a kernel of your own."
        )
    if missing == ["jax"] and on_hardware:
        yield "To emulate GEMMs too: pip install 'f8emu[jax]'."
    elif missing == ["torch"]:
        yield "f8emu.jax.dot_general(recipe) trains in JAX. For torch: pip install 'f8emu[torch]'."


__all__, __dir__ = public(__name__)
