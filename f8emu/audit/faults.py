"""The faults that an audit looks for: what each does to a served model, the remedy, and where it was met in public."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files


class Severity(StrEnum):
    """How bad a finding is. A note is no fault."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of fault: a row of faults.toml."""

    severity: Severity
    title: str
    effect: str
    """What it does to the served model."""
    remedy: str
    thread: str
    """Where it was met in public; empty: nowhere."""


def _read() -> Mapping[str, Check]:
    table = tomllib.loads((files("f8emu.audit") / "faults.toml").read_text(encoding="utf-8"))
    return {key: Check(Severity(severity), *texts) for key, (severity, *texts) in table.items()}


CHECKS = _read()
"""Key -> what is checked. Findings cite the key."""
