"""The arguments of the GEMMs: what is refused, and what the rest becomes.

Shape suffixes as in `f8ref.numpy.scaled_mm`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from f8emu.spec import (
    BFLOAT16,
    FLOAT32,
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
from f8ref.numpy.codec import Array, as_float32, typed_array


class ScaledGemm(NamedTuple):
    """A `scaled_mm` that is not refused."""

    a_MK: Array
    b_NK: Array
    formats: tuple[Format, Format]
    granularities: tuple[Granularity, Granularity]
    scale_a: NDArray[np.float32]
    """[1, 1], [M, 1] or [M, B]: a 128x128 scale is repeated for every row."""
    scale_b: NDArray[np.float32]
    """[1, 1], [1, N] or [B, N]."""
    bias: NDArray[np.float32] | None
    out_format: Format
    model: AccumulationModel


class GroupedGemm(NamedTuple):
    """A `scaled_grouped_mm` that is not refused."""

    a_MK: Array
    b_GKN: Array
    scale_a_M: NDArray[np.float32]
    scale_b_GN: NDArray[np.float32]
    bounds: list[int]
    """0, and where each group of rows ends."""
    out_format: Format


def checked_scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    granularity_a: Granularity | str,
    granularity_b: Granularity | str,
    bias: ArrayLike | None,
    out_dtype: Format | str,
    use_fast_accum: bool,
    split_k: int,
    chip: Chip,
) -> ScaledGemm:
    """The arguments of `scaled_mm`; raises what that raises."""
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
    (m, k), n = a_MK.shape, b_KN.shape[1]
    if granularities[0].is_blockwise:
        model = chip.block_scaled_model(granularities)
    else:
        model = chip.float8_model(use_fast_accum=use_fast_accum)
    return ScaledGemm(
        a_MK,
        b_KN.T,
        (format_a, format_b),
        granularities,
        _scale(scale_a, granularities[0], (m, k), f"{call}: scale_a"),
        _scale(scale_b, granularities[1], (n, k), f"{call}: scale_b", transposed=True),
        None if bias is None else _bias(bias, n, f"{call}: bias"),
        out_format,
        model,
    )


def checked_scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike,
    *,
    out_dtype: Format | str,
    use_fast_accum: bool,
    chip: Chip,
) -> GroupedGemm:
    """The arguments of `scaled_grouped_mm`; raises what that raises."""
    call = "scaled_grouped_mm"
    a_MK, b_GKN, ends_G = np.asarray(a), np.asarray(b), np.asarray(offs)
    scale_a_M, scale_b_GN = (
        typed_array(scale, (FLOAT32,), f"{call}: {name}")[0]
        for name, scale in (("scale_a", scale_a), ("scale_b", scale_b))
    )
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
    formats = [
        typed_array(array, chip.operand_formats, f"{call}: {name}")[1] for name, array in (("b", b_GKN), ("a", a_MK))
    ]
    bounds = [0, *ends_G.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != m:
        raise OperandError(
            f"{call}: offs must rise to the {m} rows of a; got {ends_G.tolist()}; give the end of each group's rows"
        )
    rowwise = Granularity.ROWWISE
    refusal = chip.refusal((formats[0], formats[1]), (rowwise, rowwise), use_fast_accum=use_fast_accum)
    if refusal is not None:
        raise UnsupportedError(f"{call}: {refusal}")
    return GroupedGemm(a_MK, b_GKN, scale_a_M, scale_b_GN, bounds, out_format)


def checked_mm(a: ArrayLike, b: ArrayLike, out_dtype: Format | str, split_k: int) -> tuple[Array, Array, Format]:
    """Of the arguments of `mm` a [M, K], b [N, K] and the format of the output; raises what that raises."""
    a_MK, _ = typed_array(a, (BFLOAT16,), "mm: a")
    b_KN, _ = typed_array(b, (BFLOAT16,), "mm: b")
    _check_inner(a_MK, b_KN, "mm")
    _check_split(split_k, "mm")
    return a_MK, b_KN.T, output_format("mm", out_dtype)


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
