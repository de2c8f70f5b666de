"""Every recorded GEMM of the H200, every bit."""

import numpy as np
import pytest

import tests.oracle.together as f8
from f8emu.conformance.cases.golden import GoldenCase, shipped_golden

GOLDEN = shipped_golden()
VERBS = {"scaled_mm": f8.scaled_mm, "scaled_grouped_mm": f8.scaled_grouped_mm, "mm": f8.mm}


def test_all_cases_are_there() -> None:
    assert len(GOLDEN.cases) == 174
    assert sum(case.out.size for case in GOLDEN.cases) == 846_592


@pytest.mark.parametrize("case", GOLDEN.cases, ids=lambda case: case.id)
def test_recorded_bits(case: GoldenCase) -> None:
    result = case.gemm.run(VERBS)
    assert result.dtype == case.out.dtype
    # NaN too is compared by its bits: the hardware emits all ones, and so does the oracle [SPEC-1].
    word = np.dtype(f"uint{8 * result.dtype.itemsize}")
    np.testing.assert_array_equal(result.view(word), case.out.view(word))
