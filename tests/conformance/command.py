"""The command line, called in this process."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from f8emu import cli


def invoke(*arguments: str, **environment: str | None) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; any exception but the exit is raised."""
    result = CliRunner().invoke(cli.build_app(), list(arguments), env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def stages_in(report: Path) -> dict[str, dict[str, Any]]:
    """Name -> stage of the first subject of a JSON report."""
    return {stage["stage"]: stage for stage in json.loads(report.read_text())["subjects"][0]["stages"]}
