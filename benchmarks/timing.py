"""Time, memory and kernels of a step: events on the GPU, a clock on the CPU, and torch.profiler."""

import importlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_kinds import KINDS, kinds
from benchmarks.runner import draw

Step = Callable[[], object]


class Timed(NamedTuple):
    """Milliseconds a step."""

    ms: float
    # What the host needed to launch it; above `ms` the host is the limit, and the GPU waits.
    enqueue_ms: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def back_to_back(step: Step, steps: int, device: torch.device) -> Timed:
    """`steps` steps without a synchronization in between, as training runs, after one that is not timed."""
    step()
    is_cuda = device.type == "cuda"
    begin, end = (torch.cuda.Event(enable_timing=True) if is_cuda else None for _ in range(2))
    if begin:
        begin.record()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    enqueue_ms = 1e3 * (time.perf_counter() - start) / steps
    if not (begin and end):
        return Timed(enqueue_ms, enqueue_ms)
    end.record()
    torch.cuda.synchronize(device)
    return Timed(begin.elapsed_time(end) / steps, enqueue_ms)


def alone(call: Step, device: torch.device) -> float:
    """Median milliseconds of one call, with a cold cache: `triton.testing.do_bench`; on a CPU the better of two."""
    if device.type == "cuda":
        testing = importlib.import_module("triton.testing")
        return float(testing.do_bench(call, return_mode="median"))
    call()
    return min(back_to_back(call, 1, device).ms for _ in range(2))


def captured(step: Step) -> Step:
    """The step as a CUDA graph: its kernels without the host. The step must neither wait nor depend on the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """Most memory that a step holds above what was there before it; None on a CPU, which does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kept_bytes(forward: Step, device: torch.device) -> int | None:
    """Memory held between forward and backward above what was there before: output and what backward needs."""
    before = held_bytes(device)
    output = forward()
    kept = held_bytes(device) - before
    del output
    return kept if device.type == "cuda" else None


