"""The comparison: bits, NaN as NaN, -0 apart, and the lines that it prints; what a difference is broken down into.

That is ulps against numpy's own neighbours, shares by trait, and maps; all add up.
"""

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.conformance import Subject, shipped_golden, verify
from f8emu.conformance.compare import (
    LAST_BIN,
    NOT_COMPARED,
    abbreviated,
    bin_label,
    bins,
    different,
    distances,
    merged,
    mismatches,
    shape_fault,
    ulp_histogram,
)
from f8emu.conformance.run.breakdown import Tally, breakdowns, contrasts
from f8emu.conformance.run.check import Case, answer, run_case
from f8emu.conformance.run.result import MAX_CELLS, StageResult, Status, difference_map, joined
from f8emu.conformance.run.subject import NotOffered
from f8emu.conformance.run.verify import Result
from f8emu.environment import percent
from f8emu.report.figures import ulp_plot
from f8emu.report.terminal import page_lines
from f8emu.report.verify import Run, page, to_json
from tests.conformance.command import raising
from tests.conformance.planted_gemm import never_promoting

NOBODY = Subject(name="nobody", engine="none", verbs={})


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


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


E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("observed", "expected", "line"),
    [
        (f32(1.0, 0.0), f32(1.0, -0.0), "c: x [1] in [1] => 0x00000000 (0)  expected: 0x80000000 (-0)"),
        (u8(0x7E), u8(0x7F), "c: x [0] in [0] => 126  expected: 127"),
        (np.array([448.0], E4M3), np.array([np.nan], E4M3), "c: x [0] in [0] => 0x7e (448)  expected: 0x7f (nan)"),
        (np.array(True), np.array(False), "c: x in [] => True  expected: False"),
    ],
)
def test_lines(observed: np.ndarray, expected: np.ndarray, line: str) -> None:
    (mismatch,) = mismatches("c", "x", observed, expected, lambda index: f"in {list(index)}")
    assert mismatch.line() == line


def test_vectors_are_abbreviated() -> None:
    x = np.arange(300, dtype=np.uint16)
    words = [abbreviated(part, "a", shown=2) for part in (x, x[:2], x[7:8], x[:0])]
    assert words == ["a=<0000 0001 .. 012b>(300)", "a=<0000 0001>(2)", "a=0x0007", "a=<>(0)"]


def test_dtype_and_shape_are_part_of_the_answer() -> None:
    expected = np.zeros((2, 3), np.float32)
    assert "float64[2, 3], expected float32[2, 3]" in shape_fault(np.zeros((2, 3)), expected)
    assert "float32[3, 2], expected float32[2, 3]" in shape_fault(np.zeros((3, 2), np.float32), expected)
    assert "gave list, expected an array" in shape_fault([[0.0] * 3] * 2, expected)
    assert "gave NoneType" in shape_fault(None, expected) and shape_fault(expected, expected) == ""


# A case


def result_of(run: Any, expected: Any) -> StageResult:
    """Of a case that gives these parts, or runs this."""
    run = run if callable(run) else lambda subject, parts=run: parts
    return run_case(Case(id="c", run=run, traits={"kind": "planted"}), NOBODY, expected).result


def test_every_output_is_counted_and_the_first_part_is_explained() -> None:
    ones = np.ones((4, 6), np.float32)
    wrong = ones.copy()
    wrong[1, 2:4] = 1 + 2.0**-23
    expected = {"a": ones, "b": ones, "c": ones}
    result = result_of({"a": ones, "b": wrong, "c": ones[:2]}, expected)
    assert (result.outputs_total, result.outputs_equal, result.first_differences) == (72, 46, {"b": 1})
    assert result.ulps["float32"].labelled() == {"+1": 2, NOT_COMPARED: 24}
    (place,), (mismatch,) = result.places, result.mismatches
    assert place.part == "b" and np.argwhere(place.differing).tolist() == [[1, 2], [1, 3]]
    assert mismatch.line() == "c: b [1, 2] => 0x3f800001 (1.00000012)  expected: 0x3f800000 (1); 2 of 24 differ"
    tally = Tally(cases=1, cases_differing=1, outputs=72, outputs_differing=26)
    assert result.tallies == {"kind": {"planted": tally}} and result.status is Status.DIFFERENT
    equal = result_of(expected, expected)
    assert equal.status is Status.EQUAL and equal.ulps == {} and equal.places == breakdowns([equal]) == []
    # a missing part, and another dtype
    result = result_of({"a": ones, "b": ones}, expected)
    assert (result.outputs_equal, result.first_differences, result.cases_equal) == (48, {"c": 1}, 0)
    result = result_of({**expected, "a": ones.astype(np.float64)}, expected)
    assert (result.outputs_equal, result.first_differences) == (48, {"a": 1})
    assert "gave float64[4, 6], expected float32[4, 6]" in result.mismatches[0].line()


