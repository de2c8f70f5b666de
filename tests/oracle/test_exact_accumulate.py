"""f8ref.exact.accumulate: dot products built by hand, each of which separates a rule from the rules it is not.

In the derivations `[e]` is a product's raw exponent, the unit of a float8 step is 2^(e_max - 13), and E4M3 x E4M3 is
meant where no format is named.
"""

from collections.abc import Sequence
from fractions import Fraction

import pytest

from f8emu.spec import BFLOAT16, E4M3FN, E5M2, HOPPER, AccumulationModel, Format
from f8ref.exact import (
    NAN,
    ZERO,
    Number,
    Product,
    accumulate,
    accumulate_split,
    chain,
    encode,
    exponent_of,
    finite,
    infinity,
    product,
    raw_exponent,
    round_to,
    tensor_core_step,
)

FAST, SLOW = HOPPER.float8_fast, HOPPER.float8
INF = infinity()
Pair = tuple[float | Number, float | Number]


def code(value: float | Number, format: Format) -> int:
    """The code of a value that the format holds exactly."""
    number = value if isinstance(value, Number) else finite(Fraction(value))
    assert round_to(number, format) == number, value
    return encode(number, format)


def products(pairs: Sequence[Pair], a_format: Format = E4M3FN, b_format: Format = E4M3FN) -> list[Product]:
    return [product(code(a, a_format), code(b, b_format), a_format, b_format) for a, b in pairs]


def at(positions: dict[int, Pair], length: int, format: Format = E4M3FN) -> list[Product]:
    """Products that are zero but at some positions of K."""
    return products([positions.get(k, (0.0, 0.0)) for k in range(length)], format, format)


def step(pairs: Sequence[Pair], accumulator: float = 0.0, model: AccumulationModel = FAST) -> Fraction:
    """One step; the value of the new accumulator."""
    return tensor_core_step(finite(Fraction(accumulator)), products(pairs), model).value


# ---- operands and products


@pytest.mark.parametrize(
    ("format", "codes", "exponent"),
    [
        (E4M3FN, (0x00, 0x80, 0x01, 0x07, 0x08, 0x0F), -6),  # zeros and subnormals share the smallest normal's
        (E4M3FN, (0x38, 0x3F, 0xB8), 0),
        (E4M3FN, (0x78, 0x7E), 8),
        (E5M2, (0x00, 0x01, 0x03, 0x04, 0x07), -14),
        (E5M2, (0x3C, 0x3F), 0),
        (E5M2, (0x78, 0x7B), 15),
        (BFLOAT16, (0x0000, 0x0001, 0x007F, 0x0080), -126),
    ],
)
def test_op_1_raw_exponent(format: Format, codes: tuple[int, ...], exponent: int) -> None:
    """[OP-1] The exponent is what the field says; a subnormal is not normalised."""
    assert [raw_exponent(c, format) for c in codes] == [exponent] * len(codes)


def test_op_2_product_is_exact_and_not_normalised() -> None:
    """[OP-2] 1.875 * 1.875 = 3.515625 keeps exponent 0 + 0; 2^-9 * 2^-16 = 2^-25 keeps -6 + -14."""
    large = product(0x3F, 0xBF, E4M3FN, E4M3FN)
    assert (large.number.value, large.exponent) == (Fraction(-225, 64), 0)
    small = product(0x01, 0x01, E4M3FN, E5M2)
    assert (small.number.value, small.exponent) == (Fraction(1, 1 << 25), -20)
    assert product(0x01, 0x01, E5M2, E4M3FN) == small


# ---- one step


def test_acc_3_terms_lose_what_is_below_the_unit() -> None:
    """[ACC-3] 256 * 256 = 2^16 [16], unit 2^3. 8 is one unit; 4 is half a unit, and gone.

    The terms are cut before they are added: two 4 are 0, not one unit.
    """
    assert step([(256, 256), (8, 1)]) == 65544
    assert step([(256, 256), (4, 1)]) == 65536
    assert step([(256, 256), (4, 1), (4, 1)]) == 65536
    assert step([(4, 1), (4, 1), (256, 256)]) == 65536  # in any order within the step


def test_acc_3_cuts_toward_zero_on_the_magnitude() -> None:
    """[ACC-3] 2^16 and -12, unit 8: -12 is -1.5 units, cut to -1. Floor would give -2 (65520), so would nearest even.

    And nearest even would make +12 two units (65552).
    """
    assert step([(256, 256), (-12, 1)]) == 65528
    assert step([(256, 256), (12, 1)]) == 65544
    assert step([(-256, 256), (12, 1)]) == -65528


