"""The tensor core rule by rule: dot products small enough to derive by hand, each of which another rule would miss."""

import ml_dtypes
import numpy as np
import pytest

import f8ref.numpy as f8

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
TINY = 2.0**-9
"""The smallest E4M3 value: significand 1 of 8 at the raw exponent -6."""


def vector(values: dict[int, float], k: int, dtype: type) -> np.ndarray:
    """Zeros, but for `values` at their places."""
    x = np.zeros(k, np.float32)
    for place, value in values.items():
        x[place] = value
    result = x.astype(dtype)
    np.testing.assert_array_equal(result.astype(np.float32), x)  # the cases are written in exact values
    return result


def dot(
    a: dict[int, float],
    b: dict[int, float],
    k: int = 32,
    *,
    a_dtype: type = E4M3,
    b_dtype: type = E4M3,
    **options: object,
) -> float:
    one = np.ones(1, np.float32)
    result = f8.scaled_mm(
        vector(a, k, a_dtype)[None],
        vector(b, k, b_dtype)[:, None],
        one,
        one,
        out_dtype="float32",
        **options,  # type: ignore[arg-type]
    )
    return float(result[0, 0])


def dot_bf16(a: dict[int, float], b: dict[int, float], k: int = 16, **options: object) -> float:
    result = f8.mm(vector(a, k, BF16)[None], vector(b, k, BF16)[:, None], out_dtype="float32", **options)  # type: ignore[arg-type]
    return float(result[0, 0])


@pytest.mark.parametrize("fast", [True, False])
class TestStep:
    def test_cut_to_13_bits_below_the_largest(self, fast: bool) -> None:
        """[ACC-3] e_max = 16 (256 * 256), so the unit is 2^3: 15 is cut to 8, and 7.5 to nothing."""
        a, b = {0: 256.0, 1: 15.0, 2: 7.5}, {0: 256.0, 1: 1.0, 2: 1.0}
        assert dot(a, b, use_fast_accum=fast) == 65536 + 8

    def test_every_term_is_cut_before_the_sum(self, fast: bool) -> None:
        """[ACC-4] 31 terms of 7.5 are nothing each, though together 232.5."""
        a = {0: 256.0} | dict.fromkeys(range(1, 32), 7.5)
        b = {0: 256.0} | dict.fromkeys(range(1, 32), 1.0)
        assert dot(a, b, use_fast_accum=fast) == 65536

    def test_toward_zero_on_the_magnitude(self, fast: bool) -> None:
        """[ACC-3] -15 is cut to -8: a floor would give -16."""
        assert dot({0: 256.0, 1: -15.0}, {0: 256.0, 1: 1.0}, use_fast_accum=fast) == 65536 - 8
        assert dot({0: -256.0, 1: 15.0}, {0: 256.0, 1: 1.0}, use_fast_accum=fast) == -65536 + 8

    def test_products_are_not_normalised(self, fast: bool) -> None:
        """[OP-2] 1.75 * 1.75 = 3.0625 has exponent 0, so the unit is 2^-13; normalised it would be 2^-12.

        3.0625 - 3.0625 goes away, and of 1.5 * 2^-12 all 3 units of 2^-13 were kept.
        """
        a = {0: 1.75, 1: -1.75, 2: 1.5 * 2.0**-6}
        b = {0: 1.75, 1: 1.75, 2: 2.0**-6}
        assert dot(a, b, use_fast_accum=fast) == 3 * 2.0**-13

    def test_a_subnormal_keeps_the_raw_exponent(self, fast: bool) -> None:
        """[OP-1] 2^-9 * 256 has exponent -6 + 8 = 2, so the unit is 2^-11; normalised it would be -9 + 8, and 2^-14.

        After the two went away, nothing is left of 1.5 * 2^-12, and one unit of 2.25 * 2^-12.
        """
        b = {0: 256.0, 1: 256.0, 2: 1.5 * 2.0**-6}
        assert dot({0: TINY, 1: -TINY, 2: 2.0**-6}, b, use_fast_accum=fast) == 0
        assert dot({0: TINY, 1: -TINY, 2: 1.5 * 2.0**-6}, b, use_fast_accum=fast) == 2.0**-11

    def test_zero_products_take_no_part(self, fast: bool) -> None:
        """[ACC-2] 448 * 0 would have exponent 8 - 6 and hide 2^-18."""
        assert dot({0: 448.0, 1: TINY}, {0: 0.0, 1: TINY}, use_fast_accum=fast) == 2.0**-18
        assert dot({0: 448.0, 1: TINY}, {0: -0.0, 1: -TINY}, use_fast_accum=fast) == -(2.0**-18)

    def test_the_sum_is_cut_to_14_bits(self, fast: bool) -> None:
        """[ACC-5] Two terms that fill the unit: 65536 + 65536 = 2^17 has unit 2^4, so 8 more are cut from the sum."""
        a, b = {0: 256.0, 1: 256.0, 2: 8.0}, {0: 256.0, 1: 256.0, 2: 1.0}
        assert dot(a, b, use_fast_accum=fast) == 2.0**17
        assert dot({k: -v for k, v in a.items()}, b, use_fast_accum=fast) == -(2.0**17)

    def test_a_sum_of_zero_is_positive(self, fast: bool) -> None:
        """[ACC-5]"""
        for a, b in (({}, {}), ({0: -0.0}, {0: 1.0}), ({0: 1.0, 1: -1.0}, {0: 1.0, 1: 1.0}), ({0: -1.0}, {0: 0.0})):
            result = dot(a, b, use_fast_accum=fast)
            assert result == 0
            assert not np.signbit(result)

    def test_mixed_formats(self, fast: bool) -> None:
        """57344 * 448 = 3.0625 * 2^23, so the unit is 2^10: 1024 is one, 896 * 1.125 = 1008 none.

        The sum keeps multiples of 2^11.
        """
        a = {0: 57344.0, 1: 1024.0, 2: 1024.0, 3: 896.0}
        b = {0: 448.0, 1: 1.0, 2: 1.0, 3: 1.125}
        assert dot(a, b, a_dtype=E5M2, use_fast_accum=fast) == 57344 * 448 + 2048
        assert dot(b, a, b_dtype=E5M2, use_fast_accum=fast) == 57344 * 448 + 2048


