"""Time and peak memory of one workload, its subjects taking turns."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.kernels import kernels
from benchmarks.runner import Entry, add_ratios, attempt, spread, take_turns
from benchmarks.subjects import Subject, make_subject, recipe_of
from benchmarks.timing import back_to_back, captured, kept_bytes, peak_bytes
from benchmarks.workloads import Floor, Workload

WARMUP = 5
"""Steps before the first figure: compilation, and a delayed recipe's first states."""


def measure(
    workload: Workload,
    wanted: Sequence[tuple[str, str]],
    device: torch.device,
    *,
    rounds: int,
    steps: int,
    floor: Floor | None = None,
    is_graph: bool = False,
    checkpointing: str = "none",
    profiled: Sequence[str] = (),
) -> list[Entry]:
    """One entry for each (subject, mode): figures, or why there are none.

    With `is_graph` the step is a CUDA graph.
    Subjects in `profiled` have their kernels listed.
    """
    model = workload.build().to(device, torch.bfloat16)
    x, grad_output = workload.input(device), workload.grad_output(device)
    entries: list[Entry] = [{"subject": name, "mode": mode} for name, mode in wanted]
    ready: dict[str, tuple[Subject, Entry, Callable[[], object]]] = {}
    for entry in entries:
        start = time.perf_counter()
        with attempt(entry, f"{entry['subject']} {entry['mode']}"):
            subject = make_subject(entry["subject"], entry["mode"], model, x, grad_output, checkpointing)
            for _ in range(WARMUP):
                subject.step()
            subject.free()
            step = captured(subject.step) if is_graph else subject.step
            entry["warmup_s"] = round(time.perf_counter() - start, 2)
            ready[subject.label] = subject, entry, step
    before = graphs_compiled()
    enqueue: dict[str, list[float]] = {label: [] for label in ready}

    def turn(label: str) -> float:
        subject, _, step = ready[label]
        timed = back_to_back(step, steps, device)
        enqueue[label].append(timed.enqueue_ms)
        if not is_graph:
            subject.free()
        return timed.ms

    times = take_turns({label: lambda label=label: turn(label) for label in ready}, rounds)
    for label, (subject, entry, step) in ready.items():
        entry |= spread(times[label]) | {"enqueue_ms": statistics.median(enqueue[label])}
        if not is_graph:
            entry["peak_bytes"] = peak_bytes(subject.step, device)
            subject.free()
            entry["kept_bytes"] = kept_bytes(subject.forward, device)
        results = subject.gradients if is_graph else subject.results()
        entry["is_finite"] = all(bool(tensor.isfinite().all()) for tensor in results)
        if subject.name in profiled:
            entry["kernels"] = kernels(step, device)
        if not is_graph:
            subject.free()
        if floor is not None:
            entry |= floor(workload, recipe_of(subject.name))
            entry["fraction_of_floor"] = entry["floor_ms"] / entry["ms"]
        if graphs_compiled() != before:
            entry["compiled_while_timed"] = True
    add_ratios(entries, {"memory": "peak_bytes", "kept": "kept_bytes"})
    return entries


def is_wrong(entry: Entry) -> bool:
    """A subject other than torchao's that failed, or whose numbers are not finite."""
    return not entry["subject"].startswith("torchao/") and ("failed" in entry or not entry["is_finite"])


def forget() -> None:
    """Frees models and compiled code before the next workload."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def graphs_compiled() -> int:
    """Since the process began."""
    stats: Any = torch._dynamo.utils.counters["stats"]
    return stats["unique_graphs"]
