"""Refuses torch.func's transforms, for which the float8 layers have no rules."""

import torch

from f8emu.spec.errors import UnsupportedError


def require_no_transform(call: str) -> None:
    """Raise UnsupportedError inside of torch.func.grad, vjp, jvp, vmap or what is made of them."""
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        raise UnsupportedError(
            f"{call}: torch.func's transforms (grad, vjp, jvp, vmap, jacrev, ...) are not supported for float8 layers; "
            "compute gradients with backward() or torch.autograd.grad, and batches as more rows, or convert the model "
            "back with dequantize_float8_training"
        )
