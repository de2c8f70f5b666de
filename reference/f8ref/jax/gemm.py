"""The accumulators of a whole GEMM, before any epilogue.

The epilogue is a program of its own, so that output formats, biases and scales do not compile the GEMM again. So is the
unpacking of float8 codes, after which the sums of all pairs of formats are one program.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import Granularity
from f8ref.jax import softfloat
from f8ref.jax.chain import Chain, Index, blockwise_sum, chained_sum, multiply_add, operand

LIMIT = 1 << 24
"""The most accumulators of a tile: 4096 x 4096, since a GPU wants every output in flight."""

TileFunction = Callable[[Index, Index, int, int], jax.Array]
"""(first row, first column, rows, columns) -> the accumulators of that tile, uint32."""


def accumulators(a: jax.Array, b: jax.Array, chain: Chain) -> jax.Array:
    """Float32 bit patterns of the accumulators of `a @ b`.

    Shapes: typed codes a [M, K], b [K, N] -> [M, N] uint32.
    """
    return _accumulators(operand(chain.step, a, chain.a_format), operand(chain.step, b, chain.b_format), chain.shared)


@functools.partial(jax.jit, static_argnames="chain")
def _accumulators(a: jax.Array, b: jax.Array, chain: Chain) -> jax.Array:
    m, n = a.shape[0], b.shape[1]
    if 0 in (m, n):
        return jnp.zeros((m, n), jnp.uint32)
    a, b = _padded(a, m, chain.padded_k), _padded(b, chain.padded_k, n)

    def tile(m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
        return chained_sum(chain, *_windows(chain, a, b, m_0, n_0, rows, columns))

    return tiled(m, n, tile)


@functools.partial(jax.jit, static_argnames=("chain", "pair"))
def blockwise_totals(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    chain: Chain,
    pair: tuple[Granularity, Granularity],
) -> jax.Array:
    """[EPI-5] Float32 bit patterns of `a @ b` with blockwise scales, which belong inside the chain.

    Shapes: typed codes a [M, K], b [K, N]; scales as `pair` says, those of b transposed -> [M, N] uint32.
    """
    m, n = a.shape[0], b.shape[1]
    if 0 in (m, n, chain.k):
        return jnp.zeros((m, n), jnp.uint32)
    # 1. Operands in whole blocks, and a scale for every row and block.
    a = _padded(operand(chain.step, a, chain.a_format), m, chain.padded_k)
    b = _padded(operand(chain.step, b, chain.b_format), chain.padded_k, n)
    factor_a, factor_b = _of_rows(scale_a, pair[0], m), _of_rows(scale_b.T, pair[1], n).T
    is_vector_pair = pair == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)

    # 2. Tile by tile; each block's partial is fused into the total with its scales, in the order of its pair.
    def tile(m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
        f_a = _window(factor_a, m_0, 0, rows, chain.blocks)
        f_b = _window(factor_b, 0, n_0, chain.blocks, columns)

        def promote(i: jax.Array, partial: jax.Array, total: jax.Array) -> jax.Array:
            s_a = lax.dynamic_slice_in_dim(f_a, i, 1, 1)
            s_b = lax.dynamic_slice_in_dim(f_b, i, 1, 0)
            if is_vector_pair:
                return softfloat.fused_multiply_add(softfloat.multiply(partial, s_a), s_b, total)
            return softfloat.fused_multiply_add(partial, softfloat.multiply(s_a, s_b), total)

        return blockwise_sum(chain, *_windows(chain, a, b, m_0, n_0, rows, columns), promote)

    return tiled(m, n, tile)


@functools.partial(jax.jit, static_argnames="chain")
def grouped_accumulators(a: jax.Array, b: jax.Array, ends: jax.Array, chain: Chain) -> jax.Array:
    """[EPI-6] Float32 bit patterns of the accumulators of `a[rows of g] @ b[g]`; 0 for rows of no group.

    Shapes: typed codes a [M, K], b [G, K, N]; ends [G] -> [M, N] uint32.
    """
    # 1. Operands padded once for all groups.
    groups, _, n = b.shape
    m = a.shape[0]
    if 0 in (m, n):
        return jnp.zeros((m, n), jnp.uint32)
    a_codes = _padded(operand(chain.step, a, chain.a_format), m, chain.padded_k)
    b_codes = operand(chain.step, b, chain.b_format)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    # 2. A loop over groups, within it over the tiles of their rows, since their sizes are not static.
    rows, columns = tile_shape(m, n)
    across = -(-n // columns)

    def one_group(g: jax.Array, out: jax.Array) -> jax.Array:
        start, end = starts[g], jnp.minimum(ends[g], m)
        b_g = _padded(lax.dynamic_index_in_dim(b_codes, g, 0, keepdims=False), chain.padded_k, n)

        def put(i: jax.Array, out: jax.Array) -> jax.Array:
            # A tile may reach into other groups' rows; those keep what they have.
            m_0 = jnp.minimum(start + i // across * rows, m - rows)
            n_0 = jnp.minimum(i % across * columns, n - columns)
            totals = chained_sum(chain, *_windows(chain, a_codes, b_g, m_0, n_0, rows, columns))
            row = m_0 + jnp.arange(rows)[:, None]
            old = lax.dynamic_slice(out, (m_0, n_0), (rows, columns))
            totals = jnp.where((row >= start) & (row < end), totals, old)
            return lax.dynamic_update_slice(out, totals, (m_0, n_0))

        return lax.fori_loop(0, -(-(end - start) // rows) * across, put, out)

    return lax.fori_loop(0, groups, one_group, jnp.zeros((m, n), jnp.uint32))


@functools.partial(jax.jit, static_argnames="chain")
def multiply_adds(a: jax.Array, b: jax.Array, c: jax.Array, chain: Chain) -> jax.Array:
    """Float32 bit patterns of `a[i] . b[i] + c[i]`.

    Shapes: typed codes a, b [cases, K], c [cases] uint32 float32 bit patterns -> [cases] uint32.
    """
    a_codes = _padded(operand(chain.step, a, chain.a_format), a.shape[0], chain.padded_k)
    b_codes = _padded(operand(chain.step, b, chain.b_format), b.shape[0], chain.padded_k)

    def one(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return multiply_add(chain, a[None, :], b[:, None], c[None, None])[0, 0]

    return jax.vmap(one)(a_codes, b_codes, c)


def _of_rows(scale: jax.Array, granularity: Granularity, rows: int) -> jax.Array:
    """Float32 bit patterns of the scales of every row."""
    return jnp.repeat(softfloat.bits(scale), granularity.block[0] or rows, axis=0)[:rows]


def _windows(
    chain: Chain, a: jax.Array, b: jax.Array, m_0: Index, n_0: Index, rows: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """The operands of one tile: rows of a and columns of b."""
    return _window(a, m_0, 0, rows, chain.padded_k), _window(b, 0, n_0, chain.padded_k, columns)


def tile_shape(m: int, n: int) -> tuple[int, int]:
    """Extents of the tiles of a product [m, n], as equal as can be and near to squares."""
    columns = _share(n, max(math.isqrt(LIMIT), LIMIT // m))
    return _share(m, LIMIT // columns), columns


def tiled(m: int, n: int, tile: TileFunction) -> jax.Array:
    """The accumulators [m, n] put together from tiles.

    A last tile that would stick out starts earlier instead, and computes some of them again.
    """
    # One tile needs no loop.
    rows, columns = tile_shape(m, n)
    if (rows, columns) == (m, n):
        return tile(0, 0, m, n)
    across = math.ceil(n / columns)

    def put(i: jax.Array, out: jax.Array) -> jax.Array:
        m_0 = jnp.minimum(i // across * rows, m - rows)
        n_0 = jnp.minimum(i % across * columns, n - columns)
        return lax.dynamic_update_slice(out, tile(m_0, n_0, rows, columns), (m_0, n_0))

    return lax.fori_loop(0, math.ceil(m / rows) * across, put, jnp.zeros((m, n), jnp.uint32))


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def _window(x: jax.Array, m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
    return lax.dynamic_slice(x, (m_0, n_0), (rows, columns))


def _share(extent: int, limit: int) -> int:
    """An equal share of an extent, `limit` at most."""
    return math.ceil(extent / math.ceil(extent / limit))
