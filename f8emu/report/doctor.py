"""The findings of `f8emu doctor` as a page and as data."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from f8emu.conformance.compare import counted
from f8emu.doctor import Diagnosis, next_steps
from f8emu.environment import tested
from f8emu.report.page import Cell, Page, Section, Text


def doctor_page(diagnosis: Diagnosis) -> Page:
    """What this machine has, what fails, and what to do next."""
    count = len(diagnosis.problems)
    verdict = Cell(text=counted(count, "problem") if count else "no problem", tone="bad" if count else "good")
    sections = [
        Section(title="This machine", blocks=[Text(points=list(heading(diagnosis)))]),
        Section(title="What to do next", blocks=[Text(points=[f"next: {step}" for step in next_steps(diagnosis)])]),
    ]
    return Page(title="f8emu doctor", verdict=verdict, sections=sections)


def heading(diagnosis: Diagnosis) -> Iterator[str]:
    """A line for each fact, then the problems."""
    yield diagnosis.system
    yield ", ".join(f"{package} {release}" for package, release in diagnosis.versions.items())
    yield f"tested with {tested()}"
    for device in diagnosis.devices:
        float8 = f", compute capability {device.capability}, {'' if device.has_float8 else 'no '}float8 hardware"
        yield f"{device.library} {device.kind}: {device.name}{float8 if device.capability else ''}"
    for device, engine in diagnosis.engines.items():
        yield f"scaled_mm of torch tensors on {device}: {engine}"
    yield from diagnosis.problems


def doctor_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The findings as plain data."""
    return {"schema": 1, **asdict(diagnosis)}
