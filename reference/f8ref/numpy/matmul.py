"""Whole GEMMs of a Hopper GPU: the tensor core's accumulator, then scales, bias and output type.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, G groups, B blocks of 128 along K.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    BFLOAT16,
    E5M2,
    FLOAT8_OPERANDS,
    FLOAT32,
    HIGH_PRECISION,
    HOPPER_BF16,
    HOPPER_FP8,
    HOPPER_FP8_FAST,
    SCALED_GEMM_GRANULARITIES,
    AccumulationModel,
    Format,
    Granularity,
    OperandError,
    SpecError,
)
from f8ref.numpy.accumulate import Operand, accumulate, operand, partials
from f8ref.numpy.cast import convert
from f8ref.numpy.codec import Array, as_float32, resolve_format, typed_array
from f8ref.numpy.float32 import fma

_TILE = 2048
"""Outputs computed at a time: the terms of their step, 32 times as many, stay in cache."""
_TILE_N = 256


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    granularity_a: Granularity = Granularity.TENSORWISE,
    granularity_b: Granularity = Granularity.TENSORWISE,
    bias: ArrayLike | None = None,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    split_k: int = 1,
) -> Array:
    """`(a * scale_a) @ (b * scale_b) + bias` of float8 operands, with the bits of `torch._scaled_mm` on an H200.

    Every operation of the epilogue is one float32 rounding, nearest-even:

    - tensorwise [EPI-1]: `acc * (scale_a * scale_b)`
    - rowwise [EPI-2]: `(acc * scale_b) * scale_a`
    - blockwise [EPI-5]: a float32 total takes the accumulator of each 128 of K by a fused multiply-add
    - then the bias [EPI-3] and the output type [EPI-4]

    Shapes: `a` [M, K], `b` [K, N], `bias` [N], result [M, N]; any M, N and K.
    `scale_a` is `granularity_a.scale_shape(M, K)`; `scale_b` is `granularity_b.scale_shape(N, K)` transposed.
    Exactness: all recorded cases of an H200, every bit; NaN is all ones.

    Raises:
        OperandError: operands or scales of the wrong dtype or shape, or E5M2 x E5M2.
        SpecError: granularities that no GEMM pairs, blockwise with fast accumulation or split-K, unknown `out_dtype`.
    """
    call = "scaled_mm"
    a_MK, b_NK, format_a, format_b = _float8_operands(a, b, call)
    out_format = resolve_format(out_dtype, HIGH_PRECISION, f"{call}: out_dtype")
    _check_options(granularity_a, granularity_b, use_fast_accum, split_k)
    m, k = a_MK.shape
    n = b_NK.shape[0]
    scale_a = _scale(scale_a, granularity_a, (m, k), f"{call}: scale_a")
    scale_b = _scale(scale_b, granularity_b, (n, k), f"{call}: scale_b", transposed=True)
    bias = None if bias is None else _bias(bias, n, f"{call}: bias")

    model = HOPPER_FP8_FAST if use_fast_accum else HOPPER_FP8
    a_KM, b_KN = operand(a_MK, format_a, model), operand(b_NK, format_b, model)
    with np.errstate(over="ignore", invalid="ignore"):
        if granularity_a.is_blockwise:
            result = _blockwise(a_KM, b_KN, scale_a, scale_b, (granularity_a, granularity_b), model)
        elif granularity_a is Granularity.ROWWISE:
            result = (_accumulated(a_KM, b_KN, model, split_k) * scale_b) * scale_a  # [EPI-2]
        else:
            result = _accumulated(a_KM, b_KN, model, split_k) * (scale_a * scale_b)  # [EPI-1]
        if bias is not None:
            result = result + bias  # [EPI-3]
    return convert(result, out_format)  # [EPI-4]


def mm(a: ArrayLike, b: ArrayLike, *, out_dtype: Format | str = "bfloat16", split_k: int = 1) -> Array:
    """The bfloat16 matmul `a @ b` of an H200 [BF16-1], [BF16-2].

    Shapes: `a` [M, K], `b` [K, N], result [M, N].
    Exactness: all recorded cases, every bit; NaN is all ones.

    Raises:
        OperandError: operands that are not bfloat16, or shapes that do not fit.
        SpecError: an unknown `out_dtype`, or a `split_k` below 1.
    """
    a_MK, _ = typed_array(a, (BFLOAT16,), "mm: a")
    b_KN, _ = typed_array(b, (BFLOAT16,), "mm: b")
    _check_inner(a_MK, b_KN, "mm")
    _check_split(split_k, "mm")
    out_format = resolve_format(out_dtype, HIGH_PRECISION, "mm: out_dtype")
    model = HOPPER_BF16
    accumulated = _accumulated(operand(a_MK, BFLOAT16, model), operand(b_KN.T, BFLOAT16, model), model, split_k)
    return convert(accumulated, out_format)


def _blockwise(
    a: Operand,
    b: Operand,
    scale_a_MB: NDArray[np.float32],
    scale_b_BN: NDArray[np.float32],
    granularities: tuple[Granularity, Granularity],
    model: AccumulationModel,
) -> NDArray[np.float32]:
    """The float32 total of a blockwise GEMM [EPI-5]."""
    both_vectors = granularities == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)

    def tile(rows: slice, columns: slice) -> NDArray[np.float32]:
        total = np.zeros((a.part(rows=rows).rows, b.part(rows=columns).rows), np.float32)
        for block, partial in enumerate(partials(a.part(rows=rows), b.part(rows=columns), model)):
            factor_a, factor_b = scale_a_MB[rows, block, None], scale_b_BN[block, None, columns]
            if both_vectors:
                total = fma(partial * factor_a, factor_b, total)
            else:
                total = fma(partial, factor_a * factor_b, total)
        return total

    return _tiled(a.rows, b.rows, tile)


def _accumulated(a: Operand, b: Operand, model: AccumulationModel, split_k: int) -> NDArray[np.float32]:
    """`accumulate` of the whole matrices."""
    return _tiled(
        a.rows, b.rows, lambda rows, columns: accumulate(a.part(rows=rows), b.part(rows=columns), model, split_k)
    )


def _tiled(m: int, n: int, tile: Callable[[slice, slice], NDArray[np.float32]]) -> NDArray[np.float32]:
    """[M, N] put together from `tile(rows, columns)`; outputs do not depend on each other."""
    result = np.empty((m, n), np.float32)
    width = min(n, _TILE_N) or 1
    height = _TILE // width
    for i in range(0, m, height):
        for j in range(0, n, width):
            rows, columns = slice(i, i + height), slice(j, j + width)
            result[rows, columns] = tile(rows, columns)
    return result


def _scale(
    scale: ArrayLike, granularity: Granularity, shape: tuple[int, int], call: str, *, transposed: bool = False
) -> NDArray[np.float32]:
    """Scales that broadcast against [rows, blocks of K], or, `transposed`, against [blocks of K, rows]."""
    array, _ = typed_array(scale, (FLOAT32,), call)
    expected = granularity.scale_shape(*shape)
    expected = expected[::-1] if transposed else expected
    if granularity is Granularity.TENSORWISE and array.size == 1:
        return array.reshape(1, 1)
    if array.shape != expected:
        raise OperandError(
            f"{call} must have shape {expected} for {granularity.value}; got {array.shape}; "
            "the scales of b are seen through its transpose"
        )
    if granularity is Granularity.BLOCKWISE_128X128:
        rows = shape[0]
        array = array.repeat(128, axis=1)[:, :rows] if transposed else array.repeat(128, axis=0)[:rows]
    return array


def _bias(bias: ArrayLike, n: int, call: str) -> NDArray[np.float32]:
    values = as_float32(bias, call)
    if values.shape != (n,):
        raise OperandError(f"{call} must have shape ({n},), one value a column; got {values.shape}; reshape it")
    return values


def _float8_operands(a: ArrayLike, b: ArrayLike, call: str) -> tuple[Array, Array, Format, Format]:
    """`a` [M, K], `b` transposed to [N, K], and their formats."""
    a_MK, format_a = typed_array(a, FLOAT8_OPERANDS, f"{call}: a")
    b_KN, format_b = typed_array(b, FLOAT8_OPERANDS, f"{call}: b")
    _check_inner(a_MK, b_KN, call)
    if format_a == E5M2 and format_b == E5M2:
        raise OperandError(
            f"{call}: float8_e5m2 x float8_e5m2 does not exist on Hopper; make one operand float8_e4m3fn"
        )
    return a_MK, b_KN.T, format_a, format_b


def _check_inner(a_MK: Array, b_KN: Array, call: str) -> None:
    if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise OperandError(f"{call}: a must be [M, K] and b [K, N]; got {a_MK.shape} and {b_KN.shape}; transpose b?")


def _check_split(split_k: int, call: str) -> None:
    if split_k < 1:
        raise SpecError(f"{call}: split_k must be at least 1; got {split_k}; 1 is no split")


def _check_options(granularity_a: Granularity, granularity_b: Granularity, use_fast_accum: bool, split_k: int) -> None:
    if (granularity_a, granularity_b) not in SCALED_GEMM_GRANULARITIES:
        known = "; ".join(f"{x.value} x {y.value}" for x, y in SCALED_GEMM_GRANULARITIES)
        raise SpecError(
            f"scaled_mm: granularities must be one of {known}; got {granularity_a.value} x {granularity_b.value}; "
            "repeat a tensorwise scale for every row to use it beside rowwise"
        )
    _check_split(split_k, "scaled_mm")
    if granularity_a.is_blockwise and (use_fast_accum or split_k != 1):
        raise SpecError(
            "scaled_mm: blockwise scaling has neither fast accumulation nor split-K; "
            f"got use_fast_accum={use_fast_accum}, split_k={split_k}; leave both out"
        )
