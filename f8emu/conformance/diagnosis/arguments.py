"""The arguments of a GEMM as a kernel reads them under `Rules`: formats, scales, places, codes.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 128 along K.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.diagnosis.microscaled import TILES, decoded_scales
from f8emu.conformance.diagnosis.places import Misplaced, Places
from f8emu.conformance.diagnosis.rules import Grid, Misreading, Reading, Rules, ScaleSign, ScaleValue
from f8emu.spec import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT16, Format, Granularity, format_by_name
from f8emu.spec.scaling import BLOCK
from f8ref.numpy.accumulate import Decoded, operand
from f8ref.numpy.cast import convert

Part = tuple[np.ndarray, np.ndarray]
"""Rows and columns of an output."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of a GEMM, or of a part of it, scales spread over rows and columns."""

    a_MK: np.ndarray
    b_NK: np.ndarray
    formats: tuple[Format, Format]
    scale_a_MB: np.ndarray
    scale_b_BN: np.ndarray
    bias: np.ndarray | None  # [N] float32


def read_arguments(case: GemmCase, rules: Rules, at: Part | None) -> Arguments:
    """The arguments as misread, or what of them the outputs `at` need."""
    rows, columns = at or (slice(None), slice(None))
    if is_transposed(case, rules):
        rows, columns = columns, rows
    # 1. Scales and biases, some of them in the place of others.
    scales = _scales(case, rules)
    bias = None if case.bias is None else case.bias.astype(np.float32)
    for wrong in rules.misplaced:
        if wrong.of is Places.BIAS:
            bias = None if bias is None else _taken(bias, wrong, 0, 0)
        else:
            side = 0 if wrong.of in (Places.SCALES_A, Places.BLOCKS_A) else 1
            scales[side] = _taken(scales[side], wrong, int(wrong.of in (Places.BLOCKS_A, Places.BLOCKS_B)), 1)
    # 2. Operands and their formats.
    a, b = case.a, case.b
    if Misreading.OPERANDS_SWAPPED in rules.misreads and a.shape == b.shape:
        a, b = b, a
    formats = format_by_name(a.dtype.name), format_by_name(b.dtype.name)
    return Arguments(
        a_MK=a[rows],
        b_NK=b[columns],
        formats=(_format_read(rules.reads[0], *formats), _format_read(rules.reads[1], *formats[::-1])),
        scale_a_MB=scales[0][rows],
        scale_b_BN=scales[1].T[:, columns],
        bias=None if bias is None else bias[columns],
    )


def _power_of_two(threshold: float) -> Callable[[np.ndarray], np.ndarray]:
    """The power of two above where the significand, at least 0.5 and below 1, is above the threshold, else below."""

    def rounded(scale: np.ndarray) -> np.ndarray:
        significand, exponent = np.frexp(np.abs(scale))
        power = np.ldexp(np.float32(0.5), exponent + (significand > threshold))
        return np.where(np.isfinite(scale) & (scale != 0), np.copysign(power, scale), scale)

    return rounded


SCALE_VALUES: dict[ScaleValue, Callable[[np.ndarray], np.ndarray]] = {
    ScaleValue.OWN: lambda scale: scale,
    ScaleValue.INVERTED: lambda scale: np.float32(1) / scale,
    ScaleValue.IGNORED: np.ones_like,
    ScaleValue.BFLOAT16: lambda scale: convert(scale, BFLOAT16).astype(np.float32),
    ScaleValue.FLOAT16: lambda scale: convert(scale, FLOAT16).astype(np.float32),
    ScaleValue.POWER_UP: _power_of_two(0.5),
    ScaleValue.POWER_DOWN: _power_of_two(1),
    ScaleValue.POWER_NEAREST: _power_of_two(0.75),
    ScaleValue.POWER_LOG: _power_of_two(0.5**0.5),
}
"""The changes of float32 scales."""
_SIGNS: dict[ScaleSign, Callable[[np.ndarray], np.ndarray]] = {
    ScaleSign.OWN: lambda scale: scale,
    ScaleSign.DROPPED: np.abs,
    ScaleSign.NAN: lambda scale: np.where(scale < 0, np.float32(np.nan), scale),
}
_GRIDS: dict[Grid, Callable[[np.ndarray], np.ndarray]] = {
    Grid.OWN: lambda scale: scale,
    Grid.AS_COLUMNS: lambda scale: scale.ravel().reshape(scale.shape, order="F"),
    Grid.AS_ROWS: lambda scale: scale.ravel(order="F").reshape(scale.shape),
    **TILES,
}


