"""The GEMMs of a chip, float8 with scales and bfloat16: operands are checked here, and the parts put together."""

import jax
import jax.numpy as jnp

from f8emu.spec import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    HIGH_PRECISION,
    HOPPER,
    Chip,
    Format,
    Granularity,
    OperandError,
    SpecError,
    UnsupportedError,
    granularity_by_name,
    output_format,
)
from f8ref.jax.chain import Chain
from f8ref.jax.codec import codes, dtype_format, float32_bits
from f8ref.jax.epilogue import finish, product
from f8ref.jax.gemm import accumulators, blockwise_totals, grouped_accumulators, multiply_adds
from f8ref.jax.general import taken


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    *,
    granularity_a: Granularity | str = Granularity.TENSORWISE,
    granularity_b: Granularity | str = Granularity.TENSORWISE,
    bias: jax.Array | None = None,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    split_k: int = 1,
    chip: Chip = HOPPER,
) -> jax.Array:
    """`a @ b` of float8 codes with their scales, as the tensor core and its epilogue compute it.

    With `acc` the accumulator of [ACC-1..5], chained as [CHAIN-1] (`use_fast_accum`) or [CHAIN-2], in `split_k`
    slices [CHAIN-3]: `acc * (scale_a * scale_b) + 0` tensorwise [EPI-1], `(acc * scale_b) * scale_a` rowwise [EPI-2],
    fused multiply-adds over blocks of 128 blockwise [EPI-5], in each slice; then `+ bias` in float32 [EPI-3] and one
    rounding [EPI-4].

    Shapes: a [M, K], b [K, N], of any extents; scale_a `granularity_a.scale_shape(M, K)`; scale_b
    `granularity_b.scale_shape(N, K)` transposed; a tensorwise scale any shape of one element; bias [N]; result [M, N].
    Exactness: every bit of the recorded H200 outputs (reference/README.md); NaN is all ones. Traceable, everything but
    the arrays being static.

    Raises:
        OperandError: an operand with a wrong dtype or shape.
        SpecError: an unknown granularity or output format, or a `split_k` below 1.
        UnsupportedError: formats, granularities, options or an output format that the chip has no GEMM for.
    """
    call = "scaled_mm"
    formats = _formats(call, a, b, chip)
    m, n, k = _extents(call, a, b)
    pair = (granularity_by_name(call, granularity_a), granularity_by_name(call, granularity_b))
    slices = _slices(call, split_k)
    _require_gemm(call, chip.refusal(formats, pair, use_fast_accum=use_fast_accum))
    _require_scale(call, "scale_a", scale_a, pair[0], pair[0].scale_shape(m, k))
    _require_scale(call, "scale_b", scale_b, pair[1], pair[1].scale_shape(n, k)[::-1])
    out = output_format(call, out_dtype)
    is_blockwise = pair[0].is_blockwise
    model = chip.accumulation(pair, use_fast_accum=use_fast_accum)
    a, b, scale_a, scale_b = map(jnp.asarray, (a, b, scale_a, scale_b))
    a, b, formats = taken(model, a, b, formats)
    chain = Chain(model, *formats, a.shape[1], slices, scale_block_k=pair[0].block[1] if is_blockwise else None)
    addend = _bias(call, bias, n)
    if is_blockwise:
        return finish(blockwise_totals(a, b, scale_a, scale_b, chain, pair), (), addend, out)
    is_tensorwise = pair[0] is Granularity.TENSORWISE
    if is_tensorwise:
        factors = (product(scale_a.reshape(1, 1), scale_b.reshape(1, 1)),)
    else:
        factors = (scale_b, scale_a)
    return finish(accumulators(a, b, chain), factors, addend, out, adds_zero=is_tensorwise)


