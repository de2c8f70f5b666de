"""Delayed scaling of models: the trace of the oracle, checkpoints, and steps that went wrong."""

import copy
import dataclasses
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import f8emu.torch as f8
import f8ref.numpy as reference
from f8emu.spec import (
    DELAYED,
    E4M3FN,
    E5M2,
    TENSORS,
    AmaxHistoryReduction,
    Cast,
    DelayedScaling,
    Gemm,
    OperandError,
    Recipe,
    ScaleRule,
)
from f8emu.torch.fused.delayed import UNCALLED
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits, to_numpy
from tests.torch_path.delayed import BF16, assert_same, batch, buffers_of, loss_of, make, train
from tests.torch_path.states import assert_same_state, through_file

FORMATS = dict(zip(TENSORS, (E4M3FN, E4M3FN, E5M2), strict=True))
sync = f8.sync_float8_amax_and_scale_history


@pytest.mark.parametrize(
    "reduction, margin, power_of_two",
    [(AmaxHistoryReduction.MAX, 0, False), (AmaxHistoryReduction.MOST_RECENT, 2, True)],
    ids=str,
)
def test_fifty_steps_equal_the_oracle(reduction: AmaxHistoryReduction, margin: int, power_of_two: bool) -> None:
    """States entry by entry, outputs and gradients, with zero and non-finite amaxes among them."""
    delayed = DelayedScaling(history_length=4, reduction=reduction, margin=margin)
    recipe = dataclasses.replace(DELAYED, delayed=delayed, scale_rule=ScaleRule(power_of_two=power_of_two))
    layer = f8.Float8Linear(32, 16, False, dtype=BF16, recipe=recipe)
    assert layer.delayed is not None
    states: dict[str, Any] = {name: reference.initial_delayed_state(delayed) for name in TENSORS}
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        exponent = torch.randint(-20, 9, (), generator=generator)
        return (torch.randn(shape, generator=generator) * torch.exp2(exponent)).to(BF16)

    for step in range(50):
        with torch.no_grad():
            layer.weight.copy_(draw(16, 32))
        tensors = {"input": draw(16, 32), "grad_output": draw(16, 16)}
        if step % 9 in (0, 4):
            tensors["input"].zero_()
        if step % 9 in (2, 7):  # the values of the next steps vanish or saturate under such a scale
            tensors["grad_output"] *= 2.0 ** (110 if step % 9 == 2 else -110)
        if step % 9 == 6:
            tensors["grad_output"][3, 2] = (float("inf"), float("nan"))[step % 2]
        x = tensors["input"].clone().requires_grad_()
        layer.zero_grad()
        output = layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            output.backward(tensors["grad_output"])
        arrays = map(to_numpy, (x, layer.weight, tensors["grad_output"]))
        expected = reference.linear(recipe, *arrays, delayed_state=states)
        assert expected.grad_input is not None and expected.grad_weight is not None
        products = [expected.output.product, expected.grad_input.product, expected.grad_weight.product]
        assert_all_same_bits([output, x.grad, layer.weight.grad], products)
        traces = zip(TENSORS, (expected.output.a, expected.output.b, expected.grad_input.a), strict=True)
        for i, (name, trace) in enumerate(traces):
            states[name] = reference.update_delayed_state(
                states[name], trace.amax, FORMATS[name], recipe.scale_rule, delayed
            )
            assert_same_bits(layer.delayed.amax_history[i], states[name].amax_history)
            assert_same_bits(layer.delayed.inv_scale[i], states[name].inv_scale)
            assert layer.delayed.initialized[i].item() == bool(states[name].initialized)
            assert layer.delayed.amaxes[i] == UNCALLED
    assert layer.delayed.counts.tolist() == [[12, 0, 0], [0, 0, 0], [0, 0, 5]]


