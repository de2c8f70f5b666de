"""A diagnosis as text: what the machine has, a table of the probes, a line for every fault, and what to do next."""

import shutil
from collections.abc import Iterator
from typing import TextIO

from f8emu.doctor.diagnosis import Diagnosis
from f8emu.doctor.next_steps import next_steps
from f8emu.doctor.probe import Probe

_PIPE_WIDTH = 160
"""Columns of a table that goes to a file; a terminal has its own, and `COLUMNS` overrides both."""
_NOT_MEASURED = (
    "torch.compile is not probed, it takes too long to start: on a GPU its float32 division has been seen to be "
    "approximate, and its bfloat16 chains keep float32 between operations."
)


def write(diagnosis: Diagnosis, stream: TextIO) -> None:
    """Writes the whole diagnosis."""
    for line in _heading(diagnosis):
        stream.write(line + "\n")
    if diagnosis.probes:
        _write_probes(diagnosis, stream)
    stream.write("\n")
    for i, line in enumerate(next_steps(diagnosis)):
        stream.write(f"{'next: ' if i == 0 else '      '}{line}\n")


def _write_probes(diagnosis: Diagnosis, stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("subject", "probe", "observed", "expected", "what f8emu does")
    for probe in diagnosis.probes:
        style = None if probe.agrees else "red" if probe.relied_on else "yellow"
        table.add_row(*_row(probe), style=style)
    Console(file=stream, width=shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns).print(table)
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