def test_acc_2_product_exponent_is_raw_above() -> None:
    """[ACC-2] 1.5 * 1.5 = 2.25 [0], unit 2^-13: 2.25 - 2.25 + 2^-13 = 2^-13.

    With the normalised exponent 1 the unit would be 2^-12 and the sum 0.
    """
    assert step([(1.5, 1.5), (-1.5, 1.5), (2**-6, 2**-7)]) == Fraction(1, 1 << 13)


def test_acc_2_product_exponent_is_raw_below() -> None:
    """[ACC-2] E4M3 x E5M2: 2^-9 * 1 [-6 + 0 = -6], unit 2^-19; 2^-9 * 2^-11 = 2^-20 is cut to 0.

    Normalised, the first product has exponent -9, the unit 2^-22, and the sum would be 2^-9 + 2^-20.
    """
    terms = products([(2**-9, 1), (2**-9, 2**-11)], E4M3FN, E5M2)
    assert tensor_core_step(ZERO, terms, FAST).value == Fraction(1, 1 << 9)
    # The same values from normal codes: 2^-6 * 2^-3 [-9], and now the small one stays.
    terms = products([(2**-6, 2**-3), (2**-6, 2**-14)], E4M3FN, E5M2)
    assert tensor_core_step(ZERO, terms, FAST).value == Fraction(1, 1 << 9) + Fraction(1, 1 << 20)


def test_acc_2_zero_products_take_no_part() -> None:
    """[OP-2], [ACC-2] 0 * 448 would have exponent -6 + 8 = 2 and unit 2^-11, which would drop 2^-6 * 2^-6 = 2^-12."""
    assert step([(0, 448), (2**-6, 2**-6)]) == Fraction(1, 1 << 12)
    assert step([(-0.0, 448), (448, 0)]) == 0


def test_acc_2_accumulator_takes_part() -> None:
    """[ACC-2] Accumulator 2^16 and product 4: unit 8, the product is lost. The other way round the accumulator is."""
    assert step([(4, 1)], accumulator=65536) == 65536
    assert step([(256, 256)], accumulator=4) == 65536
    assert step([(256, 256)], accumulator=-12) == 65528  # and is cut toward zero as any term


def test_acc_2_accumulator_exponent_is_normalised() -> None:
    """[ACC-2] 2.25 as a product has exponent 0, as the accumulator 1: unit 2^-12, so 2.25 - 2.25 + 2^-13 = 0 now."""
    after_first = step([(1.5, 1.5)])
    assert step([(-1.5, 1.5), (2**-6, 2**-7)], accumulator=float(after_first)) == 0


def test_acc_4_sum_is_exact_in_any_order() -> None:
    """[ACC-4] 32 products of 448 * 448 = 200704 [16] make 49 * 2^17, with nothing cut; permutations change nothing."""
    assert step([(448, 448)] * 32) == 32 * 448 * 448
    pairs: list[Pair] = [(256, 256), (-12, 1), (96, 104), (0.5, 3), (-240, 26), (8, 1), (2**-9, 448)]
    expected = step(pairs)
    for turn in range(len(pairs)):
        assert step(pairs[turn:] + pairs[:turn]) == expected


def test_acc_5_sum_is_cut_toward_zero() -> None:
    """[ACC-5] 8192 + 8192 + 3, all units of 1 (e_max 13). The sum 16387 has exponent 14: multiples of 2 stay, 16386.

    Nearest even would give 16388, and floor -16388 for the negative sum.
    """
    pairs: list[Pair] = [(64, 128), (64, 128), (3, 1)]
    assert step(pairs) == 16386
    assert step([(-a, b) for a, b in pairs if isinstance(a, (int, float))]) == -16386


def test_acc_5_keeps_14_significant_bits_whatever_was_cancelled() -> None:
    """[ACC-5] After cancellation the sum may be far below e_max: it is normalised, nothing more is lost.

    64 * 128 = 8192 [13], unit 1; -112 * 72 = -8064 [12]; 1: the sum 129 is kept whole.
    """
    assert step([(64, 128), (-112, 72), (1, 1)]) == 129


def test_acc_5_zero_is_positive() -> None:
    """[ACC-5] A sum of zero is +0: from cancellation, from negative zeros, from terms cut to nothing."""
    for pairs in ([(1.0, 1.0), (-1.0, 1.0)], [(-0.0, 1.0)], [(0.0, -3.0)] * 32):
        result = tensor_core_step(ZERO, products(list(pairs)), FAST)
        assert result == ZERO
    assert tensor_core_step(finite(-4), products([(4, 1)]), FAST) == ZERO
    assert chain([], FAST) == ZERO


# ---- chains


def test_acc_1_steps_are_32_long() -> None:
    """[ACC-1] 8192, -8192 and 0.5 in one step: 0.5 is below the unit 1. At k = 32 it has a step of its own."""
    for k, value in ((31, 0), (32, Fraction(1, 2))):
        pairs = at({0: (64, 128), 1: (-64, 128), k: (0.5, 1)}, 64)
        assert chain(pairs, FAST).value == value
        assert chain(pairs, SLOW).value == value


