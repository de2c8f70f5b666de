"""The command line, called in this process, and few recorded GEMMs to give it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from typer.testing import CliRunner

from f8emu import cli
from f8emu.conformance import GoldenFile, read_golden, shipped_golden, write_golden

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'reference'}"}
"""Of a process that imports what is here."""


def invoke(*arguments: object, **environment: str | None) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; any exception but the exit is raised."""
    result = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


_BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *arguments: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in which some packages are not installed."""
    command = [sys.executable, "-c", f"BLOCKED = {blocked!r}{_BLOCKER}{code}", *arguments]
    environment = {**os.environ, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that does nothing else."""

    def call(*args: Any, **options: Any) -> NoReturn:
        raise error

    return call


def stages_in(report: Path) -> dict[str, dict[str, Any]]:
    """Name -> stage of the first subject of a JSON report."""
    return {stage["stage"]: stage for stage in json.loads(report.read_text())["subjects"][0]["stages"]}


def few_recorded(path: Path, *numbers: int) -> GoldenFile:
    """A file of these cases of the shipped one."""
    shipped = shipped_golden()
    write_golden(path, [shipped.cases[number] for number in numbers], shipped.metadata)
    return read_golden(path)
