"""Time and peak memory of a workload, its subjects taking turns; and what must be equal bit for bit.

Equal are f8emu's tensorwise recipe and torchao's Float8Linear; a model with and without activation checkpointing,
eager; layers compiled and eager.
"""

import copy
import gc
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.runner import AbsentError, Entry, add_ratios, attempt, race, say
from benchmarks.subjects import Call, Subject, checkpointed, compiled, converted, make_subject, recipe_of
from benchmarks.timing import Step, back_to_back, captured, kept_bytes, kernels, peak_bytes
from benchmarks.workloads import Floor, Workload
from f8emu.torch import delayed_state_dict

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
CHECKPOINTED_PARTS = ("output", "grad_input", "grad_parameters", "delayed_state")


def compared(subjects: Sequence[str], what: str, count: Callable[[str], dict[str, int]], **of: Any) -> list[Entry]:
    """An entry for each subject of f8emu: how many numbers of each part differ, or why `count` failed."""
    found: list[Entry] = [{"subject": name, **of} for name in subjects if name.startswith("f8emu/")]
    for entry in found:
        with attempt(entry):
            entry["numbers_differing"] = count(entry["subject"])
            say(f"{entry['subject']}, {what}: {verdict(entry['numbers_differing'])}")
        forget()
    return found


def is_altered(entries: Sequence[Entry]) -> bool:
    """Whether a comparison failed or found a number that differs."""
    return any("failed" in e or any(e["numbers_differing"].values()) for e in entries)


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
    found: list[Entry] = []
    for (tokens, k, n), has_bias, dtype in product(shapes, (False, True), (torch.bfloat16, torch.float32)):
        model = nn.Sequential(nn.Linear(k, n, bias=has_bias)).to(device, dtype)
        x, grad_output = _drawn(tokens, k, device), _drawn(tokens, n, device) * 1e-3
        layers = [converted(f"{library}/tensorwise", copy.deepcopy(model)) for library in ("f8emu", "torchao")]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.float32):
            ours, theirs = (_pass(layer, layer, x, grad_output) for layer in layers)
        differing = {part: _differing(a, b) for part, a, b in zip(PARTS, ours, theirs, strict=False)}
        entry = {"tokens": tokens, "k": k, "n": n, "bias": has_bias, "parameters": str(dtype).removeprefix("torch.")}
        found.append(entry | {"numbers_differing": differing})
    return found


def equal_to_no_checkpointing(
    subject: str, workload: Workload, checkpointing: str, device: torch.device
) -> dict[str, int]:
    """How many numbers of each part differ over two steps.

    Delayed scaling starts anew in the first and has scales of its own in the second. Attention is torch's plain one
    here: the others add up their gradients in any order.
    """
    plain, other = _twins(subject, workload.build, device)
    call = checkpointed(subject, other, checkpointing)
    return _differing_in_two_steps(plain, other, call, workload.input(device), workload.grad_output(device))


def equal_compiled(subject: str, tokens: int, dim: int, hidden: int, device: torch.device) -> dict[str, int]:
    """How many numbers of each part differ between two layers, dim -> hidden -> dim, and the same compiled; two steps.

    Between the layers is nothing that the compiler could round otherwise.
    """

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False))

    plain, other = _twins(subject, build, device)
    x, grad_output = _drawn(tokens, dim, device), _drawn(tokens, dim, device) * 1e-3
    return _differing_in_two_steps(plain, other, compiled(subject, other), x, grad_output)


def _drawn(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.randn(rows, cols, device=device, dtype=torch.bfloat16)


def _twins(subject: str, build: Callable[[], nn.Module], device: torch.device) -> tuple[nn.Module, nn.Module]:
    with device:
        model = build().to(torch.bfloat16)
    model = converted(subject, model)
    return model, copy.deepcopy(model)


def _differing_in_two_steps(
    plain: nn.Module, other: nn.Module, call: Call, x: Tensor, grad_output: Tensor
) -> dict[str, int]:
    """How many numbers differ between `plain` and `call`, which runs `other`."""
    found: dict[str, int] = dict.fromkeys(CHECKPOINTED_PARTS, 0)
    for _ in range(2):
        with sdpa_kernel(SDPBackend.MATH):
            expected, observed = (_pass(model, run, x, grad_output) for model, run in ((plain, plain), (other, call)))
        for i, (a, b) in enumerate(zip(observed, expected, strict=True)):
            found[CHECKPOINTED_PARTS[min(i, 2)]] += _differing(a, b)
        states = (delayed_state_dict(model) for model in (plain, other))
        found["delayed_state"] += sum(int((a != b).sum()) for a, b in zip(*(s.values() for s in states), strict=True))
        for model in (plain, other):
            model.zero_grad()
    return found


def _differing(a: Tensor, b: Tensor) -> int:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.view(bits) != b.view(bits)).sum())


def _pass(model: nn.Module, call: Call, x: Tensor, grad_output: Tensor) -> list[Tensor]:
    own = x.clone().requires_grad_()
    output = call(own)
    output.backward(grad_output)
    grads = [own.grad, *(p.grad for p in model.parameters())]
    return [output.detach(), *(g for g in grads if g is not None)]