def scaled_grouped_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array,
    *,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip = HOPPER,
) -> jax.Array:
    """`(acc * scale_a) * scale_b` for each group of rows of `a`, with its own matrix of `b` [EPI-6].

    Group g is the rows from `offs[g - 1]` (0 for the first) up to `offs[g]`; rows after the last group give zeros.

    Shapes: a [total_M, K], b [G, K, N], scale_a [total_M], scale_b [G, N], offs [G] int32 -> [total_M, N].
    Exactness: as `scaled_mm`, rowwise.

    Raises:
        OperandError: an operand with a wrong dtype or shape.
        SpecError: an unknown output format.
        UnsupportedError: formats or an output format that the chip has no GEMM for.
    """
    call = "scaled_grouped_mm"
    formats = _formats(call, a, b, chip)
    _require_gemm(call, chip.refusal(formats, (Granularity.ROWWISE, Granularity.ROWWISE)))
    dtype_format(scale_a, call, "scale_a", (FLOAT32.name,))
    dtype_format(scale_b, call, "scale_b", (FLOAT32.name,))
    if str(getattr(offs, "dtype", None)) != "int32":
        raise OperandError(f"{call}: offs must be an array of int32; got {getattr(offs, 'dtype', type(offs).__name__)}")
    shapes = tuple(tuple(x.shape) for x in (a, b, scale_a, scale_b, offs))
    if tuple(map(len, shapes)) != (2, 3, 1, 2, 1) or shapes != _grouped_shapes(shapes[0], shapes[1]):
        raise OperandError(
            f"{call}: a, b, scale_a, scale_b and offs must be [total_M, K], [G, K, N], [total_M], [G, N] and [G]; "
            f"got {', '.join(map(str, shapes))}. A 2-d b has no groups: that is scaled_mm"
        )
    out = output_format(call, out_dtype)
    a, b, scale_a, scale_b, offs = map(jnp.asarray, (a, b, scale_a, scale_b, offs))
    model = chip.float8_fast if use_fast_accum else chip.float8
    a, b, formats = taken(model, a, b, formats)
    chain = Chain(model, *formats, a.shape[1])
    if b.shape[0] == 0:
        return jnp.zeros((a.shape[0], b.shape[2]), out.name)
    totals = grouped_accumulators(a, b, offs, chain)
    row = jnp.arange(a.shape[0], dtype=offs.dtype)[:, None]
    group = jnp.sum(row >= offs[None, :], axis=1, dtype=offs.dtype)
    # Rows of no group have no scale either: 0 * 0.
    scale_b_row = jnp.where((group < b.shape[0])[:, None], scale_b.at[group].get(mode="clip"), 0)
    scale_a_row = jnp.where(group < b.shape[0], scale_a, 0)[:, None]
    return finish(totals, (scale_a_row, scale_b_row), None, out)


def mm(
    a: jax.Array,
    b: jax.Array,
    *,
    out_dtype: Format | str = "bfloat16",
    split_k: int = 1,
    chip: Chip = HOPPER,
) -> jax.Array:
    """`a @ b` of bfloat16 values, as the tensor core computes it [BF16-1], in `split_k` slices [BF16-2].

    Shapes: a [M, K], b [K, N], of any extents -> [M, N].
    Exactness: every bit of the recorded H200 outputs. These hold neither float32 subnormals nor overflow; there, by
    the same rules, an accumulator cut to zero is +0, a subnormal one counts with exponent -126, and 2^128 is infinity.

    Raises:
        OperandError: an operand that is not a bfloat16 matrix, or extents that do not fit.
        SpecError: an unknown output format, or a `split_k` below 1.
        UnsupportedError: an output format that no GEMM gives.
    """
    dtype_format(a, "mm", "a", (BFLOAT16.name,))
    dtype_format(b, "mm", "b", (BFLOAT16.name,))
    _, _, k = _extents("mm", a, b)
    chain = Chain(chip.bfloat16, BFLOAT16, BFLOAT16, k, _slices("mm", split_k))
    totals = accumulators(jnp.asarray(a), jnp.asarray(b), chain)
    return finish(totals, (), None, output_format("mm", out_dtype))


