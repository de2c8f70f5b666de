"""Layers that train against the oracle, as the suite's stage puts them: every code, scale, product and gradient."""

from typing import Any

import pytest

from f8emu.conformance.layers.layer import LayerMode
from f8emu.conformance.layers.layer_cases import layer_cases


@pytest.mark.parametrize("mode", [LayerMode.EAGER, LayerMode.COMPILED], ids=lambda mode: mode.value)
def test_layers_equal_the_oracle(mode: LayerMode, assert_layers_equal: Any) -> None:
    cases = tuple(case for case in layer_cases() if case.mode is mode)
    assert_layers_equal("torch", cases)
