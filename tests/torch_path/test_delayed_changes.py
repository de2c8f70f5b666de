"""Whatever changes between two passes, the update after it is that of each tensor by itself (`update_delayed_state`).

The update looks layers, tensors and parameters up every time; what it keeps must not outlive what it was made of.
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

import f8emu.torch as f8
from f8emu.spec.trace import DelayedState
from f8emu.torch.delayed import update as delayed_update
from f8emu.torch.layer.float8_linear import Float8Linear

Model = Any
"""A sequence of two layers with a ReLU between them."""
State = dict[str, Tensor]


def converted(*sizes: int) -> Model:
    first, *others = [nn.Linear(k, n, dtype=torch.bfloat16) for k, n in itertools.pairwise(sizes)]
    return f8.convert_to_float8_training(nn.Sequential(first, nn.ReLU(), *others), config="delayed")


def layers_of(model: Model) -> dict[str, Float8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def nothing(model: Model) -> Model:
    return model


def layer_added(model: Model) -> Model:
    model.append(converted(16, 16)[0])
    return model


def layer_deleted(model: Model) -> Model:
    model[2] = nn.Identity()
    gc.collect()
    return model


def layer_dequantized(model: Model) -> Model:
    model[0] = f8.dequantize_float8_training(model[0])
    return model


def layer_converted_again(model: Model) -> Model:
    model[0] = f8.convert_to_float8_training(f8.dequantize_float8_training(model[0]), config="delayed")
    return model


def layer_of_another_model(model: Model) -> Model:
    other = converted(32, 48, 16)
    model[0], other[0] = other[0], model[0]
    return model


def moved(model: Model) -> Model:
    return model._apply(torch.clone)


def to_float32(model: Model) -> Model:
    return model.float()


def to_meta_and_back(model: Model) -> Model:
    kept = copy.deepcopy(model.state_dict())
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(kept)
    return model


def state_loaded(model: Model) -> Model:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def state_assigned(model: Model) -> Model:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def delayed_state_loaded(model: Model) -> Model:
    state = f8.delayed_state_dict(model)
    f8.load_delayed_state_dict(model, {key: x * 2 if x.is_floating_point() else x for key, x in state.items()})
    return model


def buffers_replaced(model: Model) -> Model:
    for layer in layers_of(model).values():
        assert layer.delayed is not None
        for name, buffer in list(layer.delayed.named_buffers()):
            setattr(layer.delayed, name, torch.empty_like(buffer).copy_(buffer))
    return model


def buffers_with_other_memory(model: Model) -> Model:
    for layer in layers_of(model).values():
        assert layer.delayed is not None
        for buffer in layer.delayed.buffers():
            buffer.data = buffer.clone()
    return model


def weight_replaced(model: Model) -> Model:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    return model


def weight_written_past_the_layer(model: Model) -> Model:
    """As FSDP2 does in every pass."""
    model[0]._parameters["weight"] = nn.Parameter(model[0].weight.detach() * 2)
    return model


def weights_swapped(model: Model) -> Model:
    other = converted(32, 48, 16)
    model[0].weight, other[0].weight = other[0].weight, model[0].weight
    return model


def frozen(model: Model) -> Model:
    model[0].requires_grad_(False)
    return model


def copied(model: Model) -> Model:
    return copy.deepcopy(model)


def pickled(model: Model) -> Model:
    return pickle.loads(pickle.dumps(model))


def group_chosen(model: Model) -> Model:
    f8.set_amax_reduction_group(model, False)
    return model


CHANGES: list[Callable[[Model], Model]] = [
    nothing,
    layer_added,
    layer_deleted,
    layer_dequantized,
    layer_converted_again,
    layer_of_another_model,
    moved,
    to_float32,
    to_meta_and_back,
    state_loaded,
    state_assigned,
    delayed_state_loaded,
    buffers_replaced,
    buffers_with_other_memory,
    weight_replaced,
    weight_written_past_the_layer,
    weights_swapped,
    frozen,
    copied,
    pickled,
    group_chosen,
]


def state_of(layer: Float8Linear) -> State:
    assert layer.delayed is not None
    return {name: x.clone() for name, x in layer.delayed.state().items() if name != "counts"}


def updated(layer: Float8Linear) -> State:
    """The state after an update, tensor by tensor; one that was not cast keeps its own."""
    assert layer.delayed is not None and layer.recipe.delayed is not None
    before, formats = state_of(layer), layer.delayed.formats.split(",")
    fields = ("amax_history", "inv_scale", "initialized")
    found: list[DelayedState] = []
    for i in range(3):
        state = DelayedState(*(before[field][i] for field in fields))
        if before["amax"][i] >= 0:
            delayed, rule = layer.recipe.delayed, layer.recipe.scale_rule
            state = f8.update_delayed_state(state, before["amax"][i], formats[i], rule, delayed)
        found.append(state)
    return {
        **{field: torch.stack([getattr(state, field) for state in found]) for field in fields},
        "amax": torch.full((3,), -1.0),
    }


def follow(run: Callable[[Tensor], Tensor], model: Model, called: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass in which the named layers are called, one update at its end, and the state of every layer after it."""
    layers, update = layers_of(model), delayed_update.update_states
    before = {name: state_of(layer) for name, layer in layers.items()}
    expected: list[dict[str, State]] = []

    def watched(found: Any) -> None:
        expected.append({name: updated(layer) for name, layer in layers.items()})
        update(found)

    x = torch.randn(8, 32).to(next(model.parameters()).dtype).requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(delayed_update, "update_states", watched)
        run(x).float().square().mean().backward()
    (wanted,) = expected
    for name, layer in layers.items():
        is_new = not torch.equal(wanted[name]["amax_history"], before[name]["amax_history"])
        assert is_new == (name in called), name
        for field, value in state_of(layer).items():
            assert torch.equal(value, wanted[name][field]), (name, field)


COMPILED = [nothing, moved, state_loaded, buffers_with_other_memory, copied]
"""Those that are tried in compiled code too, which knows a layer by its tensors alone."""


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "backend"),
    [*((change, None) for change in CHANGES), *((change, "aot_eager") for change in COMPILED)],
    ids=lambda x: getattr(x, "__name__", x or "eager"),
)
def test_the_update_follows(
    change: Callable[[Model], Model], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    bystander, model = converted(32, 48, 16), converted(32, 48, 16)
    kept = {name: state_of(layer) for name, layer in layers_of(bystander).items()}
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    for step in range(4):
        if step == 2:
            changed = change(model)
            if changed is not model or backend is None:
                run = changed if backend is None else torch.compile(changed, backend=backend, fullgraph=True)
            model = changed
        follow(run, model, {*layers_of(model)}, monkeypatch)
    if isinstance(model[0], Float8Linear):
        follow(model[0], model, {"0"}, monkeypatch)
    for name, layer in layers_of(bystander).items():
        after = state_of(layer)
        assert all(torch.equal(after[field], value) for field, value in kept[name].items()), "another model's"
    torch._dynamo.reset()
