"""The alterations of `benchmarks.proofs.evidence` on a few recorded GEMMs: each changes outputs and is undone."""

from dataclasses import replace

import pytest

from benchmarks.proofs.evidence import ALTERATIONS, altered, changed
from f8emu.conformance import GoldenFile, shipped_golden

CASES = (16, 29, 61, 73, 100, 125, 157, 170)
"""Tensorwise fast and promoted, 16 x 16 x 16, subnormals, split-K, 1x128 scales, bfloat16."""


@pytest.fixture(scope="module")
def few() -> GoldenFile:
    golden = shipped_golden()
    return replace(golden, cases=[golden.cases[i] for i in CASES])


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_rule_is_seen(name: str, few: GoldenFile) -> None:
    with altered(ALTERATIONS[name][1]()):
        cases, outputs = changed(few)
    assert 0 < cases <= outputs
    assert changed(few) == (0, 0)
