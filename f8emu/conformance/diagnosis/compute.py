"""The bits of a GEMM under any `Rules`, in numpy on the pieces of the oracle.

Under the right rules it is the oracle again (tests/conformance/test_fit.py).

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 128 along K.
"""

from dataclasses import replace
from functools import reduce

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.diagnosis.adding import adding_rules, promoted, scaled_first, sliced, slices
from f8emu.conformance.diagnosis.arguments import (
    BLOCK_K,
    Arguments,
    Memory,
    Part,
    flushed,
    is_transposed,
    operands,
    places_taken,
    read_arguments,
    reading_of,
)
from f8emu.conformance.diagnosis.rules import BiasRule, Misplaced, Places, Rounding, Rules, ScaleOrder
from f8emu.spec import BFLOAT16, FLOAT32, Format, format_by_name
from f8ref.numpy.accumulate import Operand, side_by_side
from f8ref.numpy.cast import convert
from f8ref.numpy.scaled_mm import fma


def compute(case: GemmCase, rules: Rules, *, at: Part | None = None, memory: Memory | None = None) -> np.ndarray:
    """The output of a GEMM under `rules`, [M, N], or of it the rows and columns `at`; not to be written to.

    Exactness: under the right rules every bit of f8ref.numpy; NaN is all ones.
    """
    assert case.mode in (Mode.TENSORWISE, Mode.ROWWISE, Mode.BLOCKWISE), case.id
    memory = memory or Memory()
    # 1. The K that takes part, and its slices.
    if rules.split_above:
        rules = replace(rules, split_k=rules.split_k if case.k > rules.split_above else 1, split_above=0)
    if rules.k_multiple > 1 or rules.k_less:
        whole, k = case, max(case.k - rules.k_less, 0) // rules.k_multiple * rules.k_multiple
        case = memory.get((whole,), ("K", k), lambda: replace(whole, a=whole.a[:, :k], b=whole.b[:, :k]))
    # 2. Outputs in the place of others are those of the other rules.
    outputs = next((one for one in rules.misplaced if one.of.is_output), None)
    if outputs is not None:
        return _misplaced_outputs(case, rules, outputs, at, memory)
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        # 3. Arguments, 4. accumulators, 5. scales to output: each is made once for all rules that agree on it.
        key = (rules.misreads, rules.reads, rules.misplaced)
        read = memory.get((case, at), key, lambda: read_arguments(case, rules, at))
        acc = _before_epilogue(case, read, rules, memory)
        ending = (rules.scales, rules.adds_zero, rules.bias, rules.output, rules.output_through, rules.saturates)
        slicing = (rules.split_k, rules.model.split_k_multiple) if case.mode is Mode.BLOCKWISE else ()
        key = (*ending, rules.flushes_results, *slicing)
        return memory.get((read, acc), key, lambda: _output(case, read, acc, rules))


def _misplaced_outputs(case: GemmCase, rules: Rules, wrong: Misplaced, at: Part | None, memory: Memory) -> np.ndarray:
    """The outputs that stand in the place of others, zeros where none does."""
    axis = 0 if wrong.of is Places.ROWS else 1
    part = list(at or map(np.arange, case.output_shape))
    part[axis] = taken = places_taken(wrong, case.output_shape[axis])[part[axis]]
    there = memory.get(tuple(part), "part", lambda: (part[0], part[1]))  # one object for equal places
    rest = replace(rules, misplaced=tuple(one for one in rules.misplaced if one is not wrong))
    found = compute(case, rest, at=there, memory=memory)
    is_nowhere = np.expand_dims(taken < 0, 1 - axis)
    return np.where(is_nowhere, np.zeros((), found.dtype), found)


