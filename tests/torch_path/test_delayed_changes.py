"""Whatever changes between two steps, the update after it is that of each tensor by itself (`update_delayed_state`).

The update looks layers, tensors and parameters up in every step; what it keeps must not outlive what it was made of.
"""

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import f8emu.torch as f8
from f8emu.spec.trace import DelayedState
from f8emu.torch.training import step_hooks
from f8emu.torch.training.float8_linear import Float8Linear

pytestmark = pytest.mark.usefixtures("exact_products")

BOTH = [{"0", "2"}]
Model = Any
"""A sequence of two layers with a ReLU between them."""
State = dict[str, Tensor]
Changed = tuple[Model, Optimizer, list[set[str]]]
"""The model, its optimizer, and the layers that a step of it updates: a set for each update."""


def converted(*sizes: int) -> Model:
    first, *others = [nn.Linear(k, n, dtype=torch.bfloat16) for k, n in itertools.pairwise(sizes)]
    return f8.convert_to_float8_training(nn.Sequential(first, nn.ReLU(), *others), config="delayed")


def sgd(model: Model) -> Optimizer:
    return SGD(model.parameters(), lr=0.01)


def layers_of(model: Model) -> dict[str, Float8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def nothing(model: Model, optimizer: Optimizer) -> Changed:
    return model, optimizer, BOTH


def layer_added(model: Model, optimizer: Optimizer) -> Changed:
    model.append(converted(16, 16)[0])
    optimizer.add_param_group({"params": list(model[3].parameters())})
    return model, optimizer, [{"0", "2", "3"}]


def layer_deleted(model: Model, optimizer: Optimizer) -> Changed:
    model[2] = nn.Identity()
    gc.collect()
    return model, optimizer, [{"0"}]


def layer_deleted_with_its_parameters(model: Model, optimizer: Optimizer) -> Changed:
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    return layer_deleted(model, optimizer)


def parameters_in_another_order(model: Model, optimizer: Optimizer) -> Changed:
    optimizer.param_groups[0]["params"].reverse()
    return model, optimizer, BOTH


def parameters_dropped(model: Model, optimizer: Optimizer) -> Changed:
    del optimizer.param_groups[0]["params"][2:]
    return model, optimizer, [{"0"}]


def another_optimizer(model: Model, optimizer: Optimizer) -> Changed:
    return model, sgd(model[2]), [{"2"}]


def layer_dequantized(model: Model, optimizer: Optimizer) -> Changed:
    model[0] = f8.dequantize_float8_training(model[0])
    return model, optimizer, [{"2"}]


def layer_converted_again(model: Model, optimizer: Optimizer) -> Changed:
    model[0] = f8.convert_to_float8_training(f8.dequantize_float8_training(model[0]), config="delayed")
    return model, optimizer, BOTH


def moved(model: Model, optimizer: Optimizer) -> Changed:
    return model._apply(torch.clone), optimizer, BOTH


def to_float32(model: Model, optimizer: Optimizer) -> Changed:
    return model.float(), optimizer, BOTH


def to_meta_and_back(model: Model, optimizer: Optimizer) -> Changed:
    kept = copy.deepcopy(model.state_dict())
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(kept)
    return model, sgd(model), BOTH


def state_loaded(model: Model, optimizer: Optimizer) -> Changed:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model, optimizer, BOTH


def state_assigned(model: Model, optimizer: Optimizer) -> Changed:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model, sgd(model), BOTH


def delayed_state_loaded(model: Model, optimizer: Optimizer) -> Changed:
    state = f8.delayed_state_dict(model)
    f8.load_delayed_state_dict(model, {key: x * 2 if x.is_floating_point() else x for key, x in state.items()})
    return model, optimizer, BOTH


def buffers_replaced(model: Model, optimizer: Optimizer) -> Changed:
    for layer in layers_of(model).values():
        assert layer.delayed is not None
        for name, buffer in list(layer.delayed.named_buffers()):
            setattr(layer.delayed, name, buffer.clone())
    return model, optimizer, BOTH


def buffers_with_other_memory(model: Model, optimizer: Optimizer) -> Changed:
    for layer in layers_of(model).values():
        assert layer.delayed is not None
        for buffer in layer.delayed.buffers():
            buffer.data = buffer.clone()
    return model, optimizer, BOTH


def weight_replaced(model: Model, optimizer: Optimizer) -> Changed:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    return model, optimizer, [{"2"}]


def weight_replaced_for_the_optimizer_too(model: Model, optimizer: Optimizer) -> Changed:
    weight_replaced(model, optimizer)
    optimizer.param_groups[0]["params"][0] = model[0].weight
    return model, optimizer, BOTH


def weight_written_past_the_layer(model: Model, optimizer: Optimizer) -> Changed:
    """As FSDP2 does in every pass."""
    parameter = nn.Parameter(model[0].weight.detach() * 2)
    model[0]._parameters["weight"] = optimizer.param_groups[0]["params"][0] = parameter
    return model, optimizer, BOTH


def weights_swapped(model: Model, optimizer: Optimizer) -> Changed:
    """The optimizer holds the same parameters as before, in other layers."""
    other = converted(32, 48, 16)
    model[0].weight, other[0].weight = other[0].weight, model[0].weight
    model[0].register_module("other", other)
    return model, optimizer, [{"2", "0.other.0"}]


def frozen(model: Model, optimizer: Optimizer) -> Changed:
    model[0].requires_grad_(False)
    return model, optimizer, BOTH


def frozen_and_left_out(model: Model, optimizer: Optimizer) -> Changed:
    """It follows the optimizer of the others, which is new: the first one may step on."""
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    model(torch.ones(4, 32, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer, [{"2"}, {"0"}]


def copied(model: Model, optimizer: Optimizer) -> Changed:
    model = copy.deepcopy(model)
    return model, sgd(model), BOTH


def pickled(model: Model, optimizer: Optimizer) -> Changed:
    model = pickle.loads(pickle.dumps(model))
    return model, sgd(model), BOTH


def group_chosen(model: Model, optimizer: Optimizer) -> Changed:
    f8.set_amax_reduction_group(model, False)
    return model, optimizer, BOTH


CHANGES: list[Callable[[Model, Optimizer], Changed]] = [
    nothing,
    layer_added,
    layer_deleted,
    layer_deleted_with_its_parameters,
    parameters_in_another_order,
    parameters_dropped,
    another_optimizer,
    layer_dequantized,
    layer_converted_again,
    moved,
    to_float32,
    to_meta_and_back,
    state_loaded,
    state_assigned,
    delayed_state_loaded,
    buffers_replaced,
    buffers_with_other_memory,
    weight_replaced,
    weight_replaced_for_the_optimizer_too,
    weight_written_past_the_layer,
    weights_swapped,
    frozen,
    frozen_and_left_out,
    copied,
    pickled,
    group_chosen,
]


def state_of(layer: Float8Linear) -> State:
    assert layer.delayed is not None
    return {name: x.clone() for name, x in layer.delayed.state().items() if name != "counts"}


def updated(layer: Float8Linear) -> State:
    """The state after an update, tensor by tensor."""
    assert layer.delayed is not None and layer.recipe.delayed is not None
    before, formats = state_of(layer), layer.delayed.formats.split(",")
    found = [
        f8.update_delayed_state(
            DelayedState(
                amax_history=before["amax_history"][i],
                inv_scale=before["inv_scale"][i],
                initialized=before["initialized"][i],
            ),
            before["amax"][i],
            formats[i],
            layer.recipe.scale_rule,
            layer.recipe.delayed,
        )
        for i in range(3)
    ]
    fields = ("amax_history", "inv_scale", "initialized")
    return {
        **{name: torch.stack([getattr(state, name) for state in found]) for name in fields},
        "amax": torch.full((3,), -1.0),
    }


def follow(model: Model, optimizer: Optimizer, updates: list[set[str]], by_call: bool, end: str) -> None:
    """One step, in which only the layers before the one named `end` are called; the state of every layer after it."""
    x = torch.randn(8, 32).to(model[0].weight.dtype).requires_grad_()
    called = next((i for i, (name, _) in enumerate(model.named_children()) if name == end), len(model))
    model[:called](x).float().square().mean().backward()
    layers = layers_of(model)
    expected = {name: state_of(layer) for name, layer in layers.items()}
    for names in [layers.keys()] if by_call else updates:
        if any(bool((expected[name]["amax"] >= 0).any()) for name in names):
            expected |= {name: updated(layers[name]) for name in names}
    if by_call:
        f8.sync_float8_amax_and_scale_history(model)
    else:
        optimizer.step()
    model.zero_grad()
    for name, layer in layers.items():
        for field, value in state_of(layer).items():
            assert torch.equal(value, expected[name][field]), (name, field)


@pytest.mark.parametrize("way", ["optimizer", "call"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_update_follows(change: Callable[[Model, Optimizer], Changed], way: str) -> None:
    torch.manual_seed(0)
    bystander, model = converted(32, 48, 16), converted(32, 48, 16)
    changed: Changed = model, sgd(model), BOTH
    del model  # nor may anything else keep it
    kept = {name: state_of(layer) for name, layer in layers_of(bystander).items()}
    for step in range(5):
        if step == 2:
            changed = change(*changed[:2])
        follow(*changed, way == "call", end="2" if step == 3 else "")
    for name, layer in layers_of(bystander).items():
        after = state_of(layer)
        assert all(torch.equal(after[field], value) for field, value in kept[name].items()), "another model's"


def test_a_model_that_another_thread_converts_meanwhile_is_updated(monkeypatch) -> None:
    """It is added while a step sorts the layers: what that step keeps is without it."""
    first, others = converted(16, 16, 16), []
    optimizer, number = sgd(first), step_hooks._number

    def converts(layer: Float8Linear) -> int:
        if not others:
            others.append(None)
            others[0] = converted(16, 16)
        return number(layer)

    def step(model: Model, optimizer: Optimizer) -> None:
        model(torch.randn(32, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    monkeypatch.setattr(step_hooks, "_number", converts)
    step(first, optimizer)
    step(others[0], sgd(others[0]))
    delayed = others[0][0].delayed
    assert min(delayed.inv_scale_input, delayed.inv_scale_weight, delayed.inv_scale_grad_output) > 0