def test_acc_1_order_of_k_matters() -> None:
    """[ACC-1] 0.5 first, then 8192 - 8192 in the next step: as the accumulator, 0.5 is cut to 0."""
    assert chain(at({0: (0.5, 1), 32: (64, 128), 33: (-64, 128)}, 64), FAST) == ZERO
    assert chain(at({0: (64, 128), 1: (-64, 128), 32: (0.5, 1)}, 64), FAST).value == Fraction(1, 2)


@pytest.mark.parametrize("length", [1, 2, 31, 33, 100, 129])
def test_acc_1_tail_is_as_if_padded(length: int) -> None:
    """[ACC-1] A tail shorter than a step equals the same tail with zeros behind it."""
    pairs: list[Pair] = [((-1.0) ** k * (1 + k % 8 / 8), 2.0 ** (k % 11 - 5)) for k in range(length)]
    padded = pairs + [(0.0, 0.0)] * (-length % 32)
    for model in (FAST, SLOW):
        assert accumulate(products(pairs), model) == accumulate(products(padded), model)


def test_chain_1_and_2_promotion_every_128() -> None:
    """[CHAIN-2] 8192 at k = 0, 0.5 later: within the same 128 it is below the unit; from k = 128 on it is a partial of
    its own, and float32 holds 8192.5. [CHAIN-1] drops it wherever it is.
    """
    for k in (32, 96, 127, 128, 159, 255):
        pairs = at({0: (64, 128), k: (0.5, 1)}, 256)
        assert accumulate(pairs, FAST).value == 8192
        assert accumulate(pairs, SLOW).value == (8192 if k < 128 else Fraction(16385, 2))


def test_chain_2_total_rounds_to_nearest_even() -> None:
    """[CHAIN-2] Two blocks of 128 * 2^16 make 2^24, where float32 has a spacing of 2: + 1 is a tie to + 0, + 3 to + 4.

    Truncation would make + 3 a + 2; one chain (unit 2^11 at the end) drops all of them.
    """
    big: list[Pair] = [(256, 256)] * 256
    for third, total in ((1.0, 1 << 24), (1.5, (1 << 24) + 2), (3.0, (1 << 24) + 4)):
        pairs = products([*big, (third, 1)])
        assert accumulate(pairs, SLOW).value == total
        assert accumulate(pairs, FAST).value == 1 << 24


def test_chain_2_totals_in_order_of_k() -> None:
    """[CHAIN-2] 2^24 + 1 - 2^24: the 1 is a tie to even and lost; it stays where it comes last."""
    big: list[Pair] = [(256, 256)] * 256
    negative: list[Pair] = [(-256, 256)] * 256
    one: list[Pair] = [(1.0, 1.0), *[(0.0, 0.0)] * 127]
    assert accumulate(products(big + one + negative), SLOW) == ZERO
    assert accumulate(products(big + negative + one), SLOW).value == 1


@pytest.mark.parametrize("model", [FAST, SLOW], ids=["fast", "slow"])
def test_chain_3_slices(model: AccumulationModel) -> None:
    """[CHAIN-3] K = 320 in 2: ceil(320 / 2) = 160, rounded up to 256. 2^16 at k = 192 and 12 at k.

    k = 255 is in the chain of 2^16 (unit 8: 12 is cut to 8); k = 256 is another slice, and float32 adds 12.
    """
    for k, value in ((255, 65544), (256, 65548)):
        pairs = at({192: (256, 256), k: (12, 1)}, 320)
        assert accumulate_split(pairs, model, 2).value == value
    fast_unsplit = accumulate_split(at({192: (256, 256), 256: (12, 1)}, 320), FAST, 1)
    assert fast_unsplit.value == 65544


def test_chain_3_slices_are_added_in_order_with_nearest_even() -> None:
    """[CHAIN-3] 3 slices of 256: 2^24, 3, -2^24. Nearest even: 2^24 + 4, then 4. One chain would leave 0."""
    big: list[Pair] = [(256, 256)] * 256
    three: list[Pair] = [(3.0, 1.0), *[(0.0, 0.0)] * 255]
    negative: list[Pair] = [(-256, 256)] * 256
    pairs = products(big + three + negative)
    assert accumulate_split(pairs, FAST, 3).value == 4
    assert accumulate_split(pairs, FAST, 1) == ZERO


def test_chain_3_more_slices_than_blocks() -> None:
    """[CHAIN-3] K = 130 in 3: slices of 128, 2 and 0."""
    pairs = at({0: (64, 128), 129: (0.5, 1)}, 130)
    assert accumulate_split(pairs, FAST, 3).value == Fraction(16385, 2)
    assert accumulate_split([], FAST, 3) == ZERO


# ---- specials


