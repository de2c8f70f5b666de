"""f8emu's tensorwise recipe against torchao's Float8Linear, bit for bit, eager, on one device."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.subjects import AbsentError, converted

PARTS = ("output", "grad_input", "grad_weight", "grad_bias")


def equal_to_torchao(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> list[dict[str, Any]]:
    """One entry a shape (tokens, k, n), with and without bias: how many numbers of each part differ.

    Raises:
        AbsentError: torchao is not installed, or the device has no float8 for it.
    """
    if device.type != "cuda":
        raise AbsentError("torchao computes float8 GEMMs on a GPU only")
    found: list[dict[str, Any]] = []
    for tokens, k, n in shapes:
        for has_bias in (False, True):
            model = nn.Sequential(nn.Linear(k, n, bias=has_bias)).to(device, torch.bfloat16)
            x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
            grad_output = torch.randn(tokens, n, device=device, dtype=torch.bfloat16) * 1e-3
            ours, theirs = (
                _pass(converted(f"{library}/tensorwise", copy.deepcopy(model)), x, grad_output)
                for library in ("f8emu", "torchao")
            )
            differing = {
                part: int((a.view(torch.int16) != b.view(torch.int16)).sum())
                for part, a, b in zip(PARTS, ours, theirs, strict=False)
            }
            found.append({"tokens": tokens, "k": k, "n": n, "bias": has_bias, "numbers_differing": differing})
    return found


def _pass(model: nn.Module, x: Tensor, grad_output: Tensor) -> list[Tensor]:
    own = x.clone().requires_grad_()
    output = model(own)
    output.backward(grad_output)
    grads = [own.grad, *(p.grad for p in model.parameters())]
    return [output.detach(), *(g for g in grads if g is not None)]
