"""Walking over the accumulators of a GEMM in tiles, which bound the memory that a step needs."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

LIMIT = 1 << 24
"""The most accumulators of a tile: 4096 x 4096, since a GPU wants every output in flight."""

Index = jax.Array | int
TileFunction = Callable[[Index, Index, int, int], jax.Array]
"""(first row, first column, rows, columns) -> the accumulators of that tile, uint32."""


def tile_shape(m: int, n: int) -> tuple[int, int]:
    """Extents of the tiles of a product [m, n], as equal as can be and near to squares."""
    columns = _share(n, max(math.isqrt(LIMIT), LIMIT // m))
    return _share(m, LIMIT // columns), columns


def tiled(m: int, n: int, tile: TileFunction) -> jax.Array:
    """The accumulators [m, n] put together from tiles.

    A last tile that would stick out starts earlier instead, and computes some of them again.
    """
    rows, columns = tile_shape(m, n)
    if (rows, columns) == (m, n):
        return tile(0, 0, m, n)
    across = math.ceil(n / columns)

    def put(i: jax.Array, out: jax.Array) -> jax.Array:
        m_0 = jnp.minimum(i // across * rows, m - rows)
        n_0 = jnp.minimum(i % across * columns, n - columns)
        return lax.dynamic_update_slice(out, tile(m_0, n_0, rows, columns), (m_0, n_0))

    return lax.fori_loop(0, math.ceil(m / rows) * across, put, jnp.zeros((m, n), jnp.uint32))


def padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """A matrix of codes with zeros below and to the right."""
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def window(x: jax.Array, m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
    """`rows` x `columns` of a matrix from (m_0, n_0) on."""
    return lax.dynamic_slice(x, (m_0, n_0), (rows, columns))


def _share(extent: int, limit: int) -> int:
    """An equal share of an extent, `limit` at most."""
    return math.ceil(extent / math.ceil(extent / limit))
