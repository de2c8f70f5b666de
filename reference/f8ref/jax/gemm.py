"""The accumulators of a whole GEMM, before any epilogue: one compiled program for each padded shape and chain.

The epilogue is a program of its own, so that output formats, biases and scales do not compile the GEMM again. So is the
padding, to whole blocks of K and to multiples of 16 rows and columns, so that few extents do.
"""

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import Format, Granularity
from f8ref.jax import softfloat
from f8ref.jax.chain import Chain, Span, Step, blockwise_sum, chained_sum, multiply_add, operand
from f8ref.jax.compiling import is_outermost, program
from f8ref.jax.sharing import with_zeros
from f8ref.jax.tiles import (
    Extents,
    Index,
    TileLimit,
    compact_extents,
    for_platform,
    padded,
    shared_extents,
    tiled,
    window,
)


def accumulators(a: jax.Array, b: jax.Array, chain: Chain) -> jax.Array:
    """Float32 bit patterns of the accumulators of `a @ b`.

    Shapes: typed codes a [M, K], b [K, N] -> [M, N] uint32, padded.
    """
    if 0 in (a.shape[0], b.shape[1]):
        return jnp.zeros((a.shape[0], b.shape[1]), jnp.uint32)
    extents, compiled = _compiled(chain, a, b)
    return _accumulators(*_operands(chain, a, b, extents), chain.span, compiled)


@program("chain")
def _accumulators(a: jax.Array, b: jax.Array, span: Span, chain: Chain) -> jax.Array:
    def tile(m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
        return chained_sum(chain, span, *_windows(chain, a, b, m_0, n_0, rows, columns))

    return tiled(a.shape[0], b.shape[1], tile)


def blockwise_totals(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    chain: Chain,
    pair: tuple[Granularity, Granularity],
) -> jax.Array:
    """[EPI-5] Float32 bit patterns of `a @ b` with blockwise scales, which belong inside the chain.

    Shapes: typed codes a [M, K], b [K, N]; scales of every row [M, K / 128] and column [K / 128, N] -> [M, N] uint32,
    padded.
    """
    if 0 in (a.shape[0], b.shape[1], chain.k):
        return jnp.zeros((a.shape[0], b.shape[1]), jnp.uint32)
    extents, compiled = _compiled(chain, a, b)
    scales = _padded(scale_a, extents.m, compiled.blocks), _padded(scale_b, compiled.blocks, extents.n)
    is_vector_pair = pair == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)
    span, known = chain.span, is_vector_pair
    if compiled.serves_both:
        span, known = span._replace(is_vector_pair=is_vector_pair), None
    return _blockwise_totals(*_operands(chain, a, b, extents), *scales, span, compiled, known)


