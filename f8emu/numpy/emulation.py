"""The GEMMs on arrays of numpy, by the native engine or, where it is missing, by the oracle; the bits are the same.

The functions have the arguments of the oracle's, and `width`: which of the engine's vectors, `library.widths()`
computes; None is the fastest. Only this module of f8emu.numpy knows the engine.
"""

import functools
import os
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from f8emu.native import gemm as engine
from f8emu.native import library
from f8emu.native.model import fits
from f8emu.numpy.dtypes import Array, dtype_of
from f8emu.spec.chip import AccumulationModel, Chip
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity
from f8ref import numpy as oracle
from f8ref.numpy.checks import checked_mm, checked_scaled_grouped_mm, checked_scaled_mm


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    granularity_a: Granularity,
    granularity_b: Granularity,
    bias: ArrayLike | None = None,
    out_dtype: Format | str,
    use_fast_accum: bool,
    split_k: int,
    chip: Chip,
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
    scaling = engine.scaling_of(gemm.granularities)
    out = _empty(gemm.a_MK.shape[0], gemm.b_NK.shape[0], gemm.out_format)
    _run(gemm.a_MK, gemm.b_NK, out, gemm.model, scaling, gemm.scale_a, gemm.scale_b.T, gemm.bias, split_k, width)
    return out


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike,
    *,
    out_dtype: Format | str,
    use_fast_accum: bool,
    chip: Chip,
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
        of_group = gemm.scale_a_M[start:stop, None], gemm.scale_b_GN[group, :, None]
        _run(gemm.a_MK[start:stop], gemm.b_GKN[group].T, out[start:stop], model, engine.GROUPED, *of_group, width=width)
    return out


def mm(
    a: ArrayLike, b: ArrayLike, *, out_dtype: Format | str, split_k: int, chip: Chip, width: str | None = None
) -> Array:
    """`f8ref.numpy.mm`."""
    a_MK, b_NK, out_format = checked_mm(a, b, out_dtype, split_k)
    if not _is_native(chip.bfloat16):
        return oracle.mm(a, b, out_dtype=out_dtype, split_k=split_k, chip=chip)
    out = _empty(a_MK.shape[0], b_NK.shape[0], out_format)
    _run(a_MK, b_NK, out, chip.bfloat16, engine.UNSCALED, split_k=split_k, width=width)
    return out


def _run(
    a_MK: Array,
    b_NK: Array,
    out: Array,
    model: AccumulationModel,
    scaling: int,
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    bias: Array | None = None,
    split_k: int = 1,
    width: str | None = None,
) -> None:
    """Writes to `out`. Scales are [1, 1], [rows, 1] or [rows, blocks of K]."""
    a, b = _readable(a_MK), _readable(b_NK)
    of_a, of_b, addend = (None if x is None else _readable(x) for x in (scale_a, scale_b, bias))
    of_bias = (0, 0) if addend is None else (addend.ctypes.data, addend.strides[0] // addend.itemsize)
    engine.run(
        (*out.shape, a.shape[1]),
        _matrix(a, of_a),
        _matrix(b, of_b),
        engine.Output(out.ctypes.data, *_strides(out), out.dtype.name, *of_bias, "float32"),
        model,
        scaling,
        split_k=split_k,
        threads=_threads(),
        width=width,
    )


def _matrix(x: Array, scale: Array | None) -> engine.Matrix:
    """An operand [rows, K]; a scale of all rows, or of all K, has a stride of 0."""
    if scale is None:
        return engine.Matrix(x.ctypes.data, *_strides(x), x.dtype.name)
    rows, blocks = (0 if extent == 1 else n for n, extent in zip(_strides(scale), scale.shape, strict=True))
    return engine.Matrix(x.ctypes.data, *_strides(x), x.dtype.name, 1, scale.ctypes.data, rows, blocks)


def _strides(x: Array) -> tuple[int, int]:
    """From row to row and from column to column, in elements."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def _readable(x: Array) -> Array:
    """`x`, or a copy of one that does not lie as an array of C does."""
    return x if x.flags.aligned and not any(stride % x.itemsize for stride in x.strides) else x.copy()


def _empty(m: int, n: int, format: Format) -> Array:
    return np.empty((m, n), dtype_of(format))


@functools.cache
def _threads() -> int:
    """As many as this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_native(model: AccumulationModel) -> bool:
    """Whether the engine multiplies; where it is missing, a warning says so once."""
    if library.library() is None:
        _warn_without_engine()
        return False
    return fits(model)


@functools.cache
def _warn_without_engine() -> None:
    warnings.warn(
        f"f8emu.numpy: {library.unavailable()}; until then GEMMs are computed by f8ref.numpy, which has the same bits "
        "and is slower. This warning appears once",
        RuntimeWarning,
        stacklevel=2,
    )
