"""The GEMMs on the tensor cores: `jax.lax.dot_general` of codes, which XLA gives to cuBLASLt (NUMERICS 7), and a
kernel of its own for block scales.

Precision DEFAULT is fast accumulation [CHAIN-1], HIGHEST is promoted [CHAIN-2]. How scales are applied is a `Form`;
`form_of` chooses it, and is the place to change after a measurement. All of it holds without Triton GEMMs only: eager
calls compile programs with these options, and a trace whose options are not known is refused when it is lowered.
"""

import functools
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from f8emu.jax.bits import CHIP
from f8emu.jax.compiling import (
    EXCESS_PRECISION,
    TRITON_GEMM,
    are_hopper,
    compiled,
    compiler_options,
    is_eager,
    kernel_or_plain,
    refuse_lowering,
)
from f8emu.jax.gemm import block_kernel, emulation
from f8emu.jax.gemm.call import EngineCall
from f8emu.spec.formats import BFLOAT16, FLOAT32, Format
from f8emu.spec.scaling import BLOCK, Granularity

_ROW_MAJOR = Layout(major_to_minor=(0, 1))
_LAST_WITH_LAST = (((1,), (1,)), ((), ()))
"""`a [M, K]`, `b [N, K]`: what cuBLASLt's float8 GEMM takes without a transpose."""


class Form(Enum):
    """How a product of codes becomes an output."""

    FOLDED = "folded"
    """A bfloat16 dot times the product of the scales, typed bfloat16. XLA takes both into the call of cuBLASLt, whose
    epilogue is [EPI-1] in float32, if excess precision is on: otherwise the factor is rounded to bfloat16 indeed."""
    BFLOAT16 = "bfloat16"
    """A bfloat16 dot times scales that are powers of two."""
    FLOAT32 = "float32"
    """A float32 dot, scaled, with the bias added and rounded as [EPI-1] to [EPI-4] say. Always exact, and slower: the
    output travels once more, and as float32."""


def form_of(call: EngineCall, *, has_bias: bool, excess_precision: bool) -> Form:
    """How the scales of a GEMM, which are not of blocks, are applied: the fastest form that is exact.

    `powers_of_two`: all scales are powers of two, by the recipe's rule, from amaxes of their operands. Multiplying by
    them then commutes with the rounding to bfloat16, as long as nothing leaves the range of normal numbers:
    - No result is subnormal. A scale is at least `amax_floor / max`, 2^-48 for E4M3 and the default floor; terms are
      multiples of 2^(e_max - 13) with e_max >= -12 [ACC-3], so that a sum is 0 or at least 2^-25, and the scaled one
      at least 2^-121. A smaller floor, and E5M2, do not get here (`layer.matmul`).
    - Overflow is the same, except where `acc * scale_b` lies within 2^-9 below 2^128 and `scale_a` is below 1: the
      rounded accumulator makes an infinity of it. An accumulator is below K * 2^18, so this takes a row of the weight
      with an amax above 2^98 / K * 2^20.
    """
    if call.gemm.out != BFLOAT16 or has_bias:
        return Form.FLOAT32
    if call.gemm.granularities == (Granularity.TENSORWISE, Granularity.TENSORWISE):
        return Form.FOLDED if excess_precision else Form.FLOAT32
    return Form.BFLOAT16 if call.powers_of_two else Form.FLOAT32


def multiply(call: EngineCall, *operands: jax.Array, excess_precision: bool | None = None) -> jax.Array:
    """A checked GEMM of any extents, which are zero-padded; [N, M] if it is transposed, which costs nothing here.

    Only GEMMs with block scales need S: in others the library chooses it. XLA measures which kernel of a bfloat16
    `mm` is the fastest, and those that split K [BF16-2] are among them.
    """
    if call.is_blockwise:
        call = call.split(*operands[:2])
    if is_eager(operands):
        return _program()(operands, call, compiler_options()[EXCESS_PRECISION])
    assert excess_precision is not None, "unknown options were refused"
    return _product(operands, call, excess_precision)


def _product(operands: tuple[jax.Array, ...], call: EngineCall, excess_precision: bool) -> jax.Array:
    if call.is_blockwise:
        return _block_scaled(call, *operands)
    if call.gemm.groups:
        return _scaled_grouped_mm(call, *operands)
    if call.gemm.granularities is None:
        return _mm(call, *operands)
    return _scaled_mm(call, excess_precision, *operands)


