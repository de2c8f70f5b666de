"""The array libraries themselves: imported when they are needed, and the JAX device beside a torch device."""

import functools
import sys
from typing import TYPE_CHECKING, Any

from f8emu.spec.errors import required_by

if TYPE_CHECKING:
    import torch


def require_jax(call: str) -> Any:
    """The module `jax`, with its devices started.

    By default JAX's CUDA client preallocates three quarters of the GPU's memory, which torch then lacks. If torch sees
    a CUDA device, this function starts JAX's client without preallocation. The option holds for the start in this call
    and is then put back. A JAX that is running already, or one whose user has set `jax_pjrt_client_create_options`, is
    left as it is.

    Raises:
        MissingExtraError: jax is not installed.
    """
    with required_by(call, "jax"):
        import jax
    torch = sys.modules.get("torch")  # not imported here: who has not loaded torch has no memory to lose to JAX
    if torch is not None and torch.cuda.is_available():
        _start_without_preallocation()
    return jax


def require_torch(call: str) -> Any:
    """The module `torch`.

    Raises:
        MissingExtraError: torch is not installed.
    """
    with required_by(call, "torch"):
        import torch
    return torch


def library_of(x: Any) -> str | None:
    """The library that an array belongs to: torch, jax or numpy; None if `x` is not an array. It imports no library."""
    torch, jax, numpy = (sys.modules.get(name) for name in ("torch", "jax", "numpy"))
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return "numpy" if numpy is not None and isinstance(x, numpy.ndarray | numpy.generic) else None


def jax_device(device: "torch.device | str") -> Any:
    """The JAX device on which arrays made from tensors on `device` live.

    It is the same GPU if JAX has a CUDA backend that sees it, else the CPU.

    Raises:
        MissingExtraError: jax or torch is not installed.
    """
    torch = require_torch("interop.jax_device")
    jax = require_jax("interop.jax_device")
    place = torch.device(device)
    if place.type == "cuda":
        # CUDA_VISIBLE_DEVICES is read by both libraries, so that the local number is the same GPU.
        index = torch.cuda.current_device() if place.index is None else place.index
        try:
            devices = jax.local_devices(backend="cuda")
        except RuntimeError:
            devices = []  # JAX was installed or started without CUDA
        for candidate in devices:
            if candidate.local_hardware_id == index:
                return candidate
    return jax.local_devices(backend="cpu")[0]


@functools.cache
def _start_without_preallocation() -> None:
    import jax

    option = "jax_pjrt_client_create_options"
    if getattr(jax.config, option) is None:
        jax.config.update(option, {"preallocate": False})
        try:
            jax.devices()
        finally:
            jax.config.update(option, None)
