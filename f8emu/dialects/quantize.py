"""Quantize and dequantize by a dialect, for arrays of numpy, torch and JAX.

The arithmetic is numpy's, on the host, and the same for all three. A tensor of torch on a CPU is read where it lies.
One on a GPU is copied to the host, and its results back. An array of JAX, traced or not, goes through
`jax.pure_callback`, so that both functions work under `jit`.
"""

from __future__ import annotations  # short signatures in `help`

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from f8emu.dialects import arithmetic
from f8emu.dialects.arithmetic import DTYPES, E4M3, Array
from f8emu.dialects.names import DialectName
from f8emu.dialects.rules import Block, Dialect
from f8emu.dialects.stacks import dialect_by_name
from f8emu.interop.arrays import to_numpy, to_torch
from f8emu.interop.frameworks import library_of, require_jax
from f8emu.shown import fields_of
from f8emu.spec.errors import OperandError, SpecError
from f8emu.spec.formats import E4M3FN, HIGH_PRECISION, Format

_Call = TypeVar("_Call", bound=Callable[..., Any])


class Quantized(NamedTuple):
    """Codes, and the scales that the stack stores beside them."""

    codes: Any
    """float8_e4m3fn, [rows, K]."""
    scale: Any
    """[ceil(rows / block rows), ceil(K / block K)], in the dialect's dtype."""

    def __repr__(self) -> str:
        return fields_of(self)


