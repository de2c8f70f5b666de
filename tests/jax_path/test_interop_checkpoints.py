"""A model trained in torch goes on in JAX, and the other way round: every output, gradient and scale is the same."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import f8emu.jax
import f8emu.torch as f8
from f8emu import interop
from f8emu.spec import RECIPES, Float8State, RecipeName
from tests.torch_path.states import through_file

DENSE = (((1,), (0,)), ((), ()))
NAMES = ("up", "down")
RATE = np.float32(2**-4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Input and upstream gradient of a step, growing, so that scales change."""
    x, g = np.random.default_rng(step).standard_normal((2, 32, 32), np.float32)
    return x * np.float32(1.5) ** step, g


def torch_model(recipe: RecipeName) -> Model:
    torch.manual_seed(0)
    model = Model()
    f8.convert_to_float8_training(model, config=recipe)
    return model


def torch_step(model: Model, step: int) -> list[bytes]:
    """A step, and its bits: output and gradients. The update is numpy's, whose roundings both libraries share."""
    x, g = interop.to_torch(draw(step))
    x.requires_grad_()
    y = model(x)
    y.backward(g)
    f8.sync_float8_amax_and_scale_history(model)
    bits = [raw(y), raw(x.grad)]
    for name in NAMES:
        weight = getattr(model, name).weight
        grad = interop.to_numpy(weight.grad)
        bits.append(grad.tobytes())
        with torch.no_grad():
            weight.copy_(interop.to_torch(interop.to_numpy(weight) - RATE * grad))
        weight.grad = None
    return bits


def jax_step(recipe: RecipeName, params: Any, states: Any, step: int) -> tuple[Any, Any, list[bytes]]:
    """The same step: the parameters and states after it, and its bits."""
    x, g = interop.to_jax(draw(step))

    def forward(x: jax.Array, params: Any, states: Any) -> jax.Array:
        for name in NAMES:
            if states is None:
                x = f8emu.jax.dot_general(recipe)(x, params[name]["kernel"], DENSE)
            else:
                x = f8emu.jax.delayed_dot_general(recipe)(x, params[name]["kernel"], states[name], DENSE)
        return x

    y, vjp = jax.vjp(forward, x, params, states)
    of_x, grads, amaxes = vjp(g)
    bits = [raw(y), raw(of_x), *(raw(grads[name]["kernel"].T) for name in NAMES)]
    updated = jax.tree.map(lambda p, g: interop.to_numpy(p) - RATE * interop.to_numpy(g), params, grads)
    if states is not None:
        states = {name: f8emu.jax.linear_delayed_update(states[name], amaxes[name], recipe) for name in NAMES}
    return interop.to_jax(updated), states, bits


def raw(x: Any) -> bytes:
    return interop.to_numpy(x).tobytes()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise_with_gw_hp"])
def test_training_goes_on_in_the_other_library(recipe: RecipeName) -> None:
    """Two steps in torch, two in JAX, two in torch again, beside six in torch: 0 differing bits in every step."""
    is_delayed = RECIPES[recipe].delayed is not None
    alone, moving = torch_model(recipe), torch_model(recipe)
    for step in range(2):
        assert torch_step(moving, step) == torch_step(alone, step)

    params = interop.params_from_state_dict(through_file(moving.state_dict()))
    states: Any = None
    if is_delayed:
        states = interop.float8_states_from_delayed_state_dict(through_file(f8.delayed_state_dict(moving)), recipe)
    for step in range(2, 4):
        params, states, bits = jax_step(recipe, params, states, step)
        assert bits == torch_step(alone, step)

    again = torch_model(recipe)
    if is_delayed:
        assert all(isinstance(state, Float8State) for state in states.values())
        f8.load_delayed_state_dict(again, interop.delayed_state_dict_from_float8_states(states, recipe))
        observed, wanted = f8.delayed_state_dict(again), f8.delayed_state_dict(alone)
        assert {name: raw(x) for name, x in observed.items()} == {name: raw(x) for name, x in wanted.items()}
    again.load_state_dict(interop.state_dict_from_params(params, like=again.state_dict()))
    for step in range(4, 6):
        assert torch_step(again, step) == torch_step(alone, step)
