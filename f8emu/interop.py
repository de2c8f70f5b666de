"""The one module that sees both frameworks: torch tensors <-> JAX arrays by DLPack. All imports are inside functions.

Zero-copy is shared memory, and a JAX array is assumed immutable. So an exported tensor must not be written before
the computation that reads it is done, and an imported array must not be used by JAX afterwards.
`f8emu.torch.gemm.emulation` keeps both promises for its callers: it waits for the result, and drops it on the JAX side.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

from f8emu.spec.errors import MissingExtraError, OperandError

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
"""Bytes; XLA on the CPU copies whatever is aligned to less, and some of its versions refuse it."""


def require_jax(call: str) -> Any:
    """The module `jax`, with its devices started.

    Where torch sees a CUDA device, JAX's own client for it is started without preallocation, so that it takes memory
    as it needs it: by default it would take three quarters of the GPU's away from torch. The option holds for the
    start in this call and is then put back; a JAX that is running already, or one whose user has set
    `jax_pjrt_client_create_options`, is left as it is.

    Raises:
        MissingExtraError: jax is not installed.
    """
    try:
        import jax
    except ModuleNotFoundError as error:
        raise MissingExtraError(call, "jax", "jax") from error
    if _torch_sees_cuda():
        _start_without_preallocation()
    return jax


def require_torch(call: str) -> Any:
    """The module `torch`.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError(call, "torch", "torch") from error
    return torch


def jax_device(device: "torch.device | str") -> Any:
    """The JAX device on which arrays made from tensors on `device` live.

    The same GPU where JAX has a CUDA backend that sees it, otherwise the CPU.

    Raises:
        MissingExtraError: jax or torch is not installed.
    """
    torch = require_torch("interop.jax_device")
    jax = require_jax("interop.jax_device")
    place = torch.device(device)
    if place.type == "cuda":
        index = torch.cuda.current_device() if place.index is None else place.index
        try:
            devices = jax.local_devices(backend="cuda")
        except RuntimeError:
            devices = []  # JAX was installed or started without CUDA
        for candidate in devices:
            if candidate.local_hardware_id == index:
                return candidate
    return jax.local_devices(backend="cpu")[0]


def to_jax(tensor: "torch.Tensor") -> Any:
    """The tensor as a JAX array of the same dtype, shape and bits, gradients detached.

    Shares memory where the tensor is compact (row-major, or transposed in its last two dimensions), aligned to
    64 bytes and on a device that JAX sees; otherwise it is copied once.

    Exactness: no bit changes; NaN payloads and subnormals included.

    Raises:
        MissingExtraError: jax or torch is not installed.
        OperandError: a 64-bit dtype, which JAX would silently narrow.
    """
    torch = require_torch("interop.to_jax")
    jax = require_jax("interop.to_jax")
    if tensor.dtype in (torch.float64, torch.int64, torch.complex128):
        raise OperandError(
            f"to_jax: JAX narrows 64-bit types to 32 bits; got {tensor.dtype}; convert it to a 32-bit type first"
        )
    device = jax_device(tensor.device)
    source = tensor.detach()
    if source.device.type == "cuda" and device.platform == "cpu":
        source = source.cpu()
    is_compact = source.is_contiguous() or (source.ndim >= 2 and source.mT.is_contiguous())
    if not is_compact or source.data_ptr() % _ALIGNMENT:
        source = source.clone(memory_format=torch.contiguous_format)
    return jax.numpy.from_dlpack(source)


def to_torch(array: Any, device: "torch.device | str | None" = None) -> "torch.Tensor":
    """The JAX array as a contiguous tensor of the same dtype, shape and bits, on `device` (None: where it is).

    Waits until the array is computed. Shares memory where array and tensor are on the same device: the caller must
    be the array's only user, because the tensor is writable.

    Exactness: no bit changes; NaN payloads and subnormals included.

    Raises:
        MissingExtraError: torch is not installed.
    """
    torch = require_torch("interop.to_torch")
    tensor = torch.from_dlpack(array.block_until_ready()).contiguous()
    return tensor if device is None else tensor.to(device)


def _torch_sees_cuda() -> bool:
    torch = sys.modules.get("torch")  # not imported here: who has not loaded torch has no memory to lose to JAX
    return torch is not None and torch.cuda.is_available()


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
