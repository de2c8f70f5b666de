"""The accumulators of a whole GEMM, before any epilogue.

The epilogue is a program of its own, so that output formats, biases and scales do not compile the GEMM again. So is the
unpacking of float8 codes, after which the sums of all pairs of formats are one program.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import Granularity
from f8ref.jax import softfloat
from f8ref.jax.chain import Chain, E8M0Scales, Index, blockwise_sum, chained_sum, multiply_add, operand

LIMIT = 1 << 24
"""About the most accumulators computed at once: a GPU wants every output in flight, and has to hold them."""


def accumulators(a: jax.Array, b: jax.Array, chain: Chain, scales: E8M0Scales = None) -> jax.Array:
    """Float32 bit patterns of the accumulators of `a @ b`.

    Shapes: typed codes a [M, K], b [K, N]; E8M0 bytes [M, K / 32], [K / 32, N] -> [M, N] uint32.
    """
    codes = operand(chain.step, a, chain.a_format), operand(chain.step, b, chain.b_format)
    return _accumulators(*codes, scales, chain.shared)


@functools.partial(jax.jit, static_argnames="chain")
def _accumulators(a: jax.Array, b: jax.Array, scales: E8M0Scales, chain: Chain) -> jax.Array:
    m, n = a.shape[0], b.shape[1]
    if 0 in (m, n):
        return jnp.zeros((m, n), jnp.uint32)
    a, b = _padded(a, m, chain.padded_k), _padded(b, chain.padded_k, n)
    scales = _padded_scales(scales, chain)
    return by_rows(m, n, lambda m_0, rows: chained_sum(chain, _rows(a, m_0, rows), b, _of_a(scales, m_0, rows)))


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

    # 2. Each block's partial is fused into the total with its scales, in the order of its pair.
    def some_rows(m_0: Index, rows: int) -> jax.Array:
        f_a = _rows(factor_a, m_0, rows)

        def promote(i: jax.Array, partial: jax.Array, total: jax.Array) -> jax.Array:
            s_a = lax.dynamic_slice_in_dim(f_a, i, 1, 1)
            s_b = lax.dynamic_slice_in_dim(factor_b, i, 1, 0)
            if is_vector_pair:
                return softfloat.fused_multiply_add(softfloat.multiply(partial, s_a), s_b, total)
            return softfloat.fused_multiply_add(partial, softfloat.multiply(s_a, s_b), total)

        return blockwise_sum(chain, _rows(a, m_0, rows), b, promote)

    return by_rows(m, n, some_rows)


@functools.partial(jax.jit, static_argnames="chain")
def grouped_accumulators(
    a: jax.Array, b: jax.Array, ends: jax.Array, chain: Chain, scales: E8M0Scales = None
) -> jax.Array:
    """[EPI-6] Float32 bit patterns of the accumulators of `a[rows of g] @ b[g]`; 0 for rows of no group.

    Shapes: typed codes a [M, K], b [G, K, N]; ends [G]; E8M0 bytes [M, K / 32], [G, K / 32, N] -> [M, N] uint32.
    """
    # 1. Operands padded once for all groups.
    groups, _, n = b.shape
    m = a.shape[0]
    if 0 in (m, n):
        return jnp.zeros((m, n), jnp.uint32)
    a_codes = _padded(operand(chain.step, a, chain.a_format), m, chain.padded_k)
    b_codes = operand(chain.step, b, chain.b_format)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    # 2. A loop over groups, within it over some of their rows at a time, since their sizes are not static.
    rows = _row_count(m, n)

    def one_group(g: jax.Array, out: jax.Array) -> jax.Array:
        start, end = starts[g], jnp.minimum(ends[g], m)
        b_g = _padded(lax.dynamic_index_in_dim(b_codes, g, 0, keepdims=False), chain.padded_k, n)
        of_g = None if scales is None else (scales[0], lax.dynamic_index_in_dim(scales[1], g, 0, keepdims=False))
        of_g = _padded_scales(of_g, chain)

        def put(i: jax.Array, out: jax.Array) -> jax.Array:
            # They may reach into other groups' rows; those keep what they have.
            m_0 = jnp.minimum(start + i * rows, m - rows)
            totals = chained_sum(chain, _rows(a_codes, m_0, rows), b_g, _of_a(of_g, m_0, rows))
            row = m_0 + jnp.arange(rows)[:, None]
            totals = jnp.where((row >= start) & (row < end), totals, _rows(out, m_0, rows))
            return lax.dynamic_update_slice_in_dim(out, totals, m_0, 0)

        return lax.fori_loop(0, -(-(end - start) // rows), put, out)

    return lax.fori_loop(0, groups, one_group, jnp.zeros((m, n), jnp.uint32))


@functools.partial(jax.jit, static_argnames="chain")
def multiply_adds(a: jax.Array, b: jax.Array, c: jax.Array, chain: Chain, scales: E8M0Scales = None) -> jax.Array:
    """Float32 bit patterns of `a[i] . b[i] + c[i]`.

    Shapes: typed codes a, b [cases, K], c [cases] uint32 float32 bit patterns; E8M0 bytes [cases, K / 32] -> [cases]
    uint32.
    """
    a_codes = _padded(operand(chain.step, a, chain.a_format), a.shape[0], chain.padded_k)
    b_codes = _padded(operand(chain.step, b, chain.b_format), b.shape[0], chain.padded_k)

    def one(a: jax.Array, b: jax.Array, c: jax.Array, scales: E8M0Scales) -> jax.Array:
        of_one = None if scales is None else _padded_scales((scales[0][None, :], scales[1][:, None]), chain)
        return multiply_add(chain, a[None, :], b[:, None], c[None, None], of_one)[0, 0]

    return jax.vmap(one)(a_codes, b_codes, c, scales)


def _of_rows(scale: jax.Array, granularity: Granularity, rows: int) -> jax.Array:
    """Float32 bit patterns of the scales of every row."""
    return jnp.repeat(softfloat.bits(scale), granularity.block[0] or rows, axis=0)[:rows]


def by_rows(m: int, n: int, some_rows: Callable[[Index, int], jax.Array]) -> jax.Array:
    """The accumulators [m, n] put together from `some_rows(first row, rows)`.

    The last ones start earlier where they would stick out, and compute some rows again.
    """
    rows = _row_count(m, n)
    if rows == m:
        return some_rows(0, m)

    def put(i: jax.Array, out: jax.Array) -> jax.Array:
        m_0 = jnp.minimum(i * rows, m - rows)
        return lax.dynamic_update_slice_in_dim(out, some_rows(m_0, rows), m_0, 0)

    return lax.fori_loop(0, -(-m // rows), put, jnp.zeros((m, n), jnp.uint32))


def _row_count(m: int, n: int) -> int:
    """How many rows of a product [m, n] are computed at once: an equal share."""
    parts = -(-m // max(LIMIT // n, 1))
    return -(-m // parts)


def _padded_scales(scales: E8M0Scales, chain: Chain) -> E8M0Scales:
    """Scales of whole blocks, of which there is one even if K is 0."""
    if scales is None:
        return None
    return _padded(scales[0], scales[0].shape[0], chain.blocks), _padded(scales[1], chain.blocks, scales[1].shape[1])


def _of_a(scales: E8M0Scales, m_0: Index, rows: int) -> E8M0Scales:
    """The scales of some rows of a, and those of b."""
    return None if scales is None else (_rows(scales[0], m_0, rows), scales[1])


def _rows(x: jax.Array, m_0: Index, rows: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, m_0, rows, 0)


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """A matrix of codes with zeros below and to the right."""
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))