def refuse_unknown_options(call: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """`operands`; raises UnsupportedError when they are lowered: the options of the program are not known."""
    refusal = (
        f"{call}: on a GPU exact bits need a program compiled with {TRITON_GEMM}=False; got one whose options are "
        "not known; use f8emu.jax.jit in place of jax.jit for the outermost function, around transformations: "
        f"f8emu.jax.jit(jax.grad(loss)); or set XLA_FLAGS=--{TRITON_GEMM}=false before JAX starts, where another "
        "library calls jax.jit (nnx.jit, eqx.filter_jit); engine='emulated' needs neither"
    )
    return (refuse_lowering(operands[0], refusal), *operands[1:])


@functools.cache
def _program() -> Callable[..., jax.Array]:
    """A program of its own for each eager call."""
    return compiled(_product, static_argnums=(1, 2), compiler_options=compiler_options())


def _scaled_mm(call: EngineCall, excess_precision: bool, *operands: jax.Array) -> jax.Array:
    a, b, scale_a, scale_b, *bias = operands
    transposed = call.is_transposed
    form = form_of(call, has_bias=bool(bias), excess_precision=excess_precision)
    # 1. The left operand of the dot, and the factors of its rows and of its columns in the order of [EPI-2].
    b, scale_b = b.T, scale_b.T
    left, right = (b, a) if transposed else (a, b)
    factors = (scale_b, scale_a.T) if transposed else (scale_b.T, scale_a)
    # 2. The product.
    match form:
        case Form.FOLDED:
            # Without the barrier XLA rounds the factor to bfloat16 before it looks for something to fold.
            factor = lax.optimization_barrier(scale_a.reshape(()) * scale_b.reshape(())).astype(jnp.bfloat16)
            return _ended(_dot(left, right, call.gemm.use_fast_accum, jnp.bfloat16, factor))
        case Form.BFLOAT16:
            product = _dot(left, right, call.gemm.use_fast_accum, jnp.bfloat16).astype(jnp.float32)
            return (product * factors[0] * factors[1]).astype(jnp.bfloat16)
        case _:
            product = _dot(left, right, call.gemm.use_fast_accum, jnp.float32)
    # 3. Scales, bias and one rounding.
    if call.gemm.granularities == (Granularity.TENSORWISE, Granularity.TENSORWISE):
        product = product * (scale_a * scale_b)
        product = jnp.where(product == 0, jnp.zeros_like(product), product)  # [EPI-1] XLA drops `+ 0`, which -0 needs
    else:
        product = (product * factors[0]) * factors[1]  # [EPI-2]
    if bias:
        addend = bias[0].astype(jnp.float32)
        product = lax.optimization_barrier(product)  # [EPI-3] a fused multiply-add would round once
        product = product + (addend[:, None] if transposed else addend[None, :])
    return _rounded(product, call.gemm.out)


def _scaled_grouped_mm(call: EngineCall, *operands: jax.Array) -> jax.Array:
    # [EPI-6] XLA has no grouped GEMM: one of all rows for every group, of which the group's own are kept.
    a, b, scale_a, scale_b, offs = operands
    rows = jnp.arange(a.shape[0], dtype=offs.dtype)[:, None]
    starts = jnp.concatenate([jnp.zeros_like(offs[:1]), offs[:-1]])

    def one_group(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        b_g, scale_g, start, end = group
        product = _dot(a, b_g.T, call.gemm.use_fast_accum, jnp.float32)
        product = _rounded((product * scale_a[:, None]) * scale_g[None, :], call.gemm.out)
        return jnp.where((rows >= start) & (rows < end), product, total), None

    total = jnp.zeros((a.shape[0], b.shape[2]), call.gemm.out.name)
    return lax.scan(one_group, total, (b, scale_b, starts, offs))[0]


def _mm(call: EngineCall, *operands: jax.Array) -> jax.Array:
    a, b = _apart(*operands)
    dtype = jnp.bfloat16 if call.gemm.out == BFLOAT16 else jnp.float32
    left, right, contracting = (b, a, ((0,), (1,))) if call.is_transposed else (a, b, ((1,), (0,)))
    product = lax.dot_general(left, right, (contracting, ((), ())), preferred_element_type=dtype)
    return _ended(product) if call.gemm.out == BFLOAT16 else _rounded(product, call.gemm.out)


def _dot(a: jax.Array, b: jax.Array, use_fast_accum: bool, dtype: Any, factor: jax.Array | None = None) -> jax.Array:
    """`a [M, K] @ b [N, K]^T` of codes, zero-padded to the multiples that the tensor core takes, times a factor []."""
    m, n = a.shape[0], b.shape[0]
    precision = lax.Precision.DEFAULT if use_fast_accum else lax.Precision.HIGHEST
    a, b = _apart(_padded(a), _padded(b))
    product = lax.dot_general(a, b, _LAST_WITH_LAST, precision=precision, preferred_element_type=dtype)
    if factor is not None:
        # XLA folds a factor that follows the dot directly: before the padding is cut off, and as rows. Before a
        # transpose it would lay dot and product as columns, with a bitcast between them that hides the dot. XLA's
        # partitioner would gather a constrained array; `call.in_parts` runs this for each device's part.
        product = with_layout_constraint(product * factor, _ROW_MAJOR)
    return product[:m, :n]


def _padded(codes: jax.Array) -> jax.Array:
    rows, columns = (-size % CHIP.size_multiple for size in codes.shape)
    if not rows and not columns:
        return codes
    return lax.pad(codes, jnp.zeros((), codes.dtype), ((0, rows, 0), (0, columns, 0)))


def _block_scaled(call: EngineCall, *operands: jax.Array) -> jax.Array:
    # [EPI-5] XLA has no GEMM with block scales: a kernel, and the emulation for what that does not take.
    a, b, _, _, *bias = operands
    emulated = functools.partial(emulation.multiply, call)
    if bias or not block_kernel.fits(a.shape[0], b.shape[1], a.shape[1], call.gemm.split_k or 1):
        return emulated(*operands)
    return kernel_or_plain(functools.partial(_by_kernel, call), emulated, *operands, runs_here=are_hopper)


def _by_kernel(call: EngineCall, *operands: jax.Array, **how: Any) -> jax.Array:
    """`_block_scaled` by a kernel on the tensor cores; `how` it is launched."""
    a, b, scale_a, scale_b = operands
    gemm = call.gemm
    assert gemm.granularities is not None, "a GEMM with block scales"
    granularity_a, granularity_b = gemm.granularities
    k, multiple = a.shape[1], gemm.model.split_k_multiple
    b, scale_b = b.T, scale_b.T
    slices = block_kernel.block_mm(
        *((b, a, scale_b, scale_a) if call.is_transposed else (a, b, scale_a, scale_b)),
        (granularity_b, granularity_a) if call.is_transposed else (granularity_a, granularity_b),
        out_dtype=gemm.out,
        # [CHAIN-3] The blocks of a slice.
        slice_blocks=math.ceil(math.ceil(k / (gemm.split_k or 1)) / multiple) * multiple // BLOCK,
        right_first=call.is_transposed,
        **how,
    )
    if slices.shape[0] == 1:
        return slices[0]
    return _rounded(functools.reduce(jnp.add, slices), call.gemm.out)  # [CHAIN-3] in order


def _apart(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA makes one dot of small ones that share an operand, as q, k and v do. It then finds no factor to fold into it,
    # and the library chooses its kernel, and how it splits K, for the shape of the whole.
    return lax.optimization_barrier((a, b))


def _ended(product: jax.Array) -> jax.Array:
    # cuBLASLt rounds this output. Without the barrier XLA takes what follows into its epilogue: a bias and a residual
    # are added before the rounding, and a conversion to float32 leaves the rounding out.
    return lax.optimization_barrier(product)


def _rounded(product: jax.Array, out_dtype: Format) -> jax.Array:
    # [EPI-4] Rounded once; nothing that follows may take part in it.
    if out_dtype == BFLOAT16:
        # Unlike a conversion, which excess precision allows XLA to leave out, this is kept.
        return lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
    if out_dtype == FLOAT32:
        return lax.optimization_barrier(product)  # else the caller's addition makes a fused multiply-add of the scale
    return lax.optimization_barrier(product.astype(out_dtype.name))
