"""The chip: its formats as torch dtypes and back, first checks of arguments, and which devices are one."""

import math
from functools import cache
from typing import Any

import torch

from f8emu.spec import formats
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import FLOAT8, Format, format_by_name
from f8emu.torch.torch_internals import torchscript_trace

CHIP = HOPPER  # the chip whose GEMMs run or are emulated where no other is named

_FLOAT8_CAPABILITY = (8, 9)
_PAIRS_CAPABILITY = (9, 0)

FLOAT8_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, f.name) for f in FLOAT8)  # the results of a cast
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the inputs of a cast and the outputs of a GEMM


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, which is that of its format."""
    return str(dtype).removeprefix("torch.")


def dtype_of(format: Format) -> torch.dtype:
    """The dtype of a format."""
    return getattr(torch, format.name)


def float8_format(call: str, format: Format | str | torch.dtype) -> Format:
    """The float8 format that `call` casts to, by a Format, its name or its dtype. SpecError if there is none."""
    if isinstance(format, torch.dtype):
        format = str(format)
    if isinstance(format, str):
        format = format.removeprefix("torch.")
    return formats.float8_format(call, format)


def operand_format(call: str, format: Format | str | torch.dtype) -> Format:
    """`float8_format`, for the operand of a GEMM. UnsupportedError if the chip does not multiply it."""
    chosen = float8_format(call, format)
    if chosen not in CHIP.operand_formats:
        known = " or ".join(f.name for f in CHIP.operand_formats)
        raise UnsupportedError(f"{call}: {CHIP.name} multiplies {known}; got {chosen}; cast to one of these")
    return chosen


def output_dtype(call: str, out_dtype: Format | str | torch.dtype) -> torch.dtype:
    """The torch dtype of a GEMM's output; whether the GEMM supports it is checked with the operands."""
    if isinstance(out_dtype, torch.dtype):
        return out_dtype
    if isinstance(out_dtype, str):
        out_dtype = format_by_name(out_dtype)
    if isinstance(out_dtype, Format):
        return getattr(torch, out_dtype.name)
    raise OperandError(f"{call}: out_dtype must be a torch.dtype, a Format or its name; got {out_dtype!r}")


def require_tensor(call: str, name: str, value: Any) -> None:
    """Raise OperandError unless `value` is a tensor, and UnsupportedError where torch.jit.trace records."""
    if not isinstance(value, torch.Tensor):
        is_number = isinstance(value, int | float)
        remedy = "convert arrays of other libraries first, JAX's with f8emu.interop.to_torch"
        raise OperandError(
            f"{call}: {name} must be a torch.Tensor; got {value if is_number else type(value).__name__}; "
            + (f"pass torch.tensor({float(value)})" if is_number else remedy)
        )
    if torchscript_trace():
        raise UnsupportedError(
            f"{call}: torch.jit.trace is not supported, since it records no views as another dtype; trace with "
            "torch.export.export or torch.compile"
        )


def rows_of(call: str, x: torch.Tensor, *, name: str = "x") -> tuple[int, int]:
    """Rows and K of `x` [..., K]: all leading dimensions count as rows. OperandError if there are none."""
    if x.ndim < 2:
        raise OperandError(
            f"{call}: {name} must have 2 dimensions or more, [..., K]; got shape {list(x.shape)}; "
            f"one row is {name}.reshape(1, -1)"
        )
    return math.prod(x.shape[:-1]), x.shape[-1]


def require_values(call: str, x: Any, *, name: str = "x", ndim: int | None = None) -> None:
    """Raise OperandError unless `x` is a float32, bfloat16 or float16 tensor, of `ndim` dimensions if given."""
    require_tensor(call, name, x)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise OperandError(
            f"{call}: {name} must be float32, bfloat16 or float16; got {x.dtype}; convert it first: "
            "a float64 would be rounded twice, an integer has no float8 rule"
        )
    if ndim is not None and x.ndim != ndim:
        raise OperandError(
            f"{call}: {name} must have {ndim} dimensions; got shape {list(x.shape)}; "
            f"flatten the leading ones with {name}.reshape(-1, {name}.shape[-1])"
        )


@cache
def has_float8_hardware(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on the tensor cores of `device`."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


def is_device_of(chip: Chip, device: torch.device) -> bool:
    """Whether the library of `device` is the one whose bits the profile has; `HOPPER` is any Hopper GPU."""
    if not has_float8_hardware(device) or capability_of(device) != chip.capability:
        return False
    return chip.plan in ("", HOPPER.plan) or chip.plan == torch.cuda.get_device_name(device)


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@cache
def compares_pairs(device: torch.device) -> bool:
    """Whether `device` is a GPU that compares two pairs of 16-bit integers with one instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _PAIRS_CAPABILITY


def require_hopper(call: str, device: torch.device) -> None:
    """Raise UnsupportedError unless `device` is a Hopper GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != CHIP.capability:
        raise UnsupportedError(
            f"{call}: torch has it for {CHIP.name} only, compute capability 9.0; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; pass engine='emulated'"
        )
