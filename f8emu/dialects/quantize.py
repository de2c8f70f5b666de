"""Quantize and dequantize by a dialect, for arrays of numpy, torch and JAX.

The arithmetic is numpy's, on the host, and the same for all three. A tensor of torch on a CPU is read where it lies.
One on a GPU is copied to the host, and its results back. An array of JAX, traced or not, goes through
`jax.pure_callback`, so that both functions work under `jit`.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from f8emu.dialects import arithmetic
from f8emu.dialects.arithmetic import E4M3, Array, Factors
from f8emu.dialects.rules import Block, Dialect
from f8emu.dialects.stacks import dialect_by_name
from f8emu.interop.arrays import to_numpy, to_torch
from f8emu.interop.frameworks import library_of, require_jax
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import HIGH_PRECISION


class Quantized(NamedTuple):
    """Codes, and the scales that the stack stores beside them."""

    codes: Any
    """float8_e4m3fn, [rows, K]."""
    scale: Any
    """[ceil(rows / block rows), ceil(K / block K)], in the dialect's dtype."""


def quantize(x: Any, dialect: Dialect | str, *, block: Block | None = None, scale: Any = None) -> Quantized:
    """The codes and scales of a matrix by a dialect.

    `dialect.formula` says how they are computed. `block` is one of `dialect.blocks`, by default the first. `scale`
    gives the stored scales instead of computing them; a dialect without a rule for its scales needs it.

    Shapes:
        x [rows, K] float32, bfloat16 or float16 -> codes [rows, K], scale [ceil(rows / block rows), ceil(K / block K)],
        arrays of x's library on its device. The last blocks may be partial.

    Exactness: as `Dialect` promises. A NaN code is 0x7F. numpy, torch and JAX give the same bits.

    Raises:
        SpecError: an unknown dialect, or a block that it does not have.
        OperandError: no matrix of these dtypes, scales of another shape or dtype, or none where they are needed.
    """
    found = dialect_by_name(dialect)
    chosen = _block("quantize", found, block)
    rows_and_k = _matrix("quantize", "x", x, tuple(f.name for f in HIGH_PRECISION))
    grid = arithmetic.grid_shape(rows_and_k, chosen)
    dtype = _dtype(x)
    stored = _stored_dtype(found, dtype)
    if scale is None and found.scale is None:
        raise OperandError(
            f"quantize: {found.name} must be given scale, {grid} {stored}; got none: it has no rule for them; "
            "take them from a calibration or a checkpoint"
        )
    if scale is not None:
        _is_grid("quantize", found, scale, grid, stored)

    def run(x: Array, *scale: Array) -> tuple[Array, Array]:
        if scale:
            factors = arithmetic.factors_from_stored(scale[0], found)
        else:
            factors = _factors(x, found, chosen)
        return arithmetic.encode(x, factors, found, chosen), factors.stored

    operands = (x,) if scale is None else (x, scale)
    return Quantized(*_on_host(run, operands, ((rows_and_k, E4M3), (grid, stored))))


def dequantize(codes: Any, scale: Any, dialect: Dialect | str, *, block: Block | None = None, out_dtype: Any) -> Any:
    """`code * s`, rounded to float32 and then to `out_dtype`; s is 1/t, rounded, where t is stored.

    Without `block`, it is the first of `dialect.blocks` whose grid has the shape of the scales.

    Shapes:
        codes float8_e4m3fn [rows, K], scale as from `quantize` -> out_dtype [rows, K], of the codes' library.

    Exactness: two roundings, the second none for float32; a NaN code gives NaN. numpy, torch and JAX agree.

    Raises:
        SpecError: an unknown dialect, a block that it does not have, or another `out_dtype`.
        OperandError: wrong dtypes or shapes.
    """
    found = dialect_by_name(dialect)
    shape = _matrix("dequantize", "codes", codes, (E4M3.name,))
    target = _high_precision(out_dtype)
    chosen = _block("dequantize", found, block) if block is not None else _block_of(found, shape, scale)
    if _dtype(scale).name not in ("float32", "bfloat16", "float16", "float8_e8m0fnu"):
        raise OperandError(
            f"dequantize: scale must be floating-point; got {_dtype(scale)}; view bytes as float8_e8m0fnu"
        )
    _is_grid("dequantize", found, scale, arithmetic.grid_shape(shape, chosen), None)

    def run(codes: Array, scale: Array) -> tuple[Array]:
        s = arithmetic.factors_from_stored(scale, found).scale
        return (arithmetic.decode(codes, s, chosen, target, rounds_scale=found.stored.is_rounded_to_output),)

    return _on_host(run, (codes, scale), ((shape, target),))[0]


