"""Casts and quantizers, right and wrong, that are put to the suite by their names."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import f8emu.numpy as f8
from f8emu.dialects import quantize
from f8emu.spec import E8M0Rule, Float8Name, ScaleRule

E4M3, E5M2, FNUZ = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz
F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]

# Right casts


def by_torch(x: Any) -> Any:
    import torch

    return x.to(torch.float8_e5m2)


def by_ml_dtypes(x: Array) -> Array:
    return x.astype(FNUZ)


def ours(x: Array) -> Array:
    import f8emu.numpy

    return f8emu.numpy.cast(x, "float8_e5m2").view(np.uint8)


def ours_of_torch(x: Any) -> Any:
    import f8emu.torch

    return f8emu.torch.cast(x, "float8_e4m3fn")


def ours_of_jax(x: Any) -> Any:
    import f8emu.jax

    if x.shape != (256, 256):
        raise NotImplementedError("to XLA every shape is another program")
    return f8emu.jax.cast(x, "float8_e4m3fn")


def padded(x: Array) -> Array:
    rows, columns = x.shape
    tiles = np.full((-(-rows // 16) * 16, -(-columns // 32) * 32), np.nan, x.dtype)
    tiles[:rows, :columns] = x
    return clipped(tiles)[:rows, :columns]


def in_float64(x: Array) -> Array:
    return np.clip(x.astype(np.float64), -57344, 57344).astype(E5M2)


def clipped(x: Array, dtype: Any = E4M3) -> Array:
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x.astype(F32), -largest, largest).astype(dtype)


def divided(x: Array, scale: Array) -> Array:
    return clipped(x.astype(F32) / scale)


# Wrong casts


def via_float16(x: Array) -> Array:
    return clipped(x.astype(F32).astype(F16))


def via_bfloat16(x: Array) -> Array:
    return clipped(x.astype(BF16), E5M2)


def on_grid(x: Array, rounded: Any) -> Array:
    """E4M3 by a rounding of one's own, in units of the last place."""
    values = np.clip(x.astype(np.float64), -448, 448)
    unit = np.ldexp(1.0, np.maximum(np.frexp(np.abs(values))[1] - 1, -6) - 3)
    whole = np.copysign(rounded(np.abs(values) / unit) * unit, values)
    return np.where(np.isnan(values), np.nan, whole).astype(F32).astype(E4M3)


ties_away = partial(on_grid, rounded=lambda units: np.floor(units + 0.5))
truncated = partial(on_grid, rounded=np.floor)


def flushed(x: Array) -> Array:
    y = clipped(x, E5M2).astype(F32)
    return np.where(np.abs(y) < 2.0**-14, np.copysign(F32(0), y), y).astype(E5M2)


def carry_lost(x: Array) -> Array:
    y, x = clipped(x).astype(F32), x.astype(F32)
    carried = (np.frexp(y)[1] > np.frexp(x)[1]) & (np.abs(y) >= 2.0**-5)
    return np.where(carried & np.isfinite(x), y / 2, y).astype(E4M3)


def top_lost(x: Array) -> Array:
    return np.where(np.abs(x.astype(F32)) >= 256, np.copysign(F32(448), x.astype(F32)), clipped(x)).astype(E4M3)


def infinity_to_zero(x: Array) -> Array:
    return np.where(np.isinf(x.astype(F32)), F32(0), clipped(x)).astype(E4M3)


def nan_of_zero(x: Array) -> Array:
    """FNUZ by its sign and its magnitude: what would be -0 is NaN."""
    codes = x.astype(FNUZ).view(np.uint8)
    return np.where(codes == 0, np.signbit(x.astype(F32)) * 0x80, codes).astype(np.uint8).view(FNUZ)


def by_inverse(x: Array, scale: Array) -> Array:
    return clipped(x.astype(F32) * (F32(1) / scale))


def subnormals_twice(x: Array) -> Array:
    """Two faults: through bfloat16, and only among subnormals."""
    x = x.astype(F32)
    return np.where(np.abs(x) < 2.0**-6, clipped(x.astype(BF16)), clipped(x)).astype(E4M3)


def unwritten_tail(x: Array) -> Array:
    """A kernel of 65,536 threads."""
    codes = clipped(x).copy()
    codes.view(np.uint8).reshape(-1)[1 << 16 :] = 0
    return codes


