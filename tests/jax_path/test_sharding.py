"""Layers over several devices: global scales, gathers of codes, and the oracle's bits. `sharded` has the cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax_path.sharded import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """Of all cases, run in one process: the number of virtual devices is set before JAX starts."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "reference")))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.jax_path.sharded"],
        env=os.environ | {"XLA_FLAGS": flags.strip(), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_sharded(case: str, results: dict[str, str | None]) -> None:
    assert results[case] is None, results[case]
