"""The end of every backward pass updates the scales, however a model is trained and whatever changes between passes."""

import copy
import functools
import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.torch.layer import delayed_update
from tests.torch_path.delayed import (
    BF16,
    STEPS,
    Model,
    Update,
    Way,
    assert_same,
    batch,
    buffers_of,
    by_calls_alone,
    by_tensors,
    loss_of,
    make,
    no_update,
    plain,
    two_runs,
    updates_of,
)
from tests.torch_path.states import assert_same_state, state_of

sync = f8.sync_float8_amax_and_scale_history


@torch.no_grad()
def error_of(model: Model, output: Tensor, x: Tensor) -> float:
    """Relative, against high precision."""
    expected = x.double()
    for layer in model:
        if isinstance(layer, f8.Float8Linear):
            expected = linear(expected, layer.weight.double(), layer.bias.double())
        else:
            expected = expected.relu()
    return float((output - expected).norm() / expected.norm())


@torch.no_grad()
def write_data(model: nn.Module) -> None:
    """A step that leaves no trace in a version counter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None


def with_optimizer(kind: type[Optimizer], passes: int = 1, **options: Any) -> Way:
    return lambda model, update: plain(model, update, kind(model.parameters(), lr=0.01, **options), passes)  # type: ignore[call-arg]


def checkpointed(model: Model, update: Update, reentrant: bool) -> None:
    """Layer by layer: reentrant checkpointing runs a backward pass of its own for each."""

    def run(x: Tensor) -> Tensor:
        for layer in (model[0], model[2]):
            x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x.relu(), use_reentrant=reentrant)  # type: ignore[assignment]
        return x

    plain(model, update, run=run)


def by_autograd_grad(model: Model, update: Update) -> None:
    parameters = list(model.parameters())
    for step in range(STEPS):
        grads = torch.autograd.grad(loss_of(model, step), parameters)
        update(model)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= 0.01 * grad


def functional(model: Model, update: Update) -> None:
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    plain(model, update, SGD(others.values(), lr=0.01), run=lambda x: functional_call(model, others, x))


def in_backward(model: Model, update: Update) -> None:
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


def computed_weights(model: Model, update: Update) -> None:
    """The weights are computed from parameters of other names."""
    prune.l1_unstructured(model[0], "weight", amount=0.25)
    parametrizations.weight_norm(model[2])
    plain(model, update)


def two_halves(model: Model, update: Update) -> None:
    """A generator and a discriminator, converted together: each is trained while the other rests."""
    halves = [(model[0], 48), (model[2], 16)]
    for step in range(2 * STEPS):
        layer, _ = halves[step % 2]
        x = batch(step // 2).repeat(1, 2)[:, : layer.in_features]  # type: ignore[operator]
        layer(x).float().square().mean().backward()
        update(model)
        write_data(model)


def interleaved(model: Model, update: Update) -> None:
    """A pipeline: a pass begins before the one in front of it has run backwards."""
    losses = [loss_of(model, 0)]
    for step in range(1, STEPS + 1):
        losses.append(loss_of(model, min(step, STEPS - 1)))
        losses.pop(0).backward()
        update(model)
    write_data(model)


def evaluated_in_between(model: Model, update: Update) -> None:
    """Each evaluation has an outlier, in every way in which a pass can be one without gradients."""
    optimizer = SGD(model.parameters(), lr=0.01)
    averaged = AveragedModel(model, use_buffers=True)
    for step in range(STEPS):
        loss_of(model, step).backward()
        update(model)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        before = state_of(model), state_of(averaged.module)
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                model.eval()(batch(0) * 1e4)
                averaged(batch(0))
        model.train()
        for old, one in zip(before, (model, averaged.module), strict=True):
            assert all(torch.equal(old[key], new) for key, new in state_of(one).items())


def after_an_error(model: Model, update: Update) -> None:
    """A backward pass that an error ended has no end: its amaxes count at the end of the next one."""

    def fail(grad: Tensor) -> None:
        raise MemoryError

    output = model(batch(0))
    hidden = model[0](batch(0))
    hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        (output.float().sum() + model[2](hidden.relu()).float().sum()).backward()
    model.zero_grad()
    update(model)
    plain(model, update)


WAYS: dict[str, Way] = {
    "sgd": with_optimizer(SGD),
    "adamw, fused": with_optimizer(AdamW, fused=True),
    "accumulation": with_optimizer(AdamW, passes=2, foreach=True),
    "checkpointing": functools.partial(checkpointed, reentrant=False),
    "reentrant checkpointing": functools.partial(checkpointed, reentrant=True),
    "autograd.grad": by_autograd_grad,
    "functional_call": functional,
    "in the backward pass": in_backward,
    "computed weights": computed_weights,
    "two halves": two_halves,
    "interleaved": interleaved,
    "evaluated in between": evaluated_in_between,
    "after an error": after_an_error,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_backward_pass_updates(way: str) -> None:
    automatic = two_runs(WAYS[way])
    assert min(itertools.chain(*updates_of(automatic))) >= STEPS
    x = batch(STEPS - 1).requires_grad_()
    automatic(x).float().sum().backward()  # the weights may have changed much since the last pass
    with torch.no_grad():
        least = error_of(automatic, automatic(x), x)  # by scales that are never old
    assert error_of(automatic, automatic(x), x) < 1.5 * least


def layer_deleted(model: Model) -> None:
    model[2] = nn.Identity()
    gc.collect()


def layer_of_another_model(model: Model) -> None:
    other = make(32, 48, 16)
    model[0], other[0] = other[0], model[0]


def to_meta_and_back(model: Model) -> None:
    kept = copy.deepcopy(model.state_dict())
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(kept)


def delayed_state_loaded(model: Model) -> None:
    state = f8.delayed_state_dict(model)
    f8.load_delayed_state_dict(model, {key: x * 2 if x.is_floating_point() else x for key, x in state.items()})


def buffers_replaced(model: Model) -> None:
    for buffers in buffers_of(model):
        for name, buffer in list(buffers.named_buffers()):
            setattr(buffers, name, torch.empty_like(buffer).copy_(buffer))


def buffers_with_other_memory(model: Model) -> None:
    for buffers in buffers_of(model):
        for buffer in buffers.buffers():
            buffer.data = buffer.clone()


CHANGES: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda model: None,
    "a layer added": lambda model: model.append(make(16, 16)[0]),
    "a layer deleted": layer_deleted,
    "a layer dequantized": lambda model: setattr(model, "0", f8.dequantize_float8_training(model[0])),
    "a layer converted again": lambda model: setattr(
        model, "0", f8.convert_to_float8_training(f8.dequantize_float8_training(model[0]), config="delayed")
    ),
    "a layer of another model": layer_of_another_model,
    "moved": lambda model: model._apply(torch.clone),
    "to float32": lambda model: model.float(),
    "to meta and back": to_meta_and_back,
    "state loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "state assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "delayed state loaded": delayed_state_loaded,
    "buffers replaced": buffers_replaced,
    "buffers with other memory": buffers_with_other_memory,
    "weight replaced": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach() * 2)),
    # As FSDP2 does in every pass.
    "weight written past the layer": lambda model: model[0]._parameters.update(
        weight=nn.Parameter(model[0].weight.detach() * 2)
    ),
    "frozen": lambda model: model[0].requires_grad_(False),
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "group chosen": lambda model: f8.set_amax_reduction_group(model, False),
}
COMPILED = ("nothing", "moved", "state loaded", "buffers with other memory", "copied")
"""Changes that are tried in compiled code too, which knows a layer by its tensors alone."""


@pytest.mark.parametrize(
    ("change", "backend"),
    [*((change, None) for change in CHANGES), *((change, "aot_eager") for change in COMPILED)],
    ids=lambda x: x or "eager",
)
def test_the_update_follows_a_change(change: str, backend: str | None) -> None:
    """It looks layers, tensors and parameters up every time; what it keeps must not outlive what it was made of."""
    bystander = make(seed=1)
    plain(bystander, no_update)
    kept = state_of(bystander)

    def way(model: Model, update: Update) -> Model:
        def compiled(model: Model) -> Any:
            if backend is None or update is not no_update:  # the other run is eager
                return model
            return torch.compile(model, backend=backend, fullgraph=True)

        run = compiled(model)
        for step in range(STEPS):
            if step == 2:
                changed = CHANGES[change](model)
                if isinstance(changed, nn.Sequential) and changed is not model:
                    model, run = changed, compiled(changed)
                if update is not no_update:
                    by_calls_alone(model)
            x = batch(step).to(next(model.parameters()).dtype)
            run(x.requires_grad_()).float().square().mean().backward()
            update(model)
            write_data(model)
        if isinstance(model[0], f8.Float8Linear):  # called alone
            x = batch(0).to(model[0].weight.dtype).requires_grad_()
            model[0](x).float().sum().backward()
            update(model)
        return model

    model = two_runs(way)
    assert len(updates_of(model)) == len([x for x in model.modules() if isinstance(x, f8.Float8Linear)])
    assert_same_state(kept, state_of(bystander))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd_updates_at_the_begin_of_the_next_pass() -> None:
    """It calls nothing at the end of a backward pass."""
    model, twin = make(), by_calls_alone(make())
    for step in range(STEPS):
        loss_of(twin, step).backward()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss_of(model, step).backward()
        assert_same(model, twin)
        by_tensors(twin)
    loss_of(model, 0)
    loss_of(twin, 0)
    assert_same(model, twin)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd_takes_both_passes() -> None:
    """The backward pass is called inside of compiled code, as in torch's tutorial."""
    model, twin = make(32, 16), make(32, 16)

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).float().square().mean().backward()

    compiled = torch.compile(step, backend="aot_eager")
    for i in range(2):
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled(model, batch(i))
        step(twin, batch(i))
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad), i
            mine.grad = its.grad = None