def held_bytes(device: torch.device) -> int:
    """What is allocated now; 0 on a CPU, which does not count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    count = 1 << 31 if device.type == "cuda" else 1 << 24
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2e3 * count / alone(lambda: target.copy_(source), device)


# Kernels

STEPS = 3
# CUTLASS's names are types of a thousand characters. Kernels that differ only later count as one.
_NAME_LENGTH = 160
_WAITS = 12  # kernels before which the GPU waited longest
Times = list[tuple[float, float]]


class Run(NamedTuple):
    """One run of a kernel; times in microseconds, from anywhere."""

    name: str
    stream: int
    begin: float
    end: float


class Profile(NamedTuple):
    """Steps one after the other."""

    kernels: list[dict[str, Any]]  # see `kernels`
    runs: list[Run]  # of all steps; empty on a CPU
    step_us: float  # a step, by the host's clock


def kernels(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """Name, calls and microseconds of every kernel of a step, the longest first; on a CPU, of every operator."""
    return profiled(step, device).kernels


def profiled(step: Step, device: torch.device) -> Profile:
    """The kernels of a step, and when each ran."""
    is_cuda = device.type == "cuda"
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    step()
    synchronize(device)
    # The step before has compiled and allocated; the host's clock sees the profiler too.
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(device)
        step_us = (time.perf_counter() - start) * 1e6 / STEPS
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0])
    for event in seen.key_averages():
        us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        # Annotations span kernels that have events of their own.
        if event.device_type == kind and not event.is_user_annotation and us:
            total = totals[event.key[:_NAME_LENGTH]]
            total[0] += event.count
            total[1] += us
    entries = [
        {"name": name, "calls": round(calls / STEPS, 2), "us": round(us / STEPS, 1)}
        for name, (calls, us) in totals.items()
    ]
    runs = [
        Run(event.name[:_NAME_LENGTH], event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in (seen.events() or () if is_cuda else ())
        if event.device_type == kind and not event.is_user_annotation
    ]
    return Profile(sorted(entries, key=lambda entry: -entry["us"]), runs, step_us)


def exposure(runs: Sequence[Run], step_us: float, steps: int = STEPS) -> dict[str, Any]:
    """What the time of a step is made of, in microseconds, where kernels of several streams may run at once.

    - `computing_us`: at least one kernel runs that is no collective; `beside_us`: what more than one do at once, twice.
    - `exposed_us`: a collective runs, and nothing else; by the collective in `exposed`.
    - `idle_us`: nothing runs.
    - `waits`: exposed and idle time before a kernel, by its name, the longest `_WAITS`.

    The three times are a step's; more than that only by the host's clock, which also sees the profiler.
    """
    # 1. The time in which something computes; what a collective adds to it, nothing hides.
    collectives = [run for run in runs if re.search(KINDS["collectives"], run.name)]
    others = sorted((run for run in runs if not re.search(KINDS["collectives"], run.name)), key=lambda run: run.begin)
    computing, busy = _length(_union(others)), _length(_union([*others, *collectives]))
    exposed = {
        name: _length(_union([*others, *(run for run in collectives if run.name == name)])) - computing
        for name in {run.name for run in collectives}
    }
    # 2. The gaps between computing kernels, each by the kernel that ends it.
    waits: defaultdict[str, float] = defaultdict(float)
    end = others[0].begin if others else 0.0
    for run in others:
        if run.begin > end:
            waits[run.name] += run.begin - end
        end = max(end, run.end)

    def most(times: dict[str, float]) -> dict[str, float]:
        return {name: round(us / steps, 1) for name, us in sorted(times.items(), key=lambda item: -item[1])}

    return {
        "step_us": round(step_us, 1),
        "computing_us": round(computing / steps, 1),
        "beside_us": round((sum(run.end - run.begin for run in others) - computing) / steps, 1),
        "collectives_us": round(_length(_union(collectives)) / steps, 1),
        "exposed_us": round((busy - computing) / steps, 1),
        "idle_us": round(step_us - busy / steps, 1),
        "exposed": most(exposed),
        "waits": dict(list(most(waits).items())[:_WAITS]),
    }


def _union(runs: Iterable[Run]) -> Times:
    """The times at which at least one of them runs, in order."""
    times: Times = []
    for run in sorted(runs, key=lambda run: run.begin):
        if times and run.begin <= times[-1][1]:
            times[-1] = times[-1][0], max(times[-1][1], run.end)
        else:
            times.append((run.begin, run.end))
    return times


def _length(times: Times) -> float:
    return sum(end - begin for begin, end in times)


def draw_kernels(title: str, entries: Sequence[dict[str, Any]]) -> None:
    """The kernels as a table, with their sum, then their kinds; collectives may run beside other kernels."""
    calls, total = (sum(entry[what] for entry in entries) for what in ("calls", "us"))
    of_all = {"name": "sum", "calls": calls, "us": total}
    rows = [
        (e["name"][:100], f"{e['calls']:g}", f"{e['us']:.1f}", f"{e['us'] / total:.1%}") for e in (*entries, of_all)
    ]
    draw(title, ("kernel", "calls", "us", "part"), rows)
    parts = [[kind, f"{us:.1f}", f"{us / total:.1%}"] for kind, us in kinds(entries).items() if us]
    draw(f"{title}: kinds", ("kind", "us", "part"), parts)


def draw_exposure(title: str, times: dict[str, Any]) -> None:
    """Where the time of a step goes: computing, collectives that nothing hides, and nothing at all."""
    rows = [
        ["computing", times["computing_us"]],
        ["collectives alone (exposed)", times["exposed_us"]],
        *([f"  of {name[:80]}", us] for name, us in times["exposed"].items()),
        ["nothing runs", times["idle_us"]],
        ["step, by the host's clock", times["step_us"]],
        ["collectives, hidden or not", times["collectives_us"]],
        ["kernels beside other kernels", times["beside_us"]],
        *([f"wait before {name[:80]}", us] for name, us in times["waits"].items()),
    ]
    table = [[name, f"{us / 1e3:.2f}", f"{us / times['step_us']:.1%}"] for name, us in rows]
    draw(title, ("a step of rank 0", "ms", "part"), table)
