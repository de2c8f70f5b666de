"""`f8emu audit` of a checkpoint in shards against reading its files with numpy, in the same run.

    python -m benchmarks.audit --json OUT

The checkpoint has weights in blocks of 128 x 128 and is in the page cache. A time is the shortest of several, the two
taking turns. Memory is the most that a process of its own held for the audit, and for importing it alone.
Exit status 1 if the audit finds a fault.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.emulator import cpu_name, shortest
from benchmarks.runner import Bench, Entry, draw_entries, option, turns_of
from f8emu.audit import audit
from f8emu.dialects import quantize
from tests.audit.checkpoints import checkpoint, fp8, normal

BENCH = Bench(
    "benchmarks.audit",
    __doc__,
    option("device", "cpu", choices=("cpu",)),
    option("mebibytes", 2048, "of codes"),
    option("shards", 4),
    *turns_of(5),
)
_ROWS, _K = 2048, 8192  # 16 MiB a weight
_PEAK = """
import re, sys
from f8emu.audit import audit
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])  # in KiB, since exec
imported = peak()
audit(sys.argv[1])
print(1024 * imported, 1024 * peak())
"""


def write(folder: Path, mebibytes: int, shards: int) -> Path:
    """Weights that are quantized once, under as many names as it takes."""
    made = quantize(normal(_ROWS, _K), "deep_gemm_block")
    count = max(1, mebibytes * 2**20 // (_ROWS * _K))
    layers = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    tensors = {name: made.codes for name in layers} | {f"{name}_scale_inv": made.scale for name in layers}
    files = {
        f"model-{i + 1:05}-of-{shards:05}.safetensors": [
            tensor for name in layers[i::shards] for tensor in (name, f"{name}_scale_inv")
        ]
        for i in range(shards)
    }
    return checkpoint(folder, tensors, fp8(), files)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), run.arguments.mebibytes, run.arguments.shards)
        files = sorted(path.glob("*.safetensors"))

        def read() -> None:
            for file in files:
                np.fromfile(file, np.uint8)

        result = audit(path)
        times = shortest(
            {"numpy.fromfile": read, "f8emu audit": lambda: audit(path)}, run.arguments.rounds, lambda: None
        )
        peak = subprocess.run([sys.executable, "-c", _PEAK, str(path)], check=True, capture_output=True, text=True)
        imported, peak_bytes = map(int, peak.stdout.split())
    entry: Entry = {
        "subject": "f8emu audit",
        "bytes": result.elements,
        "seconds": times["f8emu audit"],
        "baseline_seconds": times["numpy.fromfile"],
        "ratio": times["f8emu audit"] / times["numpy.fromfile"],
        "peak_bytes": peak_bytes,
        "imported_bytes": imported,
    }
    draw_entries(
        "f8emu audit against numpy.fromfile", [entry], "seconds:.2f baseline_seconds:.2f ratio:.2f peak_bytes:GiB"
    )
    run.record(
        cpu=cpu_name(), cores=len(os.sched_getaffinity(0)), load_before=round(os.getloadavg()[0], 1), figures=[entry]
    )
    return result.verdict.status


if __name__ == "__main__":
    sys.exit(main())
