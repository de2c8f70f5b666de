"""Walking over the accumulators of a GEMM in tiles: what a step needs stays in cache, and only codes are held whole."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LANES = 16
"""A product is computed with a multiple of this many columns; narrower rows would not fill a vector."""
_ROWS = 16
"""A product is computed with a multiple of this many rows, or fewer: few numbers of rows compile a program."""

_SHARED = 64
"""The smallest number of rows and columns that GEMMs share."""
_STEPS = (2, 1)
"""The binary logarithms of the factor from one shared number to the next: the first whose cost is borne is taken."""
_SHARED_K = (512, 4096)
_SHARED_TERMS = 1 << 24
"""So many products take two cores a millisecond; to compile a program takes half a second."""

Index = jax.Array | int
TileFunction = Callable[[Index, Index, int, int], jax.Array]
"""(first row, first column, rows, columns) -> the accumulators of that tile, uint32."""


class TileLimit(NamedTuple):
    """Largest tile: about `outputs` elements, and `columns` wide where there are rows enough."""

    outputs: int
    columns: int

    def shape(self, m: int, n: int) -> tuple[int, int]:
        """Extents of the tiles of a product [m, n], as equal as can be."""
        rows = _share(m, self.outputs // _share(n, self.columns, _LANES), 8)
        return rows, _share(n, max(self.columns, self.outputs // rows), _LANES)


CPU_TILE = TileLimit(outputs=1 << 16, columns=1 << 8)
"""256 x 256: 256 KiB of accumulators and 64 KiB of exponents stay in the cache of two cores."""
WIDE_TILE = TileLimit(outputs=1 << 24, columns=1 << 12)
"""4096 x 4096 for an accelerator, which wants every output in flight."""


class Extents(NamedTuple):
    """M, N and K of a GEMM as it is computed."""

    m: int
    n: int
    k: int


def compact_extents(m: int, n: int, k: int) -> Extents:
    """Columns in whole vectors; rows a power of two, or a multiple of 16; K as it is."""
    rows = 1 << (m - 1).bit_length() if m < _ROWS else math.ceil(m / _ROWS) * _ROWS
    return Extents(rows, math.ceil(n / _LANES) * _LANES, k)


def shared_extents(m: int, n: int, k: int, unit_k: int) -> Extents | None:
    """Extents that many GEMMs share, and so a program; None where that would cost more than a millisecond or so.

    K is only memory, since the number of blocks that are walked is an argument of the program.
    """
    summed = math.ceil(k / unit_k) * unit_k
    for step in _STEPS:
        rows, columns = (_SHARED << -(-(-(-extent // _SHARED) - 1).bit_length() // step) * step for extent in (m, n))
        if rows * columns * summed <= _SHARED_TERMS:
            return next(Extents(rows, columns, capacity) for capacity in _SHARED_K if capacity >= k)
    return None


def padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """A matrix of codes with zeros below and to the right."""
    if x.shape == (rows, columns):
        return x
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def for_platform(m: int, n: int, build: Callable[[TileLimit], jax.Array]) -> jax.Array:
    """`build` with the tile limit of the platform that it is compiled for; the bits do not depend on it."""
    if CPU_TILE.shape(m, n) == WIDE_TILE.shape(m, n):
        return build(CPU_TILE)
    return lax.platform_dependent(cpu=lambda: build(CPU_TILE), default=lambda: build(WIDE_TILE))


def tiled(m: int, n: int, tile: TileFunction) -> jax.Array:
    """The accumulators [m, n] put together from tiles; n as `padded_columns` gives it.

    A last tile that would stick out starts earlier instead, and computes some of them again.
    """

    def walk(limit: TileLimit) -> jax.Array:
        rows, columns = limit.shape(m, n)
        if (rows, columns) == (m, n):
            return tile(0, 0, m, n)
        across = math.ceil(n / columns)

        def put(i: jax.Array, out: jax.Array) -> jax.Array:
            m_0 = jnp.minimum(i // across * rows, m - rows)
            n_0 = jnp.minimum(i % across * columns, n - columns)
            return lax.dynamic_update_slice(out, tile(m_0, n_0, rows, columns), (m_0, n_0))

        return lax.fori_loop(0, math.ceil(m / rows) * across, put, jnp.zeros((m, n), jnp.uint32))

    return for_platform(m, n, walk)


def window(x: jax.Array, m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
    """`rows` x `columns` of a matrix from (m_0, n_0) on."""
    if x.shape[0] != rows:
        x = lax.dynamic_slice_in_dim(x, m_0, rows, 0)
    if x.shape[1] != columns:
        x = lax.dynamic_slice_in_dim(x, n_0, columns, 1)
    return x


def _share(extent: int, limit: int, multiple: int) -> int:
    """An equal share of an extent, about `limit` at most and in multiples, but no more than the extent."""
    share = math.ceil(extent / math.ceil(extent / max(limit, 1)))
    return min(extent, math.ceil(share / multiple) * multiple)