def test_exceptions_are_failures_and_not_offered_is_neither() -> None:
    expected = {"": np.zeros(4, np.float32)}
    fails = raising(ZeroDivisionError("oh\nsecond line"))
    result = result_of(fails, expected)
    assert (result.outputs_total, result.outputs_equal, result.status) == (4, 0, Status.DIFFERENT)
    assert result.mismatches[0].line() == "c => raised ZeroDivisionError: oh"
    assert result.ulps["float32"].labelled() == {NOT_COMPARED: 4} and result.places == []
    result = result_of(raising(NotOffered("no such thing")), expected)
    assert (result.reason, result.outputs_total, result.status) == ("no such thing", 0, Status.NOT_OFFERED)
    result = result_of({}, answer(Case(id="c", run=fails), NOBODY))
    assert "the oracle raised ZeroDivisionError" in result.mismatches[0].line() and result.status is Status.DIFFERENT


# How far


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz])
def test_distance_of_every_pair_of_codes(dtype: type) -> None:
    """The rank among all values of the format, sorted by numpy, says how far apart two codes are."""
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    values = codes.astype(np.float64)
    ranks = np.searchsorted(np.unique(values[np.isfinite(values)]), values)
    observed, expected = (x.ravel() for x in np.meshgrid(np.arange(256), np.arange(256)))
    distance, apart = distances(codes[observed], codes[expected])
    finite = np.isfinite(values[observed]) & np.isfinite(values[expected])
    assert np.array_equal(apart, ~finite & different(codes[observed], codes[expected]))
    sign = np.where(values[expected] < 0, -1, 1)
    assert np.array_equal(distance[finite], ((ranks[observed] - ranks[expected]) * sign)[finite])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_steps_of_nextafter(dtype: Any) -> None:
    x = np.array([1.0, -1.0, 6e-8, -2.5, 1023.999], dtype)
    farther = nearer = x
    for steps in range(1, 6):
        farther = np.nextafter(farther, np.copysign(dtype(np.inf), x))
        nearer = np.nextafter(nearer, -np.copysign(dtype(np.inf), x))
        assert distances(farther, x)[0].tolist() == [steps] * x.size
        assert distances(nearer, x)[0].tolist() == [-steps] * x.size


def test_histogram_counts_every_output_that_differs() -> None:
    nan, inf = np.nan, np.inf
    pairs = [(1.0, nan), (1.0, inf), (inf, 1.0), (-inf, inf), (inf, nan), (nan, 1.0), (nan, -inf), (nan, nan)]
    pairs += [(2.0, 2.0), (0.0, -0.0), (1 + 2**-23, 1.0), (1 + 2**-21, 1.0), (1.0, 1 + 2**-22)]
    observed, expected = np.array(pairs, np.float32).T
    histogram = ulp_histogram(observed, expected)
    assert histogram.labelled() == {
        "-2": 1, "zero of the other sign": 1, "+1": 1, "+3 to +4": 1,
        "number for infinity": 1, "number for NaN": 1, "infinity for number": 1, "the other infinity": 1,
        "infinity for NaN": 1, "NaN for number": 1, "NaN for infinity": 1,
    }  # fmt: skip
    assert histogram.total == np.count_nonzero(different(observed, expected)) == 11
    assert (histogram.lowest, histogram.highest) == (-2, 4)
    twice = merged((histogram, histogram))
    assert (twice.total, twice.highest, sum(twice.apart.values())) == (22, 4, 14)
    assert twice.words().startswith("22 outputs differ, by -2 to +4 ulps, most often -2 (9 %); number for infinity 2; ")
    assert ulp_histogram(np.array([7, 3], np.uint8), np.array([3, 3], np.uint8)).labelled() == {"+3 to +4": 1}