@pytest.mark.parametrize("kind", ["frozen", "no_grad", "checkpointed", "a copy of other weights", "now frozen"])
def test_a_pass_without_gradients_scales_by_its_own_amaxes(kind: str) -> None:
    """It has the bits of a layer that was never trained, and no scale of another day."""
    model = make()
    plain(model, no_update)
    if kind == "a copy of other weights":  # as an average of weights
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.mul_(64)
    fresh = make()
    for mine, its in zip(model.parameters(), fresh.parameters(), strict=True):
        its.data.copy_(mine)
    before = state_of(model)
    x = batch(0) * 2.0**20
    if "frozen" in kind:
        head = nn.Linear(16, 4, dtype=BF16)
        for one in (model, fresh):
            one.requires_grad_(False)
        outputs = [one(x) for one in (model, fresh)]
        head(outputs[0]).sum().backward()
    else:
        run: Any = functools.partial(checkpoint, use_reentrant=True) if kind == "checkpointed" else nn.Module.__call__
        with torch.no_grad():
            outputs = [run(one, x.clone().requires_grad_()) for one in (model, fresh)]
    assert torch.equal(*outputs)
    assert all(torch.equal(before[key], value) for key, value in state_of(model).items())
    assert error_of(model, outputs[0], x) < 0.08


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_an_update_that_is_due_is_not_lost() -> None:
    """After a backward pass that autograd did not end, a model that goes on elsewhere begins with the update."""
    model, loaded = make(), make()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss_of(model, 0).backward()
    loaded.load_state_dict(copy.deepcopy(model.state_dict()))
    others = loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = model(batch(1))
    assert updates_of(model) == [[1, 1, 1]] * 2
    for other in others:
        assert torch.equal(other(batch(1)), expected)
        assert updates_of(other) == [[1, 1, 1]] * 2


