"""What must be equal bit for bit, on one device.

f8emu's tensorwise recipe and torchao's Float8Linear; a model with and without activation checkpointing, eager; layers
compiled and eager.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import forget
from benchmarks.runner import AbsentError, Entry, attempt, say
from benchmarks.subjects import checkpointed, compiled, converted
from benchmarks.workloads import Workload
from f8emu.torch import delayed_state_dict

PARTS = ("output", "grad_input", "grad_weight", "grad_bias")
CHECKPOINTED_PARTS = ("output", "grad_input", "grad_parameters", "delayed_state")


def compared(subjects: Sequence[str], what: str, count: Callable[[str], dict[str, int]], **of: Any) -> list[Entry]:
    """An entry for each subject of f8emu: how many numbers of each part differ, or why `count` failed."""
    found: list[Entry] = []
    for subject in (name for name in subjects if name.startswith("f8emu/")):
        entry: Entry = {"subject": subject, **of}
        found.append(entry)
        with attempt(entry):
            entry["numbers_differing"] = count(subject)
        told = f"FAILED, {entry['failed']}" if "failed" in entry else verdict(entry["numbers_differing"])
        say(f"{subject}, {what}: {told}")
        forget()
    return found


def is_altered(entries: Sequence[Entry]) -> bool:
    """Whether a comparison failed or found a number that differs."""
    return any("failed" in e or any(e["numbers_differing"].values()) for e in entries)


def verdict(differing: dict[str, int]) -> str:
    parts = ", ".join(f"{count} of {part}" for part, count in differing.items() if count)
    return f"DIFFERS in {parts}" if parts else f"equal, every bit of {', '.join(differing)}"


def equal_to_torchao(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> list[dict[str, Any]]:
    """One entry a shape (tokens, k, n), with and without bias, parameters in bfloat16, and in float32 under autocast.

    An entry says how many numbers of each part differ.

    Raises:
        AbsentError: torchao is not installed, or the device has no float8 for it.
    """
    if device.type != "cuda":
        raise AbsentError("torchao computes float8 GEMMs on a GPU only")
    found: list[dict[str, Any]] = []
    for (tokens, k, n), has_bias, dtype in product(shapes, (False, True), (torch.bfloat16, torch.float32)):
        model = nn.Sequential(nn.Linear(k, n, bias=has_bias)).to(device, dtype)
        x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
        grad_output = torch.randn(tokens, n, device=device, dtype=torch.bfloat16) * 1e-3
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.float32):
            ours, theirs = (
                _pass(layer, layer, x, grad_output)
                for layer in (
                    converted(f"{library}/tensorwise", copy.deepcopy(model)) for library in ("f8emu", "torchao")
                )
            )
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
    with device:
        model = workload.build().to(torch.bfloat16)
    plain = converted(subject, model)
    other = copy.deepcopy(plain)
    call = checkpointed(subject, other, checkpointing)
    return _differing_in_two_steps(plain, other, call, workload.input(device), workload.grad_output(device))


def equal_compiled(subject: str, tokens: int, dim: int, hidden: int, device: torch.device) -> dict[str, int]:
    """How many numbers of each part differ between two layers, dim -> hidden -> dim, and the same compiled; two steps.

    Between the layers is nothing that the compiler could round otherwise.
    """
    with device:
        model = nn.Sequential(nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)).to(torch.bfloat16)
    plain = converted(subject, model)
    other = copy.deepcopy(plain)
    x = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
    grad_output = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16) * 1e-3
    return _differing_in_two_steps(plain, other, compiled(subject, other), x, grad_output)


def _differing_in_two_steps(
    plain: nn.Module, other: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, grad_output: Tensor
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


def _pass(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, grad_output: Tensor) -> list[Tensor]:
    own = x.clone().requires_grad_()
    output = call(own)
    output.backward(grad_output)
    grads = [own.grad, *(p.grad for p in model.parameters())]
    return [output.detach(), *(g for g in grads if g is not None)]
