"""Time and peak memory of a workload, its subjects taking turns; and the tensorwise recipe against torchao's layer."""

import copy
import gc
import statistics
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.runner import AbsentError, Entry, add_ratios, race
from benchmarks.subjects import Subject, converted, make_subject, recipe_of
from benchmarks.timing import Step, back_to_back, captured, kept_bytes, kernels, peak_bytes
from benchmarks.workloads import Floor, Workload

WARMUP = 5  # steps before the first figure: compilation, and a delayed recipe's first states


class _Ready(NamedTuple):
    """A subject after its warm-up."""

    subject: Subject
    step: Step
    enqueue_ms: list[float]  # of every turn


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
    microbatches: int = 1,
    profiled: Sequence[str] = (),
) -> list[Entry]:
    """One entry for each (subject, mode): figures, or why there are none.

    With `is_graph` the step is a CUDA graph.
    Subjects in `profiled` have their kernels listed.
    """
    model = workload.build().to(device, torch.bfloat16)
    x, grad_output = workload.input(device), workload.grad_output(device)

    def prepare(entry: Entry) -> _Ready:
        how = checkpointing, microbatches
        subject = make_subject(entry["subject"], entry["mode"], model, x, grad_output, *how)
        for _ in range(WARMUP):
            subject.step()
        subject.free()
        return _Ready(subject, captured(subject.step) if is_graph else subject.step, [])

    def turn(ready: _Ready) -> float:
        timed = back_to_back(ready.step, steps, device)
        ready.enqueue_ms.append(timed.enqueue_ms)
        if not is_graph:
            ready.subject.free()
        return timed.ms

    # 1. Times, all subjects in turn; the input and the weights are copies of the same tensors.
    entries: list[Entry] = [{"subject": name, "mode": mode} for name, mode in wanted]
    for entry, (subject, step, enqueue_ms) in race(entries, prepare, turn, rounds):
        entry["enqueue_ms"] = statistics.median(enqueue_ms)
        # 2. Memory, one subject after the other; a graph keeps its own, which no step allocates.
        if not is_graph:
            entry["peak_bytes"] = peak_bytes(subject.step, device)
            subject.free()
            entry["kept_bytes"] = kept_bytes(subject.forward, device)
        # 3. What must hold of the numbers, and what the time is made of.
        results = subject.gradients if is_graph else subject.results()
        entry["is_finite"] = all(bool(tensor.isfinite().all()) for tensor in results)
        if entry["subject"] in profiled:
            entry["kernels"] = kernels(step, device)
        if not is_graph:
            subject.free()
        if floor is not None:
            entry |= floor(workload, recipe_of(entry["subject"]))
            entry["fraction_of_floor"] = entry["floor_ms"] / entry["ms"]
    add_ratios(entries, {"memory": "peak_bytes", "kept": "kept_bytes"})
    return entries


def forget() -> None:
    """Frees models and compiled code before the next workload."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Equality

PARTS = ("output", "grad_input", "grad_weight", "grad_bias")


def is_altered(entries: Sequence[Entry]) -> bool:
    """Whether a number differs."""
    return any(any(entry["numbers_differing"].values()) for entry in entries)


def verdict(differing: dict[str, int]) -> str:
    parts = ", ".join(f"{count} of {part}" for part, count in differing.items() if count)
    return f"DIFFERS in {parts}" if parts else f"equal, every bit of {', '.join(differing)}"


def equal_to_torchao(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> list[Entry]:
    """One entry a shape (tokens, k, n), with and without bias, parameters in bfloat16, and in float32 under autocast.

    An entry says how many numbers of each part differ.

    Raises:
        AbsentError: torchao is not installed, or the device has no float8 for it.
    """
    if device.type != "cuda":
        raise AbsentError("torchao computes float8 GEMMs on a GPU only")
    entries: list[Entry] = []
    for (tokens, k, n), has_bias, dtype in product(shapes, (False, True), (torch.bfloat16, torch.float32)):
        model = nn.Sequential(nn.Linear(k, n, bias=has_bias)).to(device, dtype)
        x, grad_output = _drawn(tokens, k, device), _drawn(tokens, n, device) * 1e-3
        layers = [converted(f"{library}/tensorwise", copy.deepcopy(model)) for library in ("f8emu", "torchao")]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.float32):
            ours, theirs = (_results(layer, x, grad_output) for layer in layers)
        numbers = {part: differing(a, b) for part, a, b in zip(PARTS, ours, theirs, strict=False)}
        entry = {"tokens": tokens, "k": k, "n": n, "bias": has_bias, "parameters": str(dtype).removeprefix("torch.")}
        entries.append(entry | {"numbers_differing": numbers})
    return entries


def _drawn(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.randn(rows, cols, device=device, dtype=torch.bfloat16)


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ, of tensors of one dtype on one device."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())


def _results(model: nn.Module, x: Tensor, grad_output: Tensor) -> list[Tensor]:
    """Output and gradients of a pass."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.backward(grad_output)
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [output.detach(), *(g for g in grads if g is not None)]
