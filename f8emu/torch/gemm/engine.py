"""Which calls the GEMMs take, and what computes each: the device's tensor cores, or the emulation of a chip's.

Both engines refuse the same calls, so that code tested without a GPU also runs on one. `f8emu.spec.gemm_call` checks
shapes, formats and options. Layouts and devices are checked here, by the rules of `torch._scaled_mm`,
`torch.nn.functional.scaled_mm` and `torch._scaled_grouped_mm` on CUDA (torch 2.11 to 2.13), which torch's CPU versions
do not enforce. Only shapes, strides, dtypes and devices are read, so the checks work on fake tensors too.
"""

import warnings
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS, GPUS, HOPPER, chip_by_name
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.gemm_call import GemmCall, Shaped, check_library, mm_call, scaled_grouped_mm_call, scaled_mm_call
from f8emu.spec.names import ChipName, EngineName
from f8emu.spec.scaling import Granularity
from f8emu.torch.chip import HIGH_PRECISION_DTYPES, has_float8_hardware, is_device_of, name_of
from f8emu.torch.gemm import emulation
from f8emu.torch.torch_internals import is_dtensor


class Engine(Enum):
    """The engines that compute GEMMs."""

    AUTO = "auto"  # HARDWARE if the device is the requested chip, otherwise EMULATED
    HARDWARE = "hardware"
    EMULATED = "emulated"


Checked = tuple[GemmCall, Engine]
_ROWWISE = (Granularity.ROWWISE, Granularity.ROWWISE)


def check_engine(call: str, engine: str) -> None:
    """Raise OperandError for an unknown engine."""
    known = [member.value for member in Engine]
    if engine not in known:
        raise OperandError(f"{call}: engine must be one of {', '.join(known)}; got {engine!r}")


def resolve_engine(call: str, device: torch.device, engine: str, chip: Chip = HOPPER) -> Engine:
    """HARDWARE or EMULATED, for tensors on `device` and the bits of `chip`.

    Hardware means a CUDA device that is that chip, by its compute capability: another one gives other bits.
    """
    check_engine(call, engine)
    if engine == Engine.EMULATED.value:
        return Engine.EMULATED
    if is_device_of(chip, device):
        return Engine.HARDWARE
    if engine == Engine.HARDWARE.value:
        raise UnsupportedError(f"{call}: {_no_hardware(device, chip)}")
    if has_float8_hardware(device):
        warn_of_idle_gpu(device, chip)
    return Engine.EMULATED


def engine_of(device: torch.device | str, engine: EngineName = "auto", *, chip: Chip | ChipName = HOPPER) -> str:
    """The engine that computes a GEMM of tensors on `device`, in words for a report: emulation or the hardware.

    Raises:
        OperandError: an unknown engine.
        SpecError: an unknown chip.
        UnsupportedError: "hardware" on a device that is not that chip.
        MissingExtraError: emulation on a GPU, or without the compiled engine, but jax is not installed.
    """
    device, chip = torch.device(device), chip_by_name("engine_of", chip)
    if resolve_engine("engine_of", device, engine, chip) is Engine.HARDWARE:
        return f"torch._scaled_mm on {torch.cuda.get_device_name(device)}"
    words = emulation.emulator_name(device)
    return words if chip == HOPPER else f"{chip} {words}"


# Checks: each has the arguments of its operator (`operators`), raises what the public verb documents, and gives the
# call and its engine.


def checked_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
    granularity_a: str | None,
    granularity_b: str | None,
    split_k: int | None,
    chip: str = HOPPER.name,
) -> Checked:
    """A `scaled_mm`."""
    addend = None if bias is None else _shaped(bias)
    gemm = scaled_mm_call(
        *map(_shaped, (a, b, scale_a, scale_b)),
        bias=addend,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=_output_name("scaled_mm", out_dtype),
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=GPUS[chip],
    )
    check_library(gemm, addend)
    _check_float8_layout(gemm, a, b)
    if gemm.granularities == _ROWWISE and not (scale_a.is_contiguous() and scale_b.is_contiguous()):
        raise OperandError("scaled_mm: rowwise scales must be contiguous; call scale.contiguous() first")
    _check_devices("scaled_mm", a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    return _with_engine(gemm, a, engine)


def checked_scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    engine: str,
    chip: str = HOPPER.name,
) -> Checked:
    """A `scaled_grouped_mm` [EPI-6]."""
    call = "scaled_grouped_mm"
    out = _output_name(call, out_dtype)
    ends = None if offs is None else _shaped(offs)
    of_a, of_b, of_scale_a, of_scale_b = map(_shaped, (a, b, scale_a, scale_b))
    options = {"out_dtype": out, "use_fast_accum": use_fast_accum, "chip": GPUS[chip]}
    gemm = scaled_grouped_mm_call(of_a, of_b, of_scale_a, of_scale_b, ends, **options)
    check_library(gemm)
    _check_float8_layout(gemm, *(x if x.ndim == 2 else x[0] for x in (a, b)))
    if gemm.granularities == _ROWWISE and (scale_a.stride(-1) != 1 or scale_b.stride(-1) != 1):
        raise OperandError(f"{call}: scales must be contiguous; call scale.contiguous() first")
    _check_devices(call, a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs)
    return _with_engine(gemm, a, engine)