def zero_block_scale(dialect: Dialect | str, dtype: Any = "bfloat16") -> float:
    """The stored scale of a block of zeros in a matrix of `dtype`: it narrows down who wrote a checkpoint.

    Raises:
        SpecError: an unknown dialect or dtype.
        OperandError: a dialect whose scales are given.
    """
    zero = np.zeros((1, 1), np.float32)
    return float(arithmetic.scales_from_amax(zero, dialect_by_name(dialect), _high_precision(dtype))[0, 0])


# 1 Arguments


def _factors(x: Array, dialect: Dialect, block: Block) -> Factors:
    assert dialect.scale is not None
    amax = arithmetic.block_amax(x, block, ignores_nan=dialect.scale.ignores_nan)
    return arithmetic.factors_from_amax(amax, dialect, x.dtype)


def _dtype(x: Any) -> np.dtype[Any]:
    """The dtype of an array of any library, as numpy has it."""
    name = str(x.dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def _high_precision(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else np.dtype(dtype).name
    known = [format.name for format in HIGH_PRECISION]
    if name not in known:
        raise SpecError(f"dequantize: out_dtype must be one of {', '.join(known)}; got {dtype!r}")
    return np.dtype(getattr(ml_dtypes, name, name))


def _matrix(call: str, name: str, x: Any, dtypes: tuple[str, ...]) -> tuple[int, int]:
    if library_of(x) is None or x.ndim != 2 or _dtype(x).name not in dtypes:
        got = f"{x.dtype} {list(x.shape)}" if library_of(x) else type(x).__name__
        raise OperandError(
            f"{call}: {name} must be a matrix [rows, K] of numpy, torch or JAX in {', '.join(dtypes)}; got {got}; "
            "reshape it to [-1, K], or convert it"
        )
    return tuple(x.shape)


def _block(call: str, dialect: Dialect, block: Block | None) -> Block:
    if block is None:
        return dialect.blocks[0]
    if tuple(block) not in dialect.blocks:
        known = ", ".join(map(str, dialect.blocks))
        raise SpecError(f"{call}: block must be one that {dialect.name} has, {known}; got {block}; None is all")
    return block


def _block_of(dialect: Dialect, shape: tuple[int, int], scale: Any) -> Block:
    for block in dialect.blocks:
        if tuple(scale.shape) == arithmetic.grid_shape(shape, block):
            return block
    return dialect.blocks[0]


def _stored_dtype(dialect: Dialect, dtype: np.dtype[Any]) -> np.dtype[Any]:
    name = dialect.stored.dtype
    return dtype if name == "input" else np.dtype(getattr(ml_dtypes, name, name))


def _is_grid(call: str, dialect: Dialect, scale: Any, grid: tuple[int, int], dtype: np.dtype[Any] | None) -> None:
    is_array = library_of(scale) is not None
    if not is_array or tuple(scale.shape) != grid or (dtype is not None and _dtype(scale) != dtype):
        got = f"{scale.dtype} {list(scale.shape)}" if is_array else type(scale).__name__
        raise OperandError(
            f"{call}: scale must be {dtype or 'an array'} {list(grid)}, a grid of the blocks of {dialect.name}; got "
            f"{got}; reshape it, or choose another block"
        )


# 2 The host


def _on_host(run: Any, operands: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
    """`run` on numpy's arrays, its results as arrays of the operands' library; `results` are shapes and dtypes."""
    library = library_of(operands[0])
    if library == "jax":
        jax = require_jax("dialects.quantize")
        shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)
        host = lambda *arrays: run(*(np.asarray(array) for array in arrays))  # noqa: E731
        return tuple(jax.pure_callback(host, shapes, *operands, vmap_method="sequential"))
    found = run(*(to_numpy(operand, copy=None) for operand in operands))
    return tuple(to_torch(array, operands[0].device, copy=None) for array in found) if library == "torch" else found
