"""Checkpoints of plain and converted models: the same keys and bits, through a file, strict, both ways."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import f8emu.torch as f8
from f8emu.spec import RECIPES, ROWWISE, RecipeName
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.states import assert_same_state, through_file


class Model(nn.Module):
    """Modules in modules, with and without bias; one that is there twice, and a weight tied to an embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(48, 32)
        blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32, bias=False)) for _ in range(2)]
        self.blocks = nn.ModuleDict({"first": nn.Sequential(*blocks), "again": blocks[0]})
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks["again"](self.blocks["first"](self.embed(tokens))))


def converted(name: RecipeName, seed: int = 0) -> Model:
    model = Model(seed).bfloat16()
    assert f8.convert_to_float8_training(model, config=name) is model
    return model


def step(model: nn.Module) -> torch.Tensor:
    output = model(torch.arange(48).reshape(3, 16))
    output.float().square().sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    return output.detach()


def new_start(name: str) -> AbstractContextManager[Any]:
    """The warning of a plain state dict that is loaded under this recipe."""
    if name == "delayed":
        return pytest.warns(RuntimeWarning, match="no state of delayed scaling")
    return nullcontext()


@pytest.mark.parametrize(("is_converted", "into_converted"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", RECIPES)
def test_a_file_of_one_model_loads_into_another(name: RecipeName, is_converted: bool, into_converted: bool) -> None:
    """Strictly, after steps too; nothing of float8 is in the file but the state of delayed scaling in its metadata."""
    model, other = (
        converted(name, seed) if is_own else Model(seed).bfloat16()
        for seed, is_own in ((1, is_converted), (0, into_converted))
    )
    expected: nn.Module = Model(seed=1).bfloat16()
    if into_converted:
        f8.convert_to_float8_training(expected, config=name)
    if is_converted:
        step(model)
    state = through_file(model.state_dict())
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with nullcontext() if is_converted or not into_converted else new_start(name):
        other.load_state_dict(state, strict=True)
    assert_same_state(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embed.weight and other.blocks["again"] is other.blocks["first"][0]  # type: ignore[index]
    if is_converted and into_converted:
        assert_same_state(f8.delayed_state_dict(other), f8.delayed_state_dict(model))
        assert bool(f8.delayed_state_dict(other)) == (name == "delayed")
        model.zero_grad()
        expected = model
    assert_same_bits(step(other), step(expected))


def test_the_state_of_one_recipe_is_left_by_another() -> None:
    """From delayed to rowwise and back: the parameters go over, the state of delayed scaling starts anew."""
    delayed, rowwise = converted("delayed", seed=1), converted("rowwise")
    step(delayed)
    rowwise.load_state_dict(delayed.state_dict(), strict=True)
    assert_same_state(rowwise.state_dict(), delayed.state_dict())
    assert all(m.recipe is ROWWISE for m in rowwise.modules() if isinstance(m, f8.Float8Linear))
    with new_start("delayed"):
        delayed.load_state_dict(rowwise.state_dict(), strict=True)
    assert not any(value.any() for key, value in f8.delayed_state_dict(delayed).items() if key.endswith("initialized"))
