"""The kernels of a step, by torch.profiler: what its time is made of."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.runner import draw
from benchmarks.timing import Step, synchronize

STEPS = 3
_NAME_LENGTH = 160
"""CUTLASS's names are types of a thousand characters. Kernels that differ only later count as one."""
_WAITS = 12
"""Kernels before which the GPU waited longest."""


KINDS = {
    "collectives": "nccl",
    "GEMMs": "nvjet|cutlass|gemm|cublas",
    "attention": "sdpa|fmha|flash|cudnn",
    "casts and amaxes": "^(cast|row|tensor|col|scales|transpose)[a-z_]*_kernel|cast_pair|amax|transpose_codes",
    "optimizer and gradient norm": "multi_tensor_apply",
    "FSDP2's copies": "chunk_cat|split_with_sizes",
}
"""Kind -> what the names of its kernels have in them; the first that does counts."""


class Run(NamedTuple):
    """One run of a kernel; times in microseconds, from anywhere."""

    name: str
    stream: int
    begin: float
    end: float


class Profile(NamedTuple):
    """Steps one after the other."""

    kernels: list[dict[str, Any]]
    """See `kernels`."""
    runs: list[Run]
    """Of all steps; empty on a CPU."""
    step_us: float
    """A step, by the host's clock."""


def kernels(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """Name, calls and microseconds of every kernel of a step, the longest first; on a CPU, of every operator."""
    return profiled(step, device).kernels


def profiled(step: Step, device: torch.device) -> Profile:
    """The kernels of a step, and when each ran."""
    is_cuda = device.type == "cuda"
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(device)
        step_us = (time.perf_counter() - start) * 1e6 / STEPS
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    found: dict[str, dict[str, Any]] = {}
    for event in seen.key_averages():
        us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        # Annotations span kernels that have events of their own.
        if event.device_type != kind or event.is_user_annotation or not us:
            continue
        name = event.key[:_NAME_LENGTH]
        entry = found.setdefault(name, {"name": name, "calls": 0.0, "us": 0.0})
        entry["calls"] += event.count / STEPS
        entry["us"] += us / STEPS
    for entry in found.values():
        entry |= {"calls": round(entry["calls"], 2), "us": round(entry["us"], 1)}
    runs: list[Run] = []
    if is_cuda:
        for event in seen.events() or ():
            if event.device_type == kind and not event.is_user_annotation:
                times = event.time_range
                runs.append(Run(event.name[:_NAME_LENGTH], event.device_resource_id, times.start, times.end))
    return Profile(sorted(found.values(), key=lambda entry: -entry["us"]), runs, step_us)


def exposure(runs: Sequence[Run], step_us: float, steps: int = STEPS) -> dict[str, Any]:
    """What the time of a step is made of, in microseconds, where kernels of several streams may run at once.

    - `computing_us`: at least one kernel runs that is no collective; `beside_us`: what more than one do at once, twice.
    - `exposed_us`: a collective runs, and nothing else; by the collective in `exposed`.
    - `idle_us`: nothing runs.
    - `waits`: exposed and idle time before a kernel, by its name, the longest `_WAITS`.

    The three times are a step's; more than that only by the host's clock, which also sees the profiler.
    """
    collectives = [run for run in runs if re.search(KINDS["collectives"], run.name)]
    others = sorted((run for run in runs if not re.search(KINDS["collectives"], run.name)), key=lambda run: run.begin)
    computing = _union(others)
    busy = _union([*others, *collectives])
    computing_us = _length(computing)
    exposed: dict[str, float] = {}
    for name in {run.name for run in collectives}:
        of_name = [run for run in collectives if run.name == name]
        exposed[name] = _length(_union([*others, *of_name])) - computing_us
    waits: defaultdict[str, float] = defaultdict(float)
    end = None
    for run in others:
        if end is not None and run.begin > end:
            waits[run.name] += run.begin - end
        end = run.end if end is None else max(end, run.end)
    longest = sorted(waits.items(), key=lambda item: -item[1])
    return {
        "step_us": round(step_us, 1),
        "computing_us": round(computing_us / steps, 1),
        "beside_us": round((sum(run.end - run.begin for run in others) - computing_us) / steps, 1),
        "collectives_us": round(_length(_union(collectives)) / steps, 1),
        "exposed_us": round((_length(busy) - computing_us) / steps, 1),
        "idle_us": round(step_us - _length(busy) / steps, 1),
        "exposed": {name: round(us / steps, 1) for name, us in sorted(exposed.items(), key=lambda item: -item[1])},
        "waits": {name: round(us / steps, 1) for name, us in longest[:_WAITS]},
    }


def _union(runs: Iterable[Run]) -> list[tuple[float, float]]:
    """The times at which at least one of them runs, in order."""
    found: list[tuple[float, float]] = []
    for run in sorted(runs, key=lambda run: run.begin):
        if found and run.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], run.end)
        else:
            found.append((run.begin, run.end))
    return found


def _length(times: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in times)


def kinds(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of a step by kind of kernel; what the compiler has fused with a cast counts as a cast."""
    totals = dict.fromkeys([*KINDS, "other"], 0.0)
    for entry in found:
        totals[next((kind for kind, names in KINDS.items() if re.search(names, entry["name"])), "other")] += entry["us"]
    return totals


def draw_kernels(title: str, found: Sequence[dict[str, Any]]) -> None:
    """The kernels as a table, with their sum, then their kinds; collectives may run beside other kernels."""
    total = sum(entry["us"] for entry in found)
    rows = [
        [entry["name"][:100], f"{entry['calls']:g}", f"{entry['us']:.1f}", f"{entry['us'] / total:.1%}"]
        for entry in found
    ]
    calls = sum(entry["calls"] for entry in found)
    draw(title, ("kernel", "calls", "us", "part"), [*rows, ["sum", f"{calls:g}", f"{total:.1f}", ""]])
    parts = [[kind, f"{us:.1f}", f"{us / total:.1%}"] for kind, us in kinds(found).items() if us]
    draw(f"{title}: kinds", ("kind", "us", "part"), parts)


def draw_exposure(title: str, found: dict[str, Any]) -> None:
    """Where the time of a step goes: computing, collectives that nothing hides, and nothing at all."""
    rows = [
        ["computing", found["computing_us"]],
        ["collectives alone (exposed)", found["exposed_us"]],
        *([f"  of {name[:80]}", us] for name, us in found["exposed"].items()),
        ["nothing runs", found["idle_us"]],
        ["step, by the host's clock", found["step_us"]],
        ["collectives, hidden or not", found["collectives_us"]],
        ["kernels beside other kernels", found["beside_us"]],
        *([f"wait before {name[:80]}", us] for name, us in found["waits"].items()),
    ]
    table = [[name, f"{us / 1e3:.2f}", f"{us / found['step_us']:.1%}"] for name, us in rows]
    draw(title, ("a step of rank 0", "ms", "part"), table)