def _scales(case: GemmCase, rules: Rules) -> list[np.ndarray]:
    """Both scales, [M, B] and [N, B]."""
    # 1. As they lie in memory: one taken for the other, or for another memory order.
    scales = [case.scales[0], case.scales[1].T]
    if Misreading.SCALES_SWAPPED in rules.misreads and scales[0].shape == scales[1].shape:
        scales.reverse()
    scales = [_GRIDS[grid](scale) for grid, scale in zip(rules.grids, scales, strict=True)]
    if case.mode.is_microscaled:
        scales = [decoded_scales(scale, rules) for scale in scales]
    # 2. Spread over rows. [EPI-5] A square of 128 has one for 128 rows.
    granularities, sizes = (case.granularity_a, case.granularity_b), (len(case.a), len(case.b))
    for side, (granularity, rows) in enumerate(zip(granularities, sizes, strict=True)):
        if granularity is Granularity.BLOCKWISE_128X128:
            scales[side] = scales[side].repeat(BLOCK, axis=0)[:rows]
        elif scales[side].size == 1:
            scales[side] = np.broadcast_to(scales[side].reshape(1, 1), (rows, 1))
    # 3. Their values, as they are used.
    if Misreading.SCALES_FIRST_BLOCK in rules.misreads:
        scales = [scale[:, :1].repeat(scale.shape[1], 1) for scale in scales]
    scales = [_SIGNS[sign](scale) for sign, scale in zip(rules.scale_signs, scales, strict=True)]
    return [SCALE_VALUES[value](scale) for value, scale in zip(rules.scale_values, scales, strict=True)]


def _taken(x: np.ndarray, wrong: Misplaced, axis: int, nothing: int) -> np.ndarray:
    """The element that is read in each place of an axis; `nothing` where none is."""
    taken = wrong.places(x.shape[axis])
    is_nowhere = (taken < 0).reshape(-1, *[1] * (x.ndim - 1 - axis))
    return np.where(is_nowhere, x.dtype.type(nothing), np.take(x, taken, axis))


def _format_read(reading: Reading, declared: Format, other: Format) -> Format:
    fnuz = {E4M3FN: E4M3FNUZ, E5M2: E5M2FNUZ}.get(declared, declared)
    formats = {Reading.OTHER: other, Reading.E4M3: E4M3FN, Reading.E5M2: E5M2, Reading.FNUZ: fnuz}
    return formats.get(reading, declared)


def is_transposed(case: GemmCase, rules: Rules) -> bool:
    """Whether the output is written transposed, which fits a square one alone."""
    return Misreading.OUTPUT_TRANSPOSED in rules.misreads and len(case.a) == len(case.b)


def operands(read: Arguments, rules: Rules) -> tuple[Decoded, Decoded]:
    """Both operands, K first, as f8ref.numpy decodes them."""
    return _operand(read.a_MK, read.formats[0], rules), _operand(read.b_NK, read.formats[1], rules)


def _operand(array: np.ndarray, fmt: Format, rules: Rules) -> Decoded:
    codes = read_codes(array, fmt, rules)
    decoded = operand(codes.view(dtype_of(fmt)), fmt, rules.model)
    if Misreading.NAN_AS_NUMBER not in rules.misreads or fmt != E4M3FN:
        return decoded
    # The code beside NaN has its sign, and its exponent.
    is_nan = (codes & fmt.magnitude_mask) > fmt.max_code
    largest = operand((codes - is_nan).view(dtype_of(fmt)), fmt, rules.model)
    values = np.where(np.isnan(decoded.values), np.copysign(480, largest.values), largest.values)
    return largest._replace(values=values)


def read_codes(array: np.ndarray, fmt: Format, rules: Rules) -> np.ndarray:
    """The codes of an operand; under `flushes_operands` zeros for subnormal ones."""
    codes = codes_of(array)
    if not rules.flushes_operands:
        return codes
    is_subnormal = (codes & fmt.magnitude_mask) <= fmt.fraction_mask
    return np.where(is_subnormal, codes & fmt.sign_mask, codes).astype(codes.dtype)