def _before_epilogue(case: GemmCase, read: Arguments, rules: Rules, memory: Memory) -> np.ndarray:
    """What the adder gives: accumulators [M, N], with block scales those of each block [B, M, N]."""
    codes, k = (read.a_MK, read.b_NK), case.k
    reading = (*reading_of(rules), read.format_a, read.format_b)
    if rules.scales.is_before_dot:
        # Only operands in bfloat16 are added by a tensor core.
        rounded = (rules.terms, rules.sums) if rules.scales is ScaleOrder.BEFORE_DOT_BFLOAT16 else ()
        adding = rules.adder, rules.lanes, rules.model.promote_k, rules.split_k, *rounded
        key = (rules.scales, *adding, *reading)
        of = (*codes, read.scale_a_MB, read.scale_b_BN)
        return memory.get(of, key, lambda: _scaled_before(read, rules))
    if case.mode is Mode.BLOCKWISE:
        key = ("blocks", *adding_rules(rules, BLOCK_K, 1), *reading)
        return memory.get(codes, key, lambda: _partials(*operands(read, rules, memory), rules))
    key = (*adding_rules(rules, k, rules.split_k), *reading)
    return memory.get(codes, key, lambda: sliced(*operands(read, rules, memory), rules))


def _output(case: GemmCase, read: Arguments, acc: np.ndarray, rules: Rules) -> np.ndarray:
    """Scales, bias and the output type, on what the adder gave."""
    scales = read.scale_a_MB, read.scale_b_BN
    bias = None if rules.bias is BiasRule.IGNORED else read.bias
    is_scaled = rules.scales.is_before_dot
    if is_scaled or case.mode is Mode.BLOCKWISE:
        result = _never_minus_zero(acc if is_scaled else _blocks(acc, *scales, rules, case.k), rules)
        if bias is not None:  # of block scales and of scaled operands nothing is left to fuse with
            result = result + bias
        output = _rounded_output(result, rules, case.out_dtype)
    else:
        output = _epilogue(acc, *scales, bias, rules, case.out_dtype)
    return output.T if is_transposed(case, rules.misreads) else output


# Scales, bias, output


def _epilogue(
    acc: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, bias: np.ndarray | None, rules: Rules, out: Format
) -> np.ndarray:
    """[EPI-1..4] in the order of the rules."""
    # 1. [EPI-1], [EPI-2] The scales, one after the other.
    if bias is not None and rules.bias is BiasRule.BEFORE_SCALES:
        acc, bias = acc + bias, None
    if rules.scales is ScaleOrder.AFTER_OUTPUT:
        acc = _rounded_output(acc, rules, out).astype(np.float32)
    value, factor = _scaled_once(acc, scale_a, scale_b, rules.scales)
    # 2. [EPI-3] The bias, in a rounding of its own unless altered.
    if bias is not None and rules.bias is BiasRule.FUSED:
        return _rounded_output(fma(value, factor, np.broadcast_to(bias, value.shape)), rules, out)
    result = _never_minus_zero(value * factor, rules)
    if bias is not None and rules.bias is BiasRule.AFTER_OUTPUT:
        result = _rounded_output(result, rules, out).astype(np.float32) + bias
    elif bias is not None:
        result = result + bias
    # 3. [EPI-4] The output type.
    return _rounded_output(result, rules, out)


def _scaled_once(
    x: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, order: ScaleOrder
) -> tuple[np.ndarray, np.ndarray]:
    """What is multiplied last, [M, N], and by what."""
    match order:
        case ScaleOrder.COLUMN_FIRST | ScaleOrder.FMA_COLUMN_FIRST:
            return x * scale_b, scale_a
        case ScaleOrder.ROW_FIRST | ScaleOrder.FMA_ROW_FIRST:
            return x * scale_a, scale_b
        case _:
            return x, scale_a * scale_b


def _never_minus_zero(scaled: np.ndarray, rules: Rules) -> np.ndarray:
    return scaled + np.float32(0) if rules.adds_zero else scaled


