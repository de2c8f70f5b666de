"""The tensor core rule by rule: dot products built by hand, each of which separates a rule from the rules it is not.

A row has the rule's id in `reference/NUMERICS.md`, the reason, the products at their places in K, and their sum. In a
reason `[e]` is a product's raw exponent, the unit of a float8 step is 2^(e_max - 13), and E4M3 x E4M3 is meant where no
format is named. The definition, the oracle and the engine must give the same.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from f8emu.spec import BFLOAT16, E4M3FN, E5M2, HOPPER, Format, Granularity
from f8ref.exact import exponent_of, product, raw_exponent
from tests.oracle.exactly import IMPLEMENTATIONS, codes_of, dtype_of, implementation

INF, NAN = float("inf"), float("nan")
TINY = 2.0**-9
"""The smallest E4M3 value: significand 1 of 8 at the raw exponent -6."""
S, M = 2.0**-4, 2.0**13
BIG = (256.0, 256.0)
"""[16]: the unit beside it is 8."""
E5, E4 = (E5M2, E4M3FN), (E4M3FN, E5M2)
Terms = dict[int, tuple[float, float]]
Row = tuple[str, str, Terms, float, dict[str, Any]]
ONLY_FAST, ONLY_SLOW = {"use_fast_accum": True}, {"use_fast_accum": False}


def at(places: Any, term: tuple[float, float]) -> Terms:
    return dict.fromkeys(places, term)


STEPS: list[Row] = [
    ("OP-1", "TINY * 256 has exponent -6 + 8 [2], unit 2^-11",
        {0: (TINY, 256), 1: (-TINY, 256), 2: (2**-6, 1.5 * 2**-6)}, 0, {}),
    ("OP-1", "normalised it would be 2^-14",
        {0: (TINY, 256), 1: (-TINY, 256), 2: (1.5 * 2**-6, 1.5 * 2**-6)}, 2**-11, {}),
    ("OP-2", "1.75 * 1.75 has exponent 0, not 1",
        {0: (1.75, 1.75), 1: (-1.75, 1.75), 2: (1.5 * 2**-6, 2**-6)}, 3 * 2**-13, {}),
    ("ACC-2", "raw above: 1.5 * 1.5 [0], unit 2^-13", {0: (1.5, 1.5), 1: (-1.5, 1.5), 2: (2**-6, 2**-7)}, 2**-13, {}),
    ("ACC-2", "raw below: 2^-9 [-6], unit 2^-19 cuts 2^-20", {0: (TINY, 1), 1: (TINY, 2**-11)}, TINY, {"formats": E4}),
    ("ACC-2", "of normal codes [-9], and it stays",
        {0: (2**-6, 2**-3), 1: (2**-6, 2**-14)}, TINY + 2**-20, {"formats": E4}),
    ("ACC-2", "0 * 448 [2] takes no part", {0: (0, 448), 1: (2**-6, 2**-6)}, 2**-12, {}),
    ("ACC-2", "nor does -0", {0: (448, -0.0), 1: (TINY, -TINY)}, -(2.0**-18), {}),
    ("ACC-3", "8 is one unit", {0: BIG, 1: (8, 1)}, 65544, {}),
    ("ACC-3", "4 is half a unit, and gone", {0: BIG, 1: (4, 1)}, 65536, {}),
    ("ACC-3", "15 is cut to 8, 7.5 to nothing", {0: BIG, 1: (15, 1), 2: (7.5, 1)}, 65544, {}),
    ("ACC-3", "-12 is cut toward zero, to -8", {0: BIG, 1: (-12, 1)}, 65528, {}),
    ("ACC-3", "and so is 12", {0: BIG, 1: (12, 1)}, 65544, {}),
    ("ACC-3", "and 12 beside a negative", {0: (-256, 256), 1: (12, 1)}, -65528, {}),
    ("ACC-4", "cut before they are added", {0: BIG, 1: (4, 1), 2: (4, 1)}, 65536, {}),
    ("ACC-4", "in any order within the step", {0: (4, 1), 1: (4, 1), 2: BIG}, 65536, {}),
    ("ACC-4", "31 terms of 7.5 are nothing each", {0: BIG} | at(range(1, 32), (7.5, 1)), 65536, {}),
    ("ACC-4", "49 * 2^17, with nothing cut", at(range(32), (448, 448)), 32 * 448 * 448, {}),
    ("ACC-5", "16387 [14]: multiples of 2 stay", {0: (64, 128), 1: (64, 128), 2: (3, 1)}, 16386, {}),
    ("ACC-5", "toward zero, no floor", {0: (-64, 128), 1: (-64, 128), 2: (-3, 1)}, -16386, {}),
    ("ACC-5", "2^17 has unit 16: 8 is cut from the sum", {0: BIG, 1: BIG, 2: (8, 1)}, 2**17, {}),
    ("ACC-5", "129 is kept whole after cancellation", {0: (64, 128), 1: (-112, 72), 2: (1, 1)}, 129, {}),
    ("ACC-5", "a sum of zero is +0", {0: (1, 1), 1: (-1, 1)}, 0, {}),
    ("ACC-5", "of -0 too", {0: (-0.0, 1)}, 0, {}),
    ("ACC-5", "of many", at(range(32), (0, -3)), 0, {}),
    ("ACC-5", "of nothing", {}, 0, {"k": 32}),
    ("ACC-5", "of an accumulator that cancels", {0: (-4, 1), 32: (4, 1)}, 0, {}),
    ("ACC-5", "E5M2: unit 2^10, 1008 is none",
        {0: (57344, 448), 1: (1024, 1), 2: (1024, 1), 3: (896, 1.125)}, 57344 * 448 + 2048, {"formats": E5}),
    ("ACC-5", "on the other side",
        {0: (448, 57344), 1: (1, 1024), 2: (1, 1024), 3: (1.125, 896)}, 57344 * 448 + 2048, {"formats": E4}),
    ("ACC-2", "the accumulator takes part: 7.5 is lost", {0: BIG, 32: (7.5, 1)}, 65536, {}),
    ("ACC-2", "and is cut", {0: (7.5, 1), 32: BIG}, 65536, {}),
    ("ACC-2", "toward zero", {0: (-12, 1), 32: BIG}, 65528, {}),
    ("ACC-2", "2.25 as the accumulator has exponent 1", {0: (1.5, 1.5), 32: (-1.5, 1.5), 33: (2**-6, 2**-7)}, 0, {}),
    ("ACC-2", "unit 2^-12: one of 1.75 stays",
        {0: (1.75, 1.75), 32: (1.75 * 2**-6, 2**-6), 33: (-1.75, 1.75)}, 2**-12, {}),
]  # fmt: skip
SLICES: list[tuple[int, float, float]] = [(255, 65544, 65544), (256, 65544, 65548)]
CHAINS: list[Row] = [
    ("ACC-1", "0.5 in the step of 8192 is below the unit", {0: (64, 128), 1: (-64, 128), 31: (0.5, 1)}, 0, {"k": 64}),
    ("ACC-1", "in the next it is not", {0: (64, 128), 1: (-64, 128), 32: (0.5, 1)}, 0.5, {"k": 64}),
    ("ACC-1", "the order of K matters", {0: (0.5, 1), 32: (64, 128), 33: (-64, 128)}, 0, {"k": 64}),
    *(("CHAIN-1", f"one chain: {k}",
        {0: (64, 128), k: (0.5, 1)}, 8192, {"k": 256, **ONLY_FAST}) for k in (32, 128, 255)),
    *(("CHAIN-2", f"within 128: {k}",
        {0: (64, 128), k: (0.5, 1)}, 8192, {"k": 256, **ONLY_SLOW}) for k in (32, 96, 127)),
    *(("CHAIN-2", f"promoted: {k}",
        {0: (64, 128), k: (0.5, 1)}, 8192.5, {"k": 256, **ONLY_SLOW}) for k in (128, 159, 255)),
    *(("CHAIN-2", f"a tie of 2^24 + {x}",
        at(range(256), BIG) | {256: (x, 1)}, (1 << 24) + y, ONLY_SLOW) for x, y in ((1, 0), (1.5, 2), (3, 4))),
    ("CHAIN-1", "one chain drops it", at(range(256), BIG) | {256: (3, 1)}, 1 << 24, ONLY_FAST),
    ("CHAIN-2", "2^-8 beside 2^16 goes down to even", {0: BIG, 128: (S, S)}, 65536, {"k": 256, **ONLY_SLOW}),
    ("CHAIN-2", "3 * 2^-8 up to even", {0: BIG, 128: (S, 3 * S)}, 65536 + 2**-6, {"k": 256, **ONLY_SLOW}),
    ("CHAIN-2", "above a tie", {0: BIG, 128: (S, 1.125 * S)}, 65536 + 2**-7, {"k": 256, **ONLY_SLOW}),
    ("CHAIN-2", "in order of K", {0: BIG, 128: (S, S), 256: (-256, 256)}, 0, {"k": 384, **ONLY_SLOW}),
    ("CHAIN-2", "at the end it stays", {0: BIG, 128: (-256, 256), 256: (S, S)}, 2**-8, {"k": 384, **ONLY_SLOW}),
    *(("CHAIN-3", f"ceil(320 / 2) is rounded up to 256: {k}",
        {192: BIG, k: (12, 1)}, s, {"k": 320, "split_k": 2}) for k, _, s in SLICES),
    ("CHAIN-3", "unsplit", {192: BIG, 256: (12, 1)}, 65544, {"k": 320, **ONLY_FAST}),
    *(("CHAIN-3", f"400 in 3 is two slices: {k}",
        {0: BIG, k: (7.5, 1)}, s, {"k": 400, "split_k": 3, **ONLY_FAST})
        for k, s in ((134, 65536), (255, 65536), (256, 65543.5), (300, 65543.5))),
    ("CHAIN-3", "added in order, nearest even",
        at(range(256), BIG) | {256: (3, 1)} | at(range(512, 768), (-256, 256)), 4, {"split_k": 3, **ONLY_FAST}),
    ("CHAIN-3", "one chain leaves 0",
        at(range(256), BIG) | {256: (3, 1)} | at(range(512, 768), (-256, 256)), 0, ONLY_FAST),
    ("CHAIN-3", "a tie between slices", {0: BIG, 128: (S, S), 256: (-256, 256)}, 0, {"k": 384, "split_k": 3}),
    ("CHAIN-3", "up to even", {0: BIG, 128: (S, 3 * S)}, 65536 + 2**-6, {"k": 256, "split_k": 2}),
    ("CHAIN-3", "more slices than blocks: 128, 2 and 0", {0: (64, 128), 129: (0.5, 1)}, 8192.5, {"split_k": 3}),
    ("CHAIN-3", "of nothing", {}, 0, {"k": 128, "split_k": 3}),
    ("CHAIN-3", "promoted partials", {0: BIG, 256: (S, S), 384: (S, S)}, 65536, {"k": 512, **ONLY_SLOW}),
    ("CHAIN-3", "a slice promotes too",
        {0: BIG, 256: (S, S), 384: (S, S)}, 65536 + 2**-7, {"k": 512, "split_k": 2, **ONLY_SLOW}),
]  # fmt: skip
BFLOAT16S: list[Row] = [
    ("BF16-1", "2^26, unit 2: 3 is cut to 2", {0: (M, M), 1: (-M, M), 2: (3, 1)}, 2, {"k": 16}),
    ("BF16-1", "2^25, unit 1: 3 stays", {0: (M, M / 2), 1: (-M, M / 2), 2: (3, 1)}, 3, {"k": 16}),
    ("BF16-1", "2^24 + 3 is cut to 24 bits", {0: (4096, 4096), 1: (3, 1)}, (1 << 24) + 2, {"k": 16}),
    ("BF16-1", "toward zero", {0: (-4096, 4096), 1: (-3, 1)}, -(1 << 24) - 2, {"k": 16}),
    ("BF16-1", "15 units of 2^-25 are 3.75 * 2^-23", {0: (1, 1)} | at(range(1, 16), (2**-25, 1)), 1 + 3 * 2**-23, {}),
    ("BF16-1", "terms of 2^-26 are nothing", {0: (1, 1)} | at(range(1, 16), (2**-26, 1)), 1, {}),
    ("BF16-1", "four terms of 2^-25 within a step",
        {0: (1, 1)} | at(range(12, 16), (2**-25, 1)), 1 + 2**-23, {"k": 32}),
    ("BF16-1", "two and two in two steps of 16", {0: (1, 1)} | at(range(14, 18), (2**-25, 1)), 1, {"k": 32}),
    ("BF16-1", "at k = 16 the 1 has a step of its own",
        {0: (4 * M, 4 * M), 1: (-4 * M, 4 * M), 16: (1, 1)}, 1, {"k": 32}),
    ("BF16-1", "at k = 15 it has not", {0: (4 * M, 4 * M), 1: (-4 * M, 4 * M), 15: (1, 1)}, 0, {"k": 32}),
    *(("BF16-1", f"no promotion: {k}",
        {0: (M, M), k: (12, 1)}, (1 << 26) + 8, {"k": 512}) for k in (16, 127, 128, 500)),
    ("BF16-1", "2^-24 is cut in each step", {0: (1, 1)} | at(range(16, 4096, 16), (2**-24, 1)), 1, {}),
    *(("BF16-2", f"ceil(160 / 2) is rounded up to 128: {k}",
        {0: (M, M), k: (12, 1)}, (1 << 26) + s, {"k": 160, "split_k": 2}) for k, s in ((80, 8), (127, 8), (128, 16))),
    *(("BF16-2", f"192 in 2: {k}",
        {0: (1, 1), k: (3 * 2**-24, 1)}, 1 + s, {"k": 192, "split_k": 2}) for k, s in ((127, 2**-23), (128, 2**-22))),
    ("BF16-1", "a zero is [-133]: 2^-159 is nothing", {0: (2**-70, 2**-70), 1: (-(2**-80), 2**-79)}, 2**-140, {}),
    ("BF16-1", "2^-158 is a unit", {0: (2**-70, 2**-70), 1: (-(2**-79), 2**-79)}, 2**-140 - 2**-149, {}),
    ("BF16-1", "[-134] is below", {0: (2**-67, 2**-67), 1: (-(2**-80), 2**-79)}, 2**-134, {}),
    ("BF16-1", "[-133] is the same", {0: (2**-67, 2**-66), 1: (-(2**-79), 2**-79)}, 2**-133 - 2**-149, {}),
    ("BF16-1", "[-132] is above", {0: (2**-66, 2**-66), 1: (-(2**-79), 2**-79)}, 2**-132, {}),
    ("BF16-1", "a number is [-126]: 2^-152 is nothing",
        {0: (2**-70, 2**-70), 16: (-(2**-76), 2**-76)}, 2**-140, {}),
    ("BF16-1", "2^-151 is a unit", {0: (2**-70, 2**-70), 16: (-(2**-76), 2**-75)}, 2**-140 - 2**-149, {}),
    ("ACC-5", "2^-150 is cut to 0", {0: (2**-75, 2**-75)}, 0, {}),
    ("ACC-5", "3 * 2^-150 to 2^-149", {0: (3 * 2**-75, 2**-75)}, 2**-149, {}),
    ("ACC-5", "subnormals stay", {0: (2**-70, 2**-70)}, 2**-140, {}),
    ("ACC-5", "of one operand too", {0: (2**-133, 1)}, 2**-133, {}),
    ("ACC-5", "too large is infinity", {0: (2.0**127, 1), 1: (2.0**127, 1)}, INF, {}),
    ("ACC-5", "of a product", {0: (2.0**64, -(2.0**64))}, -INF, {}),
    ("ACC-5", "the sum of a step is exact", {0: (2.0**127, 1), 1: (2.0**127, 1), 2: (-(2.0**127), 1)}, 2.0**127, {}),
    ("SPEC-1", "infinity by overflow, and the other one", {0: (2.0**127, 1), 1: (2.0**127, 1), 16: (-INF, 1)}, NAN, {}),
    ("SPEC-1", "it stays beside numbers", {0: (2.0**127, 1), 1: (2.0**127, 1), 16: (-(2.0**127), 1)}, INF, {}),
    ("SPEC-1", "in one step infinity wins", {0: (2.0**127, 1), 1: (2.0**127, 1), 2: (-INF, 1)}, -INF, {}),
]  # fmt: skip
SPECIALS: list[tuple[list[tuple[float, float]], float]] = [
    ([(1, NAN)], NAN),
    ([(NAN, 0), (1, 1)], NAN),
    ([(INF, 0)], NAN),
    ([(INF, -0.0), (1, 1)], NAN),
    ([(INF, 1), (1, NAN)], NAN),
    ([(INF, 1), (INF, -1)], NAN),
    ([(INF, 1), (-INF, 1)], NAN),
    ([(INF, 1), (INF, 2)], INF),
    ([(INF, 1), (-INF, -2)], INF),
    ([(INF, TINY), (-57344, 448)], INF),
    ([(INF, -1), (448, 448)], -INF),
]


def dot(backend: str, terms: Terms, k: int, formats: tuple[Format, Format], **options: Any) -> np.ndarray:
    """[1, 1] float32; rowwise scales of 1 keep the sign of a zero."""
    k = max([k, *(place + 1 for place in terms)])
    operands: list[np.ndarray] = []
    for side, format in enumerate(formats):
        x = np.zeros(k, np.float32)
        for place, term in terms.items():
            x[place] = term[side]
        operands.append(x.astype(dtype_of(format)))
        np.testing.assert_array_equal(operands[-1].astype(np.float32), x)  # the rows are written in exact values
    a, b = operands[0][None], operands[1][:, None]
    f8 = implementation(backend)
    if formats[0] is BFLOAT16:
        return f8.mm(a, b, out_dtype="float32", **options)
    unit, rows = np.ones((1, 1), np.float32), Granularity.ROWWISE
    return f8.scaled_mm(a, b, unit, unit, granularity_a=rows, granularity_b=rows, out_dtype="float32", **options)


def expected_code(sum: float) -> int:
    return 0x7FFFFFFF if sum != sum else int(codes_of(np.float32(sum)))


BACKENDS = pytest.mark.parametrize("backend", IMPLEMENTATIONS)


@BACKENDS
@pytest.mark.parametrize("row", [*STEPS, *CHAINS, *BFLOAT16S], ids=lambda row: f"{row[0]}: {row[1]}")
def test_rule(row: Row, backend: str) -> None:
    _, _, terms, sum, given = row
    default = (BFLOAT16, BFLOAT16) if row in BFLOAT16S else (E4M3FN, E4M3FN)
    options: dict[str, Any] = {"k": 0, "formats": default, **given}
    is_open = default[0] is not BFLOAT16 and "use_fast_accum" not in options
    manners: list[dict[str, Any]] = [ONLY_FAST, ONLY_SLOW] if is_open else [{}]
    for more in manners:
        observed = dot(backend, terms, **(options | more))
        assert hex(codes_of(observed).item()) == hex(expected_code(sum)), (observed, more)


@BACKENDS
@pytest.mark.parametrize(("pairs", "sum"), SPECIALS, ids=str)
@pytest.mark.parametrize("far", [1, 32, 128], ids=["same step", "next step", "next 128"])
def test_spec_1(pairs: list[tuple[float, float]], sum: float, far: int, backend: str) -> None:
    """[SPEC-1] E5M2 x E4M3, the special terms in one step, in neighbouring steps, in neighbouring partials."""
    terms = at(range(len(pairs) * far), (1.0, 0.5)) | {i * far: pair for i, pair in enumerate(pairs)}
    for fast in (True, False):
        for split_k in (1, 2):
            observed = dot(backend, terms, 0, E5, use_fast_accum=fast, split_k=split_k)
            assert hex(codes_of(observed).item()) == hex(expected_code(sum))


@BACKENDS
def test_acc_4_order_within_a_step(backend: str) -> None:
    pairs: list[Any] = [BIG, (-12, 1), (96, 104), (0.5, 3), (-240, 26), (8, 1), (TINY, 448)]
    turned = [dict(enumerate(pairs[turn:] + pairs[:turn])) for turn in range(len(pairs))]
    assert len({dot(backend, terms, 32, (E4M3FN, E4M3FN)).item() for terms in turned}) == 1


@BACKENDS
@pytest.mark.parametrize("length", [1, 2, 31, 33, 100, 129])
def test_acc_1_tail_is_as_if_padded(length: int, backend: str) -> None:
    terms: Terms = {k: ((-1.0) ** k * (1 + k % 8 / 8), 2.0 ** (k % 11 - 5)) for k in range(length)}
    for fast in (True, False):
        sums = [dot(backend, terms, k, (E4M3FN, E4M3FN), use_fast_accum=fast) for k in (0, length + -length % 32)]
        assert codes_of(sums[0]) == codes_of(sums[1])


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
    """[OP-2] 1.875 * 1.875 = 3.515625 keeps exponent 0 + 0; 2^-9 * 2^-16 = 2^-25 keeps -6 + -14.

    Float8 products are in [2^-25, 2^25), so a unit is never below 2^-33.
    """
    large = product(0x3F, 0xBF, E4M3FN, E4M3FN)
    assert (large.number.value, large.exponent) == (Fraction(-225, 64), 0)
    small, largest = product(0x01, 0x01, E4M3FN, E5M2), product(0x7E, 0x7B, E4M3FN, E5M2)
    assert (small.number.value, small.exponent) == (Fraction(1, 1 << 25), -20)
    assert product(0x01, 0x01, E5M2, E4M3FN) == small
    assert exponent_of(largest.number.magnitude) == 24
    assert small.exponent - HOPPER.float8.aligned_fraction_bits == -33
