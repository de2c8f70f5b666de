"""Formats of the spec <-> dtypes of torch, and the first checks of an argument."""

from typing import Any

import torch

from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import E4M3FN, E5M2, FLOAT8_OPERANDS, Format, format_by_name

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What a tensor core multiplies."""
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a cast takes and a GEMM gives."""


def float8_format(call: str, format: Format | str | torch.dtype) -> Format:
    """The float8 operand format that a caller named.

    Raises:
        SpecError: no format has that name, or it is not one of a float8 operand.
    """
    if isinstance(format, torch.dtype):
        format = E5M2 if format is torch.float8_e5m2 else E4M3FN if format is torch.float8_e4m3fn else str(format)
    if isinstance(format, str):
        format = format_by_name(format.removeprefix("torch."))
    if format not in FLOAT8_OPERANDS:
        known = " or ".join(f.name for f in FLOAT8_OPERANDS)
        raise SpecError(f"{call}: format must be {known}; got {format.name}")
    return format


def output_dtype(call: str, out_dtype: Format | str | torch.dtype) -> torch.dtype:
    """The torch dtype of a GEMM's output; which of them a GEMM can give is checked with its operands.

    Raises:
        SpecError: no format has that name.
        OperandError: not a dtype, a format or a name.
    """
    if isinstance(out_dtype, torch.dtype):
        return out_dtype
    if isinstance(out_dtype, str):
        out_dtype = format_by_name(out_dtype)
    if isinstance(out_dtype, Format):
        return getattr(torch, out_dtype.name)
    raise OperandError(f"{call}: out_dtype must be a torch.dtype, a Format or its name; got {out_dtype!r}")


def require_tensor(call: str, name: str, value: Any) -> None:
    """Raise OperandError unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise OperandError(
            f"{call}: {name} must be a torch.Tensor; got {type(value).__name__}; "
            "convert arrays of other libraries first, JAX's with f8emu.interop.to_torch"
        )


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
