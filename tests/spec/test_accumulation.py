"""The accumulation models against the literals of the measured rules (reference/README.md)."""

import pytest

from f8emu.spec import ACCUMULATION_MODELS

# step [ACC-1], aligned bits [ACC-3], result bits [ACC-5], promotion [CHAIN-2], slice multiple [CHAIN-3] [BF16-2]
MEASURED = {
    "hopper_fp8_fast": (32, 13, 13, None, 128),
    "hopper_fp8": (32, 13, 13, 128, 128),
    "hopper_bf16": (16, 25, 23, None, 64),
}


def test_every_model_is_measured() -> None:
    assert ACCUMULATION_MODELS.keys() == MEASURED.keys()


@pytest.mark.parametrize("name", MEASURED)
def test_model_equals_the_measured_rule(name: str) -> None:
    model = ACCUMULATION_MODELS[name]
    assert model.name == name
    assert MEASURED[name] == (
        model.step_k,
        model.aligned_fraction_bits,
        model.result_fraction_bits,
        model.promote_k,
        model.split_k_multiple,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_steps_tile_what_they_are_chained_over(name: str) -> None:
    """A promotion or a split-K slice never ends inside a step."""
    model = ACCUMULATION_MODELS[name]
    assert model.split_k_multiple % model.step_k == 0
    assert (model.promote_k or model.step_k) % model.step_k == 0
