"""The GEMMs without a tensor core, emulated.

GEMMs of CPU tensors are the engine's, `f8emu.native`. GEMMs of GPU tensors, and all of them where the engine is not
compiled, are those of `f8ref.jax`, which only this module may import, inside functions: on the GPU if JAX has a CUDA
backend, which is started without reserving memory (`f8emu.interop`); otherwise the tensors travel through the CPU.
JAX compiles a program for every shape, which takes about a second.
"""

import contextlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from f8emu import interop
from f8emu.native import gemm as native
from f8emu.native import library
from f8emu.spec.chip import Chip
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
    chip: Chip,
    gemm: native.Gemm | None = None,
) -> Tensor:
    """A checked `scaled_mm`; `gemm` is what `described_scaled_mm` gave for operands of the same signature.

    Raises:
        MissingExtraError: it is not the engine's, and jax is not installed.
    """
    options: dict[str, Any] = {"use_fast_accum": use_fast_accum, "split_k": split_k, "chip": chip}
    gemm = gemm or described_scaled_mm(a, b, scale_a, scale_b, granularities, bias=bias, out_dtype=out_dtype, **options)
    if gemm is not None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
        of_bias = 0 if bias is None else bias.data_ptr()
        addresses = a.data_ptr(), b.data_ptr(), scale_a.data_ptr(), scale_b.data_ptr(), out.data_ptr(), of_bias
        native.run_at(gemm, *addresses, threads=torch.get_num_threads())
        return out
    operands, names = (a, b, scale_a, scale_b), {"granularity_a": granularities[0], "granularity_b": granularities[1]}
    return _run("scaled_mm", operands, bias=bias, out_dtype=_name(out_dtype), **names, **options)


def described_scaled_mm(
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
    chip: Chip,
) -> native.Gemm | None:
    """The engine's description of a `scaled_mm`, which holds for all operands of the same shapes, strides and dtypes;
    None: it is not the engine's.
    """
    if not _is_native(a.device):
        return None
    is_blockwise = granularities[0].is_blockwise
    return native.described(
        (a.shape[0], b.shape[1], a.shape[1]),
        _matrix(a, scale_a, granularities[0]),
        _matrix(b.t(), scale_b.t() if scale_b.ndim == 2 else scale_b, granularities[1]),
        _output(a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype), bias),
        chip.block_scaled_model(granularities) if is_blockwise else chip.float8_model(use_fast_accum=use_fast_accum),
        native.scaling_of(granularities),
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
    chip: Chip,
) -> Tensor:
    """A checked `scaled_grouped_mm`.

    Raises:
        MissingExtraError: it is not the engine's, and jax is not installed.
    """
    m, k = a.shape
    if _is_native(a.device):
        out = a.new_empty((m, b.shape[2]), dtype=out_dtype)
        for group, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
            native.run(
                (end - start, b.shape[2], k),
                _matrix(a[start:end], scale_a[start:end, None], Granularity.ROWWISE),
                _matrix(b[group].t(), scale_b[group, :, None], Granularity.ROWWISE),
                _output(out[start:end], None),
                chip.float8_model(use_fast_accum=use_fast_accum),
                native.GROUPED,
                split_k=1,
                threads=torch.get_num_threads(),
            )
        return out
    return _run(
        "scaled_grouped_mm",
        (a, b, scale_a, scale_b, offs),
        out_dtype=_name(out_dtype),
        use_fast_accum=use_fast_accum,
        chip=chip,
    )


def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, split_k: int, chip: Chip) -> Tensor:
    """A checked `mm`.

    Raises:
        MissingExtraError: it is not the engine's, and jax is not installed.
    """
    (m, k), n = a.shape, b.shape[1]
    if _is_native(a.device):
        out = a.new_empty((m, n), dtype=out_dtype)
        native.run(
            (m, n, k),
            _matrix(a),
            _matrix(b.t()),
            _output(out, None),
            chip.bfloat16,
            native.UNSCALED,
            split_k=split_k,
            threads=torch.get_num_threads(),
        )
        return out
    return _run("mm", (a, b), out_dtype=_name(out_dtype), split_k=split_k, chip=chip)


def emulator_name(device: torch.device) -> str:
    """What emulates a GEMM of tensors on `device`, for reports.

    Raises:
        MissingExtraError: jax is not installed.
    """
    if _is_native(device):
        return "emulated by f8emu.native on cpu"
    return f"emulated by f8ref.jax on {interop.jax_device(device).platform}"


def _is_native(device: torch.device) -> bool:
    """Whether the engine multiplies."""
    return device.type == "cpu" and library.is_there(
        "f8emu.torch",
        "GEMMs on CPUs are emulated by f8ref.jax, which has the same bits, needs JAX and is slower",
    )


def _matrix(x: Tensor, scale: Tensor | None = None, granularity: Granularity = Granularity.TENSORWISE) -> native.Matrix:
    """An operand [rows, K], its scales [rows, blocks of K] or one element."""
    rows, k = x.stride()
    format = _name(x.dtype)
    if scale is None:
        return native.Matrix(x.data_ptr(), rows, k, format)
    per_row, per_block = (0, 0) if granularity is Granularity.TENSORWISE else scale.stride()
    if granularity is Granularity.ROWWISE:
        per_block = 0
    square = 128 if granularity is Granularity.BLOCKWISE_128X128 else 1
    return native.Matrix(x.data_ptr(), rows, k, format, square, scale.data_ptr(), per_row, per_block)


def _output(out: Tensor, bias: Tensor | None) -> native.Output:
    rows, columns = out.stride()
    if bias is None:
        return native.Output(out.data_ptr(), rows, columns, _name(out.dtype))
    of_bias = bias.data_ptr(), bias.stride(0), _name(bias.dtype)
    return native.Output(out.data_ptr(), rows, columns, _name(out.dtype), *of_bias)


def _run(verb: str, operands: tuple[Tensor, ...], bias: Tensor | None = None, **options: Any) -> Tensor:
    jax = interop.require_jax(f"f8emu.torch.{verb} (engine 'emulated')")
    import f8ref.jax

    device = operands[0].device
    if bias is not None:
        options["bias"] = interop.to_jax(bias, copy=None)
    # Row-major: JAX compiles again for another layout.
    arrays = [interop.to_jax(x.contiguous(), copy=None) for x in operands]
    # The emulator's constants must be on the device of its operands, also if JAX's default device is another. If it is
    # the same, it is not set again: naming JAX's default device would recompile everything.
    place = interop.jax_device(device)
    with contextlib.nullcontext() if place == jax.devices()[0] else jax.default_device(place):
        result = getattr(f8ref.jax, verb)(*arrays, **options)
    return interop.to_torch(result, device, copy=None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
