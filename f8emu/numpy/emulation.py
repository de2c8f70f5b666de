"""GEMMs and casts of numpy's arrays by the native engine or, where it is missing, by the oracle; the bits are the same.

The functions have the arguments of the oracle's, and `width`: which of the engine's vectors, `library.widths()`
computes; None is the fastest. Only this module of f8emu.numpy knows the engine.
"""

import functools
import os
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from f8emu.native import cast as caster
from f8emu.native import gemm as engine
from f8emu.native import library
from f8emu.native.model import fits
from f8emu.numpy.dtypes import Array, dtype_of
from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.formats import HIGH_PRECISION, Format, float8_format
from f8emu.spec.scaling import Granularity, ScaleRule, granularity_by_name
from f8emu.spec.trace import Scales
from f8ref import numpy as oracle
from f8ref.numpy.checks import checked_mm, checked_scaled_grouped_mm, checked_scaled_mm
from f8ref.numpy.codec import canonical_nan, typed_array
from f8ref.numpy.linear import Verbs
from f8ref.numpy.scale import as_matrix, checked_amax, checked_scale

_SQUARE = 128
"""Rows that share a 128x128 scale."""
_Operand = tuple[Array, Array | None, int]
"""[rows, K]; its scales, [1 or rows, 1 or blocks of K]; and how many rows share one of these."""


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    granularity_a: Granularity | str = Granularity.TENSORWISE,
    granularity_b: Granularity | str = Granularity.TENSORWISE,
    bias: ArrayLike | None = None,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    split_k: int = 1,
    chip: Chip = HOPPER,
    width: str | None = None,
) -> Array:
    """`f8ref.numpy.scaled_mm`."""
    options: dict[str, Any] = {
        "granularity_a": granularity_a,
        "granularity_b": granularity_b,
        "bias": bias,
        "out_dtype": out_dtype,
        "use_fast_accum": use_fast_accum,
        "split_k": split_k,
        "chip": chip,
    }
    gemm = checked_scaled_mm(a, b, scale_a, scale_b, **options)
    if not _is_native(gemm.model):
        return oracle.scaled_mm(a, b, scale_a, scale_b, **options)
    out = _empty(gemm.a_MK.shape[0], gemm.b_NK.shape[0], gemm.out_format)
    shared = [_SQUARE if granularity is Granularity.BLOCKWISE_128X128 else 1 for granularity in gemm.granularities]
    _run(
        (gemm.a_MK, gemm.scale_a[:: shared[0]], shared[0]),
        (gemm.b_NK, gemm.scale_b.T[:: shared[1]], shared[1]),
        out,
        gemm.model,
        engine.scaling_of(gemm.granularities),
        bias=gemm.bias,
        split_k=split_k,
        width=width,
    )
    return out


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike,
    *,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip = HOPPER,
    width: str | None = None,
) -> Array:
    """`f8ref.numpy.scaled_grouped_mm`."""
    options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum, "chip": chip}
    gemm = checked_scaled_grouped_mm(a, b, scale_a, scale_b, offs, **options)
    model = chip.float8_model(use_fast_accum=use_fast_accum)
    if not _is_native(model):
        return oracle.scaled_grouped_mm(a, b, scale_a, scale_b, offs, **options)
    out = _empty(gemm.a_MK.shape[0], gemm.b_GKN.shape[2], gemm.out_format)
    for group, (start, stop) in enumerate(pairwise(gemm.bounds)):
        a_group = gemm.a_MK[start:stop], gemm.scale_a_M[start:stop, None], 1
        b_group = gemm.b_GKN[group].T, gemm.scale_b_GN[group, :, None], 1
        _run(a_group, b_group, out[start:stop], model, engine.GROUPED, width=width)
    return out


def mm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out_dtype: Format | str = "bfloat16",
    split_k: int = 1,
    chip: Chip = HOPPER,
    width: str | None = None,
) -> Array:
    """`f8ref.numpy.mm`."""
    a_MK, b_NK, out_format = checked_mm(a, b, out_dtype, split_k)
    if not _is_native(chip.bfloat16):
        return oracle.mm(a, b, out_dtype=out_dtype, split_k=split_k, chip=chip)
    out = _empty(a_MK.shape[0], b_NK.shape[0], out_format)
    _run((a_MK, None, 1), (b_NK, None, 1), out, chip.bfloat16, engine.UNSCALED, split_k=split_k, width=width)
    return out


