"""The GEMMs without a tensor core: emulated by `f8ref.jax`, which only this module may import, inside functions.

GEMMs of CPU tensors run on JAX's CPU backend without a copy. GEMMs of GPU tensors run on the GPU if JAX has a CUDA
backend, which is started without reserving memory (`f8emu.interop`); otherwise the tensors travel through the CPU.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from f8emu import interop
from f8emu.spec.scaling import Granularity


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    granularities: tuple[Granularity, Granularity],
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    split_k: int,
) -> Tensor:
    """`f8ref.jax.scaled_mm` on tensors.

    Raises:
        MissingExtraError: jax is not installed.
    """
    return _run(
        "scaled_mm",
        (a, b, scale_a, scale_b),
        bias=bias,
        granularity_a=granularities[0],
        granularity_b=granularities[1],
        out_dtype=_name(out_dtype),
        use_fast_accum=use_fast_accum,
        split_k=split_k,
    )


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`f8ref.jax.scaled_grouped_mm` on tensors.

    Raises:
        MissingExtraError: jax is not installed.
    """
    return _run(
        "scaled_grouped_mm",
        (a, b, scale_a, scale_b, offs),
        out_dtype=_name(out_dtype),
        use_fast_accum=use_fast_accum,
    )


def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, split_k: int) -> Tensor:
    """`f8ref.jax.mm` on tensors.

    Raises:
        MissingExtraError: jax is not installed.
    """
    return _run("mm", (a, b), out_dtype=_name(out_dtype), split_k=split_k)


def emulator_name(device: torch.device) -> str:
    """What emulates a GEMM of tensors on `device`, for reports.

    Raises:
        MissingExtraError: jax is not installed.
    """
    return f"emulated by f8ref.jax on {interop.jax_device(device).platform}"


def _run(verb: str, operands: tuple[Tensor, ...], bias: Tensor | None = None, **options: Any) -> Tensor:
    jax = interop.require_jax(f"f8emu.torch.{verb} (engine 'emulated')")
    import f8ref.jax

    device = operands[0].device
    if bias is not None:
        options["bias"] = interop.to_jax(bias)
    arrays = [interop.to_jax(x) for x in operands]
    # The emulator's constants must be on the device of its operands, also if JAX's default device is another. If it is
    # the same, it is not set again: naming JAX's default device would recompile everything.
    place = interop.jax_device(device)
    with contextlib.nullcontext() if place == jax.devices()[0] else jax.default_device(place):
        result = getattr(f8ref.jax, verb)(*arrays, **options)
    return interop.to_torch(result, device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
