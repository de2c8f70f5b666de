"""A diagnosis as text: what the machine has, a table of the probes, a line for every fault, and what to do next."""

import shutil
from collections.abc import Iterator
from typing import TextIO

from f8emu.doctor.diagnosis import Diagnosis

_PIPE_WIDTH = 160
"""Columns of a table that goes to a file; a terminal has its own, and `COLUMNS` overrides both."""
_NOT_MEASURED = (
    "torch.compile is not probed, it takes too long to start: on a GPU its float32 division has been seen to be "
    "approximate, and its bfloat16 chains keep float32 between operations."
)


def write(diagnosis: Diagnosis, stream: TextIO) -> None:
    """Writes the whole diagnosis."""
    stream.writelines(f"{line}\n" for line in _heading(diagnosis))
    if diagnosis.probes:
        _write_probes(diagnosis, stream)
    stream.write("\n")
    for i, line in enumerate(next_steps(diagnosis)):
        stream.write(f"{'next: ' if i == 0 else '      '}{line}\n")


def _heading(diagnosis: Diagnosis) -> Iterator[str]:
    yield diagnosis.system
    yield ", ".join(f"{package} {found}" for package, found in diagnosis.versions.items())
    for device in diagnosis.devices:
        float8 = f", compute capability {device.capability}, {'' if device.has_float8 else 'no '}float8 hardware"
        yield f"{device.library} {device.kind}: {device.name}{float8 if device.capability else ''}"
    for device, engine in diagnosis.engines.items():
        yield f"scaled_mm of torch tensors on {device}: {engine}"
    yield from diagnosis.problems


def _write_probes(diagnosis: Diagnosis, stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("subject", "probe", "observed", "expected", "what f8emu does")
    for probe in diagnosis.probes:
        style = None if probe.agrees else "red" if probe.relied_on else "yellow"
        remedy = "" if probe.agrees else probe.f8emu
        table.add_row(probe.subject, probe.name, probe.observed, probe.expected, remedy, style=style)
    Console(file=stream, width=shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns).print(table)
    deviating = sum(not probe.agrees for probe in diagnosis.probes)
    stream.write(f"{deviating} of {len(diagnosis.probes)} probes deviate; ")
    stream.write(f"f8emu relies on {len(diagnosis.faults) or 'none'} of them.\n")
    for probe in diagnosis.faults:
        stream.write(f"FAULT {probe.subject}: {probe.name}: {probe.observed}. f8emu {probe.f8emu}\n")
    stream.write(f"{_NOT_MEASURED}\n{diagnosis.seconds:.1f} s\n")


def next_steps(diagnosis: Diagnosis) -> Iterator[str]:
    """What this machine can do now, and what it lacks, in one to three lines."""
    if diagnosis.faults:
        yield "A FAULT above changes bits on this machine: undo what it names before you trust a result."
    missing = [name for name in ("torch", "jax") if diagnosis.versions.get(name) == "not installed"]
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
    elif missing == ["jax"]:
        yield "There is no float8 hardware here, and torch emulates GEMMs with JAX, which is missing:"
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