def test_a_distance_lies_in_the_bin_of_its_label() -> None:
    distance = np.concatenate([np.arange(-5000, 5001), [2**16, 2**16 + 1, -(2**16) - 1, 2**31]])
    for d, index in zip(distance.tolist(), bins(distance).tolist(), strict=True):
        label = bin_label(index)
        numbers = [int(text) for text in re.findall(r"[+-]?\d+", label)]
        if abs(index) == LAST_BIN:
            assert abs(d) > abs(numbers[0]) == 2**16 and d * numbers[0] > 0, (d, label)
        else:
            assert (min(numbers, default=0) <= d <= max(numbers, default=0)) and label.startswith(("+", "-", "zero")), d


# Where


def test_map_of_a_matrix_and_of_larger_outputs() -> None:
    expected = np.ones((300, 70), np.float32)
    observed = expected.copy()
    observed[7, 3] = np.nextafter(np.float32(1), np.float32(2))
    observed[6, 3] = np.float32(1 - 2**-22)
    observed[299, 69] = np.nan
    place = difference_map("case", "part", observed, expected)
    assert place.cell == (3, 1) and place.differing.shape == (100, 70)
    assert place.differing.sum() == 3 and place.differing[2, 3] == 2 and place.farthest[2, 3] == -4
    assert place.apart.nonzero() == (np.array([99]), np.array([69]))
    assert "3 of 21,000 outputs differ, in 2 of 100 rows of cells (3 each) and 2 of 70 columns" in place.summary()
    assert ", by -4 ulps, 1 cell with" in place.summary()
    for shape in ((1000,), (1000, 1), (1, 1000), (10, 10, 10)):
        x = np.arange(1000, dtype=np.float32).reshape(shape)
        vector = difference_map("case", "", x, np.zeros(shape, np.float32))
        assert vector.differing.shape == (4, MAX_CELLS) and vector.differing.sum() == 999


# A subject


@pytest.fixture(scope="module")
def planted() -> Result:
    """Never promotes, and has NaN in a corner: float16 outputs of large cases alone."""
    subject = never_promoting(lambda out: out.dtype == np.float16 and out.shape[0] == 48)
    golden = replace(shipped_golden(), cases=shipped_golden().cases[:16])
    return verify([subject], stages=["formats", "golden", "gemms"], golden=golden)


def test_breakdown_names_what_differs(planted: Result) -> None:
    subject = planted.subjects[0]
    (breakdown,) = breakdowns(subject.stages)
    assert breakdown.stages == ("recorded GEMMs", "generated GEMMs"), "the same traits, counted together"
    total = joined(subject.stages[1:], errors=0)
    whole = Tally(
        cases=total.cases_total,
        cases_differing=total.cases_total - total.cases_equal,
        outputs=total.outputs_total,
        outputs_differing=total.outputs_total - total.outputs_equal,
    )
    assert breakdown.whole == whole and whole.cases_differing > 20
    assert list(breakdown.tallies) == [
        "accumulation", "scales", "operands", "output", "bias", "M", "N", "K", "tail of K", "slices of K", "inputs",
        "family",
    ]  # fmt: skip
    for values in breakdown.tallies.values():
        assert sum(values.values(), Tally()) == whole
    assert sum(histogram.total for histogram in breakdown.ulps.values()) == whole.outputs_differing
    assert list(breakdown.telling()["K"]) == ["1 to 128", "129 to 512", "513 to 2048"], "in order"
    fast = breakdown.tallies["accumulation"]["fast"]
    assert fast.cases_differing == 20, "NaN in a corner: 20 of float16 and 48 rows"
    assert breakdown.ulps["float16"].apart["NaN for number"] > 0
    kinds = breakdown.ulps_by_kind
    assert merged(kinds.values()) == merged(breakdown.ulps.values())
    assert all("promoted" in kind for kind, histogram in kinds.items() if histogram.finite)
    assert {"rowwise promoted, float32", "tensorwise fast, float16"} < kinds.keys()
    picture, ranked = (
        ulp_plot(breakdown).svg,
        sorted(kinds.items(), key=lambda kind: kind[1].not_compared - kind[1].total),
    )
    for i, (kind, histogram) in enumerate(ranked):
        assert (f">{kind}, {histogram.total:,} outputs differ</text>" in picture) == (i < 6)
    assert f">{len(kinds) - 6} others, {merged(of for _, of in ranked[6:]).total:,} outputs differ</text>" in picture
    (golden,) = breakdowns([stage for stage in subject.stages if stage.stage == "golden"])
    sentence = "Of the cases with accumulation: promoted, 100 % (8 of 8) differ; of all others 0 % (0 of 8)"
    assert list(golden.sentences()) == [sentence]


