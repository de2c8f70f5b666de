"""[EPI-1] and [EPI-6] against an H100: scaled sums of -0, and groups whose scales lie far apart.

Recorded by `f8emu record`, its cases of those names; the shipped file has no output that tells these rules.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from f8emu.conformance import read_golden
from f8emu.conformance.cases.gemm import Mode
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.compute import compute
from f8emu.conformance.diagnosis.rules import ScaleOrder, rules_of
from f8emu.conformance.run.subject import load_subject
from f8emu.spec import HOPPER
from tests.oracle.exactly import EXACT

GOLDEN = read_golden(Path(__file__).parent / "data" / "epilogues.safetensors")


def test_what_was_recorded() -> None:
    assert GOLDEN.device == "NVIDIA H100 80GB HBM3"
    kinds = Counter(case.gemm.mode for case in GOLDEN.cases)
    assert kinds == {Mode.TENSORWISE: 8, Mode.ROWWISE: 8, Mode.GROUPED_ROWWISE: 2}


@pytest.mark.parametrize("name", ["f8ref.numpy", "f8ref.jax", "f8ref.exact"])
def test_every_bit(name: str) -> None:
    verbs = vars(EXACT) if name == "f8ref.exact" else load_subject(name).verbs
    for case in GOLDEN.cases:
        assert not different(case.gemm.run(verbs), case.out).any(), (case.id, case.name)


def test_without_these_rules_it_would_differ() -> None:
    """0 is added to tensorwise results alone, before the bias; the scales of a grouped GEMM are those of rows first."""
    for case in GOLDEN.cases:
        is_grouped = case.gemm.mode is Mode.GROUPED_ROWWISE
        gemms = [gemm for gemm, _ in case.gemm.groups()] if is_grouped else [case.gemm]
        right = rules_of(HOPPER, gemms[0])
        wrong = replace(right, adds_zero=not right.adds_zero)
        if is_grouped:
            right, wrong = replace(right, scales=ScaleOrder.ROW_FIRST), right
        outputs = [np.concatenate([compute(gemm, rules) for gemm in gemms]) for rules in (right, wrong)]
        assert not different(outputs[0], case.out).any()
        assert different(outputs[1], case.out).sum() > 10, (case.id, case.name)
