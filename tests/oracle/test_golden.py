"""Every GEMM recorded on an H200, every bit, of the oracle, the engine at every width and f8ref.jax.

Some outputs of each of the definition.
"""

from functools import partial

import numpy as np
import pytest

from f8emu.conformance.cases.golden import GoldenCase, shipped_golden
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import Status, verify
from tests.oracle import together
from tests.oracle.exactly import EXACT, assert_same_bits

VERBS = {name: getattr(together, name) for name in ("scaled_mm", "scaled_grouped_mm", "mm")}


CASES = pytest.mark.parametrize("case", shipped_golden().cases, ids=lambda case: case.id)


@CASES
def test_recorded_bits(case: GoldenCase) -> None:
    assert_same_bits(case.gemm.run(VERBS), case.out)


@CASES
def test_recorded_bits_of_the_definition(case: GoldenCase) -> None:
    """Three rows and a few columns, more where K is short, and most where specials meet."""
    draw, is_special = np.random.default_rng(list(case.id.encode())), case.name == "special"
    few = (8, 8) if is_special else (3, max(1, min(4, 8192 // (3 * case.gemm.k))))
    at = tuple(np.sort(draw.permutation(size)[:count]) for size, count in zip(case.out.shape, few, strict=True))
    verbs = {verb: partial(getattr(EXACT, verb), at=at) for verb in VERBS}
    assert_same_bits(case.gemm.run(verbs), case.out[np.ix_(*at)])


def test_recorded_bits_of_jax() -> None:
    """All 174 cases and 846,592 outputs are there."""
    pytest.importorskip("jax")
    ((stage,),) = (subject.stages for subject in verify([load_subject("f8ref.jax")], stages=["golden"]).subjects)
    assert (stage.status, stage.cases_total, stage.outputs_total) == (Status.EQUAL, 174, 846_592)
