"""The bits of a GEMM under any `Rules`, in numpy on the pieces of the oracle.

Under the right rules it is the oracle again (tests/conformance/test_fit.py). A chain of cut tensor-core steps is
f8ref.numpy's own; other adders and roundings are written here, for operands [K, rows], as f8ref.numpy decodes them, or
several chains side by side, [K, chains, rows].

Shape suffixes: M rows of `a`, N columns of `b`, K summed, B blocks of 128 along K.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.diagnosis.arguments import (
    Arguments,
    Part,
    is_transposed,
    operands,
    read_arguments,
    read_codes,
)
from f8emu.conformance.diagnosis.groups import OWN_GROUPS, Rows
from f8emu.conformance.diagnosis.microscaled import microscaled
from f8emu.conformance.diagnosis.places import Misplaced, Places
from f8emu.conformance.diagnosis.rules import (
    Adder,
    BiasRule,
    EqualScales,
    Misreading,
    Rounding,
    Rules,
    ScaleOrder,
)
from f8emu.spec import BFLOAT16, E8M0FNU, FLOAT16, FLOAT32, HOPPER, Format, Granularity, format_by_name
from f8emu.spec.scaling import BLOCK, MX_BLOCK
from f8ref.numpy.accumulate import Decoded, chain, exponents_of, operand, power_of_two, side_by_side, to_last_place
from f8ref.numpy.cast import convert
from f8ref.numpy.codec import canonical_nan
from f8ref.numpy.scaled_mm import fma, rounded_sum

_PRODUCTS = 1 << 17  # made at a time
_T = TypeVar("_T")


class Memory:
    """A cache of arrays: hypotheses about an epilogue share accumulators, and many have the same output.

    Arrays of the same bits are one, whichever probe or rule they come from; other objects are themselves alone.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._numbers: dict[int, tuple[object, int]] = {}
        self._contents: dict[Hashable, int] = {}

    def get(self, of: tuple[object, ...], key: Hashable, make: Callable[[], _T]) -> _T:
        """The result of `make` for these objects. Both are kept: nobody may write to either."""
        full = (*map(self._number, of), key)
        if full not in self._known:
            self._known[full] = make()
        return self._known[full]

    def _number(self, x: object) -> int:
        known = self._numbers.get(id(x))
        if known is None:
            content = (x.dtype, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else id(x)
            known = x, self._contents.setdefault(content, len(self._contents))
            self._numbers[id(x)] = known
        return known[1]


def compute(case: GemmCase, rules: Rules, *, at: Part | None = None, memory: Memory | None = None) -> np.ndarray:
    """The output of a GEMM under `rules`, [M, N], or of it the rows and columns `at`; not to be written to.

    Exactness: under the right rules every bit of f8ref.numpy; NaN is all ones.
    """
    memory = memory or Memory()
    if case.mode.is_grouped:
        return _grouped(case, rules, at, memory)
    assert case.mode is not Mode.BF16, case.id
    # 1. The K that takes part, and its slices.
    if rules.split_above:
        rules = replace(rules, split_k=rules.split_k if case.k > rules.split_above else 1, split_above=0)
    if rules.k_multiple > 1 or rules.k_less:
        whole, k = case, max(case.k - rules.k_less, 0) // rules.k_multiple * rules.k_multiple
        case = memory.get((whole,), ("K", k), lambda: replace(whole, a=whole.a[:, :k], b=whole.b[:, :k]))
    if rules.equal_scales is not EqualScales.ROWWISE and case.mode is Mode.ROWWISE:
        rules = _of_equal_scales(case, rules)
    # 2. Outputs in the place of others are those of the other rules.
    outputs = next((wrong for wrong in rules.misplaced if wrong.of.is_output), None)
    if outputs is not None:
        return _misplaced_outputs(case, rules, outputs, at, memory)
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        # 3. Arguments, 4. accumulators, 5. scales to output: each is made once for all rules that agree on it.
        key = (rules.misreads, rules.reads, rules.misplaced, rules.scale_values, rules.scale_signs, rules.grids)
        read = memory.get((case, at), key, lambda: read_arguments(case, rules, at))
        acc = _accumulators(case, read, rules, memory)
        ending = (rules.scales, rules.adds_zero, rules.bias, rules.output, rules.output_through, rules.saturates)
        slicing = (rules.split_k, rules.model.split_k_multiple) if case.mode is Mode.BLOCKWISE else ()
        key = (*ending, rules.flushes_results, *slicing)
        return memory.get((read, acc), key, lambda: _output(case, read, acc, rules))


def _misplaced_outputs(case: GemmCase, rules: Rules, wrong: Misplaced, at: Part | None, memory: Memory) -> np.ndarray:
    """The outputs that stand in the place of others, zeros where none does."""
    axis = 0 if wrong.of is Places.ROWS else 1
    part = list(at or map(np.arange, case.output_shape))
    part[axis] = taken = wrong.places(case.output_shape[axis])[part[axis]]
    there = memory.get(tuple(part), "part", lambda: (part[0], part[1]))  # one object for equal places
    rest = replace(rules, misplaced=tuple(other for other in rules.misplaced if other is not wrong))
    output = compute(case, rest, at=there, memory=memory)
    return np.where(np.expand_dims(taken < 0, 1 - axis), np.zeros((), output.dtype), output)


def _of_equal_scales(case: GemmCase, rules: Rules) -> Rules:
    looked_at = case.scales[:1] if rules.equal_scales is EqualScales.OF_A else case.scales
    rules = replace(rules, equal_scales=EqualScales.ROWWISE)
    if all((scale == scale.flat[:1]).all() for scale in looked_at):
        return replace(rules, scales=ScaleOrder.PRODUCT, adds_zero=True)
    return rules


def _grouped(case: GemmCase, rules: Rules, at: Part | None, memory: Memory) -> np.ndarray:
    """Groups of rows [EPI-6]: those that share b and its scales are a rowwise GEMM, or zeros where no group is read."""
    assert case.offs is not None
    m, n = case.output_shape
    read, inner = rules.groups.rows(case.offs, m), replace(rules, groups=OWN_GROUPS)
    output = np.zeros((m, n), dtype_of(case.out_dtype))
    for group, scale_b in sorted(set(zip(read.b.tolist(), read.scale_b.tolist(), strict=True))):
        rows = np.flatnonzero((read.b == group) & (read.scale_b == scale_b))
        if group >= 0:
            key = ("group", group, scale_b, rows.tobytes(), read.scale_a[rows].tobytes())
            part = memory.get((case,), key, partial(_group, case, read, rows))
            output[rows] = compute(part, inner, memory=memory)
    return output if at is None else output[np.ix_(*at)]


def _group(case: GemmCase, read: Rows, rows: np.ndarray) -> GemmCase:
    first, (scale_a, scale_b) = rows[0], case.scales
    of_a, of_b = scale_a[read.scale_a[rows]], scale_b[read.scale_b[first]]
    alone = replace(case, a=case.a[rows], b=case.b[read.b[first]], offs=None)
    if case.mode is Mode.GROUPED_MX:
        of_a = of_a.copy()
        codes_of(of_a)[read.scale_a[rows] < 0] = E8M0FNU.nan_code
        return replace(alone, mode=Mode.MX, scale_a=of_a, scale_b=of_b)
    return replace(
        alone,
        mode=Mode.ROWWISE,
        granularity_a=Granularity.ROWWISE,
        granularity_b=Granularity.ROWWISE,
        scale_a=of_a[:, None],
        scale_b=of_b[None],
    )


# Accumulators


def _accumulators(case: GemmCase, read: Arguments, rules: Rules, memory: Memory) -> np.ndarray:
    """The adder's accumulators [M, N]; with block scales those of each block [B, M, N]."""
    codes = read.a_MK, read.b_NK
    adding = rules.adder, rules.model, rules.lanes, rules.goto_k, rules.terms, rules.sums
    key = (*read.formats, rules.flushes_operands, Misreading.NAN_AS_NUMBER in rules.misreads, *adding)
    if rules.scales.is_before_dot:
        of, key = (*codes, read.scale_a_MB, read.scale_b_BN), (*key, rules.split_k, rules.scales)
        return memory.get(of, key, lambda: _scaled_before(read, rules))
    if case.mode is Mode.BLOCKWISE:
        return memory.get(codes, (*key, "blocks"), lambda: _partials(read, rules))
    if case.mode is Mode.MX:
        of, key = (*codes, read.scale_a_MB, read.scale_b_BN), (*key, rules.split_k, rules.scales, rules.misreads)
        return memory.get(of, key, lambda: microscaled(read, *operands(read, rules), rules, sliced))
    return memory.get(codes, (*key, rules.split_k), lambda: sliced(*operands(read, rules), rules))


def _partials(read: Arguments, rules: Rules) -> np.ndarray:
    """[EPI-5] Of each block of K, [B, M, N]."""
    a, b = operands(read, rules)
    partials = [promoted(*blocks, rules) for blocks in side_by_side(a, b, BLOCK)]
    return np.concatenate([np.zeros((0, a.rows, b.rows), np.float32), *partials])


def _scaled_before(read: Arguments, rules: Rules) -> np.ndarray:
    """Operands decoded and scaled first, then multiplied, [M, N]."""
    model = replace(HOPPER.bfloat16, promote_k=rules.model.promote_k)
    scaled: list[Decoded] = []
    codes, factors = (read.a_MK, read.b_NK), (read.scale_a_MB, read.scale_b_BN.T)
    for array, fmt, factor in zip(codes, read.formats, factors, strict=True):
        values = read_codes(array, fmt, rules).view(dtype_of(fmt)).astype(np.float32)
        if factor.dtype == np.float64:  # E8M0 scales, of which float32 has every value but 2^128
            factor = factor.astype(np.float32).repeat(MX_BLOCK, axis=1)[:, : values.shape[1]]
        elif factor.shape[1] > 1:
            factor = factor.repeat(BLOCK, axis=1)[:, : values.shape[1]]
        values = values * factor
        if rules.scales is ScaleOrder.BEFORE_DOT_BFLOAT16:
            scaled.append(operand(convert(values, BFLOAT16), BFLOAT16, model))
        else:  # no tensor core adds float32: exponents do not count
            scaled.append(Decoded(values.T.astype(np.float64), np.zeros(values.T.shape, np.int32)))
    if rules.scales is ScaleOrder.BEFORE_DOT_BFLOAT16:
        rules = replace(rules, model=model)
    return sliced(scaled[0], scaled[1], rules)


# Scales, bias, output


def _output(case: GemmCase, read: Arguments, acc: np.ndarray, rules: Rules) -> np.ndarray:
    """[EPI-1..5] in the order of the rules, on what the adder gave."""
    out, bias = case.out_dtype, None if rules.bias is BiasRule.IGNORED else read.bias
    scale_a, scale_b = read.scale_a_MB, read.scale_b_BN
    # 1. [EPI-1], [EPI-2], [EPI-5] The scales: of operands they are used up, of blocks each partial has its own.
    factor: np.ndarray | None = None
    if case.mode is Mode.BLOCKWISE and not rules.scales.is_before_dot:
        acc = _blocks(acc, scale_a, scale_b, rules, case.k)
    elif not rules.scales.is_before_dot and case.mode is not Mode.MX:
        if bias is not None and rules.bias is BiasRule.BEFORE_SCALES:
            acc, bias = acc + bias, None
        if rules.scales is ScaleOrder.AFTER_OUTPUT:
            acc = _rounded_output(acc, rules, out).astype(np.float32)
        acc, factor = _scaled_once(acc, scale_a, scale_b, rules.scales)
    # 2. [EPI-3] The bias, in a rounding of its own unless altered.
    is_fused = rules.bias is BiasRule.FUSED and rules.adder is not Adder.FLOAT64
    if factor is not None and bias is not None and is_fused:
        result = fma(acc, factor, np.broadcast_to(bias, acc.shape))
    else:
        result = acc if factor is None else acc * factor
        result = result + np.float32(0) if rules.adds_zero else result
        if factor is not None and bias is not None and rules.bias is BiasRule.AFTER_OUTPUT:
            result = _rounded_output(result, rules, out).astype(np.float32)
        result = result if bias is None else result + bias
    # 3. [EPI-4] The output type.
    output = _rounded_output(result, rules, out)
    return output.T if is_transposed(case, rules) else output


def _blocks(partials: np.ndarray, scale_a_MB: np.ndarray, scale_b_BN: np.ndarray, rules: Rules, k: int) -> np.ndarray:
    """The float32 total of the scaled blocks, slice by slice."""
    # One slice has every block; several begin at multiples of the library's own length [CHAIN-3].
    multiple = rules.model.split_k_multiple if rules.split_k > 1 else BLOCK
    zero = np.zeros((len(scale_a_MB), scale_b_BN.shape[1]), np.float32)
    totals: list[np.ndarray] = []
    for part in slices(k, rules.split_k, multiple):
        total = zero
        for block in range(part.start // BLOCK, -(-part.stop // BLOCK)):
            scales = scale_a_MB[:, block, None], scale_b_BN[block, None]
            value, factor = _scaled_once(partials[block], *scales, rules.scales)
            factor = np.broadcast_to(factor, zero.shape)
            is_fused = rules.scales.is_fused and rules.adder is not Adder.FLOAT64
            total = fma(value, factor, total) if is_fused else value * factor + total
        totals.append(total)
    return reduce(np.add, totals) if totals else zero


def _scaled_once(
    x: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, order: ScaleOrder
) -> tuple[np.ndarray, np.ndarray]:
    """The two factors of the last multiplication: [M, N], and a scale."""
    if order in (ScaleOrder.COLUMN_FIRST, ScaleOrder.FMA_COLUMN_FIRST):
        return x * scale_b, scale_a
    if order in (ScaleOrder.ROW_FIRST, ScaleOrder.FMA_ROW_FIRST):
        return x * scale_a, scale_b
    return x, scale_a * scale_b


def _rounded_output(x: np.ndarray, rules: Rules, out: Format) -> np.ndarray:
    """[EPI-4] and its alterations."""
    # 1. What is done to the result. Of float64 only numpy's float16 is rounded to at once.
    if x.dtype == np.float64:
        if out == FLOAT16 and not rules.output_through:
            return x.astype(np.float16)
        x = x.astype(np.float32)
    if rules.flushes_results:
        is_tiny = np.abs(x) < np.float32(2.0**FLOAT32.min_exponent)
        x = np.where(is_tiny, np.copysign(np.float32(0), x), x)
    if rules.output_through:
        x = convert(x, format_by_name(rules.output_through)).astype(np.float32)
    result = convert(x, out)
    # 2. A neighbour of what is nearest. Codes of one sign are in the order of magnitudes.
    is_other = out == BFLOAT16 or (out.bits == 16 and rules.output is not Rounding.CUT_BFLOAT16)
    if is_other and rules.output is not Rounding.NEAREST:
        codes, exact = codes_of(result).copy(), np.abs(x.astype(np.float64))
        nearest, above = (np.abs(y.view(result.dtype).astype(np.float64)) for y in (codes, codes + 1))
        if rules.output is Rounding.NEAREST_AWAY:
            codes[np.isfinite(x) & np.isfinite(nearest) & (exact * 2 == nearest + above)] += 1
        else:
            codes[np.isfinite(x) & (nearest > exact)] -= 1
        result = codes.view(result.dtype)
    # 3. Saturation.
    if rules.saturates:
        largest = np.array(out.max_code, f"u{out.bits // 8}").view(result.dtype).astype(np.float32)
        is_beyond = np.isinf(result.astype(np.float32)) & np.isfinite(x)
        result = np.where(is_beyond, np.copysign(largest, x).astype(result.dtype), result)
    return result


def sliced(a: Decoded, b: Decoded, rules: Rules) -> np.ndarray:
    """The accumulator of a whole GEMM, [M, N] float32: the sum of its slices of K [CHAIN-3]."""
    total = np.zeros((a.rows, b.rows), np.float32)
    for part in slices(a.k, rules.split_k, rules.model.split_k_multiple):
        total = total + promoted(a.part(k=part), b.part(k=part), rules)
    return total


def slices(k: int, split_k: int, multiple: int) -> Iterator[slice]:
    """The slices of K [CHAIN-3]: one length, a multiple; the last is shorter."""
    length = max(-(-k // (split_k * multiple)) * multiple, multiple)
    return (slice(start, min(start + length, k)) for start in range(0, k, length))


def promoted(a: Decoded, b: Decoded, rules: Rules) -> np.ndarray:
    """The float32 total of the chains of one slice [CHAIN-1], [CHAIN-2], [M, N]."""
    total = np.zeros((*a.values.shape[1:], b.rows), np.float32)
    for chains in side_by_side(a, b, rules.model.promote_k or max(a.k, 1)):
        for partial_sum in _chain(*chains, rules):
            total = total + partial_sum
    return total


def _chain(a: Decoded, b: Decoded, rules: Rules) -> np.ndarray:
    """Chains over all of K, from zero, [chains, M, N] float32."""
    if rules.adder is Adder.TENSOR_CORE and rules.terms is Rounding.CUT and rules.sums is Rounding.CUT:
        return chain(a, b, rules.model)
    # 1. Finite numbers.
    left, right = (np.where(np.isfinite(x.values), x.values, 0).astype(np.float64) for x in (a, b))
    if rules.adder is Adder.TENSOR_CORE:
        sums = _rounded_steps(a, b, left, right, rules)
    elif rules.adder is Adder.FLOAT32:
        parts = _goto_blocks(len(left), rules.goto_k or len(left))
        sums = reduce(np.add, [_in_float32(left[part], right[part], rules) for part in parts])
    else:  # float64 holds the exact sum of E4M3 products, and of nearly all others
        sums = np.einsum("k...m,k...n->...mn", left, right, optimize=True)
        sums = sums.astype(np.float32) if rules.adder is Adder.EXACT else sums
    # 2. [SPEC-1] What is not finite adds as IEEE 754 says, whatever adds the rest; signs of numbers do not overflow.
    if np.isfinite(a.values).all() and np.isfinite(b.values).all():
        return sums
    signs = (np.where(np.isfinite(x.values), np.sign(x.values), x.values).astype(np.float32) for x in (a, b))
    ieee = np.einsum("k...m,k...n->...mn", *signs)
    return np.where(np.isfinite(ieee), sums, canonical_nan(ieee))


def _goto_blocks(k: int, length: int) -> Iterator[slice]:
    """The blocks of K of GotoBLAS and OpenBLAS: what is left between one length and two is halved."""
    start = 0
    while start < k or not k:
        rest = k - start
        stop = start + (length if rest >= 2 * length else -(-rest // 16) * 8 if rest > length else rest)
        yield slice(start, stop)
        if stop == k:
            return
        start = stop


def _in_float32(left: np.ndarray, right: np.ndarray, rules: Rules) -> np.ndarray:
    """Float32 sums that take turns along K, added up pairwise at the end."""
    sums = np.zeros((rules.lanes, *left.shape[1:], right.shape[-1]), np.float32)
    turns = rules.lanes * max(_PRODUCTS // (rules.lanes * max(left[0].size * right.shape[-1], 1)), 1)
    for k in range(0, len(left), turns):
        products = left[k : k + turns, ..., :, None] * right[k : k + turns, ..., None, :]
        if missing := -len(products) % rules.lanes:
            products = np.concatenate([products, np.zeros((missing, *products.shape[1:]))])
        products = products.reshape(-1, *sums.shape)
        if rules.scales is ScaleOrder.BEFORE_DOT:  # float32 does not hold the products of scaled numbers
            for product in products:
                sums = rounded_sum(product, sums)
        else:
            exact = products.astype(np.float32)
            exact[0] += sums
            sums = np.add.accumulate(exact)[-1]
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    return sums[0]


def _rounded_steps(a: Decoded, b: Decoded, left: np.ndarray, right: np.ndarray, rules: Rules) -> np.ndarray:
    """Tensor-core steps [ACC-1..5] whose terms or sums are rounded to nearest."""
    # Exact: numbers have at most 16 significant bits, or 24, and are below 2^52.
    model = rules.model
    terms, sums = (np.trunc if x is Rounding.CUT else np.rint for x in (rules.terms, rules.sums))
    accumulator = np.zeros((*left.shape[1:], b.rows))
    for k in range(0, a.k, model.step_k):
        step = slice(k, k + model.step_k)
        # [OP-2] Exact products. [ACC-2] The largest exponent, of the accumulator too.
        product = left[step, ..., :, None] * right[step, ..., None, :]
        exponent = (a.exponents[step, ..., :, None] + b.exponents[step, ..., None, :]).max(axis=0)
        largest = np.maximum(exponent, exponents_of(accumulator, model.accumulator))
        to_units = power_of_two(model.aligned_fraction_bits - largest)
        # [ACC-3] Terms in units. [ACC-4] Their exact sum.
        total = (terms(product * to_units).sum(axis=0) + terms(accumulator * to_units)) / to_units
        # [ACC-5] The places that are kept of it.
        to_places = to_last_place(total, model)
        accumulator = sums(total * to_places) / to_places + 0.0
    return accumulator.astype(np.float32)
