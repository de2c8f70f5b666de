"""The GitHub Action: its steps run as a runner runs them, on a project of two tests; pip is replaced, and recorded."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
PIP = """
import os, sys
with open(os.environ["PIP_CALLS"], "a") as file:
    print(*sys.argv[1:], file=file)
"""
# That torch is emulated in such a process is seen in tests/torch_path/test_emulate.py, which waits for torch.
SUITE = """
import os, sitecustomize

def test_a_chip_is_emulated():
    assert os.environ["F8EMU_RUN"] == "H100"
    assert sitecustomize.__file__.endswith("f8emu/startup/sitecustomize.py")

def test_nothing_else():
    pass
"""


def run_action(project: Path, **inputs: str) -> tuple[int, str, list[str]]:
    """The exit status of the first step that fails, or of the last; what it printed; and what pip was asked."""
    # 1. The variables of a runner; `pip` is a module of ours, and pytest loads no plugins of this machine.
    values = {name: str(inputs.get(name, entry["default"])) for name, entry in ACTION["inputs"].items()}
    assert inputs.keys() <= values.keys()
    stub = project / "stub"
    (stub / "pip").mkdir(parents=True)
    (stub / "pip/__init__.py").touch()
    (stub / "pip/__main__.py").write_text(PIP)
    environment = {
        **os.environ,
        "GITHUB_ACTION_PATH": str(ROOT),
        "PIP_CALLS": str(project / "pip_calls"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, (stub, ROOT, ROOT / "reference"))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }

    def expanded(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[str(match[1])], text)

    # 2. The steps, one after the other.
    status, printed = -1, ""
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash" and "${{" not in step["run"]
        condition = re.fullmatch(r"inputs\.(\w+) != ''", step.get("if", "inputs.chip != ''"))
        assert condition is not None
        if not values[condition[1]]:
            continue
        script = project / "step.sh"
        script.write_text(step["run"])
        ran = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=project / expanded(step.get("working-directory", ".")),
            env=environment | {name: expanded(text) for name, text in step.get("env", {}).items()},
            capture_output=True,
            text=True,
            check=False,
        )
        status, printed = ran.returncode, ran.stdout + ran.stderr
        if status:
            break
    return status, printed, (project / "pip_calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("suite", "status"), [(SUITE, 0), ("def test_fails(): assert 1 == 2", 1)], ids=["passes", "fails"]
)
def test_the_status_is_that_of_the_suite(suite: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(suite)
    ended, printed, pip = run_action(tmp_path)
    assert ended == status, printed
    assert ("1 failed" if status else "2 passed") in printed
    assert pip == [
        "install torch --index-url https://download.pytorch.org/whl/cpu",
        f"install {ROOT}[torch] pytest",
    ]


def test_inputs_reach_the_commands(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    _, printed, pip = run_action(
        tmp_path,
        **{
            "torch": "",
            "packages": "-e .[test] torchao",
            "bf16": "true",
            "chip": "Hopper",
            "working-directory": "library",
            "command": 'false | true; echo "$F8EMU_RUN in ${PWD##*/}"',
        },
    )
    assert pip == [f"install {ROOT}[torch] -e .[test] torchao"]
    assert printed == "", "a failing pipe ends the command"
    ended, printed, _ = run_action(tmp_path / "library", command='echo "$F8EMU_RUN"; exit 7', bf16="true", torch="")
    assert (ended, printed) == (7, "H100,bf16\n")


def test_text_of_an_input_is_no_part_of_a_script(tmp_path: Path) -> None:
    ended, printed, _ = run_action(tmp_path, chip='H100"; touch planted; "')
    assert ended == 2 and "chip must be one of" in printed
    assert not (tmp_path / "planted").exists()