def _rounded_output(x: np.ndarray, rules: Rules, out: Format) -> np.ndarray:
    """[EPI-4] and its alterations."""
    if rules.flushes_results:
        is_tiny = (np.abs(x) < np.float32(2.0**FLOAT32.min_exponent)) & (x != 0)
        x = np.where(is_tiny, np.copysign(np.float32(0), x), x)
    if rules.output_through:
        x = convert(x, format_by_name(rules.output_through)).astype(np.float32)
    result = convert(x, out)
    is_other = out.bits == 16 if rules.output is not Rounding.CUT_BFLOAT16 else out == BFLOAT16
    if rules.output is not Rounding.NEAREST and is_other:
        result = _rounded_otherwise(x, result, rules.output)
    if rules.saturates:
        largest = np.array(out.max_code, f"u{out.bits // 8}").view(dtype_of(out))
        limit = np.where(np.signbit(x), -largest.astype(np.float32), largest.astype(np.float32)).astype(dtype_of(out))
        result = np.where(np.isinf(result.astype(np.float32)) & np.isfinite(x), limit, result)
    return result


def _rounded_otherwise(x: np.ndarray, nearest: np.ndarray, rounding: Rounding) -> np.ndarray:
    """The neighbour toward zero, or of a tie the one away from it."""
    codes, values = codes_of(nearest).copy(), nearest.astype(np.float64)
    # Codes of one sign are in the order of magnitudes: one less is the neighbour toward zero.
    magnitude, rounded = np.abs(x.astype(np.float64)), np.abs(values)
    if rounding is not Rounding.NEAREST_AWAY:
        codes[np.isfinite(x) & (rounded > magnitude)] -= 1
        return codes.view(nearest.dtype)
    above = (codes + 1).view(nearest.dtype).astype(np.float64)
    codes[np.isfinite(x) & np.isfinite(values) & (magnitude * 2 == rounded + np.abs(above))] += 1
    return codes.view(nearest.dtype)


def _partials(a: Operand, b: Operand, rules: Rules) -> np.ndarray:
    """The accumulator of each block of K [EPI-5], [B, M, N]."""
    partials = [promoted(*blocks, rules) for blocks in side_by_side(a, b, BLOCK_K)]
    return np.concatenate([np.zeros((0, a.rows, b.rows), np.float32), *partials])


def _blocks(partials: np.ndarray, scale_a_MB: np.ndarray, scale_b_BN: np.ndarray, rules: Rules, k: int) -> np.ndarray:
    """The float32 total of the scaled blocks, slice by slice."""
    # One slice has every block; several begin at multiples of the library's own length [CHAIN-3].
    multiple = rules.model.split_k_multiple if rules.split_k > 1 else BLOCK_K
    zero = np.zeros((len(scale_a_MB), scale_b_BN.shape[1]), np.float32)
    totals: list[np.ndarray] = []
    for part in slices(k, rules.split_k, multiple):
        total = zero
        for block in range(part.start // BLOCK_K, -(-part.stop // BLOCK_K)):
            value, factor = _scaled_once(
                partials[block], scale_a_MB[:, block, None], scale_b_BN[block, None], rules.scales
            )
            factor = np.broadcast_to(factor, zero.shape)
            total = fma(value, factor, total) if rules.scales.is_fused else value * factor + total
        totals.append(total)
    return reduce(np.add, totals) if totals else zero


def _scaled_before(read: Arguments, rules: Rules) -> np.ndarray:
    """Operands decoded and scaled first, then multiplied."""
    k = read.a_MK.shape[1]
    scaled = []
    for array, fmt, factors in (
        (read.a_MK, read.format_a, read.scale_a_MB),
        (read.b_NK, read.format_b, read.scale_b_BN.T),
    ):
        values = flushed(array, fmt, rules).view(dtype_of(fmt)).astype(np.float32)
        if rules.scales is not ScaleOrder.EACH_PRODUCT:
            values = values * (factors if factors.shape[1] == 1 else factors.repeat(BLOCK_K, axis=1)[:, :k])
        scaled.append(values)
    return scaled_first((scaled[0], scaled[1]), (read.scale_a_MB, read.scale_b_BN), rules)
