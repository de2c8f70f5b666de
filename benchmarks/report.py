"""What every benchmark records beside its figures, and how it shows them."""

import importlib
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from f8emu.environment import versions

_console = Console()


def facts(module: str, given: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The command, the device and the versions that figures belong to."""
    found = versions()
    for package in ("torchao", "triton"):
        found[package] = package_version(package)
    found["cuda"] = torch.version.cuda
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    command = shlex.join(["python", "-m", module, *given])
    return {"command": command, "device": name, "versions": found}


def package_version(package: str) -> str | None:
    """None is not installed. A package that only lies on the path has its own `__version__`."""
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(package), "__version__", "unknown")
    except ImportError:
        return None


def write_json(path: Path, report: dict[str, Any]) -> None:
    """The report, whole or not at all: a run that is cut off leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def draw(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; the first column is a name, the others are figures."""
    table = Table(title=Text(title, style="bold"), title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        table.add_row(*map(Text, row))
    # A pipe has no width of its own, and a table cut to 80 columns says nothing.
    console = _console if _console.is_terminal else Console(width=160)
    console.print(table)


def figure(entry: dict[str, Any], key: str, form: str) -> str:
    """A figure of an entry, for a table; a dash where it has none."""
    return format(entry[key], form) if key in entry else "-"


def say(line: str) -> None:
    """A line at once, also into a pipe: a run takes minutes."""
    print(line, file=sys.stdout, flush=True)
