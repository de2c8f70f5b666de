"""The accumulators of a whole GEMM, before any epilogue: one compiled program for each padded shape and chain.

The epilogue is a program of its own, so that output formats, biases and scales do not compile the GEMM again. So is the
padding, to whole blocks of K and to multiples of 16 rows and columns, so that few extents do.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from f8emu.spec import FLOAT32, Format, Granularity
from f8ref.jax import softfloat
from f8ref.jax.chain import Chain, blockwise_sum, chained_sum, multiply_add
from f8ref.jax.codec import narrow_codes, typed
from f8ref.jax.tiles import Index, TileLimit, for_platform, padded, padded_columns, padded_rows, tiled, window

_WIDE_VECTORS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
"""XLA's default is 256 bits. On a CPU with AVX-512 this nearly doubles the speed, elsewhere it changes nothing."""


def _program(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function(*arrays, *static)` compiled, with wide vectors where that can be asked for.

    JAX takes compiler options for an outermost jit only, so inside a user's jit there are none.
    """
    static = tuple(name for name in inspect.signature(function).parameters if name in ("chain", "pair"))
    plain = jax.jit(function, static_argnames=static)
    wide = jax.jit(function, static_argnames=static, compiler_options=_WIDE_VECTORS)

    @functools.wraps(function)
    def call(*operands: Any) -> jax.Array:
        arrays = [x for x in operands if isinstance(x, jax.Array)]
        # While JAX traces, operands may still be concrete, closed over; the result of an operation is not.
        is_outermost = not any(isinstance(x, Tracer) for x in (*arrays, jnp.zeros(())))
        return (wide if is_outermost and _is_on_cpu(arrays[0]) else plain)(*operands)

    return call


def _is_on_cpu(x: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in x.devices())


def accumulators(a: jax.Array, b: jax.Array, chain: Chain) -> jax.Array:
    """Float32 bit patterns of the accumulators of `a @ b`.

    Shapes: typed codes a [M, K], b [K, N] -> [M, N] uint32, padded.
    """
    if 0 in (a.shape[0], b.shape[1]):
        return jnp.zeros((a.shape[0], b.shape[1]), jnp.uint32)
    return _accumulators(*_padded_operands(chain, a, b), chain.in_whole_blocks)


@_program
def _accumulators(a: jax.Array, b: jax.Array, chain: Chain) -> jax.Array:
    a_codes, b_codes = narrow_codes(a, chain.a_format), narrow_codes(b, chain.b_format)

    def tile(m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
        return chained_sum(chain, *_operands(chain, a_codes, b_codes, m_0, n_0, rows, columns))

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
    a, b = _padded_operands(chain, a, b)
    scale_a = _padded(scale_a, FLOAT32, a.shape[0], chain.blocks)
    scale_b = _padded(scale_b, FLOAT32, chain.blocks, b.shape[1])
    return _blockwise_totals(a, b, scale_a, scale_b, chain.in_whole_blocks, pair)


@_program
def _blockwise_totals(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    chain: Chain,
    pair: tuple[Granularity, Granularity],
) -> jax.Array:
    a_codes, b_codes = narrow_codes(a, chain.a_format), narrow_codes(b, chain.b_format)
    factor_a, factor_b = softfloat.bits(scale_a), softfloat.bits(scale_b)
    is_vector_pair = pair == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)

    def tile(m_0: Index, n_0: Index, rows: int, columns: int) -> jax.Array:
        f_a = window(factor_a, m_0, 0, rows, chain.blocks)
        f_b = window(factor_b, 0, n_0, chain.blocks, columns)

        def promote(i: jax.Array, partial: jax.Array, total: jax.Array) -> jax.Array:
            s_a = lax.dynamic_slice_in_dim(f_a, i, 1, 1)
            s_b = lax.dynamic_slice_in_dim(f_b, i, 1, 0)
            if is_vector_pair:
                return softfloat.fused_multiply_add(softfloat.multiply(partial, s_a), s_b, total)
            return softfloat.fused_multiply_add(partial, softfloat.multiply(s_a, s_b), total)

        return blockwise_sum(chain, *_operands(chain, a_codes, b_codes, m_0, n_0, rows, columns), promote)

    return tiled(a.shape[0], b.shape[1], tile)


@_program
def grouped_accumulators(a: jax.Array, b: jax.Array, ends: jax.Array, chain: Chain) -> jax.Array:
    """[EPI-6] Float32 bit patterns of the accumulators of `a[rows of g] @ b[g]`; 0 for rows of no group.

    Shapes: typed codes a [M, K], b [G, K, N]; ends [G] -> [M, N] uint32.
    """
    groups, _, n = b.shape
    m, wide = a.shape[0], padded_columns(n)
    if 0 in (m, n):
        return jnp.zeros((m, n), jnp.uint32)
    a_codes = padded(narrow_codes(a, chain.a_format), m, chain.padded_k)
    b_codes = narrow_codes(b, chain.b_format)
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
                totals = chained_sum(chain, *_operands(chain, a_codes, b_g, m_0, n_0, rows, columns))
                row = m_0 + jnp.arange(rows)[:, None]
                old = lax.dynamic_slice(out, (m_0, n_0), (rows, columns))
                totals = jnp.where((row >= start) & (row < end), totals, old)
                return lax.dynamic_update_slice(out, totals, (m_0, n_0))

            across = -(-wide // columns)
            return lax.fori_loop(0, -(-(end - start) // rows) * across, put, out)

        return lax.fori_loop(0, groups, one_group, jnp.zeros((m, wide), jnp.uint32))

    return for_platform(m, wide, walk)[:, :n]


@_program
def multiply_adds(a: jax.Array, b: jax.Array, c: jax.Array, chain: Chain) -> jax.Array:
    """Float32 bit patterns of `a[i] . b[i] + c[i]`.

    Shapes: typed codes a, b [cases, K], c [cases] uint32 float32 bit patterns -> [cases] uint32.
    """
    a_codes = padded(narrow_codes(a, chain.a_format), a.shape[0], chain.padded_k)
    b_codes = padded(narrow_codes(b, chain.b_format), b.shape[0], chain.padded_k)

    def one(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return multiply_add(chain, a[None, :], b[:, None], c[None, None])[0, 0]

    return jax.vmap(one)(a_codes, b_codes, c)


def _padded_operands(chain: Chain, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, columns = padded_rows(a.shape[0]), padded_columns(b.shape[1])
    return _padded(a, chain.a_format, rows, chain.padded_k), _padded(b, chain.b_format, chain.padded_k, columns)


def _padded(x: jax.Array, format: Format, rows: int, columns: int) -> jax.Array:
    """A typed matrix with zeros below and to the right."""
    return x if x.shape == (rows, columns) else _with_zeros(x, format, rows, columns)


@functools.partial(jax.jit, static_argnames=("format", "rows", "columns"))
def _with_zeros(x: jax.Array, format: Format, rows: int, columns: int) -> jax.Array:
    return typed(padded(narrow_codes(x, format), rows, columns), format)


def _operands(
    chain: Chain, a: jax.Array, b: jax.Array, m_0: Index, n_0: Index, rows: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """The codes of one tile's rows of a and columns of b."""
    return window(a, m_0, 0, rows, chain.padded_k), window(b, 0, n_0, chain.padded_k, columns)