@program("chain", "is_vector_pair")
def _blockwise_totals(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    span: Span,
    chain: Chain,
    is_vector_pair: bool | None,
) -> jax.Array:
    """`is_vector_pair` is None where the span says it."""
    factor_a, factor_b = softfloat.bits(scale_a), softfloat.bits(scale_b)

    def tile(m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
        f_a = window(factor_a, m_0, 0, rows, chain.blocks)
        f_b = window(factor_b, 0, n_0, chain.blocks, columns)

        def promote(i: jax.Array, partial: jax.Array, total: jax.Array) -> jax.Array:
            s_a = lax.dynamic_slice_in_dim(f_a, i, 1, 1)
            s_b = lax.dynamic_slice_in_dim(f_b, i, 1, 0)
            if is_vector_pair is None:  # a partial times one is the partial
                s_b = jnp.where(span.is_vector_pair, s_b, softfloat.multiply(s_a, s_b))
                s_a = jnp.where(span.is_vector_pair, s_a, jnp.uint32(softfloat.ONE))
            if is_vector_pair is not False:
                return softfloat.fused_multiply_add(softfloat.multiply(partial, s_a), s_b, total)
            return softfloat.fused_multiply_add(partial, softfloat.multiply(s_a, s_b), total)

        return blockwise_sum(chain, span, *_windows(chain, a, b, m_0, n_0, rows, columns), promote)

    return tiled(a.shape[0], b.shape[1], tile)


def grouped_accumulators(a: jax.Array, b: jax.Array, ends: jax.Array, chain: Chain) -> jax.Array:
    """[EPI-6] Float32 bit patterns of the accumulators of `a[rows of g] @ b[g]`; 0 for rows of no group.

    Shapes: typed codes a [M, K], b [G, K, N]; ends [G] -> [M, N] uint32.
    """
    is_shared = chain.step is Step.FLOAT8 and is_outermost(a, b, ends)
    return _grouped_accumulators(a, b, ends, chain.span, chain.for_both() if is_shared else chain)


@program("chain")
def _grouped_accumulators(a: jax.Array, b: jax.Array, ends: jax.Array, span: Span, chain: Chain) -> jax.Array:
    groups, _, n = b.shape
    m, wide = a.shape[0], compact_extents(a.shape[0], n, chain.padded_k).n
    if 0 in (m, n):
        return jnp.zeros((m, n), jnp.uint32)
    a_codes = padded(operand(chain.step, a, chain.a_format), m, chain.padded_k)
    b_codes = operand(chain.step, b, chain.b_format)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])

    def walk(limit: TileLimit) -> jax.Array:
        rows, columns = limit.shape(m, wide)

        def one_group(g: jax.Array, out: jax.Array) -> jax.Array:
            start, end = starts[g], jnp.minimum(ends[g], m)
            b_g = padded(lax.dynamic_index_in_dim(b_codes, g, 0, keepdims=False), chain.padded_k, wide)

            def put(i: jax.Array, out: jax.Array) -> jax.Array:
                # A tile may reach into other groups' rows; those keep what they have.
                m_0 = jnp.minimum(start + i // across * rows, m - rows)
                n_0 = jnp.minimum(i % across * columns, wide - columns)
                tile = _windows(chain, a_codes, b_g, m_0, n_0, rows, columns)
                totals = chained_sum(chain, span, *tile)
                row = m_0 + jnp.arange(rows)[:, None]
                old = lax.dynamic_slice(out, (m_0, n_0), (rows, columns))
                totals = jnp.where((row >= start) & (row < end), totals, old)
                return lax.dynamic_update_slice(out, totals, (m_0, n_0))

            across = -(-wide // columns)
            return lax.fori_loop(0, -(-(end - start) // rows) * across, put, out)

        return lax.fori_loop(0, groups, one_group, jnp.zeros((m, wide), jnp.uint32))

    return for_platform(m, wide, walk)[:, :n]


@program("chain")
def multiply_adds(a: jax.Array, b: jax.Array, c: jax.Array, chain: Chain) -> jax.Array:
    """Float32 bit patterns of `a[i] . b[i] + c[i]`.

    Shapes: typed codes a, b [cases, K], c [cases] uint32 float32 bit patterns -> [cases] uint32.
    """
    a_codes = padded(operand(chain.step, a, chain.a_format), a.shape[0], chain.padded_k)
    b_codes = padded(operand(chain.step, b, chain.b_format), b.shape[0], chain.padded_k)

    def one(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return multiply_add(chain, a[None, :], b[:, None], c[None, None])[0, 0]

    return jax.vmap(one)(a_codes, b_codes, c)


def _compiled(chain: Chain, a: jax.Array, b: jax.Array) -> tuple[Extents, Chain]:
    """The extents that a GEMM is computed with, those of a shared program or no more than it needs, and its chain."""
    m, n = a.shape[0], b.shape[1]
    shared = shared_extents(m, n, chain.padded_k, chain.unit_k) if is_outermost(a, b) else None
    extents = shared or compact_extents(m, n, chain.padded_k)
    return extents, chain.compiled_for(extents.k, is_shared=shared is not None)


def _operands(chain: Chain, a: jax.Array, b: jax.Array, extents: Extents) -> tuple[jax.Array, jax.Array]:
    return (
        _operand(with_zeros(a, extents.m, extents.k), chain.step, chain.a_format, extents.m, extents.k),
        _operand(with_zeros(b, extents.k, extents.n), chain.step, chain.b_format, extents.k, extents.n),
    )


@program("step", "format", "rows", "columns")
def _operand(x: jax.Array, step: Step, format: Format, rows: int, columns: int) -> jax.Array:
    """An operand as the sums take it, with zeros below and to the right."""
    return padded(operand(step, x, format), rows, columns)


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    x = with_zeros(x, rows, columns)
    return x if x.shape == (rows, columns) else _with_zeros(x, rows, columns)


@program("rows", "columns")
def _with_zeros(x: jax.Array, rows: int, columns: int) -> jax.Array:
    return softfloat.from_bits(padded(softfloat.bits(x), rows, columns))


def _windows(
    chain: Chain, a: jax.Array, b: jax.Array, m_0: Index, n_0: Index, rows: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """The operands of one tile: rows of a and columns of b."""
    return window(a, m_0, 0, rows, chain.padded_k), window(b, 0, n_0, chain.padded_k, columns)
