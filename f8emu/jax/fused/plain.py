"""The fused casts in plain JAX: what the kernels compute, in terms of the verbs.

They run where the kernels do not: on every backend but CUDA, and for what the kernels do not take. A matrix is cast as
it is stored, also for its transpose: the codes are transposed, a byte an element.
"""

import jax

from f8emu.jax.cast import quantize_blocks
from f8emu.jax.scale import Block, group_amax, scales_of
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule
from f8emu.spec.trace import Scales

Cast = tuple[jax.Array, Scales]
"""Codes and scales of an operand."""

_ALL: Block = (None, None)
_ROW: Block = (1, None)
_COL: Block = (None, 1)


def tensor_amax(x: jax.Array) -> jax.Array:
    """The amax of `x` [M, N], [1, 1]."""
    return group_amax(x, _ALL)


def row_amax(x: jax.Array) -> jax.Array:
    """The amaxes of the rows, [M, 1]."""
    return group_amax(x, _ROW)


def row_col_amax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The amaxes of the rows, [M, 1], and of the columns, [N, 1]."""
    return group_amax(x, _ROW), group_amax(x, _COL).T


def cast_pair(
    x: jax.Array, row_inv_scale: jax.Array | None, col_inv_scale: jax.Array | None, *, format: Format
) -> tuple[jax.Array | None, jax.Array | None]:
    """Codes of `x` and of `x^T` under given inv_scales; None leaves an operand out."""
    rows = cols = None
    if row_inv_scale is not None:
        rows = quantize_blocks(x, row_inv_scale, format, _ROW if row_inv_scale.size > 1 else _ALL)
    if col_inv_scale is not None:
        if rows is not None and row_inv_scale is col_inv_scale and col_inv_scale.size == 1:
            cols = rows.T
        else:
            kind = _COL if col_inv_scale.size > 1 else _ALL
            cols = quantize_blocks(x, col_inv_scale.T, format, kind).T
    return rows, cols


def cast_pair_amax(
    x: jax.Array, inv_scale: jax.Array, *, format: Format, rows: bool, cols: bool
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Codes of `x` and of `x^T` under one inv_scale, and the amax of `x`."""
    codes = cast_pair(x, inv_scale if rows else None, inv_scale if cols else None, format=format)
    return *codes, tensor_amax(x)


def cast_rows(x: jax.Array, *, format: Format, rule: ScaleRule) -> Cast:
    """Codes and scales of the rows, each scaled by its own amax."""
    return _cast(x, _ROW, format, rule)


def cast_blocks(
    x: jax.Array,
    *,
    format: Format,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
) -> tuple[Cast | None, Cast | None]:
    """Codes and scales of `x` and of `x^T` by blocks; None leaves an operand out."""
    rows = None if row_granularity is None else _cast(x, row_granularity.block, format, rule)
    if col_granularity is None:
        return rows, None
    if rows is not None and row_granularity is col_granularity and col_granularity.is_transposable:
        codes, scales = rows
    else:
        block_n, block_m = col_granularity.block
        codes, scales = _cast(x, (block_m, block_n), format, rule)
    return rows, (codes.T, Scales(scales.inv_scale.T, scales.scale.T))


def _cast(x: jax.Array, block: Block, format: Format, rule: ScaleRule) -> Cast:
    scales = scales_of(group_amax(x, block), format, rule)
    return quantize_blocks(x, scales.inv_scale, format, block), scales
