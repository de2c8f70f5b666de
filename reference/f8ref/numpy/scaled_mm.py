"""Whole GEMMs of a chip: the tensor core's accumulator, then scales, bias and output type.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, G groups, B blocks of 128 along K.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    BFLOAT16,
    FLOAT32,
    HOPPER,
    AccumulationModel,
    Chip,
    Format,
    Granularity,
    OperandError,
    SpecError,
    UnsupportedError,
    granularity_by_name,
    output_format,
)
from f8ref.numpy.accumulate import TILE, Operand, accumulate, chain, operand, side_by_side
from f8ref.numpy.cast import convert
from f8ref.numpy.codec import Array, as_float32, typed_array
from f8ref.numpy.float32 import fma

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
    - then the bias [EPI-3] and the output type [EPI-4]

    Shapes: `a` [M, K], `b` [K, N], `bias` [N], result [M, N]; any M, N and K.
    `scale_a` is `granularity_a.scale_shape(M, K)`; `scale_b` is `granularity_b.scale_shape(N, K)` transposed.
    Exactness: all recorded cases of an H200, every bit; NaN is all ones.

    Raises:
        OperandError: operands or scales of the wrong dtype or shape.
        SpecError: an unknown granularity or `out_dtype`, or a `split_k` below 1.
        UnsupportedError: formats, granularities, options or an `out_dtype` that the chip has no GEMM for.
    """
    call = "scaled_mm"
    a_MK, format_a = typed_array(a, chip.operand_formats, f"{call}: a")
    b_KN, format_b = typed_array(b, chip.operand_formats, f"{call}: b")
    _check_inner(a_MK, b_KN, call)
    _check_split(split_k, call)
    out_format = output_format(call, out_dtype)
    granularities = granularity_by_name(call, granularity_a), granularity_by_name(call, granularity_b)
    refusal = chip.refusal((format_a, format_b), granularities, use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")
    b_NK = b_KN.T
    m, k = a_MK.shape
    n = b_NK.shape[0]
    factor_a = _scale(scale_a, granularities[0], (m, k), f"{call}: scale_a")
    factor_b = _scale(scale_b, granularities[1], (n, k), f"{call}: scale_b", transposed=True)
    addend = None if bias is None else _bias(bias, n, f"{call}: bias")

    is_blockwise = granularities[0].is_blockwise
    if is_blockwise:
        model = chip.block_scaled_model(granularities)
    else:
        model = chip.float8_model(use_fast_accum=use_fast_accum)
    a_KM, b_KN = operand(a_MK, format_a, model), operand(b_NK, format_b, model)
    with np.errstate(over="ignore", invalid="ignore"):
        if is_blockwise:
            result = _blockwise(a_KM, b_KN, factor_a, factor_b, granularities, model, split_k)
        elif granularities[0] is Granularity.ROWWISE:
            result = (_accumulated(a_KM, b_KN, model, split_k) * factor_b) * factor_a  # [EPI-2]
        else:
            # [EPI-1] -0 + 0 is +0
            result = _accumulated(a_KM, b_KN, model, split_k) * (factor_a * factor_b) + np.float32(0)
        if addend is not None:
            result = result + addend  # [EPI-3]
    return convert(result, out_format)  # [EPI-4]


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike,
    *,
    out_dtype: Format | str = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip = HOPPER,
) -> Array:
    """`(acc * scale_a) * scale_b` of every group of rows of `a` with the group's own `b` [EPI-6].

    That is a rowwise `scaled_mm` of the transposed operands.

    Group g has the rows from `offs[g - 1]` (0 for the first) up to `offs[g]`; a group may be empty.

    Shapes: `a` [M, K], `b` [G, K, N], `scale_a` [M], `scale_b` [G, N], `offs` [G]; result [M, N].
    Exactness: as for a rowwise `scaled_mm`.

    Raises:
        OperandError: wrong dtypes or shapes, or offsets that do not rise to M.
        SpecError: an unknown `out_dtype`.
        UnsupportedError: formats or an `out_dtype` that the chip has no GEMM for.
    """
    call = "scaled_grouped_mm"
    a_MK, b_GKN, ends_G = np.asarray(a), np.asarray(b), np.asarray(offs)
    scale_a_M, scale_b_GN = np.asarray(scale_a), np.asarray(scale_b)
    out_format = output_format(call, out_dtype)
    if a_MK.ndim != 2 or b_GKN.ndim != 3 or a_MK.shape[1] != b_GKN.shape[1]:
        raise OperandError(
            f"{call}: a must be [M, K] and b [G, K, N]; got {a_MK.shape} and {b_GKN.shape}; swap the last axes of b?"
        )
    m, (groups, _, n) = a_MK.shape[0], b_GKN.shape
    shapes = {"scale_a": (scale_a_M, (m,)), "scale_b": (scale_b_GN, (groups, n)), "offs": (ends_G, (groups,))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise OperandError(f"{call}: {name} must have shape {shape}; got {array.shape}; reshape it")
    if ends_G.dtype != np.int32:
        raise OperandError(f"{call}: offs must have dtype int32; got {ends_G.dtype}; convert it")
    for name, array in (("a", a_MK), ("b", b_GKN)):
        typed_array(array, chip.operand_formats, f"{call}: {name}")
    bounds = [0, *ends_G.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != m:
        raise OperandError(
            f"{call}: offs must rise to the {m} rows of a; got {ends_G.tolist()}; give the end of each group's rows"
        )

    products = [
        scaled_mm(
            b_GKN[group].T,
            a_MK[start:stop].T,
            scale_b_GN[group, :, None],
            scale_a_M[None, start:stop],
            granularity_a=Granularity.ROWWISE,
            granularity_b=Granularity.ROWWISE,
            out_dtype=out_format,
            use_fast_accum=use_fast_accum,
            chip=chip,
        ).T
        for group, (start, stop) in enumerate(pairwise(bounds))
    ]
    return np.concatenate([convert(np.zeros((0, n), np.float32), out_format), *products])


def mm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out_dtype: Format | str = "bfloat16",
    split_k: int = 1,
    chip: Chip = HOPPER,
) -> Array:
    """The bfloat16 matmul `a @ b` [BF16-1], [BF16-2].

    Shapes: `a` [M, K], `b` [K, N], result [M, N].
    Exactness: all recorded cases of an H200, every bit; NaN is all ones.

    Raises:
        OperandError: operands that are not bfloat16, or shapes that do not fit.
        SpecError: an unknown `out_dtype`, or a `split_k` below 1.
        UnsupportedError: an `out_dtype` that no GEMM gives.
    """
    a_MK, _ = typed_array(a, (BFLOAT16,), "mm: a")
    b_KN, _ = typed_array(b, (BFLOAT16,), "mm: b")
    _check_inner(a_MK, b_KN, "mm")
    _check_split(split_k, "mm")
    out_format = output_format("mm", out_dtype)
    model = chip.bfloat16
    accumulated = _accumulated(operand(a_MK, BFLOAT16, model), operand(b_KN.T, BFLOAT16, model), model, split_k)
    return convert(accumulated, out_format)


def _blockwise(
    a: Operand,
    b: Operand,
    scale_a_MB: NDArray[np.float32],
    scale_b_BN: NDArray[np.float32],
    granularities: tuple[Granularity, Granularity],
    model: AccumulationModel,
    split_k: int,
) -> NDArray[np.float32]:
    """The float32 total of a blockwise GEMM [EPI-5], or the sum of those of the slices of K [CHAIN-3]."""
    both_vectors = granularities == (Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_1X128)
    multiple = model.split_k_multiple if split_k > 1 else _BLOCK_K
    length = max(-(-a.k // (split_k * multiple)), 1) * multiple

    def slice_total(rows: slice, columns: slice, start: int) -> NDArray[np.float32]:
        part = slice(start, start + length)
        left, right = a.part(k=part, rows=rows), b.part(k=part, rows=columns)
        total = np.zeros((left.rows, right.rows), np.float32)
        partials = (partial for chains in side_by_side(left, right, _BLOCK_K) for partial in chain(*chains, model))
        for block, partial in enumerate(partials, start // _BLOCK_K):
            factor_a, factor_b = scale_a_MB[rows, block, None], scale_b_BN[block, None, columns]
            if both_vectors:
                total = fma(partial * factor_a, factor_b, total)
            else:
                total = fma(partial, factor_a * factor_b, total)
        return total

    def tile(rows: slice, columns: slice) -> NDArray[np.float32]:
        total = slice_total(rows, columns, 0)  # not added to +0, which would turn -0 into +0
        for start in range(length, a.k, length):
            total = total + slice_total(rows, columns, start)
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
    height = TILE // width
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


def _check_inner(a_MK: Array, b_KN: Array, call: str) -> None:
    if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise OperandError(f"{call}: a must be [M, K] and b [K, N]; got {a_MK.shape} and {b_KN.shape}; transpose b?")


def _check_split(split_k: int, call: str) -> None:
    if split_k < 1:
        raise SpecError(f"{call}: split_k must be at least 1; got {split_k}; 1 is no split")