def checked_mm(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, engine: str, split_k: int | None, chip: str = HOPPER.name
) -> Checked:
    """The bfloat16 `mm` [BF16-1]."""
    out = _output_name("mm", out_dtype)
    gemm = mm_call(_shaped(a), _shaped(b), out_dtype=out, split_k=split_k, chip=GPUS[chip])
    check_library(gemm)
    _check_devices("mm", a, b=b)
    return _with_engine(gemm, a, engine)


def _shaped(x: Tensor) -> Shaped:
    return Shaped(tuple(x.shape), name_of(x.dtype))


def _output_name(call: str, dtype: torch.dtype) -> str:
    if dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(map(str, HIGH_PRECISION_DTYPES))
        raise UnsupportedError(
            f"{call}: out_dtype must be one of {known}; got {dtype}; quantize or convert the result: float8 output is "
            "not modelled"
        )
    return name_of(dtype)


def _with_engine(gemm: GemmCall, a: Tensor, engine: str) -> Checked:
    chosen = resolve_engine(gemm.call, a.device, engine, gemm.chip)
    if chosen is Engine.HARDWARE and gemm.split_k is not None and not gemm.groups:
        raise UnsupportedError(
            f"{gemm.call}: on the hardware the library's heuristic decides the split of K; got split_k={gemm.split_k}; "
            "pass None, or engine='emulated'"
        )
    return gemm, chosen


def _check_float8_layout(gemm: GemmCall, a: Tensor, b: Tensor) -> None:
    k = gemm.sizes[2]
    if a.stride(1) != 1 or (a.shape[0] > 1 and a.stride(0) < k):
        raise OperandError(
            f"{gemm.call}: a must be row-major, strides [>= K, 1]; got strides {list(a.stride())} for shape "
            f"{list(a.shape)}; call a.contiguous()"
        )
    if b.stride(0) != 1 or b.stride(1) < k:
        raise OperandError(
            f"{gemm.call}: b must be column-major, strides [1, >= K]; got strides {list(b.stride())} for shape "
            f"{list(b.shape)}; pass the transpose of a row-major [N, K], such as b.t().contiguous().t()"
        )


def _check_devices(call: str, a: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and is_dtensor(x) != is_dtensor(a):
            kinds = ["a DTensor" if is_dtensor(y) else "a plain tensor" for y in (a, x)]
            raise OperandError(
                f"{call}: operands must be all DTensors or all plain tensors; got {kinds[0]} for a and {kinds[1]} for "
                f"{name}; use DTensor.from_local, or to_local()"
            )
        if x is not None and x.device != a.device:
            raise OperandError(
                f"{call}: all tensors must be on one device; a is on {a.device} and {name} on {x.device}; "
                "move one of them"
            )


def _no_hardware(device: torch.device, chip: Chip) -> str:
    if chip.capability is None:
        wanted = f"a device whose library has the bits of {chip}, and torch has no such device"
    else:
        major, minor = chip.capability
        wanted = f"tensors on a CUDA device of compute capability {major}.{minor}, {chip}"
    others = [c for c in CHIPS.values() if c != chip and is_device_of(c, device)]
    return (
        f"engine='hardware' needs {wanted}; got {device}; move the tensors to one, "
        + "".join(f"pass chip={c.name!r} for what the device is, " for c in others)
        + f"or pass engine='emulated' for the bits of {chip} on any device"
    )


@cache
def warn_of_idle_gpu(device: torch.device, chip: Chip) -> None:
    """Warn that a GPU that could multiply stands idle, which costs time."""
    profiles = [c for c in CHIPS.values() if is_device_of(c, device)]
    remedy = (
        f"pass chip={profiles[0].name!r}" if profiles else "call torch._scaled_mm itself, since the GPU has no profile"
    )
    warnings.warn(
        f"f8emu.torch: {device} multiplies float8 but is not {chip}, whose bits were requested, so GEMMs are emulated, "
        f"which is slow; for the GPU's own bits and speed {remedy}. This warning appears once per device and chip",
        RuntimeWarning,
        stacklevel=2,
    )
