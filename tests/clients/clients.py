"""The scripts, one a library: which there are, which can run here, and what a run of one records."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from tests.clients.watch import Watch

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = sorted(path.stem for path in SCRIPTS.glob("*.py"))
"""A script has the name of what it imports. Its `RUNS` train, each under every recipe of `RECIPES`,
with a `WATCH` of its own if it is not of torch."""

RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise")
LIMIT_S = 900


def is_installed(client: str) -> bool:
    return importlib.util.find_spec(client) is not None


def run_apart(client: str, *, shows_all: bool = False) -> dict[str, Any]:
    """The row of one client, from a process of its own, without network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.clients", "--here", client],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_S,
        env={**os.environ, **offline, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
    )
    if ran.returncode:
        raise RuntimeError(f"{client}: exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr}")
    if shows_all:
        sys.stderr.write(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def errors_of(row: dict[str, Any]) -> list[str]:
    return [f"{run['run']}, {run['recipe']}: {run['error']}" for run in row["runs"] if "error" in run]


def run_here(client: str) -> dict[str, Any]:
    """Trains under each recipe; what fails is recorded, and its traceback printed."""
    script = importlib.import_module(f"tests.clients.scripts.{client}")
    package = packages_distributions()[client][0]
    start = time.perf_counter()
    runs = [
        {"run": run, "recipe": recipe} | _facts(train, getattr(script, "WATCH", Watch)(recipe))
        for run, train in script.RUNS.items()
        for recipe in getattr(script, "RECIPES", RECIPES)
    ]
    return {
        "client": client,
        "package": package,
        "version": version(package),
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - start, 1),
        "needs": {other: version(other) for other in ("torch", *getattr(script, "NEEDS", ()))},
        "remark": getattr(script, "REMARK", ""),
        "runs": runs,
    }


def _facts(train: Callable[[Any, Path], None], watch: Any) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory() as folder, watch.counting():
            train(watch, Path(folder))
        return watch.facts()
    except Exception as error:  # whatever it is
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
