"""The GEMMs without a tensor core, emulated, and S, the number of slices of K, where their caller gives none.

The engine `f8emu.native` computes GEMMs of CPU tensors. `f8ref.jax`, which only this module may import, inside
functions, computes those of GPU tensors, and all of them where the engine is not compiled: on the GPU if JAX has a CUDA
backend, which is started without reserving memory (`f8emu.interop`); otherwise the tensors travel through the CPU. JAX
compiles a program for every shape, which takes about a second.

Each function takes a checked call (`engine`), and raises MissingExtraError where it needs jax and has none.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from f8emu import interop
from f8emu.native import gemm as native
from f8emu.native import library
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.gemm_call import GemmCall, GroupKind, group_parts
from f8emu.spec.scaling import Granularity
from f8emu.split_k import ask
from f8emu.split_k.gemm import Split
from f8emu.torch.chip import dtype_of, is_device_of, name_of

_CALLER = "f8emu.torch"


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    gemm: GemmCall,
    of_engine: native.GemmStruct | None = None,
) -> Tensor:
    """A `scaled_mm`; `of_engine` is what `described` gave for operands of the same signature."""
    of_engine = of_engine or described(gemm, a, b, scale_a, scale_b, bias)
    if of_engine is not None:
        return _run(of_engine, gemm, a, b, scale_a, scale_b, bias)
    assert gemm.granularities is not None
    pair = {"granularity_a": gemm.granularities[0], "granularity_b": gemm.granularities[1]}
    options = {"use_fast_accum": gemm.use_fast_accum, "split_k": gemm.split_k, **pair}
    return _run_jax(gemm, (a, b, scale_a, scale_b), bias, **options)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, gemm: GemmCall
) -> Tensor:
    """A `scaled_grouped_mm`."""
    # On a GPU, reading the ends would wait for the device.
    ends = offs.tolist() if offs is not None and offs.device.type == "cpu" else None
    parts = [] if offs is not None and ends is None else group_parts(gemm, ends)
    assert gemm.granularities is not None
    granularity = gemm.granularities[0]
    if not _is_native(a.device):
        if gemm.group_kind is not GroupKind.ROWS or offs is None:
            raise UnsupportedError(
                "scaled_grouped_mm: without the compiled engine, and on a GPU, only groups of rows of a are emulated; "
                "call scaled_mm for each group, or move the operands to the CPU"
            )
        return _run_jax(gemm, (a, b, scale_a, scale_b, offs), use_fast_accum=gemm.use_fast_accum)
    out = _empty(gemm, a).zero_()  # beyond the last group
    for part in parts:
        of_a, of_b = scale_a[part.scale_a], scale_b[part.scale_b]
        scales = (of_a, of_b.t()) if granularity.is_microscaled else (of_a[:, None], of_b[:, None])
        of_group = native.described(
            part.gemm,
            _matrix(a[part.a], scales[0], granularity),
            _matrix(b[part.b].t(), scales[1], granularity),
            _output(out[part.out], None),
        )
        native.run(of_group, threads=torch.get_num_threads())
    return out


def mm(a: Tensor, b: Tensor, gemm: GemmCall, of_engine: native.GemmStruct | None = None) -> Tensor:
    """An `mm`."""
    of_engine = of_engine or described(gemm, a, b)
    return _run_jax(gemm, (a, b), split_k=gemm.split_k) if of_engine is None else _run(of_engine, gemm, a, b)


def described(
    gemm: GemmCall,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
) -> native.GemmStruct | None:
    """The engine's description of a GEMM, for all operands of these shapes, strides and dtypes; None: not its own."""
    if not _is_native(a.device):
        return None
    of_a, of_b = gemm.granularities or (None, None)
    scales_of_b = scale_b.t() if scale_b is not None and scale_b.ndim == 2 else scale_b
    operands = _matrix(a, scale_a, of_a), _matrix(b.t(), scales_of_b, of_b)
    return native.described(gemm, *operands, _output(_empty(gemm, a), bias))


def emulator_name(device: torch.device) -> str:
    """The emulator of GEMMs of tensors on `device`, in words for a report."""
    if _is_native(device):
        return "emulated by f8emu.native on cpu"
    return f"emulated by f8ref.jax on {interop.jax_device(device).platform}"


def split_of(gemm: GemmCall, device: torch.device, layout: str, *, warns: bool = True) -> Split:
    """S of a GEMM of tensors on `device`: the library's on a GPU that is the chip, else the plan's [CHAIN-3]."""
    return ask.split_of(_CALLER if warns else None, gemm, layout, at_hand=is_device_of(gemm.chip, device))


def layout_of(a: Tensor, b: Tensor) -> str:
    """The layout of `a @ b` in cuBLAS's letters."""
    # Torch copies a matrix that is contiguous in no direction.
    return "".join("t" if x.stride(1) != 1 and x.stride(0) == 1 else "n" for x in (b, a))


def _is_native(device: torch.device) -> bool:
    return device.type == "cpu" and library.is_there(
        _CALLER, "GEMMs on CPUs are emulated by f8ref.jax, which has the same bits, needs JAX and is slower"
    )


def _empty(gemm: GemmCall, a: Tensor) -> Tensor:
    return a.new_empty(gemm.out_shape, dtype=dtype_of(gemm.out))


def _matrix(x: Tensor, scale: Tensor | None, granularity: Granularity | None) -> native.Matrix:
    # An operand [rows, K], its scales [rows, blocks of K] or one element.
    if scale is None or granularity is None:
        return native.matrix(x.data_ptr(), x.stride(), name_of(x.dtype))
    strides = (0, 0) if scale.ndim < 2 else scale.stride()
    return native.matrix(x.data_ptr(), x.stride(), name_of(x.dtype), granularity, scale.data_ptr(), strides)


def _output(out: Tensor, bias: Tensor | None) -> native.Output:
    rows, columns = out.stride()
    of_bias = (0, 0, "float32") if bias is None else (bias.data_ptr(), bias.stride(0), name_of(bias.dtype))
    return native.Output(out.data_ptr(), rows, columns, name_of(out.dtype), *of_bias)


def _run(
    of_engine: native.GemmStruct,
    gemm: GemmCall,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    out = _empty(gemm, a)
    codes = a.data_ptr(), b.data_ptr()
    scales = (0, 0) if scale_a is None or scale_b is None else (scale_a.data_ptr(), scale_b.data_ptr())
    of_bias = 0 if bias is None else bias.data_ptr()
    native.run_at(of_engine, *codes, *scales, out.data_ptr(), of_bias, threads=torch.get_num_threads())
    return out


def _run_jax(gemm: GemmCall, operands: tuple[Tensor, ...], bias: Tensor | None = None, **options: Any) -> Tensor:
    jax = interop.require_jax(f"f8emu.torch.{gemm.call} (engine 'emulated')")
    import f8ref.jax

    device = operands[0].device
    options |= {"out_dtype": gemm.out, "chip": gemm.chip}
    if bias is not None:
        options["bias"] = interop.to_jax(bias, copy=None)
    # Row-major: JAX compiles again for another layout.
    arrays = [interop.to_jax(x.contiguous(), copy=None) for x in operands]
    # The emulator's constants must be on the device of its operands, also if JAX's default device is another. If it is
    # the same, it is not set again: naming JAX's default device would recompile everything.
    place = interop.jax_device(device)
    with contextlib.nullcontext() if place == jax.devices()[0] else jax.default_device(place):
        result = getattr(f8ref.jax, gemm.verb)(*arrays, **options)
    return interop.to_torch(result, device, copy=None)
