"""Shared by tests of delayed scaling: models, data, and two runs of which one is updated tensor by tensor."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import f8emu.torch as f8
from f8emu.spec import DELAYED, Recipe, format_by_name
from f8emu.spec.scaling import DelayedState
from f8emu.torch.casts.delayed_state import DelayedBuffers
from f8emu.torch.layer.delayed_update import UpdateGroup
from f8emu.torch.layer.float8_layer import Scaled
from tests.torch_path.states import assert_same_state, state_of

BF16 = torch.bfloat16
STEPS = 4
Model = Any
"""A sequence of two layers with a ReLU between them."""
Update = Callable[[Any], Any]
Way = Callable[[Model, Update], Model | None]
"""Trains a model, and calls the update after each of its backward passes; gives another model if there is one."""


def make(*sizes: int, recipe: Recipe = DELAYED, seed: int = 0, dtype: torch.dtype = BF16) -> Model:
    torch.manual_seed(seed)
    first, *others = [nn.Linear(k, n, dtype=dtype) for k, n in itertools.pairwise(sizes or (32, 48, 16))]
    return f8.convert_to_float8_training(nn.Sequential(first, nn.ReLU(), *others), config=recipe)


def batch(step: int) -> Tensor:
    """Inputs grow four times a step: a scale that was not updated is far off."""
    generator = torch.Generator().manual_seed(100 + step)
    return (torch.randn(16, 32, generator=generator) * 4.0 ** (step % 5 - 2)).to(BF16)


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    return model(batch(step)).float().square().mean()


def no_update(model: nn.Module) -> None:
    """A user writes no update."""


def plain(model: Model, update: Update, optimizer: Optimizer | None = None, passes: int = 1, run: Any = None) -> None:
    optimizer = optimizer or SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for i in range(passes):
            loss_of(run or model, step + i).backward()
            update(model)
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, steps: Any, run: Any = None) -> list[Tensor]:
    """Every output; one backward pass and optimizer step each."""
    optimizer, outputs = SGD(model.parameters(), lr=0.01), list[Tensor]()
    for step in steps:
        output = (run or model)(batch(step))
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    return outputs


def buffers_of(model: nn.Module) -> list[DelayedBuffers]:
    layers = [module for module in model.modules() if isinstance(module, f8.Float8Linear)]
    return [layer.delayed for layer in layers if layer.delayed is not None]


def assert_same(one: nn.Module, two: nn.Module) -> None:
    assert_same_state(state_of(one), state_of(two))


def updates_of(model: nn.Module) -> list[list[int]]:
    """How many updates found an amax: of every layer, for input, weight and grad_output."""
    states = f8.delayed_state_dict(model)
    return [(value > 0).sum(1).tolist() for key, value in states.items() if key.endswith("amax_history")]


class NoUpdates(UpdateGroup):
    """A group that leaves every update to explicit calls."""

    def add(self, layer: Any) -> None:
        layer.delayed.belong_to(0)  # nobody is told of its casts

    def begin_pass(self, is_cuda: bool) -> None:
        pass


def by_calls_alone(model: Model, ranks: Any = None) -> Model:
    """The model, which updates nothing by itself from now on."""
    for layer in model.modules():
        if isinstance(layer, Scaled) and layer.delayed is not None:
            layer.update_with(NoUpdates(ranks))
    return model


@torch.no_grad()
def by_tensors(model: nn.Module) -> None:
    """The update as the definition has it (`update_delayed_state`), one tensor after another; of casts alone."""
    for buffers in buffers_of(model):
        state, delayed, rule = buffers.state(), buffers.recipe.delayed, buffers.recipe.scale_rule
        assert delayed is not None
        for i, format in enumerate(buffers.formats.split(",")):
            if state["amax"][i] < 0:
                continue
            old = DelayedState(*(state[field][i] for field in DelayedState._fields))
            new = f8.update_delayed_state(old, state["amax"][i], format_by_name(format), rule, delayed)
            buffers.amax_history[i] = new.amax_history
            if new.initialized:
                buffers.inv_scales[i].fill_(new.inv_scale)
        for amax in buffers.amaxes:
            amax.fill_(-1)


def two_runs(way: Way, build: Callable[[], Model] = make) -> Model:
    """A run without a call has the bits of one that is updated tensor by tensor after each backward pass."""
    automatic, explicit = build(), by_calls_alone(build())
    automatic = way(automatic, no_update) or automatic
    explicit = way(explicit, by_tensors) or explicit
    observed, expected = ({k: v for k, v in state_of(x).items() if "counts" not in k} for x in (automatic, explicit))
    assert_same_state(observed, expected)
    return automatic
