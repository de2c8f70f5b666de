"""Checkpoints of plain and converted models: the same keys and bits, through a file, strict, both ways."""

import copy
import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import f8emu.torch as f8
from f8emu.spec import RECIPES, ROWWISE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Modules in modules, with and without bias; one that is there twice, and a weight tied to an embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(48, 32)
        blocks = [Block(), Block()]
        self.blocks = nn.ModuleDict({"first": nn.Sequential(*blocks), "again": blocks[0]})
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks["again"](self.blocks["first"](self.embed(tokens))))


def converted(name: str, seed: int = 0) -> Model:
    model = Model(seed).bfloat16()
    assert f8.convert_to_float8_training(model, config=name) is model
    return model


def step(model: nn.Module) -> torch.Tensor:
    output = model(torch.arange(48).reshape(3, 16))
    output.float().square().sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    return output.detach()


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def new_start(name: str) -> AbstractContextManager[Any]:
    """What loading a plain state dict under this recipe says."""
    if name == "delayed":
        return pytest.warns(RuntimeWarning, match="no state of delayed scaling")
    return nullcontext()


def assert_equal_states(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for key in ours:
        assert ours[key].dtype is theirs[key].dtype and torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_of_a_plain_model_loads_into_a_converted_one(name: str, assert_same_bits: Any) -> None:
    """And gives what converting the loaded model gives."""
    plain, model = Model(seed=1).bfloat16(), converted(name)
    with new_start(name):
        model.load_state_dict(through_file(plain.state_dict()), strict=True)
    assert_equal_states(model, plain)
    assert model.head.weight is model.embed.weight and model.blocks["again"] is model.blocks["first"][0]  # type: ignore[index]
    expected = f8.convert_to_float8_training(copy.deepcopy(plain), config=name)
    assert_same_bits(step(model), step(expected))


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_of_a_converted_model_loads_into_a_plain_one(name: str, assert_same_bits: Any) -> None:
    """Nothing of float8 is left in it, after steps too."""
    model, plain = converted(name, seed=1), Model().bfloat16()
    step(model)
    state = through_file(model.state_dict())
    assert {type(value) for value in state.values()} == {torch.Tensor}
    plain.load_state_dict(state, strict=True)
    assert_equal_states(plain, model)
    by_hand = Model(seed=1).bfloat16()
    assert_same_bits(plain(torch.arange(16)), by_hand(torch.arange(16)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_of_a_converted_model_loads_into_another(name: str, assert_same_bits: Any) -> None:
    """With the state of delayed scaling, and without a word."""
    model, other = converted(name, seed=1), converted(name)
    step(model)
    other.load_state_dict(through_file(model.state_dict()), strict=True)
    assert_equal_states(other, model)
    ours, theirs = f8.delayed_state_dict(other), f8.delayed_state_dict(model)
    assert ours.keys() == theirs.keys() and bool(ours) == (name == "delayed")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    model.zero_grad()
    assert_same_bits(step(other), step(model))


@pytest.mark.parametrize("name", RECIPES)
def test_strict_is_strict(name: str) -> None:
    state = Model().bfloat16().state_dict()
    state["blocks.first.0.up.scale"] = state.pop("blocks.first.1.up.bias")
    with new_start(name), pytest.raises(RuntimeError) as raised:
        converted(name).load_state_dict(state, strict=True)
    assert 'Missing key(s) in state_dict: "blocks.first.1.up.bias"' in str(raised.value)
    assert 'Unexpected key(s) in state_dict: "blocks.first.0.up.scale"' in str(raised.value)


def test_the_state_of_one_recipe_is_left_by_another() -> None:
    """From delayed to rowwise and back: the parameters go over, the state of delayed scaling starts anew."""
    delayed, rowwise = converted("delayed", seed=1), converted("rowwise")
    step(delayed)
    rowwise.load_state_dict(delayed.state_dict(), strict=True)
    assert_equal_states(rowwise, delayed)
    assert all(m.recipe is ROWWISE for m in rowwise.modules() if isinstance(m, f8.Float8Linear))
    with new_start("delayed"):
        delayed.load_state_dict(rowwise.state_dict(), strict=True)
    assert not any(value.any() for key, value in f8.delayed_state_dict(delayed).items() if key.endswith("initialized"))
