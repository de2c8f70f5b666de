"""Time and memory of a step on a device: events on the GPU, a clock on the CPU."""

import importlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Step = Callable[[], object]


class Timed(NamedTuple):
    """Milliseconds a step."""

    ms: float
    enqueue_ms: float
    """What the host needed to launch it; above `ms` the host is the limit, and the GPU waits."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def back_to_back(step: Step, steps: int, device: torch.device) -> Timed:
    """`steps` steps without a synchronization in between, as training runs, after one that is not timed."""
    step()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        enqueue = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize(device)
        return Timed(begin.elapsed_time(end) / steps, 1e3 * enqueue / steps)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    ms = 1e3 * (time.perf_counter() - start) / steps
    return Timed(ms, ms)


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
    """Memory held between forward and backward above what was there before: output and what backward needs.

    None on a CPU, as above.
    """
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    output = forward()
    kept = torch.cuda.memory_allocated(device) - before
    del output
    return kept


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    count = 1 << 31 if device.type == "cuda" else 1 << 24
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2e3 * count / alone(lambda: target.copy_(source), device)
