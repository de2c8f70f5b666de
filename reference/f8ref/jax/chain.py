"""How steps are chained along K on one tile of the product: NUMERICS 3, and the blockwise chain of [EPI-5].

K is walked in blocks, on Hopper of 128 for float8 and 64 for bfloat16: the stretch after which a partial is promoted,
or the unit of a split-K slice.
"""

import functools
import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from f8emu.spec import BFLOAT16, E4M3FN, AccumulationModel, Format, Rounding
from f8ref.jax import softfloat
from f8ref.jax.accumulate import (
    Unpacked,
    bfloat16_step,
    float8_operand,
    float8_step,
    integer_operand,
    microscaled,
    unpacked_float8,
)
from f8ref.jax.codec import codes, narrow_codes
from f8ref.jax.general import general_step, rounded_sum

Index = jax.Array | int
E8M0Scales = tuple[jax.Array, jax.Array] | None
"""[MX-1] The bytes of a [TM, blocks] and of b [blocks, TN]; None: the chain has no scales inside its steps."""


class Step(Enum):
    """The arithmetic of a step: float32 on unpacked codes of any float8 format, int32, or wide integers.

    The accumulator of FLOAT8 is float32, the others' is a bit pattern.
    """

    FLOAT8, BFLOAT16, GENERAL = "float8", "bfloat16", "general"


