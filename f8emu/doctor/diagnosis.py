"""How torch, JAX and the GPU of this machine behave on the known traps, and which engine would run.

Everything is measured on each call; a library that is not installed is reported, not an error.
"""

import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from f8emu import interop
from f8emu.doctor.probes import Probe, probe_jax, probe_torch
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
    found = Diagnosis(
        system=platform.platform(),
        versions={name: found or "not installed" for name, found in versions().items()},
        devices=[],
        engines={},
        probes=[],
        problems=[],
        seconds=0.0,
    )
    # torch first: JAX then knows that it must leave the GPU's memory to others
    for library, find, probe in (("torch", _torch_devices, probe_torch), ("jax", _jax_devices, probe_jax)):
        for device in _tried(library, find, [], found.problems):
            kind = device.kind
            found.devices.append(device)
            found.probes.extend(_tried(f"{library} {kind}", lambda k=kind, p=probe: p(k), [], found.problems))
            if library == "torch":
                name = f"engine for {kind}"
                found.engines[kind] = _tried(name, lambda k=kind: engine_of_torch(k), "none", found.problems)
    return replace(found, seconds=round(time.perf_counter() - start, 2))


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
    """What `f8emu.torch.engine_of` says, the width or why there is no engine, and which chip another GPU is."""
    import torch

    from f8emu.torch import engine_of
    from f8emu.torch.device import is_device_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an idle GPU, or of no engine: the text says it
        text = engine_of(device)
    own = [chip for chip in CHIPS.values() if is_device_of(chip, torch.device(device))]
    if HOPPER in own:
        return f"hardware, {text}"
    if device == "cpu":
        return f"{text}; {unavailable() or f'vectors: {widths()[0]}'}"
    more = (f"; chip={chip.name!r} runs on the hardware, its profile is {chip.evidence.value}" for chip in own)
    return text + "".join(more)
