"""Time and peak memory of one workload, its subjects taking turns."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.kernels import kernels
from benchmarks.report import say
from benchmarks.subjects import BASELINE, AbsentError, Subject, make_subject, recipe_of
from benchmarks.timing import back_to_back, captured, kept_bytes, median, peak_bytes
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
) -> list[dict[str, Any]]:
    """One entry for each (subject, mode): figures, or why there are none.

    With `is_graph` the step is a CUDA graph.
    Subjects in `profiled` have their kernels listed.
    """
    model = workload.build().to(device, torch.bfloat16)
    x, grad_output = workload.input(device), workload.grad_output(device)
    entries: list[dict[str, Any]] = []
    ready: list[tuple[Subject, dict[str, Any], Callable[[], object]]] = []
    for name, mode in wanted:
        entry: dict[str, Any] = {"subject": name, "mode": mode}
        entries.append(entry)
        start = time.perf_counter()
        try:
            subject = make_subject(name, mode, model, x, grad_output, checkpointing)
            for _ in range(WARMUP):
                subject.step()
            subject.free()
            step = captured(subject.step) if is_graph else subject.step
        except AbsentError as error:
            entry["absent"] = str(error)
        except Exception as error:  # one subject that fails costs its row, not the run
            entry["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            say(f"{name} {mode} failed: {error}")
        else:
            entry["warmup_s"] = round(time.perf_counter() - start, 2)
            ready.append((subject, entry, step))
    before = _graphs_compiled()
    times: dict[str, list[float]] = {subject.label: [] for subject, _, _ in ready}
    enqueue: dict[str, list[float]] = {label: [] for label in times}
    # A full collection walks through the compiled code of all subjects, in the turn of one.
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for subject, _, step in ready:
            timed = back_to_back(step, steps, device)
            times[subject.label].append(timed.ms)
            enqueue[subject.label].append(timed.enqueue_ms)
            if not is_graph:
                subject.free()
    gc.unfreeze()
    for subject, entry, step in ready:
        of = times[subject.label]
        entry |= {"ms": median(of), "ms_min": min(of), "ms_max": max(of), "enqueue_ms": median(enqueue[subject.label])}
        if not is_graph:
            entry["peak_bytes"] = peak_bytes(subject.step, device)
            subject.free()
            entry["kept_bytes"] = kept_bytes(subject.forward, device)
        entry["is_finite"] = all(
            bool(tensor.isfinite().all()) for tensor in (subject.gradients if is_graph else subject.results())
        )
        if subject.name in profiled:
            entry["kernels"] = kernels(step, device)
        if not is_graph:
            subject.free()
        if floor is not None:
            entry |= floor(workload, recipe_of(subject.name))
            entry["fraction_of_floor"] = entry["floor_ms"] / entry["ms"]
        if _graphs_compiled() != before:
            entry["compiled_while_timed"] = True
    _add_ratios(entries)
    return entries


def forget() -> None:
    """Frees models and compiled code before the next workload."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _add_ratios(entries: list[dict[str, Any]]) -> None:
    """Speed, peak memory and memory kept for the backward pass against bfloat16 of the same mode."""
    for entry in entries:
        same = [e for e in entries if e["subject"] == BASELINE and e["mode"] == entry["mode"] and "ms" in e]
        if "ms" not in entry or not same:
            continue
        entry["speed"] = same[0]["ms"] / entry["ms"]
        if entry.get("peak_bytes"):
            entry["memory"] = entry["peak_bytes"] / same[0]["peak_bytes"]
        if entry.get("kept_bytes"):
            entry["kept"] = entry["kept_bytes"] / same[0]["kept_bytes"]


def _graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
