"""The kernels of a step, by torch.profiler: what its time is made of."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import draw
from benchmarks.timing import Step, synchronize

STEPS = 3
_NAME_LENGTH = 160
"""CUTLASS's names are types of a thousand characters. Kernels that differ only later count as one."""


KINDS = {
    "collectives": "nccl",
    "GEMMs": "nvjet|cutlass|gemm|cublas",
    "attention": "sdpa|fmha|flash|cudnn",
    "casts and amaxes": "^(cast|row|tensor|col|scales|transpose)[a-z_]*_kernel|cast_pair|amax|transpose_codes",
    "optimizer and gradient norm": "multi_tensor_apply",
    "FSDP2's copies": "chunk_cat|split_with_sizes",
}
"""Kind -> what the names of its kernels have in them; the first that does counts."""


def kernels(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """Name, calls and microseconds of every kernel of a step, the longest first; on a CPU, of every operator."""
    is_cuda = device.type == "cuda"
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
        synchronize(device)
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
    return sorted(found.values(), key=lambda entry: -entry["us"])


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
