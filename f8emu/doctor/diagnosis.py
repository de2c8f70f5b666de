"""How torch, JAX and the GPU of this machine behave on the known traps, and which engine would run.

Everything is measured on each call; a library that is not installed is reported, not an error.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from f8emu import interop
from f8emu.doctor.jax_probes import probe_jax
from f8emu.doctor.probe import Probe
from f8emu.doctor.torch_probes import probe_torch
from f8emu.environment import versions
from f8emu.native.library import unavailable, widths
from f8emu.spec import CHIPS, HOPPER, MissingExtraError

_T = TypeVar("_T")


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
    probes: list[Probe]
    problems: list[str]
    """What could not be measured, and why."""
    seconds: float

    @property
    def faults(self) -> list[Probe]:
        """Deviations that change f8emu's bits."""
        return [probe for probe in self.probes if probe.relied_on and not probe.agrees]


def diagnose() -> Diagnosis:
    """Measure everything that this machine has."""
    start = time.perf_counter()
    problems: list[str] = []
    devices: list[Device] = []
    engines: dict[str, str] = {}
    probes: list[Probe] = []
    # torch first: JAX then knows that it must leave the GPU's memory to others
    for library, find, probe in (("torch", _torch_devices, probe_torch), ("jax", _jax_devices, probe_jax)):
        found = _tried(library, find, [], problems)
        devices += found
        for device in found:
            kind = device.kind
            probes += _tried(f"{library} {kind}", lambda probe=probe, kind=kind: probe(kind), [], problems)
    for device in devices:
        if device.library == "torch":
            name = device.kind
            engines[name] = _tried(f"engine for {name}", lambda name=name: engine_of_torch(name), "none", problems)
    return Diagnosis(
        system=platform.platform(),
        versions={name: found or "not installed" for name, found in versions().items()},
        devices=devices,
        engines=engines,
        probes=probes,
        problems=problems,
        seconds=round(time.perf_counter() - start, 2),
    )


def _tried(what: str, function: Callable[[], _T], otherwise: _T, problems: list[str]) -> _T:
    """The function's result; where it raises, `otherwise` and a line in `problems`."""
    try:
        return function()
    except MissingExtraError as error:
        problems.append(f"{what}: {error}")
    except Exception as error:  # a broken driver or library is what a doctor is called for
        problems.append(f"{what}: {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
    return otherwise


def _torch_devices() -> list[Device]:
    torch = interop.require_torch("doctor")
    from f8emu.torch.device import has_float8_hardware

    found = [Device(library="torch", kind="cpu", name=torch.backends.cpu.get_cpu_capability())]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found.append(
            Device(
                library="torch",
                kind="cuda",
                name=torch.cuda.get_device_name(),
                capability=f"{major}.{minor}",
                has_float8=has_float8_hardware(torch.device("cuda")),
            )
        )
    return found


def _jax_devices() -> list[Device]:
    jax = interop.require_jax("doctor")
    kinds = dict.fromkeys(["cpu", *(device.platform for device in jax.devices())])
    return [Device(library="jax", kind=kind, name=jax.devices(kind)[0].device_kind) for kind in kinds]


def engine_of_torch(device: str) -> str:
    """What computes GEMMs of torch tensors with `engine="auto"`, and which chip a GPU that is not Hopper is."""
    import torch

    from f8emu.torch.device import is_device_of

    own = [chip for chip in CHIPS.values() if is_device_of(chip, torch.device(device))]
    if HOPPER in own:
        return f"hardware, torch._scaled_mm on {torch.cuda.get_device_name()}"
    if device == "cpu" and unavailable() is None:
        return f"emulated by f8emu.native, {widths()[0]}"
    text = f"emulated by f8ref.jax on {interop.jax_device(device).device_kind}"
    if device == "cpu":
        text += f"; {unavailable()}"
    for chip in own:
        text += f"; chip={chip.name!r} runs on the hardware, its profile is {chip.evidence.value}"
    return text