class TestChain:
    def test_the_accumulator_is_a_term_of_the_next_step(self) -> None:
        """[ACC-2], [ACC-3] After a step with 65536 the accumulator sets the unit 2^3 of the next: 7.5 is nothing."""
        assert dot({0: 256.0, 32: 7.5}, {0: 256.0, 32: 1.0}, 64) == 65536
        assert dot({0: 7.5, 32: 256.0}, {0: 1.0, 32: 256.0}, 64) == 65536
        assert dot({0: 256.0, 32: 15.0}, {0: 256.0, 32: 1.0}, 64) == 65536 + 8

    def test_the_accumulators_exponent_is_normalised(self) -> None:
        """[ACC-2] 1.75 * 1.75 = 3.0625 has exponent 0 as a product, and 1 as the accumulator of the next step.

        There the unit is 2^-12: of 1.75 * 2^-12 one unit stays when -3.0625 comes; with 2^-13 it would be 3 units.
        """
        a = {0: 1.75, 32: 1.75 * 2.0**-6, 33: -1.75}
        b = {0: 1.75, 32: 2.0**-6, 33: 1.75}
        assert dot(a, b, 64, use_fast_accum=True) == 2.0**-12

    @pytest.mark.parametrize("fast", [True, False])
    def test_a_tail_is_a_step_padded_with_zeros(self, fast: bool) -> None:
        """[ACC-1]"""
        rng = np.random.default_rng(0)
        for k in (1, 31, 33, 100, 127, 129, 300):
            a, b = (rng.normal(size=shape).astype(E4M3) for shape in ((5, k), (k, 7)))
            padded = -(-k // 128) * 128
            a_padded, b_padded = np.zeros((5, padded), E4M3), np.zeros((padded, 7), E4M3)
            a_padded[:, :k], b_padded[:k] = a, b
            one = np.ones(1, np.float32)
            results = [
                f8.scaled_mm(*x, one, one, out_dtype="float32", use_fast_accum=fast)
                for x in ((a, b), (a_padded, b_padded))
            ]
            np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))

    def test_promotion_every_128(self) -> None:
        """[CHAIN-2] 7.5 in the fifth step is lost beside 65536 in one chain; promoted it is added in float32."""
        a, b = {0: 256.0, 128: 7.5}, {0: 256.0, 128: 1.0}
        assert dot(a, b, 256, use_fast_accum=True) == 65536
        assert dot(a, b, 256, use_fast_accum=False) == 65536 + 7.5
        # In the fourth step it is still the same chain.
        a, b = {0: 256.0, 127: 7.5}, {0: 256.0, 127: 1.0}
        assert dot(a, b, 256, use_fast_accum=False) == 65536

    def test_promotion_rounds_to_nearest_even(self) -> None:
        """[CHAIN-2] Beside 2^16 the float32 unit is 2^-7: 2^-8 goes down to even, 3 * 2^-8 goes up to even."""
        a = {0: 256.0, 128: 2.0**-4}
        assert dot(a, {0: 256.0, 128: 2.0**-4}, 256) == 65536
        assert dot(a, {0: 256.0, 128: 3 * 2.0**-4}, 256) == 65536 + 2.0**-6
        assert dot(a, {0: 256.0, 128: 1.125 * 2.0**-4}, 256) == 65536 + 2.0**-7

    def test_promotion_adds_in_order_of_k(self) -> None:
        """[CHAIN-2] 2^16 + 2^-8 (a tie, lost) - 2^16 is 0; in another order 2^-8 stays."""
        a = {0: 256.0, 128: 2.0**-4, 256: -256.0}
        b = {0: 256.0, 128: 2.0**-4, 256: 256.0}
        assert dot(a, b, 384) == 0
        a, b = {0: 256.0, 128: -256.0, 256: 2.0**-4}, {0: 256.0, 128: 256.0, 256: 2.0**-4}
        assert dot(a, b, 384) == 2.0**-8


