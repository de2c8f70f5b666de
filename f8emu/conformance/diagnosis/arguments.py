"""The arguments of a GEMM as a kernel reads them under `Rules`: formats, scales, places, subnormals.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 128 along K.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.diagnosis.rules import Misplaced, Misreading, Places, Reading, Rules, Taken
from f8emu.spec import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, AccumulationModel, Format, Granularity, format_by_name
from f8ref.numpy.accumulate import Operand, are_exact_in_float32, operand

BLOCK_K = 128
Part = tuple[np.ndarray, np.ndarray]
"""Rows and columns of an output."""
_T = TypeVar("_T")


class Memory:
    """What was computed before: hypotheses about an epilogue share accumulators, and many have the same output.

    Arrays of the same bits are one, whichever probe or rule they come from; other objects are themselves alone.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._numbers: dict[int, tuple[object, int]] = {}
        self._contents: dict[Hashable, int] = {}

    def get(self, of: tuple[object, ...], key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` gives for these objects. They are kept, and so is what it gives: nobody may write to either."""
        full = (*map(self._number, of), key)
        if full not in self._known:
            self._known[full] = make()
        return self._known[full]

    def _number(self, x: object) -> int:
        found = self._numbers.get(id(x))
        if found is None:
            content = (x.dtype, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else id(x)
            found = x, self._contents.setdefault(content, len(self._contents))
            self._numbers[id(x)] = found
        return found[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of a GEMM, or of a part of it, scales spread over rows and columns."""

    a_MK: np.ndarray
    b_NK: np.ndarray
    format_a: Format
    format_b: Format
    scale_a_MB: np.ndarray
    scale_b_BN: np.ndarray
    bias: np.ndarray | None
    """[N] float32."""


def read_arguments(case: GemmCase, rules: Rules, at: Part | None) -> Arguments:
    """The arguments, or what of them the outputs `at` need."""
    wrong = rules.misreads
    rows, columns = at or (slice(None), slice(None))
    if is_transposed(case, wrong):
        rows, columns = columns, rows
    # 1. Scales [M, B] and [N, B], as misread.
    scales = _scales(case, wrong)
    # 2. Scales and biases in the place of others.
    bias = None if case.bias is None else case.bias.astype(np.float32)
    for misplaced in rules.misplaced:
        if misplaced.of is Places.BIAS:
            bias = None if bias is None else np.where(*_nowhere_or(bias, misplaced, 0, np.float32(0)))
        elif not misplaced.of.is_output:
            side = 0 if misplaced.of in (Places.SCALES_A, Places.BLOCKS_A) else 1
            axis = 0 if misplaced.of in (Places.SCALES_A, Places.SCALES_B) else 1
            scales[side] = np.where(*_nowhere_or(scales[side], misplaced, axis, np.float32(1)))
    # 3. Operands and their formats.
    a, b = case.a, case.b
    if Misreading.OPERANDS_SWAPPED in wrong and a.shape == b.shape:
        a, b = b, a
    own = format_by_name(a.dtype.name), format_by_name(b.dtype.name)
    return Arguments(
        a_MK=a[rows],
        b_NK=b[columns],
        format_a=_format_read(rules.reads[0], own[0], own[1]),
        format_b=_format_read(rules.reads[1], own[1], own[0]),
        scale_a_MB=scales[0][rows],
        scale_b_BN=scales[1].T[:, columns],
        bias=None if bias is None else bias[columns],
    )


def _scales(case: GemmCase, wrong: frozenset[Misreading]) -> list[np.ndarray]:
    """Both scales, [M, B] and [N, B]."""
    assert case.scale_a is not None and case.scale_b is not None
    # 1. As they lie in memory: one taken for the other, or for another memory order.
    scales = [case.scale_a, case.scale_b.T]
    if Misreading.SCALES_SWAPPED in wrong and scales[0].shape == scales[1].shape:
        scales.reverse()
    if Misreading.SCALES_TRANSPOSED in wrong:  # a matrix whose memory is taken for that of the other order
        scales = [np.ravel(scale).reshape(scale.shape, order="F") for scale in scales]
    # 2. Spread over rows. [EPI-5] A square of 128 has one for 128 rows.
    scales = [
        _spread(scales[0], case.granularity_a, len(case.a)),
        _spread(scales[1], case.granularity_b, len(case.b)),
    ]
    # 3. Their values, as they are used.
    if Misreading.SCALES_FIRST_BLOCK in wrong:
        scales = [scale[:, :1].repeat(scale.shape[1], 1) for scale in scales]
    if Misreading.SCALES_INVERTED in wrong:
        scales = [np.float32(1) / scale for scale in scales]
    if Misreading.SCALES_UNSIGNED in wrong:
        scales = [np.abs(scale) for scale in scales]
    if Misreading.SCALES_IGNORED in wrong:
        scales = [np.ones_like(scale) for scale in scales]
    return scales


def _spread(scale: np.ndarray, granularity: Granularity, rows: int) -> np.ndarray:
    """[rows, blocks of K]."""
    if granularity is Granularity.BLOCKWISE_128X128:
        return scale.repeat(BLOCK_K, axis=0)[:rows]
    return np.broadcast_to(scale.reshape(1, 1), (rows, 1)) if scale.size == 1 else scale


def _format_read(reading: Reading, own: Format, other: Format) -> Format:
    fnuz = {E4M3FN: E4M3FNUZ, E5M2: E5M2FNUZ}.get(own, own)
    formats = {Reading.OTHER: other, Reading.E4M3: E4M3FN, Reading.E5M2: E5M2, Reading.FNUZ: fnuz}
    return formats.get(reading, own)


def _nowhere_or(
    x: np.ndarray, misplaced: Misplaced, axis: int, nowhere: np.float32
) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """Which places of an axis nothing stands for, what counts there, and what stands for all others."""
    taken = places_taken(misplaced, x.shape[axis])
    is_nowhere = (taken < 0).reshape(-1, *[1] * (x.ndim - 1 - axis))
    return is_nowhere, nowhere, np.take(x, taken, axis)


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


# What a code is worth


def reading_of(rules: Rules) -> tuple[bool, bool]:
    """The rules that decide what a code is worth."""
    return rules.flushes_operands, Misreading.NAN_AS_NUMBER in rules.misreads


def operands(read: Arguments, rules: Rules, memory: Memory) -> tuple[Operand, Operand]:
    """Both operands, K first, as f8ref.numpy decodes them."""

    def decoded(array: np.ndarray, fmt: Format) -> Operand:
        model, (_, has_no_nan) = rules.model, reading_of(rules)
        key = (fmt, *reading_of(rules), model.operand, model.order, are_exact_in_float32(fmt, model))
        decode = _numbers_for_nan if has_no_nan and fmt == E4M3FN else operand
        return memory.get((array,), key, lambda: decode(flushed(array, fmt, rules).view(dtype_of(fmt)), fmt, model))

    return decoded(read.a_MK, read.format_a), decoded(read.b_NK, read.format_b)


def _numbers_for_nan(x: np.ndarray, fmt: Format, model: AccumulationModel) -> Operand:
    """An operand of float8_e4m3fn whose NaN codes count as numbers, 1.111 * 2^8."""
    is_nan, numbers = np.isnan(x), np.where(np.signbit(x), -480.0, 480.0)
    if model.operand is not None:  # a format that has this number
        numbers = np.where(is_nan, numbers, x.astype(np.float32))
        return operand(numbers.astype(dtype_of(model.operand)), model.operand, model)
    values, exponents, _ = operand(x, fmt, model)
    return Operand(np.where(is_nan.T, numbers.T, values), np.where(is_nan.T, 8, exponents))


def flushed(array: np.ndarray, fmt: Format, rules: Rules) -> np.ndarray:
    """The codes of an operand; under `flushes_operands` zeros for subnormal ones."""
    codes = codes_of(array)
    if not rules.flushes_operands:
        return codes
    is_subnormal = (codes & fmt.magnitude_mask) <= fmt.fraction_mask
    return np.where(is_subnormal, codes & fmt.sign_mask, codes).astype(codes.dtype)