@pytest.mark.parametrize(
    ("pairs", "result"),
    [
        ([(1.0, NAN)], NAN),
        ([(INF, 0.0)], NAN),
        ([(INF, -0.0), (1.0, 1.0)], NAN),
        ([(INF, 1.0), (INF, -1.0)], NAN),
        ([(INF, 2.0**-9), (-1.0, 448.0)], INF),
        ([(INF, -1.0), (448.0, 448.0)], infinity(negative=True)),
        ([(INF, 1.0), (INF, 2.0)], INF),
        ([(INF, 1.0), (1.0, NAN)], NAN),
    ],
)
@pytest.mark.parametrize("far", [1, 32, 128], ids=["same step", "next step", "next 128"])
def test_spec_1(pairs: list[Pair], result: Number, far: int) -> None:
    """[SPEC-1] E5M2 x E4M3, the special terms in one step, in neighbouring steps, in neighbouring partials."""
    spread: list[Pair] = []
    for pair in pairs:
        spread += [pair] + [(1.0, 0.5)] * (far - 1)
    for model in (FAST, SLOW):
        assert accumulate(products(spread, E5M2, E4M3FN), model) == result
        assert accumulate_split(products(spread, E5M2, E4M3FN), model, 2) == result


# ---- bfloat16


def bf16(positions: dict[int, Pair], length: int) -> Number:
    return accumulate(at(positions, length, BFLOAT16), HOPPER.bfloat16)


def test_bf16_1_alignment_keeps_25_fraction_bits() -> None:
    """[BF16-1] 2^26 [26], unit 2: 2^26 - 2^26 + 3 = 2. With 2^25 the unit is 1 and 3 stays."""
    assert bf16({0: (2.0**13, 2.0**13), 1: (-(2.0**13), 2.0**13), 2: (3, 1)}, 16).value == 2
    assert bf16({0: (2.0**13, 2.0**12), 1: (-(2.0**13), 2.0**12), 2: (3, 1)}, 16).value == 3


def test_bf16_1_result_is_cut_to_float32() -> None:
    """[BF16-1] 2^24 + 3: exact in the sum (unit 1/2), cut to 24 significant bits: 2^24 + 2. Nearest even is + 4."""
    assert bf16({0: (2.0**12, 2.0**12), 1: (3, 1)}, 16).value == (1 << 24) + 2
    assert bf16({0: (-(2.0**12), 2.0**12), 1: (-3, 1)}, 16).value == -(1 << 24) - 2


def test_bf16_1_steps_are_16_long() -> None:
    """[BF16-1] 2^30 - 2^30 + 1: unit 2^5 drops the 1 up to k = 15; at k = 16 it has its own step."""
    for k, value in ((15, 0), (16, 1)):
        assert bf16({0: (2.0**15, 2.0**15), 1: (-(2.0**15), 2.0**15), k: (1, 1)}, 32).value == value


def test_bf16_1_is_one_chain() -> None:
    """[BF16-1] No promotion: 2^26 at k = 0 and 12 anywhere after: 2^26 + 12 is cut to + 8, never rounded to + 16."""
    for k in (16, 127, 128, 500):
        assert bf16({0: (2.0**13, 2.0**13), k: (12, 1)}, 512).value == (1 << 26) + 8


def test_bf16_2_slices_are_multiples_of_64() -> None:
    """[BF16-2] K = 160 in 2: ceil(160 / 2) = 80, rounded up to 128. 2^26 at k = 0, 12 at k.

    k = 127: the chain cuts to + 8. k = 128: another slice, float32 rounds 12 / 8 = 1.5 to 2: + 16.
    """
    for k, value in ((80, 8), (127, 8), (128, 16)):
        pairs = at({0: (2.0**13, 2.0**13), k: (12, 1)}, 160, BFLOAT16)
        assert accumulate_split(pairs, HOPPER.bfloat16, 2).value == (1 << 26) + value


def test_bf16_results_below_the_normal_range() -> None:
    """[ACC-5] 2^-75 * 2^-75 = 2^-150 is cut to 0; 3 * 2^-150 to 2^-149, a float32 subnormal."""
    assert bf16({0: (2.0**-75, 2.0**-75)}, 16) == ZERO
    assert bf16({0: (3 * 2.0**-75, 2.0**-75)}, 16).value == Fraction(1, 1 << 149)


def test_exponents_of_the_narrative() -> None:
    """The module's own claim: float8 products are in [2^-25, 2^25), so a unit is never below 2^-33."""
    smallest, largest = product(0x01, 0x01, E4M3FN, E5M2), product(0x7E, 0x7B, E4M3FN, E5M2)
    assert exponent_of(smallest.number.magnitude) == -25
    assert exponent_of(largest.number.magnitude) == 24
    assert smallest.exponent - SLOW.aligned_fraction_bits == -33