def test_models_that_are_trained_together_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call updates them in the order of their creation, whichever ran first: a call is an all-reduce over ranks."""
    calls: list[list[Any]] = []
    update = delayed_update.update_states
    monkeypatch.setattr(delayed_update, "update_states", lambda layers: [calls.append(layers), update(layers)])
    first, second = make(), make()
    second[2] = nn.Linear(48, 32, dtype=BF16)
    (first(second(batch(0))).float().sum() + second(batch(1)).float().sum()).backward()
    assert calls == [[first[0], first[2], second[0]]]
    hidden: Any = checkpoint(first[0], batch(0).requires_grad_(), use_reentrant=True)
    output: Any = checkpoint(first[2], hidden, use_reentrant=True)
    output.sum().backward()
    assert calls[1:] == [[first[0], first[2]]], "once, at the end of the outer pass"
    copied = copy.deepcopy(first)
    copied(batch(0)).float().sum().backward()
    assert calls[2:] == [[copied[0], copied[2]]], "a copy is a group of its own"


def test_a_call_of_ones_own_changes_nothing() -> None:
    model, twin = make(), make()
    plain(model, lambda model: [sync(model), sync(model)])
    plain(twin, no_update)
    assert_same(model, twin)


def test_steps_that_a_grad_scaler_skips() -> None:
    """The gradient of one bias is infinite; no scale follows it, and the gradients before it are saturated."""
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(STEPS):
        loss = scaler.scale(loss_of(model, step))
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        if step == 2:
            with pytest.warns(RuntimeWarning, match="infinite or NaN for: grad_output of 2;"):
                loss.backward(torch.tensor(float("inf")))
        else:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        is_skipped = all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
        assert is_skipped == (step == 2)
    assert updates_of(model) == [[STEPS, STEPS, STEPS], [STEPS, STEPS, STEPS - 1]]
