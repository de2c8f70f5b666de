"""Layers that train against the oracle, as the suite's stage puts them: every code, scale, product and gradient."""

import pytest

from f8emu.conformance import load_subject, stages, verify
from f8emu.conformance.layer import LayerMode
from f8emu.conformance.layer_cases import layer_cases
from f8emu.conformance.report import mismatch_lines


@pytest.mark.parametrize("mode", [LayerMode.EAGER, LayerMode.COMPILED], ids=lambda mode: mode.value)
def test_layers_equal_the_oracle(mode: LayerMode, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuple(case for case in layer_cases() if case.mode is mode)
    monkeypatch.setattr(stages, "layer_cases", lambda full_size: cases)
    result = verify([load_subject("torch")], stages=["layers"])
    assert result.is_equal, list(mismatch_lines(result, 5))
    assert result.subjects[0].stages[0].cases_total == len(cases)
