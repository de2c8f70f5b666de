"""Every float32 input of a float8 cast, and every amax significand of a scale, in every backend.

    python -m benchmarks.proofs.exhaustive                    all, recorded in benchmarks/results/exhaustive-cast.json
    python -m benchmarks.proofs.exhaustive --only e8m0 cvt    E8M0 scales of every bfloat16 amax, and NVIDIA's of every
                                                              float32 one, recorded in exhaustive-e8m0.json
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
from benchmarks.proofs.exhaustive_e8m0 import check_cvt, check_e8m0, exact_backend
from f8emu.conformance.record.record import tracked
from f8emu.environment import versions
from f8emu.spec import FLOAT32, HOPPER, E8M0Rule, ScaleRule

INPUTS = 1 << FLOAT32.bits
SIGNIFICANDS = 1 << FLOAT32.fraction_bits
CHUNK = 1 << 20  # inputs a task: large enough that calls cost nothing, small enough to stay in cache
SIZES = {"casts": INPUTS, "scales": SIGNIFICANDS, "e8m0": 1 << 15, "cvt": 1 << 31}
"""Inputs of each kind of task: any float32, an amax in [1, 2), any bfloat16 amax, any float32 amax."""
RECORDED = {
    kinds: Path(__file__).parents[1] / "results" / f"exhaustive-{name}.json"
    for kinds, name in ((("casts", "scales"), "cast"), (("e8m0", "cvt"), "e8m0"))
}
RULES = (ScaleRule(), ScaleRule(power_of_two=True))
_ONE = FLOAT32.bias << FLOAT32.fraction_bits


class Task(NamedTuple):
    """Numbers `begin` to `end` of a strided set of inputs, and all checks of one kind of them."""

    kind: str
    begin: int
    end: int
    stride: int

    def bits(self) -> np.ndarray:
        """Float32 bit patterns."""
        numbers = np.arange(self.begin, self.end, dtype=np.uint64) * np.uint64(self.stride)
        if self.kind == "e8m0":
            numbers = numbers << np.uint64(16)
        return (numbers + np.uint64(_ONE if self.kind == "scales" else 0)).astype(np.uint32)


def tasks(stride: int, kinds: Sequence[str] = ("casts", "scales")) -> Iterator[Task]:
    """All inputs, or every `stride`-th."""
    for kind in kinds:
        count = -(-SIZES[kind] // stride)
        for begin in range(0, count, CHUNK):
            yield Task(kind, begin, min(begin + CHUNK, count), stride)


def run_task(task: Task, backends: dict[str, Backend]) -> list[Tally]:
    """Every backend, format and policy (or rule) on one task."""
    bits = task.bits()
    if task.kind == "cvt":
        return [check_cvt(bits, fmt) for fmt in HOPPER.operand_formats]
    if task.kind == "e8m0":
        backends = backends | {"f8ref.exact": exact_backend()}
    tallies: list[Tally | None] = []
    for name, backend in backends.items():
        for fmt in HOPPER.operand_formats:
            if task.kind == "e8m0":
                tallies += [check_e8m0(name, backend, bits, fmt, rule) for rule in E8M0Rule]
            elif task.kind == "casts":
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


def run(names: Sequence[str], stride: int, workers: int, kinds: Sequence[str]) -> dict[str, list[Tally]]:
    """Tallies of each kind over all its tasks."""
    # 1. A worker a core; each takes the next free one.
    context = multiprocessing.get_context("spawn")  # a fork after JAX has started may deadlock
    cores: SimpleQueue[int] = context.SimpleQueue()
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(workers)
    for i in range(workers):
        cores.put(available[i % len(available)])
    # 2. Tallies of all tasks, added as they come.
    tallies: dict[str, dict[tuple[str, str, str], Tally]] = {kind: {} for kind in kinds}
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(names, cores)) as pool:
        futures = {pool.submit(_work, task): tallies[task.kind] for task in tasks(stride, kinds)}
        for future in tracked(as_completed(futures), "casts and scales", len(futures)):
            for tally in future.result():
                key = (tally.backend, tally.format, tally.kind)
                futures[future].setdefault(key, Tally(*key)).add(tally)
    return {kind: list(of_kind.values()) for kind, of_kind in tallies.items()}


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
    parser.add_argument("--only", nargs="+", choices=tuple(SIZES), default=["casts", "scales"], help="what is checked")
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each (default 2)")
    parser.add_argument("--json", type=Path, help="where to record (default, for a full run only: benchmarks/results)")
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
    tallies = run(arguments.backends, stride, arguments.workers, arguments.only)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the workers have ended
    cpu_seconds = used.ru_utime + used.ru_stime
    differences = sum(tally.differences for of_kind in tallies.values() for tally in of_kind)
    for kind, of_kind in tallies.items():
        print(f"{kind}:", *sorted(map(str, of_kind)), sep="\n  ")
    part = "all" if stride == 1 else f"every {stride}th, not all,"
    inputs = ", ".join(f"{SIZES[kind]:,} inputs of {kind}" for kind in arguments.only)
    times = f"{seconds:.0f} s, {cpu_seconds:.0f} s of CPU"
    print(f"{differences} differences; {part} of {inputs}; {times}")
    is_whole = stride == 1 and set(DEFAULT_BACKENDS) <= set(arguments.backends)
    if path := arguments.json or (RECORDED.get(tuple(arguments.only)) if is_whole else None):
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
            **{kind: [asdict(tally) for tally in of_kind] for kind, of_kind in tallies.items()},
        }
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"recorded in {path}")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
