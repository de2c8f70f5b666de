"""`f8emu doctor`: what torch, JAX and the GPU of this machine do on the known traps, and which engine would run.

Everything is measured when asked; a library that is not installed is reported, not an error.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TextIO, TypeVar

from f8emu import interop
from f8emu.conformance.report import versions
from f8emu.doctor_jax import probe_jax
from f8emu.doctor_probe import Probe
from f8emu.doctor_torch import probe_torch
from f8emu.spec import MissingExtraError

_T = TypeVar("_T")

_PIPE_WIDTH = 160
"""Of a table that goes to a file; a terminal's own width otherwise."""
_MEASURED_CAPABILITY = (9, 0)
_NOT_MEASURED = (
    "torch.compile is not probed, it takes too long to start: on a GPU its float32 division has been seen to be "
    "approximate, and its bfloat16 chains keep float32 between operations."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that torch or JAX sees."""

    library: str
    kind: str
    """`cpu`, `cuda` (torch), `gpu` (JAX)."""
    name: str
    capability: str = ""
    """CUDA compute capability."""
    has_float8: bool = False
    """Whether `torch._scaled_mm` runs on its tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that doctor found."""

    system: str
    versions: dict[str, str]
    """Package, or driver -> version, or `not installed`."""
    devices: list[Device]
    engines: dict[str, str]
    """Device of the operands -> what computes `f8emu.torch.gemm.scaled_mm` there with `engine="auto"`."""
    probes: list[Probe]
    problems: list[str]
    """What could not be measured, and why."""
    seconds: float

    @property
    def faults(self) -> list[Probe]:
        """Deviations that f8emu's bits do not survive."""
        return [probe for probe in self.probes if probe.relied_on and not probe.agrees]


def run(*, as_json: bool = False, stream: TextIO | None = None) -> int:
    """Diagnoses this machine and prints the result, as text or as JSON.

    Gives the exit status: 1 where something deviates that f8emu relies on, otherwise 0.
    """
    out: TextIO = sys.stdout if stream is None else stream
    diagnosis = diagnose()
    if as_json:
        out.write(json.dumps(asdict(diagnosis), indent=1) + "\n")
    else:
        _print(diagnosis, out)
    return 1 if diagnosis.faults else 0


def diagnose() -> Diagnosis:
    """Measures everything that is there to be measured."""
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
            engines[name] = _tried(f"engine for {name}", lambda name=name: _engine(name), "none", problems)
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
    from f8emu.torch.gemm.engine import has_float8_hardware

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


def _engine(device: str) -> str:
    import torch

    from f8emu.torch.gemm.engine import Engine, resolve_engine

    if resolve_engine("doctor", torch.device(device), Engine.AUTO.value) is Engine.EMULATED:
        return f"emulated by f8ref.jax on {interop.jax_device(device).device_kind}"
    text = f"hardware, torch._scaled_mm on {torch.cuda.get_device_name()}"
    if torch.cuda.get_device_capability() != _MEASURED_CAPABILITY:
        text += "; its bits were never measured: engine='emulated' gives Hopper's"
    return text


def _print(diagnosis: Diagnosis, stream: TextIO) -> None:
    for line in _heading(diagnosis):
        stream.write(line + "\n")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for probe in diagnosis.probes:
            stream.write(f"{': '.join(_row(probe)[:3])}; expected {probe.expected}\n")
            stream.write("" if probe.agrees else f"    f8emu {probe.f8emu}\n")
    else:
        table = Table("subject", "probe", "observed", "expected", "what f8emu does")
        for probe in diagnosis.probes:
            style = None if probe.agrees else "red" if probe.relied_on else "yellow"
            table.add_row(*_row(probe), style=style)
        Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH).print(table)
    deviating = sum(not probe.agrees for probe in diagnosis.probes)
    stream.write(f"{deviating} of {len(diagnosis.probes)} probes deviate; ")
    stream.write(f"f8emu relies on {len(diagnosis.faults) or 'none'} of them.\n")
    for probe in diagnosis.faults:
        stream.write(f"FAULT {probe.subject}: {probe.name}: {probe.observed}. f8emu {probe.f8emu}\n")
    stream.write(f"{_NOT_MEASURED}\n{diagnosis.seconds:.1f} s\n")


def _row(probe: Probe) -> tuple[str, ...]:
    return (probe.subject, probe.name, probe.observed, probe.expected, "" if probe.agrees else probe.f8emu)


def _heading(diagnosis: Diagnosis) -> Iterator[str]:
    yield diagnosis.system
    yield ", ".join(f"{package} {found}" for package, found in diagnosis.versions.items())
    for device in diagnosis.devices:
        float8 = f", compute capability {device.capability}, {'' if device.has_float8 else 'no '}float8 hardware"
        yield f"{device.library} {device.kind}: {device.name}{float8 if device.capability else ''}"
    for device, engine in diagnosis.engines.items():
        yield f"scaled_mm of torch tensors on {device}: {engine}"
    yield from diagnosis.problems
