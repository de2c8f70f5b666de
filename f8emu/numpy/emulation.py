"""GEMMs and casts of numpy's arrays by the native engine or, where it is missing, by the oracle; the bits are the same.

The verbs have the arguments of the oracle's, and `width`: which of the engine's vectors, `library.widths()`, computes;
None is the fastest. Only this module of f8emu.numpy knows the engine.
"""

import functools
import os
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.native import cast as caster
from f8emu.native import gemm as engine
from f8emu.native import library
from f8emu.spec.formats import HIGH_PRECISION, Format, float8_format
from f8emu.spec.scaling import Granularity, ScaleRule, Scales, granularity_by_name
from f8ref import numpy as oracle
from f8ref.numpy.checks import GemmArrays, checked_mm, checked_scaled_mm, grouped_product
from f8ref.numpy.codec import canonical_nan, typed_array
from f8ref.numpy.linear import Verbs
from f8ref.numpy.scale import as_matrix, checked_amax, checked_scale
from f8ref.numpy.scaled_mm import product as product_of_oracle

Array = NDArray[Any]


def dtype_of(format: Format) -> np.dtype[Any]:
    """The dtype of a format: numpy's own or one of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, format.name, format.name))


def product(gemm: GemmArrays, *, width: str | None = None) -> Array:
    """The output of a GEMM whose arguments are checked."""
    if not (_is_compiled() and engine.fits(gemm.call.model)):
        return product_of_oracle(gemm)
    out = np.empty(gemm.call.sizes[:2], dtype_of(gemm.call.out))
    alive: list[Array] = []  # the copies that the engine reads
    of_a, of_b = gemm.call.granularities or (None, None)
    of_bias: tuple[Any, ...] = ()
    if gemm.bias is not None:
        bias = _readable(gemm.bias, alive)
        of_bias = bias.ctypes.data, bias.strides[0] // bias.itemsize, "float32"
    # The struct holds addresses: what it names must live until the engine returns.
    described = engine.described(
        gemm.call,
        _matrix(gemm.a_MK, gemm.scale_a, of_a, alive),
        _matrix(gemm.b_NK, gemm.scale_b, of_b, alive),
        engine.Output(out.ctypes.data, *_strides(out), out.dtype.name, *of_bias),
    )
    engine.run(described, threads=_threads(), width=width)
    return out


def scaled_mm(*operands: ArrayLike, width: str | None = None, **options: Any) -> Array:
    """`f8ref.numpy.scaled_mm` with the vectors of `width`."""
    return product(checked_scaled_mm(*operands, **options), width=width)


def scaled_grouped_mm(*operands: ArrayLike, width: str | None = None, **options: Any) -> Array:
    """`f8ref.numpy.scaled_grouped_mm`."""
    return grouped_product(functools.partial(product, width=width), *operands, **options)


def mm(*operands: ArrayLike, width: str | None = None, **options: Any) -> Array:
    """`f8ref.numpy.mm`."""
    return product(checked_mm(*operands, **options), width=width)


def amax(x: ArrayLike, granularity: Granularity | str = Granularity.TENSORWISE, *, width: str | None = None) -> Array:
    """`f8ref.numpy.amax`."""
    granularity = granularity_by_name("amax", granularity)
    values, _ = typed_array(as_matrix(x, "amax: x"), HIGH_PRECISION, "amax: x")
    if not _is_compiled() or values.size == 0:
        return oracle.amax(values, granularity)
    amaxes = np.empty(granularity.scale_shape(*values.shape), np.float32)
    _cast(values, granularity, caster.FIND, amaxes, width)
    return amaxes


def scale_from_amax(amax: ArrayLike, format: Format | str, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """`f8ref.numpy.scale_from_amax`."""
    values, target = checked_amax(amax, format, rule, margin)
    if not _is_compiled():
        return oracle.scale_from_amax(values, target, rule, margin=margin)
    contiguous = np.ascontiguousarray(values)
    inv_scale, scale = np.empty(values.shape, np.float32), np.empty(values.shape, dtype_of(rule.scale_format))
    addresses = contiguous.ctypes.data, inv_scale.ctypes.data, scale.ctypes.data
    caster.scales(*addresses, contiguous.size, target, rule, margin=margin)
    # The engine's NaN is any NaN; the oracle's is one.
    return Scales(canonical_nan(inv_scale), canonical_nan(scale) if rule.e8m0 is None else scale)


def quantize(
    x: ArrayLike,
    inv_scale: ArrayLike,
    format: Format | str,
    granularity: Granularity | str = Granularity.TENSORWISE,
    *,
    width: str | None = None,
) -> Array:
    """`f8ref.numpy.quantize`."""
    granularity, target = granularity_by_name("quantize", granularity), float8_format("quantize", format)
    values, _ = typed_array(as_matrix(x, "quantize: x"), HIGH_PRECISION, "quantize: x")
    factors = checked_scale(inv_scale, granularity, values.shape, "quantize: inv_scale")
    if not _is_compiled() or values.size == 0:
        return oracle.quantize(values, factors, target, granularity)
    factors, codes = _readable(factors, []), np.empty(values.shape, np.uint8)
    _cast(values, granularity, caster.ENCODE, factors, width, target, codes)
    return codes.view(dtype_of(target))


VERBS = Verbs(amax, scale_from_amax, quantize, product)
"""The verbs of which a linear layer consists."""


def _cast(
    x: Array,
    granularity: Granularity,
    stage: int,
    grid: Array,
    width: str | None,
    format: Format | None = None,
    codes: Array | None = None,
) -> None:
    # 1. The engine reads lines: one of the two strides must be 1.
    x = _readable(x, [])
    x = x if 1 in _strides(x) else np.ascontiguousarray(x)
    (rows, k), (row_stride, k_stride) = x.shape, _strides(x)
    values = caster.Values(x.ctypes.data, rows, k, row_stride, k_stride, x.dtype.name)
    # 2. What it finds, or takes, of each group that shares a scale; and codes.
    amax, inv_scale = (grid.ctypes.data, 0) if stage == caster.FIND else (0, grid.ctypes.data)
    places = caster.Grid(amax, inv_scale, 0, *_strides(grid))
    of_codes = caster.Codes() if codes is None else caster.Codes(codes.ctypes.data, *codes.strides)
    caster.run(values, granularity, places, format, None, of_codes, stage, threads=_threads(), width=width)


def _matrix(codes: Array, scale: Array | None, granularity: Granularity | None, alive: list[Array]) -> engine.Matrix:
    x = _readable(codes, alive)
    place = x.ctypes.data, _strides(x), x.dtype.name
    if scale is None:
        return engine.matrix(*place)
    factors = _readable(scale, alive)
    return engine.matrix(*place, granularity, factors.ctypes.data, _strides(factors))


def _strides(x: Array) -> tuple[int, int]:
    """From row to row and from column to column, in elements."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def _readable(x: Array, alive: list[Array]) -> Array:
    # The engine takes strides in elements: what lies otherwise is copied, and must live until it returns.
    if not x.flags.aligned or any(stride % x.itemsize for stride in x.strides):
        x = x.copy()
    alive.append(x)
    return x


@functools.cache
def _threads() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_compiled() -> bool:
    return library.is_there("f8emu.numpy", "f8ref.numpy computes, with the same bits and slower")
