"""Layers over several devices: global scales, gathers of codes, and the oracle's bits. `sharded` has the cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)
"""Devices; and machine code in the shortest time: sharding is XLA's own work, before that."""


def test_sharded() -> None:
    """All cases, in one process: the number of virtual devices is set before JAX starts."""
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
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
    results: dict[str, str | None] = json.loads(ran.stdout.splitlines()[-1])
    failed = [f"{case}: {why}" for case, why in results.items() if why is not None]
    assert results and not failed, "\n".join(failed)