class TestSplitK:
    def test_a_slice_is_a_chain_from_zero(self) -> None:
        """[CHAIN-3] K = 512 in 2 slices of 256: 7.5 at 256 is in a slice of its own, at 255 it is not."""
        a, b = {0: 256.0, 256: 7.5}, {0: 256.0, 256: 1.0}
        assert dot(a, b, 512, use_fast_accum=True) == 65536
        assert dot(a, b, 512, use_fast_accum=True, split_k=2) == 65536 + 7.5
        a, b = {0: 256.0, 255: 7.5}, {0: 256.0, 255: 1.0}
        assert dot(a, b, 512, use_fast_accum=True, split_k=2) == 65536

    def test_the_slice_length_is_rounded_up_to_128(self) -> None:
        """[CHAIN-3] 400 in 3 is 134, so 256: slices [0, 256), [256, 400), and none for the third."""
        for place, sum in ((134, 65536), (255, 65536), (256, 65536 + 7.5), (300, 65536 + 7.5)):
            assert dot({0: 256.0, place: 7.5}, {0: 256.0, place: 1.0}, 400, use_fast_accum=True, split_k=3) == sum

    def test_slices_are_added_to_nearest_even_in_order(self) -> None:
        """[CHAIN-3] As promotion: 2^16 + 2^-8 - 2^16 is 0 in order, and 3 * 2^-8 goes up to even."""
        a = {0: 256.0, 128: 2.0**-4, 256: -256.0}
        b = {0: 256.0, 128: 2.0**-4, 256: 256.0}
        for fast in (True, False):
            assert dot(a, b, 384, use_fast_accum=fast, split_k=3) == 0
            two = {0: 256.0, 128: 3 * 2.0**-4}
            assert dot({0: 256.0, 128: 2.0**-4}, two, 256, use_fast_accum=fast, split_k=2) == 65536 + 2.0**-6

    def test_without_fast_accumulation_a_slice_promotes_too(self) -> None:
        """[CHAIN-3] Four partials in two slices of two: 2^-8 alone is lost in 2^16, the second slice's 2^-7 is not."""
        a = {0: 256.0, 256: 2.0**-4, 384: 2.0**-4}
        b = {0: 256.0, 256: 2.0**-4, 384: 2.0**-4}
        assert dot(a, b, 512) == 65536
        assert dot(a, b, 512, split_k=2) == 65536 + 2.0**-7

    def test_bfloat16_slices_are_multiples_of_64(self) -> None:
        """[BF16-2] 192 in 2 is 96, so 128: place 127 is still in the first slice.

        1 + 3 * 2^-24 is cut to 1 + 2^-23 in a chain, and rounded up to even, 1 + 2^-22, between slices.
        """
        for place, sum in ((127, 1 + 2.0**-23), (128, 1 + 2.0**-22)):
            assert dot_bf16({0: 1.0, place: 3 * 2.0**-24}, {0: 1.0, place: 1.0}, 192, split_k=2) == sum


