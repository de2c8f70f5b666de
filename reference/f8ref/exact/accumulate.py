"""The tensor core: products, one accumulation step, and how steps are chained along K.

The numbers (32 products a step, 13 fraction bits, ...) are in `f8emu.spec.chips`; this is the algorithm. For
float8 on Hopper, with `e` the largest exponent of a step:

    product     [OP-2]   |----|......|          sig_a * sig_b at 2^(exp_a + exp_b), exact
    aligned     [ACC-3]  e    ...    e-13       bits below 2^(e - 13) are dropped, each term on its own
    sum         [ACC-4]  exact
    accumulator [ACC-5]  1 + 13 significant bits, the rest dropped

On Hopper nothing here rounds to nearest but the float32 additions of [CHAIN-2] and [CHAIN-3].
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

from f8emu.spec.chip import AccumulationModel, FlooredSum, Rounding
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import E8M0FNU, Format
from f8ref.exact.cast import decode, encode, float32, round_to
from f8ref.exact.number import NAN, ZERO, Number, NumberKind, add, exponent_of, finite, infinity, multiply, power_of_two


class Product(NamedTuple):
    """One product as the tensor core sees it [OP-2]."""

    number: Number
    exponent: int
    """The sum of the operands' raw exponents: the product is below `4 * 2^exponent`, and may be far below it."""


def raw_exponent(code: int, format: Format) -> int:
    """[OP-1] The exponent that a code's field names; a subnormal (and zero) has the one of field 1, not normalised."""
    field = (code & format.magnitude_mask) >> format.fraction_bits
    return max(field, 1) - format.bias


def product(a: int, b: int, a_format: Format, b_format: Format) -> Product:
    """[OP-2] The exact product of two codes, with the exponent `exp_a + exp_b`, not normalised."""
    number = multiply(decode(a, a_format), decode(b, b_format))
    return Product(number, raw_exponent(a, a_format) + raw_exponent(b, b_format))


@cache
def _known_products(a_format: Format, b_format: Format) -> Callable[[int, int], Product]:
    """`product` of codes of two formats."""

    @lru_cache(maxsize=1 << 17)  # holds the 65,536 products of two float8 formats
    def known(a: int, b: int) -> Product:
        return product(a, b, a_format, b_format)

    return known


def products_of(
    a: Sequence[int], b: Sequence[int], a_format: Format, b_format: Format, model: AccumulationModel
) -> list[Product]:
    """The products of a row of a and a column of b, in the order in which the model's steps take them.

    [CHIP-1] Where the model converts its operands, they are codes of that format. [CHIP-2] Where it has an order of its
    own, zeros pad K to whole orders: they take no part in anything.
    """
    # 1. [CHIP-1] The conversion, which is exact. 2. [OP-2] The products. 3. [CHIP-2] The order of K.
    if model.operand is not None:
        a, b = _converted(a, a_format, model.operand), _converted(b, b_format, model.operand)
        a_format = b_format = model.operand
    known = _known_products(a_format, b_format)
    products = [known(code_a, code_b) for code_a, code_b in zip(a, b, strict=True)]
    if not model.order:
        return products
    length = len(model.order)
    products += [Product(ZERO, 0)] * (-len(products) % length)
    return [products[start + k] for start in range(0, len(products), length) for k in model.order]


def microscaled(
    products: Sequence[Product], scale_a: Sequence[int], scale_b: Sequence[int], length: int
) -> list[Product]:
    """[MX-2] Each product times the two E8M0 scales of its block: its exponent grows by theirs. Exact.

    `scale_a` and `scale_b` are the bytes of the blocks of `length` along K. [MX-1] Byte 255 makes NaN, of a zero too.
    """
    scaled: list[Product] = []
    for block, part in enumerate(_slices(products, length)):
        factors = decode(scale_a[block], E8M0FNU), decode(scale_b[block], E8M0FNU)
        factor = multiply(*factors)
        exponent = 0 if factor.is_nan else exponent_of(factor.magnitude)
        scaled += [Product(multiply(p.number, factor), p.exponent + exponent) for p in part]
    return scaled


