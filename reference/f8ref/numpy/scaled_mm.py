"""Whole GEMMs of a chip: the tensor core's accumulator, then scales, bias and output type. And single instructions.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, G groups, B blocks of 128 along K, C cases of an instruction.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    BFLOAT16,
    E8M0FNU,
    FLOAT8,
    HOPPER,
    MX_BLOCK,
    AccumulationModel,
    Chip,
    Format,
    Granularity,
    OperandError,
    output_format,
)
from f8emu.spec.gemm_call import GemmCall
from f8ref.numpy.accumulate import (
    TILE,
    Decoded,
    accumulate,
    chain,
    microscaled,
    multiply_add,
    operand,
    side_by_side,
)
from f8ref.numpy.cast import convert
from f8ref.numpy.checks import GemmArrays, checked_mm, checked_scaled_mm, grouped_product
from f8ref.numpy.codec import Array, as_float32, typed_array

_TILE_N = 256
_BLOCK_K = 128
"""K that shares one scale in both blockwise granularities."""


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    granularity_a: Granularity | str = Granularity.TENSORWISE,
    granularity_b: Granularity | str = Granularity.TENSORWISE,
    bias: ArrayLike | None = None,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    split_k: int = 1,
    chip: Chip = HOPPER,
) -> Array:
    """`(a * scale_a) @ (b * scale_b) + bias` of float8 operands, with the bits of `torch._scaled_mm` on an H200.

    Every operation of the epilogue is one float32 rounding, nearest-even:

    - tensorwise [EPI-1]: `acc * (scale_a * scale_b) + 0`, which is never -0
    - rowwise [EPI-2]: `(acc * scale_b) * scale_a`
    - blockwise [EPI-5]: a float32 total takes the accumulator of each 128 of K by a fused multiply-add; the totals of
      the `split_k` slices of K are added up [CHAIN-3]
    - blockwise_1x32 [MX-1..5]: E8M0 scales, which scale the products inside a step; nothing is left for the epilogue
    - then the bias [EPI-3] and the output type [EPI-4]

    Shapes: `a` [M, K], `b` [K, N], `bias` [N], result [M, N]; any M, N and K.
    `scale_a` is `granularity_a.scale_shape(M, K)`; `scale_b` is `granularity_b.scale_shape(N, K)` transposed.
    Exactness: all recorded cases of an H200, every bit; NaN is all ones.

    Raises:
        OperandError: operands or scales of the wrong dtype or shape.
        SpecError: an unknown granularity or `out_dtype`, or a `split_k` below 1.
        UnsupportedError: formats, granularities, options or an `out_dtype` that the chip has no GEMM for.
    """
    gemm = checked_scaled_mm(
        a,
        b,
        scale_a,
        scale_b,
        bias=bias,
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=chip,
    )
    return product(gemm)


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike | None = None,
    *,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip = HOPPER,
) -> Array:
    """`(acc * scale_a) * scale_b` of every group, each a GEMM of its own [EPI-6].

    `offs` divides one dimension: group g runs from `offs[g - 1]` (0 for the first) up to `offs[g]`, and may be empty.
    Rows or columns beyond the last group give zeros; a K beyond it is not summed.
    E8M0 scales have the shape of their operand, `ceil(K / 32)` in place of K; groups of K are then multiples of 32.

    | divided | `a` | `b` | `scale_a` | `scale_b` | result |
    |---|---|---|---|---|---|
    | rows of `a` | [M, K] | [G, K, N] | [M] | [G, N] | [M, N] |
    | columns of `b` | [G, M, K] | [K, N] | [G, M] | [N] | [M, N] |
    | K | [M, K] | [K, N] | [G * M] | [G * N] | [G, M, N] |
    | nothing, without `offs` | [G, M, K] | [G, K, N] | [G, M] | [G, N] | [G, M, N] |

    Exactness: all recorded cases of an H100, of every kind, every bit; NaN is all ones. The library leaves what lies
    beyond the last group as it finds it. It takes groups along K whose sizes are multiples of 16.

    Raises:
        OperandError: wrong dtypes or shapes, or offsets that fall or pass the size that they divide.
        SpecError: an unknown `out_dtype`.
        UnsupportedError: formats or an `out_dtype` that the chip has no GEMM for.
    """
    options = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum, "chip": chip}
    return grouped_product(product, a, b, scale_a, scale_b, offs, **options)


def mm(
    a: ArrayLike, b: ArrayLike, *, out_dtype: Format | str = "bfloat16", split_k: int = 1, chip: Chip = HOPPER
) -> Array:
    """The bfloat16 matmul `a @ b` [BF16-1], [BF16-2].

    Shapes: `a` [M, K], `b` [K, N], result [M, N].
    Exactness: all recorded cases of an H200, every bit; NaN is all ones.

    Raises:
        OperandError: operands that are not bfloat16, or shapes that do not fit.
        SpecError: an unknown `out_dtype`, or a `split_k` below 1.
        UnsupportedError: an `out_dtype` that no GEMM gives.
    """
    return product(checked_mm(a, b, out_dtype=out_dtype, split_k=split_k, chip=chip))


def mma(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    *,
    chip: Chip = HOPPER,
    out_dtype: Format | str = "float32",
) -> Array:
    """`dot(a, b) + c` of every case by one matrix instruction of the chip, or by several in a row if K is longer.

    c is the first accumulator of the steps [ACC-2], [CHIP-6], or is added to their sum [CHIP-3]. With E8M0 scales it is
    the block-scaled instruction [MX-2].

    Shapes: `a` and `b` [cases, K], `c` [cases] of `out_dtype`, scales [cases, ceil(K / 32)]; result [cases].
    Exactness: every bit of what the chip's `evidence` names: recordings of single instructions, or MMA-Sim.

    Raises:
        OperandError: operands of the wrong dtype or shape.
        SpecError: an unknown `out_dtype`.
        UnsupportedError: formats that the chip's profile has no instruction for.
    """
    a_CK, format_a = typed_array(a, (BFLOAT16, *FLOAT8), "mma: a")
    b_CK, format_b = typed_array(b, (BFLOAT16, *FLOAT8), "mma: b")
    out_format = output_format("mma", out_dtype)
    scales = [typed_array(s, (E8M0FNU,), "mma: scale")[0] for s in (scale_a, scale_b) if s is not None]
    is_microscaled = len(scales) == 2
    model = chip.instruction("mma", (format_a, format_b), out_format, is_microscaled=is_microscaled).model
    c_C, _ = typed_array(c, (out_format,), "mma: c")
    if a_CK.ndim != 2 or b_CK.shape != a_CK.shape or c_C.shape != a_CK.shape[:1]:
        raise OperandError(
            f"mma: a and b must be [cases, K] and c [cases]; got {a_CK.shape}, {b_CK.shape} and {c_C.shape}; "
            "reshape them"
        )
    expected = (len(a_CK), -(-a_CK.shape[1] // MX_BLOCK))
    if len(scales) == 1 or any(s.shape != expected for s in scales):
        raise OperandError(
            f"mma: scale_a and scale_b must both be {list(expected)}, or absent; got {[list(s.shape) for s in scales]}"
        )
    left, right = (operand(x, f, model)._replace(is_paired=True) for x, f in ((a_CK, format_a), (b_CK, format_b)))
    if is_microscaled:
        left, right = (microscaled(x, s) for x, s in zip((left, right), scales, strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        return convert(multiply_add(left, right, as_float32(c_C, "mma: c"), model), out_format)


def product(gemm: GemmArrays) -> Array:
    """The output [M, N] of a GEMM."""
    call, model = gemm.call, gemm.call.model
    a_KM, b_KN = (operand(x, f, model) for x, f in zip((gemm.a_MK, gemm.b_NK), call.formats, strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        # 1. The accumulator, before any scale; of block scales with the scales of each block. 2. The scales.
        if call.granularities is None or gemm.scale_a is None or gemm.scale_b is None:
            result = _accumulated(a_KM, b_KN, model, call.split_k or 1)
        elif call.granularities[0].is_microscaled:
            a_KM, b_KN = microscaled(a_KM, gemm.scale_a), microscaled(b_KN, gemm.scale_b)
            result = _accumulated(a_KM, b_KN, model, call.split_k or 1)  # [MX-5]
        elif call.granularities[0].is_blockwise:
            result = _blockwise(a_KM, b_KN, gemm.scale_a, gemm.scale_b, call)
        else:
            result = _accumulated(a_KM, b_KN, model, call.split_k or 1)
            if call.granularities[0] is Granularity.TENSORWISE:
                result = scaled_by_tensor(result, gemm.scale_a, gemm.scale_b.T)
            else:
                scaled = scaled_in_groups if call.groups else scaled_by_row
                result = scaled(result, gemm.scale_a, gemm.scale_b.T)
        # 3. The bias.
        if gemm.bias is not None:
            result = with_bias(result, gemm.bias)
    # 4. [EPI-4] One rounding to the output type.
    return convert(result, call.out)


def scaled_by_tensor(acc: Array, scale_a: Array, scale_b: Array) -> Array:
    """[EPI-1] One factor; -0 + 0 is +0."""
    return acc * (scale_a * scale_b) + np.float32(0)


def scaled_by_row(acc: Array, scale_a: Array, scale_b: Array) -> Array:
    """[EPI-2] The scales of columns first."""
    return (acc * scale_b) * scale_a


def scaled_in_groups(acc: Array, scale_a: Array, scale_b: Array) -> Array:
    """[EPI-6] The scales of rows first."""
    return (acc * scale_a) * scale_b


def with_bias(result: Array, bias: Array) -> Array:
    """[EPI-3] In float32, with a rounding of its own."""
    return result + bias


def _blockwise(
    a: Decoded, b: Decoded, scale_a: NDArray[np.float32], scale_b: NDArray[np.float32], call: GemmCall
) -> NDArray[np.float32]:
    """The float32 total of a blockwise GEMM [EPI-5], or the sum of those of the slices of K [CHAIN-3]."""
    both_vectors = call.granularities == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)
    model, split_k = call.model, call.split_k or 1
    # 1. [CHAIN-3] The length of a slice: whole blocks.
    multiple = model.split_k_multiple if split_k > 1 else _BLOCK_K
    length = max(-(-a.k // (split_k * multiple)), 1) * multiple
    # A 128x128 scale is that of each of its rows.
    scale_a_MB, scale_b_NB = (
        scale if len(scale) == x.rows else scale.repeat(128, axis=0)[: x.rows]
        for scale, x in ((scale_a, a), (scale_b, b))
    )

    def slice_total(rows: slice, columns: slice, start: int) -> NDArray[np.float32]:
        part = slice(start, start + length)
        left, right = a.part(k=part, rows=rows), b.part(k=part, rows=columns)
        total = np.zeros((left.rows, right.rows), np.float32)
        # 2. [EPI-5] One chain from zero for each block, fused into the slice's total.
        partials = (partial for chains in side_by_side(left, right, _BLOCK_K) for partial in chain(*chains, model))
        for block, partial in enumerate(partials, start // _BLOCK_K):
            factor_a, factor_b = scale_a_MB[rows, block, None], scale_b_NB[columns, block]
            if both_vectors:
                total = fma(partial * factor_a, factor_b, total)
            else:
                total = fma(partial, factor_a * factor_b, total)
        return total

    def tile(rows: slice, columns: slice) -> NDArray[np.float32]:
        # 3. [CHAIN-3] The totals of the slices, in order.
        total = slice_total(rows, columns, 0)  # not added to +0, which would turn -0 into +0
        for start in range(length, a.k, length):
            total = total + slice_total(rows, columns, start)
        return total

    return _tiled(a.rows, b.rows, tile)


def _accumulated(a: Decoded, b: Decoded, model: AccumulationModel, split_k: int) -> NDArray[np.float32]:
    """`accumulate` of the whole matrices."""
    return _tiled(
        a.rows, b.rows, lambda rows, columns: accumulate(a.part(rows=rows), b.part(rows=columns), model, split_k)
    )


def _tiled(m: int, n: int, tile: Callable[[slice, slice], NDArray[np.float32]]) -> NDArray[np.float32]:
    """[M, N] put together from `tile(rows, columns)`; outputs do not depend on each other."""
    result = np.empty((m, n), np.float32)
    width = min(n, _TILE_N) or 1
    height = TILE // width
    for i in range(0, m, height):
        for j in range(0, n, width):
            rows, columns = slice(i, i + height), slice(j, j + width)
            result[rows, columns] = tile(rows, columns)
    return result


def fma(x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x * y + z` with one rounding, nearest-even.

    Shapes: any that broadcast.
    Exactness: exact, subnormals, infinities and NaN included.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # The product of two 24-bit significands fits in 53 bits, its exponent in 11: exact.
        return rounded_sum(x.astype(np.float64) * y, z)


def rounded_sum(product: NDArray[np.float64], addend: NDArray[np.float32]) -> NDArray[np.float32]:
    """`product + addend` with one rounding, nearest-even; the product is that of two float32 numbers.

    Exactness: exact. The sum is rounded to odd in float64, whose 53 bits are more than the 24 + 2 that make a second
    rounding harmless. What is not finite warns, as numpy's operators do.
    """
    # 1. The sum and, without any condition on the operands, its rounding error: NaN where the sum is not finite.
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    # 2. Round to odd: the code next to the exact sum toward zero, and a last bit that says that something is lost.
    is_inexact = np.abs(error) > 0
    is_too_far = is_inexact & ((error > 0) != (total > 0))
    odd = (total.view(np.int64) - is_too_far) | is_inexact
    # 3. The one rounding.
    return odd.view(np.float64).astype(np.float32)
