"""f8ref.jax against every GEMM recorded on an H200: all 174 cases, every bit of every output."""

import pytest

from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import Status, verify


def test_recorded_gemms() -> None:
    pytest.importorskip("jax")
    ((stage,),) = (subject.stages for subject in verify([load_subject("f8ref.jax")], stages=["golden"]).subjects)
    assert (stage.status, stage.cases_total, stage.outputs_total) == (Status.EQUAL, 174, 846_592)