class Chain(NamedTuple):
    """The static part of the sums of one GEMM."""

    model: AccumulationModel
    a_format: Format
    b_format: Format
    k: int
    split_k: int = 1
    scale_block_k: int | None = None
    """K that shares a block scale."""
    has_start: bool = False
    """Whether the chain starts from any number, not from zero."""

    @property
    def step(self) -> Step:
        """The type that computes the steps: float32 or int32 where their terms fit it."""
        # The fast steps cut and do not round, and their sums fit 24 or 32 bits; all else is general.
        model = self.model
        is_cut = model.rounding is Rounding.TOWARD_ZERO and model.floored is None
        is_float8 = self.a_format.bits == self.b_format.bits == 8
        term_bits = model.aligned_fraction_bits + 2 + model.step_k.bit_length()
        if is_cut and is_float8 and term_bits < 24 and not self.has_start:
            return Step.FLOAT8
        if is_cut and self.a_format == BFLOAT16 and model.result_fraction_bits == 23 and term_bits <= 32:
            return Step.BFLOAT16
        return Step.GENERAL

    @property
    def shared(self) -> "Chain":
        """The same sums of unpacked codes, which do not depend on the formats."""
        return self._replace(a_format=E4M3FN, b_format=E4M3FN) if self.step is Step.FLOAT8 else self

    @property
    def unit_k(self) -> int:
        """K of a whole block: what shares a scale, or is promoted, or the unit of a split-K slice."""
        return self.scale_block_k or self.model.promote_k or self.model.split_k_multiple

    @property
    def block_k(self) -> int:
        """K of one block; less than a whole one where K is."""
        steps = max(1, math.ceil(self.k / self.model.step_k))
        return min(self.unit_k, steps * self.model.step_k)

    @property
    def blocks(self) -> int:
        return max(1, math.ceil(self.k / self.block_k))

    @property
    def padded_k(self) -> int:
        """K in whole blocks, at least one. [ACC-1] pads with zeros, and a step of zeros changes no accumulator."""
        return self.blocks * self.block_k

    @property
    def blocks_per_slice(self) -> int:
        """[CHAIN-3], [BF16-2] A slice is `ceil(K / S)` long, rounded up to whole blocks."""
        if self.split_k == 1:
            return self.blocks
        multiple = self.model.split_k_multiple
        return max(1, math.ceil(math.ceil(self.k / self.split_k) / multiple) * (multiple // self.unit_k))

    @property
    def slices(self) -> int:
        return math.ceil(self.blocks / self.blocks_per_slice)

    def slice_blocks(self, s: Index) -> tuple[Index, Index]:
        """The first block of a slice, and that after its last."""
        return s * self.blocks_per_slice, jnp.minimum((s + 1) * self.blocks_per_slice, self.blocks)


@functools.partial(jax.jit, static_argnames=("step", "format"))
def operand(step: Step, x: jax.Array, format: Format) -> jax.Array:
    """A typed operand as the steps take it: unpacked float8 codes, or codes, as unsigned integers; 0 is a zero."""
    return unpacked_float8(codes(x, format), format) if step is Step.FLOAT8 else narrow_codes(x, format)


def chained_sum(chain: Chain, a: jax.Array, b: jax.Array, scales: E8M0Scales = None) -> jax.Array:
    """The accumulators of one tile before any scale, as uint32 float32 bit patterns.

    Shapes: operands a [TM, padded_k], b [padded_k, TN] -> [TM, TN].
    """
    zero = _zero(chain, a, b)
    # Finite terms of float8 are 0 or of 2^-33 to 2^60: XLA's own float32 addition has nothing to flush.
    add = jnp.add if chain.step is Step.FLOAT8 else functools.partial(rounded_sum, chain.model)
    block_sum = _block_sum(chain, a, b, scales)

    def one_slice(first: Index, end: Index) -> jax.Array:
        if chain.model.promote_k is None:  # [CHAIN-1]
            return lax.fori_loop(first, end, block_sum, zero)
        return lax.fori_loop(first, end, lambda i, total: add(total, block_sum(i, zero)), zero)  # [CHAIN-2]

    def add_slice(s: jax.Array, total: jax.Array) -> jax.Array:  # [CHAIN-3]
        return add(total, one_slice(*chain.slice_blocks(s)))

    total = one_slice(0, chain.blocks) if chain.slices == 1 else lax.fori_loop(0, chain.slices, add_slice, zero)
    return _bits(chain, total)


def multiply_add(chain: Chain, a: jax.Array, b: jax.Array, c: jax.Array, scales: E8M0Scales = None) -> jax.Array:
    """`a @ b + c` of one tile, c the first accumulator or, where the model promotes, the first total [CHIP-3].

    Shapes: as `chained_sum`, c [TM, TN] float32 bit patterns, as the result.
    """
    # c goes first into the steps, or to the promoted sums as their first total [CHIP-3].
    block_sum = _block_sum(chain, a, b, scales)
    if chain.model.promote_k is None:
        return lax.fori_loop(0, chain.blocks, block_sum, c)
    zero = jnp.zeros_like(c)
    return lax.fori_loop(0, chain.blocks, lambda i, t: rounded_sum(chain.model, t, block_sum(i, zero)), c)


def blockwise_sum(
    chain: Chain, a: jax.Array, b: jax.Array, promote: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """[EPI-5] The total of one tile over blocks of 128, or the sum of those of its slices, as float32 bit patterns.

    `promote(block index, partial, total)` gives the new total; partial and total are bit patterns.

    Shapes: as `chained_sum`.
    """
    zero = _zero(chain, a, b)
    block_sum = _block_sum(chain, a, b)

    def one_block(i: jax.Array, total: jax.Array) -> jax.Array:
        return promote(i, _bits(chain, block_sum(i, zero)), total)

    def one_slice(first: Index, end: Index) -> jax.Array:
        return lax.fori_loop(first, end, one_block, jnp.zeros(zero.shape, jnp.uint32))

    if chain.slices == 1:
        return one_slice(0, chain.blocks)

    def add_slice(s: jax.Array, total: jax.Array) -> jax.Array:  # [CHAIN-3]
        slice_total = one_slice(*chain.slice_blocks(s))
        # The first total is not added to +0, which would turn -0 into +0.
        return jnp.where(s == 0, slice_total, softfloat.add(total, slice_total))

    return lax.fori_loop(0, chain.slices, add_slice, jnp.zeros(zero.shape, jnp.uint32))


def _zero(chain: Chain, a: jax.Array, b: jax.Array) -> jax.Array:
    """An accumulator of one tile: float32 for the steps of float8, uint32 bit patterns for others."""
    return jnp.zeros((a.shape[0], b.shape[1]), jnp.float32 if chain.step is Step.FLOAT8 else jnp.uint32)


def _block(chain: Chain, x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, i * chain.block_k, chain.block_k, axis)


def _block_sum(
    chain: Chain, a: jax.Array, b: jax.Array, scales: E8M0Scales = None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(block index, accumulator) -> the accumulator after all steps of the block."""
    # A step at a time within a block: float8 from packed codes, others from a block that was taken apart.
    step_k = chain.model.step_k
    steps = chain.block_k // step_k
    if chain.step is Step.FLOAT8:

        def one_float8_step(k: jax.Array, accumulator: jax.Array) -> jax.Array:
            a_s = float8_operand(lax.dynamic_slice_in_dim(a, k, step_k, 1))
            b_s = float8_operand(lax.dynamic_slice_in_dim(b, k, step_k, 0))
            return float8_step(chain.model, accumulator, a_s, b_s)

        def float8_sum(i: jax.Array, accumulator: jax.Array) -> jax.Array:
            first = i * chain.block_k
            return lax.fori_loop(0, steps, lambda s, acc: one_float8_step(first + s * step_k, acc), accumulator)

        return float8_sum

    fraction_bits = chain.a_format.fraction_bits + chain.b_format.fraction_bits

    def one_step(accumulator: jax.Array, a_s: Unpacked, b_s: Unpacked) -> jax.Array:
        if chain.step is Step.GENERAL:
            return general_step(chain.model, fraction_bits, accumulator, a_s, b_s)
        return bfloat16_step(chain.model, accumulator, a_s, b_s)

    def block_sum(i: jax.Array, accumulator: jax.Array) -> jax.Array:
        # Taken apart a block at a time: XLA takes long to compile it for operands as short as a step.
        a_i = integer_operand(_block(chain, a, i, 1).astype(jnp.uint32), chain.a_format)
        b_i = integer_operand(_block(chain, b, i, 0).astype(jnp.uint32), chain.b_format)
        if scales is not None:  # a block is what shares a scale
            a_i = microscaled(a_i, lax.dynamic_slice_in_dim(scales[0], i, 1, 1))
            b_i = microscaled(b_i, lax.dynamic_slice_in_dim(scales[1], i, 1, 0))

        def body(step: jax.Array, accumulator: jax.Array) -> jax.Array:
            a_s, b_s = (
                jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, step * step_k, step_k, axis), block)  # noqa: B023
                for block, axis in ((a_i, 1), (b_i, 0))
            )
            return one_step(accumulator, a_s, b_s)

        return lax.fori_loop(0, steps, body, accumulator)

    return block_sum


def _bits(chain: Chain, total: jax.Array) -> jax.Array:
    """The totals as bit patterns; NaN is one [SPEC-1], the others than FLOAT8 have it so."""
    if chain.step is not Step.FLOAT8:
        return total
    bits = softfloat.bits(total)
    return jnp.where(bits & 0x7FFFFFFF > softfloat.INFINITY, jnp.uint32(softfloat.NAN), bits)