def _untraced(call: _Call) -> _Call:
    """Numpy computes on the host: a compiler of torch ends its graph before, and goes on behind."""

    @functools.wraps(call)
    def run(*args: Any, **options: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        return (dynamo.disable(call) if dynamo else call)(*args, **options)

    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it computes on the host; leave fullgraph out")
    return cast("_Call", run)


@_untraced
def quantize(x: Any, dialect: Dialect | DialectName, *, block: Block | None = None, scale: Any = None) -> Quantized:
    """The codes and scales of a matrix by a dialect.

    `dialect.formula` says how they are computed. `block` is one of `dialect.blocks`, by default the first, or the first
    that `scale` fits. `scale` gives the stored scales; a dialect without a rule for its scales needs it.

    Shapes:
        x [rows, K] float32, bfloat16 or float16 -> codes [rows, K], scale [ceil(rows / block rows), ceil(K / block K)],
        arrays of x's library on its device. The last blocks may be partial.

    Exactness: as `Dialect` promises. A NaN code is 0x7F. numpy, torch and JAX give the same bits.

    Raises:
        SpecError: an unknown dialect, or a block that it does not have.
        OperandError: no matrix of these dtypes, scales of another shape, or none where they are needed.
    """
    known = dialect_by_name(dialect)
    shape = _matrix("quantize", "x", x, HIGH_PRECISION)
    chosen = _block("quantize", known, block, shape, scale)
    if scale is None and known.scale is None:
        raise OperandError(
            f"quantize: {known.name} must be given scale, as it has no rule for it; got none; take it from a "
            "calibration or a checkpoint"
        )

    def run(x: Array, *arrays: Array) -> tuple[Array, Array]:
        if arrays:
            factors = arithmetic.factors_from_stored(arrays[0], known)
        else:
            amax = arithmetic.block_amax(x, chosen, ignores_nan=known.scale is not None and known.scale.ignores_nan)
            factors = arithmetic.factors_from_amax(amax, known, x.dtype)
        return arithmetic.encode(x, factors, known.code, chosen), factors.stored

    operands = (x,) if scale is None else (x, scale)
    stored = _name(operands[-1].dtype) if scale is not None or known.stored.dtype == "input" else known.stored.dtype
    grid = arithmetic.grid_shape(shape, chosen)
    return Quantized(*_on_host(run, operands, (shape, E4M3), (grid, DTYPES[stored])))


@_untraced
def dequantize(
    codes: Any, scale: Any, dialect: Dialect | DialectName, *, block: Block | None = None, out_dtype: Any
) -> Any:
    """`code * s`, rounded to float32 and then to `out_dtype`; s is 1/t, rounded, where t is stored.

    Without `block`, it is the first of `dialect.blocks` whose grid has the shape of the scales.

    Shapes:
        codes float8_e4m3fn [rows, K], scale as from `quantize` -> out_dtype [rows, K], of the codes' library.

    Exactness: two roundings, the second none for float32; a NaN code gives NaN. numpy, torch and JAX agree.

    Raises:
        SpecError: an unknown dialect, a block that it does not have, or another `out_dtype`.
        OperandError: wrong dtypes or shapes.
    """
    known = dialect_by_name(dialect)
    shape = _matrix("dequantize", "codes", codes, (E4M3FN,))
    target = _target("dequantize", out_dtype)
    chosen = _block("dequantize", known, block, shape, scale)

    def run(codes: Array, scale: Array) -> tuple[Array]:
        s = arithmetic.factors_from_stored(scale, known).scale
        return (arithmetic.decode(codes, s, chosen, target, rounds_scale=known.stored.is_rounded_to_output),)

    return _on_host(run, (codes, scale), (shape, target))[0]


def zero_block_scale(dialect: Dialect | DialectName, dtype: Any = "bfloat16") -> float:
    """The stored scale of a block of zeros in a matrix of `dtype`: it narrows down who wrote a checkpoint.

    Raises:
        SpecError: an unknown dialect or dtype.
        OperandError: a dialect whose scales are given.
    """
    zero, target = np.zeros((1, 1), np.float32), _target("zero_block_scale", dtype)
    return float(arithmetic.factors_from_amax(zero, dialect_by_name(dialect), target).stored[0, 0])


def _name(dtype: Any) -> str:
    """The name of a dtype that is a name itself, or of any library."""
    return np.dtype(dtype).name if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def _target(call: str, dtype: Any) -> np.dtype[Any]:
    if _name(dtype) not in (known := [format.name for format in HIGH_PRECISION]):
        raise SpecError(f"{call}: out_dtype must be one of {', '.join(known)}; got {dtype!r}; convert it afterwards")
    return DTYPES[_name(dtype)]


def _matrix(call: str, name: str, x: Any, formats: tuple[Format, ...]) -> tuple[int, int]:
    known = [format.name for format in formats]
    if library_of(x) is None or x.ndim != 2 or _name(x.dtype) not in known:
        raise OperandError(
            f"{call}: {name} must be a matrix [rows, K] of numpy, torch or JAX in {', '.join(known)}; got {_kind(x)}; "
            "reshape it to [-1, K], or convert it"
        )
    return tuple(x.shape)


def _block(call: str, dialect: Dialect, block: Block | None, shape: tuple[int, int], scale: Any) -> Block:
    """The block that was chosen, or the first whose grid the scales have, if they are given."""
    blocks = dialect.blocks if block is None else ((block[0], block[1]),)
    if not set(blocks) <= set(dialect.blocks):
        known = ", ".join(map(str, dialect.blocks))
        raise SpecError(f"{call}: block must be one that {dialect.name} has, {known}; got {block}; None is all")
    if scale is None:
        return blocks[0]
    if library_of(scale) is not None and _name(scale.dtype) in DTYPES:
        for size in blocks:
            if tuple(scale.shape) == arithmetic.grid_shape(shape, size):
                return size
    grids = " or ".join(str(list(arithmetic.grid_shape(shape, block))) for block in blocks)
    raise OperandError(
        f"{call}: scale must be {grids} in float, a number for each block of {dialect.name}; got {_kind(scale)}; "
        "reshape it, choose another block, or view bytes as float8_e8m0fnu"
    )


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if library_of(x) else type(x).__name__


def _on_host(run: Callable[..., Any], operands: tuple[Any, ...], *results: tuple[Any, Any]) -> tuple[Any, ...]:
    """`run` on numpy's arrays, its results as arrays of the operands' library; `results` are shapes and dtypes."""
    library = library_of(operands[0])
    if library == "jax":
        jax = require_jax("dialects.quantize")
        shapes = tuple(jax.ShapeDtypeStruct(*result) for result in results)
        host = lambda *arrays: run(*(np.asarray(array) for array in arrays))  # noqa: E731
        return tuple(jax.pure_callback(host, shapes, *operands, vmap_method="sequential"))
    outputs = run(*(to_numpy(operand, copy=None) for operand in operands))
    return tuple(to_torch(array, operands[0].device, copy=None) for array in outputs) if library == "torch" else outputs
