"""Pallas kernels of the blockwise casts: amax, scale and codes of 128-blocks from one reading of a matrix.

A program has one 128 x 128 tile in registers, which holds whole blocks of the matrix and of its transpose. Exactness
and conventions are those of `kernels`; each scale is of the block's own amax.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from f8emu.jax import bits
from f8emu.jax.fused.kernels import (
    CAST_BLOCKS,
    Launch,
    call,
    code_specs,
    encode,
    grid_of,
    inside_of,
    load_tile,
    store_tile,
)
from f8emu.jax.fused.kernels import magnitudes as magnitudes_of
from f8emu.jax.fused.plain import Cast
from f8emu.jax.scale import inv_scale_bits, scales_of
from f8emu.spec.formats import Format
from f8emu.spec.scaling import Granularity, ScaleRule

_SQUARE = Granularity.BLOCKWISE_128X128


def cast_blocks(
    x: jax.Array,
    *,
    format: Format,
    rule: ScaleRule,
    row_granularity: Granularity | None,
    col_granularity: Granularity | None,
    launch: Launch = CAST_BLOCKS,
    interpret: bool = False,
) -> tuple[Cast | None, Cast | None]:
    """Codes and scales of `x` and of `x^T` by blocks; None leaves an operand out."""
    m, n = x.shape
    grid = grid_of(launch, x.shape)
    rows, cols = row_granularity is not None, col_granularity is not None

    def factor(found: jax.Array, granularity: Granularity | None, axis: int) -> tuple[jax.Array, jax.Array]:
        """Amaxes of the tile's blocks and their inv_scales, broadcastable to the tile."""
        largest = jnp.max(found, axis=axis)
        if granularity is _SQUARE:
            largest = jnp.max(largest, axis=0)
        inv = bits.float32_of(inv_scale_bits(largest.astype(jnp.uint32), format, rule))
        return largest, inv if granularity is _SQUARE else jnp.expand_dims(inv, axis)

    def kernel(x_ref: Any, *refs: Any) -> None:
        inside = inside_of(launch, x.shape)
        values = load_tile(x_ref, inside)
        found = magnitudes_of(values)
        code_refs, amax_refs = list(refs[: len(refs) // 2]), list(refs[len(refs) // 2 :])
        codes = None
        if rows:
            largest, inv = factor(found, row_granularity, 1)
            _store_amax(amax_refs.pop(0), largest)
            codes = encode(values * inv, format, interpret, is_within=True)
            store_tile(code_refs.pop(0), codes, inside)
        if cols:
            largest, inv = factor(found, col_granularity, 0)
            _store_amax(amax_refs.pop(0), largest)
            if codes is None or (row_granularity, col_granularity) != (_SQUARE, _SQUARE):
                codes = encode(values * inv, format, interpret, is_within=True)
            store_tile(code_refs.pop(0), codes.T, None if inside is None else inside.T)

    outs = code_specs(launch, x.shape, format, rows, cols)
    # Amaxes of vectors are stored as they lie in a tile, and transposed afterwards: they are few.
    for granularity, axis in ((row_granularity, 0), (col_granularity, 1)):
        if granularity is _SQUARE:
            spec = pl.BlockSpec((1,), lambda i, j: (i * grid[1] + j,))
            outs.append((spec, jax.ShapeDtypeStruct((grid[0] * grid[1],), jnp.int32)))
        elif granularity is not None:
            extent = (launch.rows, launch.cols)[axis]
            spec = pl.BlockSpec((None, extent), (lambda i, j: (j, i)) if axis == 0 else (lambda i, j: (i, j)))
            outs.append((spec, jax.ShapeDtypeStruct((grid[1 - axis], grid[axis] * extent), jnp.int32)))
    ins = [pl.BlockSpec((launch.rows, launch.cols), lambda i, j: (i, j))]
    found = call(kernel, launch, grid, ins, outs, interpret, "cast_blocks")(x)
    codes, amaxes = list(found[: len(found) // 2]), list(found[len(found) // 2 :])

    def cast(granularity: Granularity | None, extent: int, is_transposed: bool) -> Cast | None:
        if granularity is None:
            return None
        largest = amaxes.pop(0)
        if granularity is _SQUARE:
            largest = largest.reshape(grid).T if is_transposed else largest.reshape(grid)
        else:
            largest = largest[:, :extent].T
        amax = bits.float32_of(bits.one_nan(largest.astype(jnp.uint32)))
        return codes.pop(0), scales_of(amax, format, rule)

    return cast(row_granularity, m, False), cast(col_granularity, n, True)


def _store_amax(ref: Any, largest: jax.Array) -> None:
    if largest.ndim == 0:
        ref[0] = largest
    else:
        ref[...] = largest