def mma(
    a: jax.Array, b: jax.Array, c: jax.Array, *, chip: Chip = HOPPER, out_dtype: Format | str = "float32"
) -> jax.Array:
    """`dot(a, b) + c` of every case by one matrix instruction of the chip, or by several in a row if K is longer.

    c is the first accumulator of the steps [ACC-2], [CHIP-6], or is added to their sum [CHIP-3].

    Shapes: a, b [cases, K], c [cases] of `out_dtype` -> [cases].
    Exactness: the public recordings of single instructions, every bit, for chips whose `evidence` is not LITERATURE.

    Raises:
        OperandError: operands of the wrong dtype or shape.
        SpecError: an unknown `out_dtype`.
        UnsupportedError: formats that the chip's profile has no instruction for.
    """
    names = tuple(f.name for f in (BFLOAT16, *FLOAT8))
    formats = dtype_format(a, "mma", "a", names), dtype_format(b, "mma", "b", names)
    out = output_format("mma", out_dtype)
    model = chip.instruction("mma", formats, out).model
    dtype_format(c, "mma", "c", (out.name,))
    a, b, c = map(jnp.asarray, (a, b, c))
    if a.ndim != 2 or b.shape != a.shape or c.shape != a.shape[:1]:
        raise OperandError(
            f"mma: a and b must be [cases, K] and c [cases]; got {a.shape}, {b.shape} and {c.shape}; reshape them"
        )
    a, transposed, formats = taken(model, a, b.T, formats)
    chain = Chain(model, *formats, a.shape[1], has_start=True)
    return finish(multiply_adds(a, transposed.T, float32_bits(codes(c, out), out), chain), (), None, out)


def _extents(call: str, a: jax.Array, b: jax.Array) -> tuple[int, int, int]:
    """(M, N, K)."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise OperandError(
            f"{call}: a must be [M, K] and b [K, N]; got shapes {tuple(a.shape)} and {tuple(b.shape)}. "
            "Transpose b if it is stored as [N, K]"
        )
    return a.shape[0], b.shape[1], a.shape[1]


def _formats(call: str, a: jax.Array, b: jax.Array, chip: Chip) -> tuple[Format, Format]:
    names = tuple(f.name for f in chip.operand_formats)
    return dtype_format(a, call, "a", names), dtype_format(b, call, "b", names)


def _require_gemm(call: str, refusal: str | None) -> None:
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")


def _grouped_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes of all operands of a grouped GEMM that a [M, K] and b [G, K, N] ask for."""
    groups, _, n = b
    return a, (groups, a[1], n), (a[0],), (groups, n), (groups,)


def _slices(call: str, split_k: int) -> int:
    if isinstance(split_k, bool) or not isinstance(split_k, int) or split_k < 1:
        raise SpecError(f"{call}: split_k must be a static integer of at least 1; got {split_k!r}")
    return split_k


def _require_scale(call: str, name: str, scale: jax.Array, granularity: Granularity, expected: tuple[int, ...]) -> None:
    dtype_format(scale, call, name, (FLOAT32.name,))
    shape = tuple(scale.shape)
    if shape != expected and not (granularity is Granularity.TENSORWISE and scale.size == 1):
        raise OperandError(
            f"{call}: {name} must have shape {expected} for {granularity.value}; got {shape}. "
            "scale_b is the scale of b.T, transposed"
        )


def _bias(call: str, bias: jax.Array | None, n: int) -> jax.Array | None:
    if bias is None:
        return None
    dtype_format(bias, call, "bias", tuple(f.name for f in HIGH_PRECISION))
    if tuple(bias.shape) != (n,):
        raise OperandError(f"{call}: bias must have shape ({n},), one for each column of b; got {tuple(bias.shape)}")
    return jnp.asarray(bias)
