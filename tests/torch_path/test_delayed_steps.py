"""Delayed scaling follows the steps of optimizers: bit by bit a twin that is updated by explicit calls."""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

import f8emu.torch as f8
from f8emu.torch.training import step_hooks

# Dynamo itself instantiates every autograd function that it traces, and Inductor imports what is deprecated.
pytestmark = [
    pytest.mark.usefixtures("exact_products"),  # of float8 models beside float8 models
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
STEPS = 4
sync = f8.sync_float8_amax_and_scale_history
Update = Callable[[nn.Module], None]
Way = Callable[[nn.Module, Update], None]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def make(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).to(dtype)
    f8.convert_to_float8_training(model, config="delayed")
    return model


def loss_of(model: Callable[[Tensor], Tensor], step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Inputs grow four times a step: a scale that was not updated is far off."""
    generator = torch.Generator().manual_seed(100 + step)
    x = (torch.randn(16, 32, generator=generator) * 4.0 ** (step - 2)).to(dtype)
    return model(x).float().square().mean()


def no_update(model: nn.Module) -> None:
    """What a user writes who relies on the optimizer."""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**f8.delayed_state_dict(model), **{k: v.detach() for k, v in model.named_parameters()}}


def assert_same(model: nn.Module, other: nn.Module) -> None:
    one, two = state_of(model), state_of(other)
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key


def updates_of(model: nn.Module) -> list[list[int]]:
    """How many updates found an amax: of every layer, for input, weight and grad_output."""
    states = f8.delayed_state_dict(model)
    return [(value > 0).sum(1).tolist() for key, value in states.items() if key.endswith("amax_history")]


def plain(model: nn.Module, update: Update, optimizer: Optimizer, passes: int = 1) -> None:
    for step in range(STEPS):
        for i in range(passes):
            loss_of(model, step + i).backward()
        update(model)
        optimizer.step()
        optimizer.zero_grad()


def with_optimizer(kind: type[Optimizer], passes: int = 1, **options: Any) -> Way:
    return lambda model, update: plain(model, update, kind(model.parameters(), lr=0.01, **options), passes)  # type: ignore[call-arg]


def two_optimizers(model: nn.Module, update: Update) -> None:
    """The second layer is stepped in every other step, and accumulates in between."""
    assert isinstance(model, nn.Sequential)
    first, second = SGD(model[0].parameters(), lr=0.01), AdamW(model[2].parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(model[0])
        first.step()
        first.zero_grad()
        if step % 2:
            update(model[2])
            second.step()
            second.zero_grad()


def assigned_data(model: nn.Module, update: Update) -> None:
    """As some offloading optimizers and FSDP1 do."""
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(model)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None


def functional(model: nn.Module, update: Update) -> None:
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    optimizer = SGD(others.values(), lr=0.01)
    for step in range(STEPS):
        loss_of(lambda x: functional_call(model, others, x), step).backward()
        update(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(others[name])


def lbfgs(model: nn.Module, update: Update) -> None:
    """Several passes and changes of the weights in one step."""
    optimizer = LBFGS(model.parameters(), lr=0.01, max_iter=3)

    def closure(step: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss.item()

    for step in range(STEPS):
        optimizer.step(functools.partial(closure, step))
        update(model)


def adapters(model: nn.Module, update: Update) -> None:
    """As LoRA: no optimizer holds the layers, which are frozen; what is trained changes their inputs and gradients."""
    assert isinstance(model, nn.Sequential)
    model.requires_grad_(False)
    torch.manual_seed(1)
    trained = nn.Linear(32, 32, dtype=torch.bfloat16)
    optimizer = AdamW(trained.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(lambda x: model(x + trained(x)), step).backward()
        update(model)
        optimizer.step()
        optimizer.zero_grad()


def in_backward(model: nn.Module, update: Update) -> None:
    """An optimizer for each parameter, which steps as soon as the gradient is complete."""
    for parameter in model.parameters():
        optimizer = SGD([parameter], lr=0.01)

        def step_one(parameter: Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_one)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(model)


def pruned(model: nn.Module, update: Update) -> None:
    """The weights are computed from parameters of other names."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=0.25)
    plain(model, update, SGD(model.parameters(), lr=0.01))


class Outer(SGD):
    """Holds the first layer; in its step another optimizer steps the second, as a wrapper of optimizers does."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(model[0].parameters(), lr=0.01)
        self.inner = AdamW(model[2].parameters(), lr=0.01)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        super().step()


def nested(model: nn.Module, update: Update) -> None:
    assert isinstance(model, nn.Sequential)
    optimizer = Outer(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(model)
        optimizer.step()
        model.zero_grad()


def after_an_error(model: nn.Module, update: Update) -> None:
    """A step that raised an error, as one that ran out of memory, is no reason to miss the following ones."""

    def closure() -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        SGD(model.parameters(), lr=0.01).step(closure)
    plain(model, update, SGD(model.parameters(), lr=0.01))


WAYS: dict[str, Way] = {
    "sgd": with_optimizer(SGD),
    "sgd, foreach": with_optimizer(SGD, foreach=True),
    "sgd, fused": with_optimizer(SGD, fused=True),
    "adamw": with_optimizer(AdamW),
    "adamw, foreach": with_optimizer(AdamW, foreach=True),
    "adamw, fused": with_optimizer(AdamW, fused=True),
    "accumulation": with_optimizer(AdamW, passes=2, fused=True),
    "two optimizers": two_optimizers,
    "p.data = ...": assigned_data,
    "functional_call": functional,
    "lbfgs": lbfgs,
    "in the backward pass": in_backward,
    "a step in a step": nested,
    "pruned": pruned,
    "after a step that raised": after_an_error,
    "adapters": adapters,
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_without_a_call_are_those_with_one(way: str) -> None:
    automatic, explicit = make(), make()
    WAYS[way](automatic, no_update)
    WAYS[way](explicit, sync)
    assert_same(automatic, explicit)
    second = STEPS // 2 if way == "two optimizers" else STEPS
    assert updates_of(automatic) == [3 * [STEPS], 3 * [second]], "one update a step"


def test_a_frozen_model_follows_no_other() -> None:
    """Training a model leaves another one alone, such as a teacher; one that is called follows, copies apart."""
    teacher, idle = make().requires_grad_(False), make().requires_grad_(False)
    again = copy.deepcopy(teacher)
    before = state_of(copy.deepcopy(idle))
    student = make()
    optimizer = SGD(student.parameters(), lr=0.01)
    for step in range(STEPS):
        with torch.no_grad():
            loss_of(teacher, step)
            loss_of(again, step + 1)
        loss_of(student, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = state_of(idle)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert updates_of(teacher) == updates_of(again) == [[STEPS, STEPS, 0]] * 2
    groups = step_hooks.stepped_layers([optimizer])
    numbers = [[layer.delayed.notes.number for layer in group if layer.delayed is not None] for group in groups]
    assert [len(group) for group in numbers] == [2, 2, 2, 2] and len({*itertools.chain(*numbers)}) == 8
    assert all(group == sorted(group) for group in numbers) and numbers[1:] == sorted(numbers[1:]), "for all ranks"


def test_layers_that_were_trained_and_then_frozen() -> None:
    """They follow the new optimizer, though the first still exists; not while the first steps in between."""
    model = make()
    first = SGD(model.parameters(), lr=0.01)
    plain(model, no_update, first)
    model.requires_grad_(False)
    head = nn.Linear(16, 16, dtype=torch.bfloat16)
    second = SGD(head.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(lambda x: head(model(x)), step).backward()
        second.step()
        first.step()
    assert updates_of(model) == [[2 * STEPS, 2 * STEPS, STEPS]] * 2
    for step in range(STEPS):
        loss_of(lambda x: head(model(x)), step).backward()
        second.step()
    assert updates_of(model) == [[3 * STEPS - 1, 3 * STEPS - 1, STEPS]] * 2, "the first of these steps told nothing yet"


def test_what_ran_in_a_step_is_updated_once_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update is an all-reduce: ranks on which the inner optimizers differ must not disagree on their number."""
    counts: list[int] = []
    monkeypatch.setattr(step_hooks, "update_states", lambda states: counts.append(len(states)))
    nested(make(), no_update)
    assert counts == [2] * STEPS


def test_an_explicit_call_and_the_step_are_one_update() -> None:
    model, twin = make(), make()
    plain(model, lambda model: [sync(model), sync(model)], SGD(model.parameters(), lr=0.01))  # type: ignore[arg-type]
    plain(twin, no_update, SGD(twin.parameters(), lr=0.01))
    assert_same(model, twin)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips(fused: bool) -> None:
    """A fused optimizer skips on the device, so its step is an update as others; otherwise the next step updates.

    The gradient of the last bias is infinite. Gradients before it are not: an infinity is saturated.
    """
    model = make(torch.float32)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    twin = copy.deepcopy(model)
    for step in range(STEPS):
        for one in (model, twin):
            with torch.autocast("cpu", torch.bfloat16):
                loss = scaler.scale(loss_of(one, step, torch.float32))
            loss.backward(torch.tensor(float("inf") if step == 2 else 1.0))
        before = state_of(model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            scaler.step(optimizer)
            if step != 2 or fused:
                sync(twin)
        told = [str(warning.message) for warning in seen if "infinite or NaN" in str(warning.message)]
        assert len(told) == (2 if step == (2 if fused else 3) else 0), "an infinite gradient is told once, by both"
        if step == 2 and not fused:
            after = state_of(model)
            assert all(torch.equal(after[key], before[key]) for key in before), "nothing steps"
        scaler.update()
        model.zero_grad()
        twin.zero_grad()
        with torch.no_grad():
            for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
                its.copy_(mine)
        assert_same(model, twin)
    usable = STEPS if fused else STEPS - 1
    assert updates_of(model)[0][:2] == updates_of(model)[1][:2] == [usable, usable]
    counts = [value[2].tolist() for key, value in state_of(model).items() if key.endswith("counts")]
    assert counts == [[0, 0, 0], [0, 0, 1]], "the infinity of the skipped step is of no use, whenever it is seen"


def test_a_copy_follows_its_own_optimizer() -> None:
    model = make()
    plain(model, no_update, SGD(model.parameters(), lr=0.01))
    copied, before, twin = copy.deepcopy(model), state_of(copy.deepcopy(model)), copy.deepcopy(model)
    plain(copied, no_update, SGD(copied.parameters(), lr=0.01))
    plain(twin, sync, SGD(twin.parameters(), lr=0.01))
    assert_same(copied, twin)
    after = state_of(model)
    assert all(torch.equal(after[key], before[key]) for key in before), "the model is left alone"


def test_averages_of_weights_leave_scales_alone() -> None:
    model = make()
    averaged = AveragedModel(model, use_buffers=True)
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    kept = f8.delayed_state_dict(averaged.module)
    fresh = f8.delayed_state_dict(make())
    assert all(torch.equal(kept[key], fresh[key]) for key in fresh)
    assert not torch.equal(averaged.module[0].weight, model[0].weight)  # type: ignore[index]


def test_the_update_compiles_into_one_graph() -> None:
    """By itself, and with the optimizer of a step that is compiled as a whole."""
    model, eager = make(), make()
    parameters = dict(model.named_parameters())

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def update_and_step(grads: list[Tensor]) -> None:
        sync(model)
        for parameter, grad in zip(parameters.values(), grads, strict=True):
            parameter.data.sub_(grad, alpha=0.01)

    torch._dynamo.utils.counters.clear()
    optimizer = SGD(eager.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update_and_step([parameter.grad for parameter in parameters.values() if parameter.grad is not None])
        model.zero_grad()
        loss_of(eager, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(model, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_compiled_step_of_an_optimizer_is_noticed() -> None:
    """The optimizer's graph stays as it is; the update runs after it, and tells of infinities."""
    models = make(), make()
    torch._dynamo.utils.counters.clear()
    for model, update in zip(models, (no_update, sync), strict=True):
        optimizer = SGD(model.parameters(), lr=0.01)
        step_model = torch.compile(optimizer.step, backend="aot_eager")
        for step in range(STEPS):
            loss_of(model, step).backward()
            update(model)
            step_model()
            model.zero_grad()
        with torch.no_grad():
            model(torch.full((1, 32), float("inf"), dtype=torch.bfloat16))
        loss_of(model, 0).backward()
        with pytest.warns(RuntimeWarning, match="infinite or NaN of: input of 0"):
            update(model)
            step_model()
    assert updates_of(models[0]) == [[STEPS, STEPS + 1, STEPS + 1], 3 * [STEPS + 1]]
    assert_same(*models)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "the optimizers' own"
