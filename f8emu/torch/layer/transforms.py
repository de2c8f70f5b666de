"""Refuses what the float8 layers have no rules for: torch.func's transforms, forward-mode AD and TorchScript."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from f8emu.spec.errors import UnsupportedError


def require_no_transform(call: str, module: nn.Module, input: Tensor) -> None:
    """Refuse a call of `module` that torch transforms or traces.

    Raises:
        UnsupportedError: inside of torch.func.grad, vjp, jvp, vmap or what is made of them; in torch.jit.trace; with an
            input or a parameter that has a tangent.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            f"{call}: torch.func's transforms (grad, vjp, jvp, vmap, jacrev, ...) are not supported for float8 layers; "
            "compute gradients with backward() or torch.autograd.grad, and batches as more rows, or convert the model "
            "back with dequantize_float8_training"
        )
    if torch._C._get_tracing_state():
        refuse_torchscript(call)
    if forward_ad._current_level >= 0:
        if any(forward_ad.unpack_dual(x).tangent is not None for x in (input, *module.parameters())):
            raise UnsupportedError(
                f"{call}: forward-mode AD (torch.autograd.forward_ad, strategy='forward-mode') is not supported for "
                "float8 layers, since a rounding has no derivative; got an input or a parameter with a tangent; "
                "compute gradients with backward(), or convert the model back with dequantize_float8_training"
            )


def refuse_torchscript(call: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(
        f"{call}: torch.jit.trace and torch.jit.script are not supported for float8 layers; export the model with "
        "torch.export.export, compile it with torch.compile, or convert it back with dequantize_float8_training"
    )