M_BY_RANGE = {"1 to 16": (0, 60), "17 to 64": (60, 60)}
CONTRASTS: dict[str, tuple[dict[str, dict[str, tuple[int, int]]], list[tuple[str, ...]]]] = {
    # what the findings saw: 93 % here, 0.3 % there
    "a tail": (
        {"tail of K": {"none": (1, 300), "a part of a step": (93, 100)}},
        [("tail of K: a part of a step",)],
    ),
    # all that differ have it, and so have many that do not
    "no contrast": ({"bias": {"with": (9, 200), "without": (0, 200)}}, []),
    "a coincidence": ({"inputs": {"specials": (1, 1), "bits": (0, 400)}}, []),
    "a range": ({"M": {"1 to 16": (0, 9), "17 to 64": (1, 90), "65 and more": (50, 50)}}, [("M above 64",)]),
    "the sharper": ({"output": {"float32": (60, 100), "bfloat16": (0, 60)}, "M": M_BY_RANGE}, [("M above 16",)]),
    # nothing tells which it is
    "confounded": ({"M": M_BY_RANGE, "N": M_BY_RANGE}, [("M above 16", "N above 16")]),
    "two values": ({"operands": {"a": (9, 9), "b": (0, 9), "c": (9, 9), "d": (0, 9)}}, [("operands: a or c",)]),
}


@pytest.mark.parametrize(("counts", "names"), CONTRASTS.values(), ids=CONTRASTS)
def test_contrasts(counts: dict[str, dict[str, tuple[int, int]]], names: list[tuple[str, ...]]) -> None:
    assert [contrast.names for contrast in contrasts(counts)] == names


def test_breakdown_in_json_and_on_the_terminal(planted: Result) -> None:
    run = Run(command=[], seconds=0.0)
    (breakdown,) = to_json(planted, run)["subjects"][0]["breakdowns"]
    assert breakdown["by"]["accumulation"]["fast"]["cases_differing"] == 20
    histogram = breakdown["ulps"]["float32"]
    assert sum(histogram["histogram"].values()) == histogram["total"] > 0
    assert sum(ulps["total"] for ulps in breakdown["ulps"].values()) == breakdown["whole"]["outputs_differing"]

    text = "\n".join(page_lines(page(planted, run), 400))
    fast = breakdown["by"]["accumulation"]["fast"]
    counts = rf"20/{fast['cases']} .* {fast['outputs_differing']:,}/{fast['outputs']:,} "
    assert re.search(rf"accumulation +fast +{counts}", text), text
    assert "…" not in text, "nothing is cut off"
    assert f"float32: {breakdown['ulps']['float32']['total']:,} outputs differ, by " in text
    assert "NaN for number" in text
    assert "not compared" in text, "fast accumulation of block scales is refused: those cases raise"


def test_percentages_are_exact_at_the_ends() -> None:
    assert [percent(x) for x in (0, 1e-9, 0.5, 1 - 1e-9, 1)] == ["0 %", "< 0.1 %", "50.0 %", "> 99.9 %", "100 %"]
