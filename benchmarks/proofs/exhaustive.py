"""Every float32 input of a float8 cast, and every amax significand of a scale, in every backend.

    python -m benchmarks.proofs.exhaustive                    all, recorded in benchmarks/results/exhaustive-cast.json
    python -m benchmarks.proofs.exhaustive --fraction 0.0001  a strided part, recorded nowhere unless --json says where

What must come out is proved in `exhaustive_checks`, by exact fractions and integers. Exit status 1 on any difference.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.proofs.exhaustive_checks import BACKENDS, DEFAULT_BACKENDS, Backend, Tally, check_cast, check_scales
from f8emu.conformance.record.record import tracked
from f8emu.environment import versions
from f8emu.spec import FLOAT32, HOPPER, ScaleRule

INPUTS = 1 << FLOAT32.bits
SIGNIFICANDS = 1 << FLOAT32.fraction_bits
CHUNK = 1 << 20  # inputs a task: large enough that calls cost nothing, small enough to stay in cache
RECORDED = Path(__file__).parents[1] / "results" / "exhaustive-cast.json"
RULES = (ScaleRule(), ScaleRule(power_of_two=True))
_ONE = FLOAT32.bias << FLOAT32.fraction_bits


class Task(NamedTuple):
    """Numbers `begin` to `end` of a strided set of inputs, all casts or all scales of them."""

    is_cast: bool
    begin: int
    end: int
    stride: int

    def bits(self) -> np.ndarray:
        """Float32 bit patterns: of any number, or of an amax in [1, 2)."""
        numbers = np.arange(self.begin, self.end, dtype=np.uint64) * np.uint64(self.stride)
        return (numbers + np.uint64(0 if self.is_cast else _ONE)).astype(np.uint32)


def tasks(stride: int) -> Iterator[Task]:
    """All inputs, or every `stride`-th."""
    for is_cast, size in ((True, INPUTS), (False, SIGNIFICANDS)):
        count = -(-size // stride)
        for begin in range(0, count, CHUNK):
            yield Task(is_cast, begin, min(begin + CHUNK, count), stride)


def run_task(task: Task, backends: dict[str, Backend]) -> list[Tally]:
    """Every backend, format and policy (or rule) on one task."""
    bits = task.bits()
    tallies: list[Tally | None] = []
    for name, backend in backends.items():
        for fmt in HOPPER.operand_formats:
            if task.is_cast:
                tallies += [check_cast(name, backend, bits, fmt, overflow) for overflow in backend.policies]
            else:
                tallies += [check_scales(name, backend, bits.view(np.float32), fmt, rule) for rule in RULES]
    return [tally for tally in tallies if tally is not None]


_backends: dict[str, Backend] = {}  # those of a worker process


def _start_worker(names: Sequence[str], cores: "SimpleQueue[int]") -> None:
    """One core each: XLA has no other way to be told to use one thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})
    _backends.update({name: BACKENDS[name]() for name in names})


def _work(task: Task) -> list[Tally]:
    return run_task(task, _backends)


def run(names: Sequence[str], stride: int, workers: int) -> tuple[list[Tally], list[Tally]]:
    """Tallies of casts and of scales over all tasks."""
    # 1. A worker a core; each takes the next free one.
    context = multiprocessing.get_context("spawn")  # a fork after JAX has started may deadlock
    cores: SimpleQueue[int] = context.SimpleQueue()
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(workers)
    for i in range(workers):
        cores.put(available[i % len(available)])
    # 2. Tallies of all tasks, added as they come.
    casts, scales = dict[tuple[str, str, str], Tally](), dict[tuple[str, str, str], Tally]()
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(names, cores)) as pool:
        futures = {pool.submit(_work, task): casts if task.is_cast else scales for task in tasks(stride)}
        for future in tracked(as_completed(futures), "casts and scales", len(futures)):
            for tally in future.result():
                key = (tally.backend, tally.format, tally.kind)
                futures[future].setdefault(key, Tally(*key)).add(tally)
    return list(casts.values()), list(scales.values())


def machine() -> dict[str, object]:
    """CPU and versions."""
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.exists() else []
    model = next((row.partition(": ")[2] for row in rows if row.startswith("model name")), platform.processor())
    return {"cpu": model, "cores": os.cpu_count(), "versions": versions()}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options, if there is something to do and every backend is installed."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs.exhaustive", description=summary)
    parser.add_argument("--fraction", type=float, default=1.0, help="part of the inputs, taken with an odd stride")
    parser.add_argument("--backends", nargs="+", choices=tuple(BACKENDS), default=DEFAULT_BACKENDS)
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each (default 2)")
    parser.add_argument("--json", type=Path, help=f"where to record (default, for a full run only: {RECORDED})")
    arguments = parser.parse_args(words)
    if not 0 < arguments.fraction <= 1:
        parser.error(f"--fraction must be above 0 and at most 1; got {arguments.fraction}")
    for package in ("jax", "torch"):
        needing = [name for name in arguments.backends if package in name]
        if needing and importlib.util.find_spec(package) is None:
            remedy = f"pip install 'f8emu[{package}]', or leave it out with --backends"
            parser.error(f"{needing[0]} needs the package {package}, which is not installed: {remedy}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = parsed(words)
    stride = 1 if arguments.fraction == 1 else round(1 / arguments.fraction) | 1
    load, start = os.getloadavg()[0], time.perf_counter()
    casts, scales = run(arguments.backends, stride, arguments.workers)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the workers have ended
    cpu_seconds = used.ru_utime + used.ru_stime
    differences = sum(tally.differences for tally in casts + scales)
    for title, tallies in (("casts", casts), ("scales, amax in [1, 2)", scales)):
        print(f"{title}:", *sorted(map(str, tallies)), sep="\n  ")
    part = "all" if stride == 1 else f"every {stride}th, not all,"
    times = f"{seconds:.0f} s, {cpu_seconds:.0f} s of CPU"
    print(f"{differences} differences; {part} of 2^32 inputs and 2^23 significands; {times}")
    is_whole = stride == 1 and set(DEFAULT_BACKENDS) <= set(arguments.backends)
    if path := arguments.json or (RECORDED if is_whole else None):
        report = {
            "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks.proofs.exhaustive", *words]),
            "exhaustive": stride == 1,
            "stride": stride,
            "workers": arguments.workers,
            **machine(),
            "load_before": round(load, 1),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
            "differences": differences,
            "casts": [asdict(tally) for tally in casts],
            "scales": [asdict(tally) for tally in scales],
        }
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"recorded in {path}")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