def _converted(codes: Sequence[int], format: Format, into: Format) -> Sequence[int]:
    return codes if into == format else [encode(decode(code, format), into) for code in codes]


def tensor_core_step(accumulator: Number, products: Sequence[Product], model: AccumulationModel) -> Number:
    """One step: the accumulator after at most `model.step_k` products were added to it.

    The accumulator has float32's exponent range. Float8 products, 2^-25 to 2^25, stay far inside it. Those of bfloat16
    may not, and then, as measured on the same H200: below the normal range whole multiples of 2^-149 are kept [ACC-5],
    a subnormal accumulator has the exponent -126 in [ACC-2], and from 2^128 on the accumulator is infinite.
    """
    assert len(products) <= model.step_k, "[ACC-1]"
    # 1. [SPEC-1] What is not finite decides the sum alone.
    special = _special_sum([accumulator, *(p.number for p in products)])
    if special is not None:
        return special
    # 2. [CHIP-6] A chip that floors the products' sum apart from the accumulator.
    if model.floored is not None:
        groups = [products[k :: model.floored.interleaved] for k in range(model.floored.interleaved)]
        return _rounded(_floored_sum(accumulator, groups, model, model.floored), model)
    # 3. [ACC-2] The largest exponent of the terms that are not zero; the accumulator's is its own, as in its format.
    terms = [(p.number, p.exponent) for p in products if not p.number.is_zero]
    if not accumulator.is_zero:
        terms.append((accumulator, _own_exponent(accumulator, model)))
    # [BF16-1], [MX-3] Or a zero takes part, with an exponent of its own: accumulator, product, padding of a short tail.
    if model.zero_exponent is not None and len(terms) < 1 + model.step_k:
        terms.append((ZERO, model.zero_exponent))
    return _rounded(_aligned_sum(terms, model)[0], model)


def _aligned_sum(terms: Sequence[tuple[Number, int]], model: AccumulationModel) -> tuple[Fraction, int | None]:
    """The sum of terms (number, exponent), each cut to the largest exponent's unit, and that exponent."""
    if not terms:
        return Fraction(0), None
    e_max = max(exponent for _, exponent in terms)
    # [ACC-3] Each term becomes an integer count of units, [ACC-4] and integers add exactly.
    unit = power_of_two(e_max - model.aligned_fraction_bits)
    return sum(_cut(term, unit) for term, _ in terms) * unit, e_max