def amax(x: ArrayLike, granularity: Granularity | str = Granularity.TENSORWISE, *, width: str | None = None) -> Array:
    """`f8ref.numpy.amax`."""
    granularity = granularity_by_name("amax", granularity)
    values, _ = typed_array(as_matrix(x, "amax: x"), HIGH_PRECISION, "amax: x")
    if not _is_compiled() or values.size == 0:
        return oracle.amax(values, granularity)
    found = np.empty(granularity.scale_shape(*values.shape), np.float32)
    grid = caster.Grid(amax=found.ctypes.data, **_places(found))
    _cast(values, granularity, grid, None, caster.Codes(), caster.FIND, width)
    return found


def scale_from_amax(amax: ArrayLike, format: Format | str, rule: ScaleRule = ScaleRule(), *, margin: int = 0) -> Scales:
    """`f8ref.numpy.scale_from_amax`."""
    values, target = checked_amax(amax, format, margin)
    if not _is_compiled():
        return oracle.scale_from_amax(values, target, rule, margin=margin)
    given = np.ascontiguousarray(values)
    inv_scale, scale = np.empty(values.shape, np.float32), np.empty(values.shape, np.float32)
    addresses = given.ctypes.data, inv_scale.ctypes.data, scale.ctypes.data
    caster.scales(*addresses, given.size, target, rule, margin=margin)
    return Scales(canonical_nan(inv_scale), canonical_nan(scale))


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
    alive: list[Array] = []
    factors = _readable(factors, alive)
    codes = np.empty(values.shape, np.uint8)
    grid = caster.Grid(inv_scale=factors.ctypes.data, **_places(factors))
    of_codes = caster.Codes(codes.ctypes.data, *codes.strides)
    _cast(values, granularity, grid, target, of_codes, caster.ENCODE, width)
    return codes.view(dtype_of(target))


VERBS = Verbs(amax, scale_from_amax, quantize, scaled_mm, mm)
"""What a linear layer is made of."""


def _cast(
    x: Array,
    granularity: Granularity,
    grid: caster.Grid,
    format: Format | None,
    codes: caster.Codes,
    stages: int,
    width: str | None,
) -> None:
    alive: list[Array] = []
    x = _readable(x, alive)
    if 1 not in _strides(x):
        x = np.ascontiguousarray(x)
    (rows, k), (row_stride, k_stride) = x.shape, _strides(x)
    values = caster.Values(x.ctypes.data, rows, k, row_stride, k_stride, x.dtype.name)
    caster.run(values, granularity, grid, format, None, codes, stages, threads=_threads(), width=width)


def _places(grid: Array) -> dict[str, int]:
    row_stride, block_stride = _strides(grid)
    return {"row_stride": row_stride, "block_stride": block_stride}


def _run(
    a: _Operand,
    b: _Operand,
    out: Array,
    model: AccumulationModel,
    scaling: int,
    *,
    bias: Array | None = None,
    split_k: int = 1,
    width: str | None = None,
) -> None:
    """Writes to `out`."""
    alive: list[Array] = []  # copies among what is read
    addend = None if bias is None else _readable(bias, alive)
    of_bias = (0, 0) if addend is None else (addend.ctypes.data, addend.strides[0] // addend.itemsize)
    engine.run(
        (*out.shape, a[0].shape[1]),
        _matrix(*a, alive),
        _matrix(*b, alive),
        engine.Output(out.ctypes.data, *_strides(out), out.dtype.name, *of_bias, "float32"),
        model,
        scaling,
        split_k=split_k,
        threads=_threads(),
        width=width,
    )


def _matrix(codes: Array, scale: Array | None, rows_per_scale: int, alive: list[Array]) -> engine.Matrix:
    """An operand; a scale of all rows, or of all K, has a stride of 0."""
    x = _readable(codes, alive)
    if scale is None:
        return engine.Matrix(x.ctypes.data, *_strides(x), x.dtype.name)
    factors = _readable(scale, alive)
    rows, blocks = (0 if extent == 1 else n for n, extent in zip(_strides(factors), factors.shape, strict=True))
    return engine.Matrix(x.ctypes.data, *_strides(x), x.dtype.name, rows_per_scale, factors.ctypes.data, rows, blocks)


def _strides(x: Array) -> tuple[int, int]:
    """From row to row and from column to column, in elements."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def _readable(x: Array, alive: list[Array]) -> Array:
    """`x`, or a copy of one that does not lie as an array of C does."""
    if not x.flags.aligned or any(stride % x.itemsize for stride in x.strides):
        x = x.copy()
    alive.append(x)
    return x


def _empty(m: int, n: int, format: Format) -> Array:
    return np.empty((m, n), dtype_of(format))


@functools.cache
def _threads() -> int:
    """As many as this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_native(model: AccumulationModel) -> bool:
    """Whether the engine multiplies by a model."""
    return _is_compiled() and fits(model)


def _is_compiled() -> bool:
    """Whether there is an engine."""
    return library.is_there("f8emu.numpy", "f8ref.numpy computes, with the same bits and slower")