class TestBfloat16:
    def test_25_bits_and_a_cut_result(self) -> None:
        """[BF16-1] The unit is 2^-25: 15 terms of it are 3.75 * 2^-23, cut to 3 * 2^-23; terms of 2^-26 are nothing."""
        ones = dict.fromkeys(range(16), 1.0)
        assert dot_bf16({0: 1.0} | dict.fromkeys(range(1, 16), 2.0**-25), ones) == 1 + 3 * 2.0**-23
        assert dot_bf16({0: 1.0} | dict.fromkeys(range(1, 16), 2.0**-26), ones) == 1
        assert dot_bf16({0: -1.0} | dict.fromkeys(range(1, 16), -(2.0**-25)), ones) == -1 - 3 * 2.0**-23

    def test_steps_of_16(self) -> None:
        """[BF16-1] Four terms of 2^-25 make 2^-23 within a step; two and two in two steps make nothing."""
        ones = dict.fromkeys(range(32), 1.0)
        assert dot_bf16({0: 1.0} | dict.fromkeys(range(12, 16), 2.0**-25), ones, 32) == 1 + 2.0**-23
        assert dot_bf16({0: 1.0} | dict.fromkeys(range(14, 18), 2.0**-25), ones, 32) == 1
        assert dot_bf16({0: 1.0} | dict.fromkeys(range(16, 20), 2.0**-25), ones, 32) == 1 + 2.0**-23

    def test_one_chain_without_promotion(self) -> None:
        """[BF16-1] In K = 4096 a 2^-24 every step is cut each time."""
        places = range(16, 4096, 16)
        assert dot_bf16({0: 1.0} | dict.fromkeys(places, 2.0**-24), dict.fromkeys(range(4096), 1.0), 4096) == 1

    def test_float32_range(self) -> None:
        """Subnormal results are kept (cut toward zero to 2^-149), and what is too large is infinity."""
        assert dot_bf16({0: 2.0**-70}, {0: 2.0**-70}) == 2.0**-140
        assert dot_bf16({0: 2.0**-75}, {0: 1.75 * 2.0**-74}) == 2.0**-149
        assert dot_bf16({0: -(2.0**-75)}, {0: 2.0**-75}) == 0
        assert dot_bf16({0: 2.0**-133}, {0: 1.0}) == 2.0**-133
        assert dot_bf16({0: 2.0**127, 1: 2.0**127}, {0: 1.0, 1: 1.0}) == np.inf
        assert dot_bf16({0: 2.0**127, 1: 2.0**127, 2: -(2.0**127)}, {0: 1.0, 1: 1.0, 2: 1.0}) == 2.0**127
        assert dot_bf16({0: 2.0**64}, {0: -(2.0**64)}) == -np.inf


@pytest.mark.parametrize("places", [(0, 1), (0, 40), (130, 3)], ids=["one step", "two steps", "two chains"])
@pytest.mark.parametrize("fast", [True, False])
class TestSpecials:
    """[SPEC-1], wherever the two terms are."""

    def special(self, a: tuple[float, float], b: tuple[float, float], places: tuple[int, int], fast: bool) -> float:
        at = [dict(zip(places, values, strict=True)) for values in (a, b)]
        return dot(at[0], at[1], 256, a_dtype=E5M2, use_fast_accum=fast)

    def test_infinities_win(self, places: tuple[int, int], fast: bool) -> None:
        assert self.special((np.inf, -57344.0), (TINY, 448.0), places, fast) == np.inf
        assert self.special((np.inf, 1.0), (-TINY, 448.0), places, fast) == -np.inf
        assert self.special((np.inf, np.inf), (1.0, 2.0), places, fast) == np.inf
        assert self.special((np.inf, -np.inf), (1.0, -2.0), places, fast) == np.inf

    def test_nan(self, places: tuple[int, int], fast: bool) -> None:
        for a, b in (
            ((np.nan, 1.0), (0.0, 1.0)),
            ((0.0, 1.0), (np.nan, 1.0)),
            ((np.inf, 1.0), (0.0, 1.0)),
            ((np.inf, 1.0), (np.nan, 1.0)),
            ((np.inf, -np.inf), (1.0, 1.0)),
            ((np.inf, np.inf), (1.0, -1.0)),
        ):
            assert np.isnan(self.special(a, b, places, fast))


def test_overflow_then_the_other_infinity() -> None:
    """An infinity that came from overflow is one: with its opposite later it is NaN, with a finite number it stays."""
    ones = dict.fromkeys(range(32), 1.0)
    assert np.isnan(dot_bf16({0: 2.0**127, 1: 2.0**127, 16: -np.inf}, ones, 32))
    assert dot_bf16({0: 2.0**127, 1: 2.0**127, 16: -(2.0**127)}, ones, 32) == np.inf
    assert dot_bf16({0: 2.0**127, 1: 2.0**127, 2: -np.inf}, ones, 32) == -np.inf
