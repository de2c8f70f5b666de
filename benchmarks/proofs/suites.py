"""Float8 tests of other projects, which skip without an H100, on a CPU under f8emu's plugin of pytest.

    git clone --branch v0.18.0 https://github.com/pytorch/ao
    python -m benchmarks.proofs.suites test/float8 --source ao --scripts test/float8/test_dtensor.py \\
        --json benchmarks/results/suites-torchao.json

A copy of the tests runs. In it a CUDA device is the CPU (`REPLACED`), and a `conftest.py` answers the checks that are
left (`CONFTEST`); the project itself is installed and unchanged. Every test that does not pass is listed with its
reason. Scripts, which `torchrun` starts, run with two processes under `f8emu run`.

Exit status 1 if none passes.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.runner import Bench, draw, option, package_version

REPLACED = {
    r'"cuda(:\d)?"': '"cpu"',
    r"\.cuda\(\)": ".cpu()",
    r"torch\.(cuda|accelerator)\.is_available\(\)": "True",
    r"torch\.accelerator\.current_accelerator\(\)": 'torch.device("cpu")',
    r"not TEST_CUDA": "False",
    r"is_sm_at_least_(89|90)\(\)": "True",
    r"torch\.cuda\.device_count\(\)": "2",
    r'"nccl"': '"gloo"',
    r"torch\.cuda\.(synchronize|empty_cache|set_device)\(": "(lambda *_: None)(",
}
"""In the sources of the tests: what asks for a GPU, and what asks a CPU for the same."""
CONFTEST = """
import torch
import torchao.testing.utils
import torchao.utils

torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.set_autocast_dtype("cpu", torch.float16)  # the default of CUDA's autocast
for module in (torchao.utils, torchao.testing.utils):
    if hasattr(module, "get_current_accelerator_device"):
        module.get_current_accelerator_device = lambda: torch.device("cpu")
"""

BENCH = Bench(
    "benchmarks.proofs.suites",
    __doc__,
    ("tests", {"nargs": "+", "help": "files or folders in the source"}),
    option("source", Path, "a checkout of the project", required=True),
    option("project", "torchao", "its distribution"),
    option("deselect", (), "tests that are left out", type=str),
    option("scripts", (), "tests that torchrun starts", type=str),
    option("limit", 3000.0, "seconds"),
)


def copied(source: Path, tests: Sequence[str], folder: Path) -> None:
    """The tests with the CPU for a GPU."""
    for test in tests:
        target = folder / test
        copy = partial(shutil.copytree, dirs_exist_ok=True) if (source / test).is_dir() else shutil.copy2
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(source / test, target)
    for file in folder.rglob("*.py"):
        text = file.read_text()
        for pattern, replacement in REPLACED.items():
            text = re.sub(pattern, replacement, text)
        file.write_text(text)
    (folder / "conftest.py").write_text(CONFTEST)


def outcomes(report: Path) -> dict[str, tuple[str, str, str]]:
    """For each test its file, outcome, and reason where it did not pass."""
    tests: dict[str, tuple[str, str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        children = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = {"failure": "failed", "error": "failed"}.get(children[0].tag, "skipped") if children else "passed"
        reason = (children[0].get("message") or "").strip().partition("\n")[0] if children else ""
        tests[f"{module}::{name}"] = (module.rpartition(".Test")[0] or module, outcome, reason[:160])
    return tests


def run_script(script: str, folder: Path, limit: float) -> tuple[str, str]:
    """Outcome and reason of a script on two processes."""
    command = [sys.executable, "-m", "f8emu", "run", "--chip", "H100", "--bf16", "--"]
    command += ["torchrun", "--standalone", "--nproc-per-node", "2", script]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit, check=False)
    if run.returncode == 0:
        return "passed", ""
    errors = [line for line in run.stderr.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    return "failed", (errors or [f"status {run.returncode}"])[0][:160]


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, device="cpu")
    arguments = run.arguments
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(arguments.source, [*arguments.tests, *arguments.scripts], folder)
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "f8emu.pytest_plugin", "--f8emu-chip=H100"]
        command += ["--f8emu-bf16", "-p", "no:cacheprovider", "-o", "addopts=", f"--junit-xml={report}"]
        command += [word for test in arguments.deselect for word in ("--deselect", test)]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        subprocess.run([*command, *arguments.tests], cwd=folder, env=environment, timeout=arguments.limit, check=False)
        if not report.is_file():
            raise SystemExit("benchmarks.proofs.suites: pytest ended without a report")
        tests = outcomes(report)
        for script in arguments.scripts:
            tests[script] = (script, *run_script(script, folder, arguments.limit))
    files = sorted({file for file, _, _ in tests.values()})
    entries = []
    for file in files:
        counts = Counter(outcome for of, outcome, _ in tests.values() if of == file)
        entries.append({"file": file, **{key: counts[key] for key in ("passed", "failed", "skipped")}})
    reasons = Counter((outcome, reason) for _, outcome, reason in tests.values() if outcome != "passed")
    rows = [{"outcome": outcome, "tests": count, "reason": why} for (outcome, why), count in reasons.most_common()]
    version = package_version(arguments.project)
    for title, table in ((f"{arguments.project} {version}", entries), ("what did not pass", rows)):
        if table:
            draw(title, list(table[0]), [list(map(str, row.values())) for row in table])
    run.record(
        project=arguments.project, version=version, deselected=arguments.deselect, files=entries, not_passed=rows
    )
    return int(not any(entry["passed"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
