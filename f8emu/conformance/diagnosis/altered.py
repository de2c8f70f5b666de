"""The bits of a GEMM under any `Rules`, in numpy on the pieces of the oracle.

Under the right rules it is the oracle again (tests/conformance/test_fit.py). What a chain of cut tensor-core steps
gives is f8ref.numpy's own; other adders and roundings are written here.

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 128 along K.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from f8emu.conformance.diagnosis.adding import (
    adding_rules,
    pairwise_sum,
    products_in_lanes,
    promoted,
    sliced,
    slices,
)
from f8emu.conformance.diagnosis.output_rounding import rounded_output
from f8emu.conformance.diagnosis.rules import Adder, BiasRule, Misreading, Rules, ScaleOrder
from f8emu.conformance.distributions import codes_of, dtype_of
from f8emu.conformance.gemm import GemmCase, Mode
from f8emu.spec import BFLOAT16, E4M3FN, HOPPER, AccumulationModel, Format, Granularity, format_by_name
from f8ref.numpy.accumulate import Operand, are_exact_in_float32, operand, side_by_side
from f8ref.numpy.cast import convert
from f8ref.numpy.float32 import fma, rounded_sum

_T = TypeVar("_T")
_BLOCK_K = 128
Part = tuple[np.ndarray, np.ndarray]
"""Rows and columns of an output."""


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
class _Read:
    """The arguments of a GEMM as a kernel reads them, scales spread over rows and columns; of a part its own."""

    a_MK: np.ndarray
    b_NK: np.ndarray
    format_a: Format
    format_b: Format
    scale_a_MB: np.ndarray
    scale_b_BN: np.ndarray
    bias: np.ndarray | None
    """[N] float32."""


def compute(case: GemmCase, rules: Rules, *, at: Part | None = None, memory: Memory | None = None) -> np.ndarray:
    """The output of a GEMM under `rules`, [M, N], or of it the rows and columns `at`; not to be written to.

    Exactness: under the right rules every bit of f8ref.numpy; NaN is all ones.
    """
    if case.mode is Mode.GROUPED_ROWWISE:
        return np.concatenate([compute(group, rules, memory=memory) for group in _groups(case)])
    memory = memory or Memory()
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        read = memory.get((case, at), rules.misreads, lambda: _read(case, rules.misreads, at))
        acc = _before_epilogue(case, read, rules, memory)
        key = (rules.scales, rules.bias, rules.output, rules.output_through, rules.saturates, rules.flushes_results)
        slicing = (rules.split_k, rules.model.split_k_multiple) if case.mode is Mode.BLOCKWISE else ()
        return memory.get((read, acc), (*key, *slicing), lambda: _output(case, read, acc, rules))


def _is_transposed(case: GemmCase, wrong: frozenset[Misreading]) -> bool:
    m, n = case.output_shape
    return Misreading.OUTPUT_TRANSPOSED in wrong and m == n


def _before_epilogue(case: GemmCase, read: _Read, rules: Rules, memory: Memory) -> np.ndarray:
    """What the adder gives: accumulators [M, N], with block scales those of each block [B, M, N]."""
    operands, k = (read.a_MK, read.b_NK), case.k
    reading = (*_reading(rules), read.format_a, read.format_b)
    if rules.scales.is_before_dot:
        key = (*_scaling_before(rules), *reading)
        of = (*operands, read.scale_a_MB, read.scale_b_BN)
        return memory.get(of, key, lambda: _scaled_before(read, rules))
    if case.mode is Mode.BLOCKWISE:
        key = ("blocks", *adding_rules(rules, _BLOCK_K, 1), *reading)
        return memory.get(operands, key, lambda: _partials(*_operands(read, rules, memory), rules))
    key = (*adding_rules(rules, k, rules.split_k), *reading)
    return memory.get(operands, key, lambda: sliced(*_operands(read, rules, memory), rules))


def _output(case: GemmCase, read: _Read, acc: np.ndarray, rules: Rules) -> np.ndarray:
    """Scales, bias and the output type, on what the adder gave."""
    scales = read.scale_a_MB, read.scale_b_BN
    bias = None if rules.bias is BiasRule.IGNORED else read.bias
    is_scaled = rules.scales.is_before_dot or case.mode is Mode.BF16
    if is_scaled or case.mode is Mode.BLOCKWISE:
        result = acc if is_scaled else _blocks(acc, *scales, rules, case.k)
        if bias is not None:  # of block scales and of scaled operands nothing is left to fuse with
            result = result + bias
        output = rounded_output(result, rules, case.out_dtype)
    else:
        output = _epilogue(acc, *scales, bias, rules, case.out_dtype)
    return output.T if _is_transposed(case, rules.misreads) else output


def _groups(case: GemmCase) -> Iterator[GemmCase]:
    """The GEMMs of a grouped one [EPI-6]."""
    assert case.offs is not None and case.scale_a is not None and case.scale_b is not None
    for group, (start, stop) in enumerate(pairwise([0, *case.offs.tolist()])):
        yield replace(
            case,
            mode=Mode.ROWWISE,
            a=case.a[start:stop],
            b=case.b[group],
            scale_a=case.scale_a[start:stop, None],
            scale_b=case.scale_b[group][None],
            granularity_a=Granularity.ROWWISE,
            granularity_b=Granularity.ROWWISE,
            offs=None,
        )


# 1 What is read


def _read(case: GemmCase, wrong: frozenset[Misreading], at: Part | None) -> _Read:
    rows, columns = at or (slice(None), slice(None))
    if _is_transposed(case, wrong):
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
        if Misreading.SCALES_IGNORED in wrong:
            factor_a, factor_b = np.ones_like(factor_a), np.ones_like(factor_b)
    format_a, format_b = format_by_name(a.dtype.name), format_by_name(b.dtype.name)
    if Misreading.OPERANDS_SWAPPED in wrong and a.shape == b.shape:
        a, b, format_a, format_b = b, a, format_b, format_a
    if Misreading.FORMATS_SWAPPED in wrong:
        format_a, format_b = format_b, format_a
    return _Read(
        a_MK=a[rows],
        b_NK=b[columns],
        format_a=format_a,
        format_b=format_b,
        scale_a_MB=factor_a[rows],
        scale_b_BN=factor_b[:, columns],
        bias=None if case.bias is None else case.bias.astype(np.float32)[columns],
    )


def _other_order(scale: np.ndarray) -> np.ndarray:
    """A matrix whose memory is taken for that of the other order."""
    return np.ravel(scale).reshape(scale.shape, order="F")


def _spread(scale: np.ndarray, granularity: Granularity, rows: int) -> np.ndarray:
    """[rows, blocks of K]."""
    if granularity is Granularity.BLOCKWISE_128X128:
        return scale.repeat(_BLOCK_K, axis=0)[:rows]
    return np.broadcast_to(scale.reshape(1, 1), (rows, 1)) if scale.size == 1 else scale


def _operands(read: _Read, rules: Rules, memory: Memory) -> tuple[Operand, Operand]:
    """Both operands, K first, as f8ref.numpy decodes them."""

    def decoded(array: np.ndarray, fmt: Format) -> Operand:
        model = rules.model
        key = (fmt, *_reading(rules), model.operand, model.order, are_exact_in_float32(fmt, model))
        return memory.get((array,), key, lambda: _operand(array, fmt, rules))

    return decoded(read.a_MK, read.format_a), decoded(read.b_NK, read.format_b)


def _operand(array: np.ndarray, fmt: Format, rules: Rules) -> Operand:
    codes = _flushed(array, fmt, rules).view(dtype_of(fmt))
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


def _reading(rules: Rules) -> tuple[bool, bool]:
    """The rules that decide what a code is worth."""
    return rules.flushes_operands, Misreading.NAN_AS_NUMBER in rules.misreads


def _flushed(array: np.ndarray, fmt: Format, rules: Rules) -> np.ndarray:
    """The codes of an operand; under `flushes_operands` zeros for subnormal ones."""
    codes = codes_of(array)
    if not rules.flushes_operands:
        return codes
    is_subnormal = (codes & fmt.magnitude_mask) <= fmt.fraction_mask
    return np.where(is_subnormal, codes & fmt.sign_mask, codes).astype(codes.dtype)


# 2 Scales, bias, output


def _epilogue(
    acc: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, bias: np.ndarray | None, rules: Rules, out: Format
) -> np.ndarray:
    """[EPI-1..4] in the order of the rules."""
    if bias is not None and rules.bias is BiasRule.BEFORE_SCALES:
        acc, bias = acc + bias, None
    match rules.scales:
        case ScaleOrder.AFTER_OUTPUT:
            value, factor = rounded_output(acc, rules, out).astype(np.float32), scale_a * scale_b
        case ScaleOrder.COLUMN_FIRST | ScaleOrder.FMA_COLUMN_FIRST:
            value, factor = acc * scale_b, scale_a
        case ScaleOrder.ROW_FIRST | ScaleOrder.FMA_ROW_FIRST:
            value, factor = acc * scale_a, scale_b
        case _:
            value, factor = acc, scale_a * scale_b
    if bias is not None and rules.bias is BiasRule.FUSED:
        return rounded_output(fma(value, factor, np.broadcast_to(bias, value.shape)), rules, out)
    result = value * factor
    if bias is not None and rules.bias is BiasRule.AFTER_OUTPUT:
        result = rounded_output(result, rules, out).astype(np.float32) + bias
    elif bias is not None:
        result = result + bias
    return rounded_output(result, rules, out)


def _partials(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """The accumulator of each block of K [EPI-5], [B, M, N]."""
    return np.concatenate(
        [
            np.zeros((0, a.rows, b.rows), np.float32),
            *(promoted(*blocks, rules) for blocks in side_by_side(a, b, _BLOCK_K)),
        ]
    )


def _blocks(partials: np.ndarray, scale_a_MB: np.ndarray, scale_b_BN: np.ndarray, rules: Rules, k: int) -> np.ndarray:
    """The float32 total of the scaled blocks, slice by slice."""
    multiple = rules.model.split_k_multiple if rules.split_k > 1 else _BLOCK_K
    result: np.ndarray | None = None
    for part in slices(k, rules.split_k, multiple):
        total = np.zeros((len(scale_a_MB), scale_b_BN.shape[1]), np.float32)
        for block in range(part.start // _BLOCK_K, -(-part.stop // _BLOCK_K)):
            p, sa, sb = partials[block], scale_a_MB[:, block, None], scale_b_BN[block]
            match rules.scales:
                case ScaleOrder.ROW_FIRST | ScaleOrder.FMA_ROW_FIRST:
                    value, factor = p * sa, np.broadcast_to(sb, p.shape)
                case ScaleOrder.COLUMN_FIRST | ScaleOrder.FMA_COLUMN_FIRST:
                    value, factor = p * sb, np.broadcast_to(sa, p.shape)
                case _:
                    value, factor = p, sa * sb
            total = fma(value, factor, total) if rules.scales.is_fused else value * factor + total
        result = total if result is None else result + total
    return np.zeros((len(scale_a_MB), scale_b_BN.shape[1]), np.float32) if result is None else result


def _scaling_before(rules: Rules) -> tuple[object, ...]:
    """The same of scaled operands: only those in bfloat16 are added by a tensor core."""
    numbers = (rules.scales, rules.model.promote_k, rules.split_k, _reading(rules))
    rounded = (rules.terms, rules.sums) if rules.scales is ScaleOrder.BEFORE_DOT_BFLOAT16 else ()
    return (*numbers, rules.adder, rules.lanes, *rounded)


def _scaled_before(read: _Read, rules: Rules) -> np.ndarray:
    """Operands decoded and scaled first, then multiplied as float32 numbers, or rounded to bfloat16 and multiplied."""
    k = read.a_MK.shape[1]
    scaled = []
    for array, fmt, factors in (
        (read.a_MK, read.format_a, read.scale_a_MB),
        (read.b_NK, read.format_b, read.scale_b_BN.T),
    ):
        values = _flushed(array, fmt, rules).view(dtype_of(fmt)).astype(np.float32)
        scaled.append(values * (factors if factors.shape[1] == 1 else factors.repeat(_BLOCK_K, axis=1)[:, :k]))
    if rules.scales is ScaleOrder.BEFORE_DOT_BFLOAT16:
        bf16 = HOPPER.bfloat16
        inner = replace(rules, model=replace(bf16, promote_k=rules.model.promote_k))
        a, b = (operand(convert(x, BFLOAT16), BFLOAT16, inner.model) for x in scaled)
        return sliced(a, b, inner)
    left_KM, right_KN = (x.T.astype(np.float64) for x in scaled)
    if rules.adder is Adder.EXACT:
        return (left_KM.T @ right_KN).astype(np.float32)
    result = np.zeros((left_KM.shape[1], right_KN.shape[1]), np.float32)
    for outer in slices(k, rules.split_k, rules.model.split_k_multiple):
        total = np.zeros_like(result)
        for start in range(outer.start, outer.stop, rules.model.promote_k or max(k, 1)):
            part = slice(start, min(start + (rules.model.promote_k or max(k, 1)), outer.stop))
            lanes = np.zeros((rules.lanes, *result.shape), np.float32)
            for turns in products_in_lanes(left_KM[part], right_KN[part], rules.lanes):
                for turn in turns:
                    lanes = rounded_sum(turn, lanes)
            total = total + pairwise_sum(lanes)
        result = result + total
    return result
