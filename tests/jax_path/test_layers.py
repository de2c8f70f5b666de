"""Layers that train against the oracle, as the suite's stage puts them: every code, scale, product and gradient.

A choice of its cases, jitted with the weight as a kernel; `f8emu verify f8emu.jax` runs them all.
"""

from typing import Any

import pytest

from f8emu.conformance.layers.layer import LayerMode
from f8emu.conformance.layers.layer_cases import layer_cases

CHOSEN = {
    LayerMode.EAGER: (
        "mixed tensor row",
        "mixed delayed row",
        "tensorwise bfloat16 33x50x70 blocks bias no input.grad",
        "tensorwise bfloat16 33x50x70 specials bias forward only",
    ),
    # tensorwise and delayed layers are jitted in the other files here
    LayerMode.COMPILED: tuple(
        f"{recipe} bfloat16 weight float32 33x50x70 normal grad_output integers bias batch 3x11 2 passes 2 steps"
        for recipe in ("rowwise", "rowwise_with_gw_hp", "blockwise")
    ),
}


@pytest.mark.parametrize("mode", CHOSEN, ids=lambda mode: mode.value)
def test_layers_equal_the_oracle(mode: LayerMode, assert_layers_equal: Any) -> None:
    chosen = CHOSEN[mode]
    cases = tuple(case for case in layer_cases() if case.mode is mode and any(words in case.id for words in chosen))
    assert len(cases) >= len(chosen) and all(any(words in case.id for case in cases) for words in chosen)
    assert_layers_equal("f8emu.jax", cases)
