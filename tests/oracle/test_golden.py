"""Every GEMM recorded on an H200, every bit, of the oracle, the engine at every width and f8ref.jax.

`test_exact_golden` has the definition, which reads the file by itself.
"""

import pytest

from f8emu.conformance.cases.golden import GoldenCase, shipped_golden
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import Status, verify
from tests.oracle import together
from tests.oracle.exactly import assert_same_bits

VERBS = {name: getattr(together, name) for name in ("scaled_mm", "scaled_grouped_mm", "mm")}


@pytest.mark.parametrize("case", shipped_golden().cases, ids=lambda case: case.id)
def test_recorded_bits(case: GoldenCase) -> None:
    assert_same_bits(case.gemm.run(VERBS), case.out)


def test_recorded_bits_of_jax() -> None:
    """All 174 cases and 846,592 outputs are there."""
    pytest.importorskip("jax")
    ((stage,),) = (subject.stages for subject in verify([load_subject("f8ref.jax")], stages=["golden"]).subjects)
    assert (stage.status, stage.cases_total, stage.outputs_total) == (Status.EQUAL, 174, 846_592)
