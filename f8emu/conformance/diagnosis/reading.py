"""The arguments of a GEMM as a kernel reads them under `Rules`: formats, scales, places, subnormals.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 128 along K.
"""

from dataclasses import dataclass

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.rules import Misplaced, Misreading, Places, Reading, Rules, Taken
from f8emu.spec import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    AccumulationModel,
    Format,
    Granularity,
    format_by_name,
)
from f8ref.numpy.accumulate import Operand, are_exact_in_float32, operand

BLOCK_K = 128
Part = tuple[np.ndarray, np.ndarray]
"""Rows and columns of an output."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """The arguments of a GEMM as a kernel reads them, scales spread over rows and columns; of a part its own."""

    a_MK: np.ndarray
    b_NK: np.ndarray
    format_a: Format
    format_b: Format
    scale_a_MB: np.ndarray
    scale_b_BN: np.ndarray
    bias: np.ndarray | None
    """[N] float32."""


def read_arguments(case: GemmCase, rules: Rules, at: Part | None) -> Read:
    """The arguments, or what of them the outputs `at` need."""
    wrong = rules.misreads
    rows, columns = at or (slice(None), slice(None))
    if is_transposed(case, wrong):
        rows, columns = columns, rows
    a, b, scale_a, scale_b = case.a, case.b, case.scale_a, case.scale_b
    m, n = len(a), len(b)
    if scale_a is None or scale_b is None:
        factor_a, factor_b = np.ones((m, 1), np.float32), np.ones((1, n), np.float32)
    else:
        if Misreading.SCALES_SWAPPED in wrong and scale_a.shape == scale_b.T.shape:
            scale_a, scale_b = scale_b.T, scale_a.T
        if Misreading.SCALES_TRANSPOSED in wrong:
            scale_a, scale_b = _other_order(scale_a), _other_order(scale_b.T).T
        factor_a = _spread(scale_a, case.granularity_a, m)
        factor_b = _spread(scale_b.T, case.granularity_b, n).T
        if Misreading.SCALES_FIRST_BLOCK in wrong:
            factor_a, factor_b = factor_a[:, :1].repeat(factor_a.shape[1], 1), factor_b[:1].repeat(len(factor_b), 0)
        if Misreading.SCALES_INVERTED in wrong:
            factor_a, factor_b = np.float32(1) / factor_a, np.float32(1) / factor_b
        if Misreading.SCALES_UNSIGNED in wrong:
            factor_a, factor_b = np.abs(factor_a), np.abs(factor_b)
        if Misreading.SCALES_IGNORED in wrong:
            factor_a, factor_b = np.ones_like(factor_a), np.ones_like(factor_b)
        for misplaced in rules.misplaced:
            factor_a, factor_b = _misplaced_scales(factor_a, factor_b, misplaced)
    bias = None if case.bias is None else case.bias.astype(np.float32)
    for misplaced in rules.misplaced:
        if bias is not None and misplaced.of is Places.BIAS:
            bias = _taken(bias[None], misplaced, 1, nowhere=0)[0]
    format_a, format_b = format_by_name(a.dtype.name), format_by_name(b.dtype.name)
    if Misreading.OPERANDS_SWAPPED in wrong and a.shape == b.shape:
        a, b, format_a, format_b = b, a, format_b, format_a
    format_a, format_b = (
        _format_read(reading, own, other)
        for reading, own, other in zip(rules.reads, (format_a, format_b), (format_b, format_a), strict=True)
    )
    return Read(
        a_MK=a[rows],
        b_NK=b[columns],
        format_a=format_a,
        format_b=format_b,
        scale_a_MB=factor_a[rows],
        scale_b_BN=factor_b[:, columns],
        bias=None if bias is None else bias[columns],
    )


def _format_read(reading: Reading, own: Format, other: Format) -> Format:
    match reading:
        case Reading.OWN:
            return own
        case Reading.OTHER:
            return other
        case Reading.E4M3:
            return E4M3FN
        case Reading.E5M2:
            return E5M2
        case Reading.FNUZ:
            return {E4M3FN: E4M3FNUZ, E5M2: E5M2FNUZ}.get(own, own)


def _misplaced_scales(
    factor_a: np.ndarray, factor_b: np.ndarray, misplaced: Misplaced
) -> tuple[np.ndarray, np.ndarray]:
    """Scales [M, B] and [B, N], those of one of them in other places; nothing else is meant."""
    match misplaced.of:
        case Places.SCALES_A:
            return _taken(factor_a, misplaced, 0), factor_b
        case Places.BLOCKS_A:
            return _taken(factor_a, misplaced, 1), factor_b
        case Places.SCALES_B:
            return factor_a, _taken(factor_b, misplaced, 1)
        case Places.BLOCKS_B:
            return factor_a, _taken(factor_b, misplaced, 0)
        case _:
            return factor_a, factor_b


def _taken(factors: np.ndarray, misplaced: Misplaced, axis: int, nowhere: int = 1) -> np.ndarray:
    taken = places_taken(misplaced, factors.shape[axis])
    is_nowhere = np.expand_dims(taken < 0, 1 - axis)
    return np.where(is_nowhere, np.float32(nowhere), np.take(factors, taken, axis))


def _other_order(scale: np.ndarray) -> np.ndarray:
    """A matrix whose memory is taken for that of the other order."""
    return np.ravel(scale).reshape(scale.shape, order="F")


def _spread(scale: np.ndarray, granularity: Granularity, rows: int) -> np.ndarray:
    """[rows, blocks of K]."""
    if granularity is Granularity.BLOCKWISE_128X128:
        return scale.repeat(BLOCK_K, axis=0)[:rows]
    return np.broadcast_to(scale.reshape(1, 1), (rows, 1)) if scale.size == 1 else scale


def operands(read: Read, rules: Rules, memory: Memory) -> tuple[Operand, Operand]:
    """Both operands, K first, as f8ref.numpy decodes them."""

    def decoded(array: np.ndarray, fmt: Format) -> Operand:
        model = rules.model
        key = (fmt, *reading_of(rules), model.operand, model.order, are_exact_in_float32(fmt, model))
        return memory.get((array,), key, lambda: _operand(array, fmt, rules))

    return decoded(read.a_MK, read.format_a), decoded(read.b_NK, read.format_b)


def _operand(array: np.ndarray, fmt: Format, rules: Rules) -> Operand:
    codes = flushed(array, fmt, rules).view(dtype_of(fmt))
    is_misread = Misreading.NAN_AS_NUMBER in rules.misreads and fmt == E4M3FN
    return (_numbers_for_nan if is_misread else operand)(codes, fmt, rules.model)


def _numbers_for_nan(x: np.ndarray, fmt: Format, model: AccumulationModel) -> Operand:
    """An operand of float8_e4m3fn whose NaN codes count as numbers, 1.111 * 2^8."""
    is_nan, negative = np.isnan(x), np.signbit(x)
    if model.operand is not None:  # a format that has this number
        numbers = np.where(is_nan, np.where(negative, -480, 480), x.astype(np.float32))
        return operand(numbers.astype(dtype_of(model.operand)), model.operand, model)
    values, exponents, _ = operand(x, fmt, model)
    numbers = np.where(negative.T, -480.0, 480.0)
    return Operand(np.where(is_nan.T, numbers, values), np.where(is_nan.T, 8, exponents))


def reading_of(rules: Rules) -> tuple[bool, bool]:
    """The rules that decide what a code is worth."""
    return rules.flushes_operands, Misreading.NAN_AS_NUMBER in rules.misreads


def flushed(array: np.ndarray, fmt: Format, rules: Rules) -> np.ndarray:
    """The codes of an operand; under `flushes_operands` zeros for subnormal ones."""
    codes = codes_of(array)
    if not rules.flushes_operands:
        return codes
    is_subnormal = (codes & fmt.magnitude_mask) <= fmt.fraction_mask
    return np.where(is_subnormal, codes & fmt.sign_mask, codes).astype(codes.dtype)


def places_taken(misplaced: Misplaced, n: int) -> np.ndarray:
    """The place that stands for each of n, -1 for none."""
    i, size = np.arange(n), misplaced.size
    match misplaced.taken:
        case Taken.SHIFTED:
            taken = (i - size).clip(0, n - 1)
        case Taken.ROLLED:
            taken = (i - size) % n
        case Taken.SWAPPED:
            taken = np.where(i ^ size < n, i ^ size, i)
        case Taken.REPEATED:
            taken = i % size
        case Taken.FIRST_OF_TILE:
            taken = i - i % size
        case Taken.ONE:
            taken = np.full(n, min(size, n - 1))
        case Taken.NOWHERE:
            taken = np.full(n, -1)
    return np.where(i < misplaced.start, i, taken)


def is_transposed(case: GemmCase, wrong: frozenset[Misreading]) -> bool:
    """Whether the output is written transposed, which fits a square one alone."""
    m, n = case.output_shape
    return Misreading.OUTPUT_TRANSPOSED in wrong and m == n
