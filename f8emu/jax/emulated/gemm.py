"""A dot of float8 codes as GEMMs of a chip, and its epilogue in float32."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from f8emu.jax.cast import cast
from f8emu.jax.emulated.program import aval_of
from f8emu.jax.emulated.rules import FLOAT8, is_fast
from f8emu.jax.gemm import engine
from f8emu.jax.gemm.call import SUM, EngineCall
from f8emu.spec.chip import Chip
from f8emu.spec.formats import BFLOAT16, FORMATS
from f8emu.spec.gemm_call import Shaped, scaled_mm_call

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
"""The dimension numbers of a `lax.dot_general`."""


def free_of(x: Any, contracting: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    """The dimensions of `x` that are neither contracted nor of the batch."""
    return [i for i in range(x.ndim) if i not in (*contracting, *batch)]


def dot(
    a: jax.Array, b: jax.Array, dims: Dims, *, out: np.dtype, planned: np.dtype, fast: bool, chip: Chip, scales: Any
) -> jax.Array:
    """`lax.dot_general` of codes, with scalar scales [EPI-1]: a GEMM for every index of the batch.

    `planned`: the output of the GPU's GEMM, on which S depends.
    """
    (contracting, contracting_b), (batch, batch_b) = dims
    rows, columns = free_of(a, contracting, batch), free_of(b, contracting_b, batch_b)
    shape = tuple(a.shape[i] for i in (*batch, *rows)) + tuple(b.shape[i] for i in columns)
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros(shape, out)
    k = math.prod(a.shape[i] for i in contracting)
    left = lax.transpose(a, (*batch, *rows, *contracting)).reshape(-1, math.prod(a.shape[i] for i in rows), k)
    right = lax.transpose(b, (*batch_b, *contracting_b, *columns)).reshape(left.shape[0], k, -1)
    shaped = [Shaped(x.shape[1:], x.dtype.name) for x in (left, right)] + [Shaped((1, 1), "float32")] * 2
    call = scaled_mm_call(*shaped, out_dtype=FORMATS[out.name], use_fast_accum=fast, chip=chip)
    as_planned = BFLOAT16 if planned in FLOAT8 else FORMATS[planned.name]
    multiply = functools.partial(engine.multiply, EngineCall(call, engine.EMULATED, sharded_k=SUM, planned=as_planned))
    units = [jnp.ones((1, 1), jnp.float32) if x is None else x.reshape(1, 1) for x in scales]
    if left.shape[0] == 1:
        return multiply((left[0], right[0], *units)).reshape(shape)
    return lax.map(lambda pair: multiply((*pair, *units)), (left, right)).reshape(shape)


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