def _floored_sum(
    accumulator: Number, groups: Sequence[Sequence[Product]], model: AccumulationModel, floored: FlooredSum
) -> Fraction:
    """[CHIP-6] Interleaved sums of products, floored to a unit and added; that and the accumulator floored."""
    # 1. Each group is cut to its own largest exponent.
    sums = [_aligned_sum([(p.number, p.exponent) for p in group if not p.number.is_zero], model) for group in groups]
    exponents = [exponent for _, exponent in sums if exponent is not None]
    # 2. The groups' sums are floored to the unit of the largest of these exponents, and added.
    total = Fraction(0)
    if exponents:
        unit = power_of_two(max(exponents) - model.aligned_fraction_bits)
        total = sum(part // unit for part, _ in sums) * unit
    if not accumulator.is_zero:
        exponents.append(_own_exponent(accumulator, model))
    elif model.zero_exponent is not None:
        exponents.append(model.zero_exponent)
    if not exponents:
        return Fraction(0)
    # 3. That sum is floored again, beside the accumulator, whose unit is its own.
    e_max = max(exponents)
    unit = power_of_two(e_max - floored.fraction_bits)
    total = total // unit * unit
    reach = floored.accumulator_reach
    if accumulator.is_zero or (reach is not None and _own_exponent(accumulator, model) < e_max - reach):
        return total
    unit = power_of_two(e_max - floored.accumulator_fraction_bits)
    return total + accumulator.value // unit * unit


def _own_exponent(accumulator: Number, model: AccumulationModel) -> int:
    return max(exponent_of(accumulator.magnitude), model.accumulator.min_exponent)


def _rounded(total: Fraction, model: AccumulationModel) -> Number:
    """[ACC-5] The sum of a step normalised and cut, or [CHIP-4] rounded to nearest even; a zero result is +0."""
    if total == 0:
        return ZERO
    # 1. [CHIP-4] To nearest even. 2. [ACC-5] Or cut: below the smallest normal the last place keeps its weight.
    if model.rounding is Rounding.NEAREST_EVEN:
        nearest = round_to(finite(total), model.accumulator)
        return ZERO if nearest.is_zero else nearest
    exponent = max(exponent_of(abs(total)), model.accumulator.min_exponent)
    if exponent > model.accumulator.max_exponent:
        return infinity(total < 0)
    unit = power_of_two(exponent - model.result_fraction_bits)
    return finite(_cut(finite(total), unit) * unit)


def _cut(number: Number, unit: Fraction) -> int:
    """How many whole units a finite number has: toward zero, because the magnitude is cut."""
    count = number.magnitude // unit
    return -count if number.negative else count


def _special_sum(terms: Sequence[Number]) -> Number | None:
    """[SPEC-1] NaN if a term is (inf * 0 is) or infinities have both signs; else infinity; None without specials."""
    if all(term.kind is NumberKind.FINITE for term in terms):
        return None
    if any(term.is_nan for term in terms):
        return NAN
    signs = {term.negative for term in terms if term.is_infinite}
    if len(signs) == 2:
        return NAN
    return infinity(signs.pop())


def chain(products: Sequence[Product], model: AccumulationModel, start: Number = ZERO) -> Number:
    """[CHAIN-1] One chain of steps, [ACC-1] `step_k` products at a time in the order of K.

    The last step may be shorter: the zeros that pad it take no part in anything.
    """
    accumulator = start
    for step in _slices(products, model.step_k):
        accumulator = tensor_core_step(accumulator, step, model)
    return accumulator


def promote(products: Sequence[Product], model: AccumulationModel, start: Number = ZERO) -> Number:
    """[CHAIN-2] A chain from zero for every `promote_k` products, added to a total, nearest even, in order.

    The total is float32, or the format of the accumulator [CHIP-3].
    """
    assert model.promote_k is not None, model
    total = start
    for block in _slices(products, model.promote_k):
        total = round_to(add(total, chain(block, model)), model.accumulator)
    return total


def accumulate(products: Sequence[Product], model: AccumulationModel, start: Number = ZERO) -> Number:
    """One chain [CHAIN-1], or promoted chains if the model promotes [CHAIN-2]; `start` is the c of an instruction."""
    return chain(products, model, start) if model.promote_k is None else promote(products, model, start)


def accumulate_split(products: Sequence[Product], model: AccumulationModel, split_k: int = 1) -> Number:
    """[CHAIN-3] K in `split_k` slices, accumulated each from zero, and their results added in float32 in order.

    A slice is `ceil(K / split_k)` long, rounded up to `split_k_multiple`; the last is shorter, and where rounding
    up leaves nothing for it, it is zero. [BF16-2] is this with its own multiple.
    """
    total, *others = [accumulate(part, model) for part in k_slices(products, model, split_k)] or [ZERO]
    for result in others:
        total = float32(add(total, result))
    return total


def k_slices(products: Sequence[Product], model: AccumulationModel, split_k: int) -> list[Sequence[Product]]:
    """[CHAIN-3] The slices of K that are not empty, in order; all of K if `split_k` is 1; SpecError if it is below."""
    if split_k < 1:
        raise SpecError(f"k_slices: split_k must be at least 1 (no split); got {split_k}")
    length = -(-len(products) // split_k)
    # One slice is not rounded up: K need not be a multiple.
    if split_k > 1:
        length = -(-length // model.split_k_multiple) * model.split_k_multiple
    return list(_slices(products, max(length, 1)))


def _slices(products: Sequence[Product], length: int) -> Iterator[Sequence[Product]]:
    """Consecutive pieces of that length; the last may be shorter."""
    for start in range(0, len(products), length):
        yield products[start : start + length]
