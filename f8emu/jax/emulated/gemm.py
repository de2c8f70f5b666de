"""A dot of float8 codes as GEMMs of a chip, and its epilogue in float32."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from f8emu.jax.cast import cast
from f8emu.jax.emulated.program import aval_of
from f8emu.jax.emulated.rules import E8M0, FLOAT8, is_fast, why_not_mxfp8
from f8emu.jax.gemm import engine
from f8emu.jax.gemm.call import SUM, EngineCall
from f8emu.spec.chip import Chip
from f8emu.spec.formats import BFLOAT16, FORMATS
from f8emu.spec.gemm_call import Shaped, scaled_mm_call
from f8emu.spec.scaling import MX_BLOCK

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
"""The dimension numbers of a `lax.dot_general`."""
_OF_MATMUL: Dims = (((2,), (2,)), ((0,), (0,)))


def free_of(x: Any, contracting: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    """The dimensions of `x` that are neither contracted nor of the batch."""
    return [i for i in range(x.ndim) if i not in (*contracting, *batch)]


def dot(
    a: jax.Array, b: jax.Array, dims: Dims, *, out: np.dtype, planned: np.dtype, fast: bool, chip: Chip, scales: Any
) -> jax.Array:
    """`lax.dot_general` of codes, a GEMM for every index of the batch, with scalar scales [EPI-1] or E8M0 ones [MX-2].

    `planned`: the output of the GPU's GEMM, on which S depends.
    """
    (contracting, contracting_b), (batch, batch_b) = dims
    rows, columns = free_of(a, contracting, batch), free_of(b, contracting_b, batch_b)
    shape = tuple(a.shape[i] for i in (*batch, *rows)) + tuple(b.shape[i] for i in columns)
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros(shape, out)
    arrays = [_matrices(a, batch, rows, contracting), _matrices(b, batch_b, contracting_b, columns)]
    units: list[jax.Array] = []
    if all(x is not None and x.dtype == E8M0 for x in scales):
        arrays += [
            _matrices(scales[0], batch, rows, contracting),
            _matrices(scales[1], batch_b, contracting_b, columns),
        ]
    else:
        units = [jnp.ones((1, 1), jnp.float32) if x is None else x.reshape(1, 1) for x in scales]
    shaped = [Shaped(x.shape[1:], x.dtype.name) for x in arrays] + [Shaped(x.shape, x.dtype.name) for x in units]
    call = scaled_mm_call(*shaped, out_dtype=FORMATS[out.name], use_fast_accum=fast, chip=chip)
    as_planned = BFLOAT16 if planned in FLOAT8 else FORMATS[planned.name]
    multiply = functools.partial(engine.multiply, EngineCall(call, engine.EMULATED, sharded_k=SUM, planned=as_planned))
    if arrays[0].shape[0] == 1:
        return multiply((*(x[0] for x in arrays), *units)).reshape(shape)
    return lax.map(lambda parts: multiply((*parts, *units)), tuple(arrays)).reshape(shape)


def _matrices(x: jax.Array, batch: tuple[int, ...], rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """An array as matrices, one for each index of the batch."""
    sizes = (math.prod(x.shape[i] for i in axes) for axes in (batch, rows, columns))
    return lax.transpose(x, (*batch, *rows, *columns)).reshape(*sizes)


def scaled_dims(eqn: JaxprEqn) -> Dims:
    """The dimension numbers of a dot with block scales."""
    return eqn.params.get("dimension_numbers", _OF_MATMUL)


def why_no_scaled_dot(eqn: JaxprEqn, chip: Chip) -> str | None:
    """[XLA-10] Why a dot with block scales is no MXFP8 GEMM of the chip; None: it is."""
    contracting, (batch, _) = scaled_dims(eqn)
    a, b, *scales = map(aval_of, eqn.invars)
    if chip.microscaled is None:
        return f"block scales: XLA dequantizes on {chip}"
    if len(contracting[0]) != 1 or len(batch) > 1:
        return "several dimensions are contracted, or of the batch: XLA dequantizes"
    ks = zip((a, b), scales, contracting, strict=True)
    blocks = tuple(x.shape[k] // max(scale.shape[k], 1) for x, scale, (k,) in ks)
    dtypes = (a.dtype, b.dtype, *(scale.dtype for scale in scales))
    return why_not_mxfp8(dtypes, blocks, is_matmul=eqn.primitive.name != "scaled_dot")


def scaled_dot(eqn: JaxprEqn, a: jax.Array, b: jax.Array, *scales: jax.Array, chip: Chip) -> jax.Array:
    """[XLA-10] An MXFP8 `jax.nn.scaled_matmul` or `lax.scaled_dot`."""
    dims, out = scaled_dims(eqn), aval_of(eqn.outvars[0]).dtype
    # A scale that more than one block shares is each one's.
    of_blocks = [
        jnp.repeat(scale, x.shape[k] // MX_BLOCK // max(scale.shape[k], 1), axis=k)
        for x, scale, (k,) in zip((a, b), scales, dims[0], strict=True)
    ]
    return dot(a, b, dims, out=out, planned=out, fast=False, chip=chip, scales=of_blocks)


def ragged_dot(eqn: JaxprEqn, a: jax.Array, b: jax.Array, group_sizes: jax.Array, *, chip: Chip) -> jax.Array:
    """[XLA-9] `lax.ragged_dot` of codes: one GEMM of a K for each group, in which the rows of other groups are zero."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(a.shape[0])[:, None]
    is_own = (rows >= ends - group_sizes) & (rows < ends)
    wide = jnp.where(is_own[:, :, None], a[:, None, :], jnp.zeros((), a.dtype))
    out, fast = aval_of(eqn.outvars[0]).dtype, is_fast(eqn.params["precision"])
    dims = (((1, 2), (0, 1)), ((), ()))
    return dot(wide, b, dims, out=out, planned=out, fast=fast, chip=chip, scales=(None, None))


def step(eqn: JaxprEqn, operands: list[jax.Array], factor: jax.Array | None) -> jax.Array:
    """An equation of an epilogue, of float32 operands; of one that scales, the operand and the factor."""
    if factor is not None:
        scaled = operands[0] * factor
        scaled = jnp.where(scaled == 0, jnp.zeros_like(scaled), scaled)  # [EPI-1] a -0 becomes +0
        return lax.optimization_barrier(scaled)  # [EPI-3] a fused multiply-add would round once
    if eqn.primitive.name == "convert_element_type":
        return operands[0]
    if len(operands) < len(eqn.invars):
        return jax.nn.gelu(operands[0], approximate=True)
    return eqn.primitive.bind(*operands, **eqn.params)


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """[EPI-4] float32 rounded once; float8 saturates."""
    if dtype in FLOAT8:
        return cast(x, dtype)
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # unlike a conversion, it is kept
    return lax.optimization_barrier(x.astype(dtype))
