"""The comparison: bits, NaN as NaN, -0 apart; and the lines that it prints."""

import ml_dtypes
import numpy as np
import pytest

from f8emu.conformance.compare import abbreviated, different, mismatches, shape_fault
from f8emu.conformance.run.check import Case, answer, run_case
from f8emu.conformance.run.subject import NotOffered, Subject
from tests.conformance.command import raising


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def f64(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
NOBODY = Subject(name="nobody", engine="none", verbs={})


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_nan_and_zeros_differ(dtype: type) -> None:
    nan, zero, one = (np.array([x], dtype) for x in (np.nan, 0.0, 1.0))
    other_nan = (nan.view(f"u{nan.itemsize}") | (1 << (8 * nan.itemsize - 1))).view(dtype)
    assert nan.tobytes() != other_nan.tobytes()
    assert not different(nan, other_nan).any()
    assert different(zero, -zero).all()
    assert different(nan, one).all() and different(one, nan).all()
    assert not different(one, one).any()


def test_every_code_differs_from_every_other_but_nan() -> None:
    for dtype, nans in ((ml_dtypes.float8_e4m3fn, 2), (ml_dtypes.float8_e5m2, 6)):
        codes = np.arange(256, dtype=np.uint8).view(dtype)
        equal = ~different(codes[:, None].repeat(256, 1), codes[None].repeat(256, 0))
        assert equal.sum() == 256 - nans + nans**2


def test_line() -> None:
    observed, expected = f32(1.0, 0.0).reshape(1, 2), f32(1.0, -0.0).reshape(1, 2)
    (mismatch,) = mismatches("case 7", "output.product", observed, expected, lambda index: f"a[{index[0]}]=0x38")
    assert mismatch.index == (0, 1)
    assert mismatch.line() == "case 7: output.product [0, 1] a[0]=0x38 => 0x00000000 (0)  expected: 0x80000000 (-0)"


def test_line_of_codes_and_of_flags() -> None:
    (line,) = (m.line() for m in mismatches("c", "", u8(0x7E).view("u1"), u8(0x7F)))
    assert line == "c [0] => 126  expected: 127"
    e4m3 = ml_dtypes.float8_e4m3fn
    (line,) = (m.line() for m in mismatches("c", "", np.array([448.0], e4m3), np.array([np.nan], e4m3)))
    assert line == "c [0] => 0x7e (448)  expected: 0x7f (nan)"
    (line,) = (m.line() for m in mismatches("c", "", np.array(True), np.array(False)))
    assert line == "c => True  expected: False"


def test_vectors_are_abbreviated() -> None:
    x = np.arange(300, dtype=np.uint16)
    assert abbreviated(x, "a", shown=2) == "a=<0000 0001 .. 012b>(300)"
    assert abbreviated(x[:2], "a") == "a=<0000 0001>(2)"
    assert abbreviated(x[7:8], "s") == "s=0x0007"
    assert abbreviated(x[:0], "a") == "a=<>(0)"


def test_dtype_and_shape_are_part_of_the_answer() -> None:
    expected = np.zeros((2, 3), np.float32)
    assert "float64[2, 3], expected float32[2, 3]" in shape_fault(np.zeros((2, 3)), expected)
    assert "float32[3, 2], expected float32[2, 3]" in shape_fault(np.zeros((3, 2), np.float32), expected)
    assert "gave list, expected an array" in shape_fault([[0.0] * 3] * 2, expected)
    assert "gave NoneType" in shape_fault(None, expected)
    assert shape_fault(expected, expected) == ""


def case(**parts: object) -> Case:
    return Case(id="c", run=lambda subject: parts)  # type: ignore[arg-type,return-value]


def test_outcome_counts_every_output_and_names_the_first_part() -> None:
    expected = {"amax": f32(1, 2), "codes": u8(1, 2, 3), "product": f32(5)}
    given = case(amax=f32(1, 2), codes=u8(9, 2, 8), product=f32(6))
    outcome = run_case(given, NOBODY, expected)
    assert (outcome.outputs_total, outcome.outputs_equal) == (6, 3)
    assert outcome.first_difference == "codes"
    mismatch = outcome.mismatch
    assert mismatch is not None and (mismatch.part, mismatch.index) == ("codes", (0,))
    assert mismatch.line() == "c: codes [0] => 9  expected: 1; 2 of 3 differ"
    assert not outcome.is_equal


def test_a_missing_part_or_a_wrong_dtype_is_a_difference() -> None:
    expected = {"a": f32(1), "b": f32(2)}
    outcome = run_case(case(a=f32(1)), NOBODY, expected)
    assert (outcome.outputs_equal, outcome.first_difference, outcome.is_equal) == (1, "b", False)
    outcome = run_case(case(a=f64(1), b=f32(2)), NOBODY, expected)
    assert (outcome.outputs_equal, outcome.first_difference) == (1, "a")
    assert outcome.mismatch is not None and "gave float64[1], expected float32[1]" in outcome.mismatch.line()


def test_exceptions_are_failures_and_not_offered_is_neither() -> None:
    expected = {"": np.zeros(4, np.float32)}
    fails = Case(id="c", run=raising(ZeroDivisionError("oh\nsecond line")))
    outcome = run_case(fails, NOBODY, expected)
    assert (outcome.outputs_total, outcome.outputs_equal, outcome.is_equal) == (4, 0, False)
    assert outcome.mismatch is not None and outcome.mismatch.line() == "c => raised ZeroDivisionError: oh"

    outcome = run_case(Case(id="c", run=raising(NotOffered("no such thing"))), NOBODY, expected)
    assert (outcome.not_offered, outcome.outputs_total, outcome.is_equal) == ("no such thing", 0, False)

    outcome = run_case(case(), NOBODY, answer(fails, NOBODY))
    assert outcome.mismatch is not None and "the oracle raised ZeroDivisionError" in outcome.mismatch.line()
    assert not outcome.is_equal