def test_compiled_training_equals_eager() -> None:
    eager, compiled = make(), make()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(compiled, fullgraph=True)
    outputs = train(compiled, range(4), run=run)
    assert_all_same_bits(outputs, train(eager, range(4)))
    assert_same(compiled, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "the second step compiles nothing"
    for model, call in ((compiled, run), (eager, eager)):  # both forward passes raise the same amaxes
        (loss_of(call, 1) + loss_of(call, 3)).backward()
        model(batch(0))
    assert_same(compiled, eager)
    assert_all_same_bits([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])


@pytest.mark.parametrize("way", ["state_dict", "functions", "pickle", "deepcopy"])
def test_a_resumed_run_gives_the_bits_of_one_without_interruption(way: str) -> None:
    """Saved in the middle of a pass, between forward and backward; with counts of amaxes that were zero."""
    model = make()
    model(0 * batch(0)).sum().backward()
    assert f8.delayed_state_dict(model)["0.counts"].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    train(model, range(5))
    model(batch(5))
    if way == "state_dict":
        resumed = make(seed=1)
        resumed.load_state_dict(through_file(model.state_dict()))
    elif way == "functions":
        resumed = make(seed=1)
        weights = OrderedDict((key, value) for key, value in model.state_dict().items())  # the metadata is gone
        with pytest.warns(RuntimeWarning, match="no state of delayed scaling"):
            resumed.load_state_dict(weights)
        f8.load_delayed_state_dict(resumed, through_file(f8.delayed_state_dict(model)))
    else:
        resumed = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert_same_state(f8.delayed_state_dict(resumed), f8.delayed_state_dict(model))
    assert all(bool((buffers.state()["amax"][:2] > 0).all()) for buffers in buffers_of(resumed))
    kept = copy.deepcopy(state := f8.delayed_state_dict(model))
    outputs = [train(one, range(6, 12)) for one in (model, resumed)]
    assert_same_state(state, kept)
    assert_all_same_bits(*outputs)
    assert_same(resumed, model)


def test_a_foreign_state_is_refused() -> None:
    short = make(recipe=dataclasses.replace(DELAYED, name="short", delayed=DelayedScaling(history_length=3)))
    with pytest.raises(RuntimeError, match=r"'amax_history' must be torch.float32 of shape \[3, 3\].*got.*\[3, 16\]"):
        short.load_state_dict(make().state_dict())
    state = f8.delayed_state_dict(make())
    del state["0.inv_scale"]
    with pytest.raises(OperandError, match=r"missing \['0.inv_scale'\], unknown \[\]"):
        f8.load_delayed_state_dict(make(), state)


def test_the_passes_of_one_backward_pass_keep_their_maximum() -> None:
    """Several forward passes before a backward pass give the state of their largest amaxes, by the same scales."""
    model = make()
    train(model, range(2))
    seen = []
    for step in (3, 4, 5):
        once = copy.deepcopy(model)
        once(batch(step))
        seen.append([buffers.state()["amax"] for buffers in buffers_of(once)])
        model(batch(step))
    for i, buffers in enumerate(buffers_of(model)):
        assert torch.equal(buffers.state()["amax"], torch.stack([amaxes[i] for amaxes in seen]).amax(0))


def test_infinities_are_counted_and_reported_by_name() -> None:
    """Each tensor's first; a layer that was never called, or whose amax was zero, uses no warning up."""
    model = make()
    model.append(nn.Linear(32, 32))
    f8.convert_to_float8_training(model, config=DELAYED)
    called, idle = model[:3], buffers_of(model)[2]
    for step in range(2):
        called(batch(step)).sum().backward()
    assert idle.counts.tolist() == [[0, 0, 0]] * 3
    first = buffers_of(model)[0]
    scale = first.inv_scale.clone()
    for step in range(3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            called(batch(step) * float("inf")).sum().backward()
        texts = [str(warning.message) for warning in seen]
        assert len(texts) == (step == 0) and all("infinite or NaN for: input of 0;" in text for text in texts)
    assert first.counts[2, 0] == 3 and torch.equal(first.inv_scale[0], scale[0])
    assert first.amax_history[0, :3].tolist() == [0, 0, 0]


def test_the_state_stays_float32_and_follows_the_module() -> None:
    model = make()
    train(model, range(3))
    before = f8.delayed_state_dict(model)
    for conversion in (nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda m: m.to("cpu", BF16)):
        conversion(model)
        after = f8.delayed_state_dict(model)
        assert all(torch.equal(after[key], before[key]) and after[key].dtype is before[key].dtype for key in before)
    layer = model[0]
    assert isinstance(layer, f8.Float8Linear) and layer.delayed is not None
    layer.delayed.type(torch.bfloat16)
    assert layer.delayed.inv_scale.dtype is torch.float32
    assert torch.equal(layer.delayed.inv_scale, before["0.inv_scale"])
    layer.reset_parameters()
    assert not layer.delayed.initialized.any()
    assert layer.delayed.inv_scale.tolist() == [1, 1, 1]
    model.to_empty(device="meta").to_empty(device="cpu")
    assert not any(buffers.initialized.any() for buffers in buffers_of(model))
    assert all(not buffers.amax_history.any() for buffers in buffers_of(model))


def test_a_recipe_with_a_high_precision_gemm() -> None:
    """Its grad_output is never cast, and its amax is missed by nobody."""
    cast, high = Cast(format=E4M3FN), Gemm(a=Cast(format=None), b=Cast(format=None))
    recipe = Recipe(name="h", output=Gemm(a=cast, b=cast), grad_input=high, grad_weight=high, delayed=DelayedScaling())
    model = make(recipe=recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, range(3))
    assert all(b.initialized.tolist() == [True, True, False] and not b.counts.any() for b in buffers_of(model))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tensors", [TENSORS[i : i + n] for n in (1, 2) for i in range(4 - n)], ids="+".join)
def test_some_tensors_have_such_scales(tensors: tuple[str, ...], compiled: bool) -> None:
    """An update learns of a backward pass whichever these are; the input of the layer needs no gradient."""
    recipe = dataclasses.replace(DELAYED, name="some", delayed=DelayedScaling(tensors=tensors))
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32, dtype=BF16)), config=recipe)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for step in range(3):
        run(batch(step)).sum().backward()
    (buffers,) = buffers_of(model)
    assert (buffers.amax_history > 0).sum(1).tolist() == [3 * (tensor in tensors) for tensor in TENSORS]
    assert not buffers.counts.any()


def test_a_tensor_that_is_not_cast_is_counted() -> None:
    """Beside one of the same layer that is: here the gradient of a pass that was given up."""
    model = make()
    model(batch(0))
    sync(model)
    assert [buffers.counts.tolist() for buffers in buffers_of(model)] == [[[0, 0, 0], [0, 0, 1], [0, 0, 0]]] * 2
