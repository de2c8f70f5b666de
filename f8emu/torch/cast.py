"""Conversions between high-precision values and float8 codes: decode, cast, quantize, dequantize.

Plain torch operations, so that a compiler can fuse them with their neighbours. Overflow is handled here and never left
to torch: `.to(float8_e4m3fn)` gives NaN up to torch 2.12 and saturates from 2.13 on. No function here has a gradient.
"""

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import Format, Overflow, overflow_by_name
from f8emu.spec.names import Float8Name, GranularityName, HighPrecisionName, OverflowName
from f8emu.spec.scaling import Granularity, granularity_by_name
from f8emu.torch import cpu_casts
from f8emu.torch.chip import (
    FLOAT8_DTYPES,
    HIGH_PRECISION_DTYPES,
    float8_format,
    output_dtype,
    require_tensor,
    require_values,
    rows_of,
)
from f8emu.torch.scale import canonical_nan, checked_scale, spread_scale

_DECODABLE = (*FLOAT8_DTYPES, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)


def decode(x: Tensor) -> Tensor:
    """The values of float8, bfloat16 or float16 codes as float32.

    Shapes:
        any -> float32 of the same shape.

    Exactness: exact; every NaN becomes 0x7fffffff, because torch's payloads differ between formats.

    Raises:
        OperandError: wrong dtype.
    """
    require_tensor("decode", "x", x)
    if x.dtype not in _DECODABLE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DECODABLE)
        raise OperandError(f"decode: x must be one of {known}; got {x.dtype}; view raw codes as their dtype first")
    return canonical_nan(x.detach().float())


def cast(
    x: Tensor, format: Format | Float8Name | torch.dtype, *, overflow: Overflow | OverflowName = Overflow.SATURATE
) -> Tensor:
    """Values rounded to the nearest float8, ties to even.

    SATURATE gives `+-max` for everything that rounds beyond it, infinities included. NONFINITE gives `+-inf` if the
    format has it, and NaN if not. NaN becomes `format.nan_code` under both.

    Shapes:
        float32, bfloat16 or float16 of any shape -> the float8 dtype, same shape.

    Exactness: bit-exact to `f8ref.numpy.cast`: every test run compares all 65,536 bfloat16 and float16
    inputs, on the installed torch version.

    Raises:
        OperandError: wrong dtype (float64 would be rounded twice).
        SpecError: unknown format.
    """
    require_values("cast", x)
    return _encode(x.detach().float(), float8_format("cast", format), overflow_by_name("cast", overflow))


def quantize(
    x: Tensor,
    inv_scale: Tensor | float,
    format: Format | Float8Name | torch.dtype,
    granularity: Granularity | GranularityName = Granularity.TENSORWISE,
) -> Tensor:
    """`cast(float32(x) * inv_scale, SATURATE)`, one rounded float32 product per element.

    Shapes:
        x [..., K], inv_scale float32 `granularity.scale_shape(rows, K)`, where rows is the product of the leading
        dimensions; a number that float32 holds is a tensorwise inv_scale -> float8 of x's shape and layout.

    Exactness: bit-exact to `f8ref.numpy.quantize`.

    Raises:
        OperandError: wrong dtype or rank, or scales of another shape.
        SpecError: unknown format or granularity.
    """
    require_values("quantize", x)
    target = float8_format("quantize", format)
    granularity = granularity_by_name("quantize", granularity)
    if cpu_casts.takes(x) and (x.ndim == 2 or x.is_contiguous()):
        grid = checked_scale("quantize", "inv_scale", inv_scale, x, granularity)
        codes, matrix = torch.empty_like(x, dtype=getattr(torch, target.name)), rows_of("quantize", x)
        cpu_casts.quantize(x.view(matrix), grid, target, granularity, codes.view(matrix))
        return codes
    factor = spread_scale("quantize", "inv_scale", inv_scale, x, granularity)
    # float() first: a bfloat16 tensor times a 0-dimensional float32 tensor is a bfloat16 product.
    return _encode(x.detach().float() * factor, target, Overflow.SATURATE)


def dequantize(
    codes: Tensor,
    scale: Tensor | float,
    granularity: Granularity | GranularityName = Granularity.TENSORWISE,
    *,
    out_dtype: torch.dtype | Format | HighPrecisionName = torch.float32,
) -> Tensor:
    """`decode(codes) * scale`, in `out_dtype`.

    Shapes:
        codes float8 [..., K], scale float32 or E8M0 `granularity.scale_shape(rows, K)`, where rows is the product of
        the leading dimensions; a number that float32 holds is a tensorwise scale -> out_dtype of the codes' shape.

    Exactness: one rounded float32 product per element; NaN is 0x7fffffff. For bfloat16 and float16 the product is
    rounded again, to nearest, ties to even.

    Raises:
        OperandError: wrong dtype or rank, or scales of another shape.
        SpecError: unknown granularity or format.
    """
    require_tensor("dequantize", "codes", codes)
    granularity = granularity_by_name("dequantize", granularity)
    if codes.dtype not in FLOAT8_DTYPES:
        raise OperandError(f"dequantize: codes must be of a float8 dtype (view raw codes as one); got {codes.dtype}")
    dtype = output_dtype("dequantize", out_dtype)
    if dtype not in HIGH_PRECISION_DTYPES:
        raise OperandError(
            f"dequantize: out_dtype must be float32, bfloat16 or float16; got {dtype}; convert afterwards"
        )
    if isinstance(scale, Tensor) and scale.dtype is torch.float8_e8m0fnu:
        scale = decode(scale)
    values = decode(codes) * spread_scale("dequantize", "scale", scale, codes, granularity)
    return canonical_nan(values).to(dtype)


def _encode(values: Tensor, format: Format, overflow: Overflow) -> Tensor:
    dtype = getattr(torch, format.name)
    # 1. Within +-max all torch versions round alike. The clamp keeps NaN, whose code is set in step 3.
    codes = values.clamp(-format.max, format.max).to(dtype).view(torch.uint8)
    # 2. Overflow: values more than half a unit in the last place above max round beyond it. The tie itself goes to the
    #    even code: max, or the one after it.
    if overflow is Overflow.NONFINITE:
        tie = format.max + 2.0 ** (format.max_exponent - format.fraction_bits - 1)
        magnitude = values.abs()
        is_beyond = magnitude >= tie if format.max_code & 1 else magnitude > tie
        if format.infinity_code is None:
            codes = torch.where(is_beyond, format.nan_code, codes)
        else:
            codes = torch.where(is_beyond, format.infinity_code | (codes & format.sign_mask), codes)
    # 3. One NaN code: torch's would depend on the sign and on the device.
    codes = torch.where(values.isnan(), format.nan_code, codes)
    return codes.view(dtype)