def changes_x(x: Array) -> Array:
    return np.clip(x, -1, 1, out=x).astype(E4M3) if x.dtype == F32 and x.size else clipped(x)


def reads_its_own_strides(x: Any) -> Any:
    import torch

    rows, columns = x.shape
    return torch.as_strided(x, (rows, columns), (columns, 1)).to(torch.float8_e4m3fn)


# Quantizers: one number, rows, blocks


def made(x: Array, *, largest: float = 448, floor: float = 1e-12, late: Any = lambda s: s) -> Pair:
    """f8emu's rule of rows, with changes."""
    amax = np.abs(x.astype(F32)).max(axis=1, keepdims=True, initial=0).astype(np.float64)
    multiplier = (largest / np.maximum(amax, floor)).astype(F32)
    return clipped(x.astype(F32) * multiplier), late(F32(1) / multiplier)


def up(scale: Array) -> Array:
    mantissa, exponent = np.frexp(scale)
    return np.where(np.isfinite(scale), np.ldexp(F32(1), exponent - (mantissa == 0.5)).astype(F32), scale)


right_rows = made
floor_1e4, to_416 = partial(made, floor=1e-4), partial(made, largest=416)
late_power, narrow_scale = partial(made, late=up), partial(made, late=lambda s: s.astype(BF16))
reciprocal = partial(made, late=lambda s: F32(1) / s)


def own_5(x: Array) -> Pair:
    import f8emu.numpy as f8

    scales = f8.scale_from_amax(f8.amax(x, "blockwise_1x128"), "float8_e5m2")
    return f8.quantize(x, scales.inv_scale, "float8_e5m2", "blockwise_1x128"), scales.scale


def vllm_token(x: Array) -> Pair:
    """vLLM's rule, as its kernel has it: s = amax / 448, at least 1 / (448 * 512), and x / s; it ignores NaN."""
    x = x.astype(F32)
    amax = np.fmax.reduce(np.abs(x), axis=1, keepdims=True, initial=0)
    scale = np.maximum(amax / F32(448), F32(1 / (448 * 512)))
    values = np.fmax(F32(-448), np.fmin(x / scale, F32(448)))
    return values.astype(E4M3), scale


def deepseek_ue8m0(x: Array) -> Pair:
    """DeepGEMM's per_block_cast_to_fp8 with use_ue8m0, of whole blocks."""
    if x.shape[0] % 128 or x.shape[1] % 128 or not x.size:
        raise ValueError("whole blocks only")
    blocks = x.astype(F32).reshape(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
    amax = np.maximum(np.abs(blocks).max(axis=(1, 3), keepdims=True), F32(1e-4))
    bits = (amax / F32(448)).view(np.int32)
    exponent = np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254)
    codes = np.where(np.isnan(amax), 255, exponent).astype(np.uint8)
    scale = codes.view(ml_dtypes.float8_e8m0fnu).astype(F32)
    return clipped((blocks * (F32(1) / scale)).reshape(x.shape)), codes[:, 0, :, 0]


def quotient(x: Array) -> Pair:
    scale = made(x)[1]
    return clipped(x.astype(F32) / scale), scale


def half_codes(x: Array) -> Pair:
    scale = made(x)[1]
    amax = np.abs(x.astype(F32)).max(axis=1, keepdims=True, initial=0).astype(np.float64)
    return clipped((x.astype(F32) * (448 / np.maximum(amax, 1e-12)).astype(F32)).clip(-448, 448).astype(F16)), scale


def vllm_unsigned(x: Array) -> Pair:
    codes, scale = vllm_token(x)
    return np.where(codes.view(np.uint8) == 0x80, 0, codes.view(np.uint8)).astype(np.uint8).view(E4M3), scale


def te_current(x: Array) -> Pair:
    return tuple(quantize(x, "transformer_engine_current"))


def mx(rule: E8M0Rule, format: Float8Name, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        inv_scale, scale = f8.scale_from_amax(f8.amax(x, "blockwise_1x32"), format, ScaleRule(e8m0=rule))
        return f8.quantize(x, inv_scale, format, "blockwise_1x32"), scale


def mx_rceil(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return mx(E8M0Rule.RCEIL, "float8_e4m3fn", x)


def mx_floor_5(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return mx(E8M0Rule.FLOOR, "float8_e5m2", x)


def mx_reciprocal(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scale = mx_rceil(x)
    with np.errstate(all="ignore"):
        return codes, np.float32(1) / scale.astype(np.float32)
