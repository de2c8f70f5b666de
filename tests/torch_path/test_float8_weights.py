"""Layers that hold their weights as float8 alone, masters in the optimizer: bits, memory, checkpoints, refusals."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import f8emu.torch as f8
from f8emu.spec import OperandError, Recipe, RecipeName, UnsupportedError
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits
from tests.torch_path.states import assert_same_state, through_file

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
STEPS = 3


def plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, dtype=dtype), nn.Linear(48, 16, bias=False, dtype=dtype))


def convert(model: nn.Module, config: RecipeName | Recipe, **settings: Any) -> nn.Sequential:
    converted = f8.convert_to_float8_training(model, config=config, **settings)
    assert isinstance(converted, nn.Sequential)
    return converted


def primary(config: RecipeName | Recipe, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return convert(plain(dtype), config, float8_primary_weights=True)


def weights(model: nn.Module) -> list[f8.Float8Weight]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, f8.Float8Weight)]


def codes(model: nn.Module) -> list[Tensor]:
    """Everything that the layers hold of their weights on the device."""
    return [getattr(weight, name) for weight in weights(model) for name in weight.__tensor_flatten__()[0]]


def batch(step: int) -> Tensor:
    """A batch of another magnitude in every step."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(16, 32, generator=generator) * 2.0**-step).bfloat16()


def step(model: Any, optimizer: Optimizer, number: int, *, parts: int = 1) -> Tensor:
    optimizer.zero_grad()
    found: list[Tensor] = []
    for part in range(parts):
        output = model(batch(number + 10 * part))
        output.float().square().mean().backward()
        found.append(output.detach())
    optimizer.step()
    return torch.stack(found)


def assert_same_model(one: nn.Module, other: nn.Module) -> None:
    assert_same_state(one.state_dict(), other.state_dict())
    assert_same_state(f8.delayed_state_dict(one), f8.delayed_state_dict(other))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_a_layer_whose_weight_is_the_master(name: RecipeName, compiled: bool) -> None:
    """Outputs, gradients, masters, scales, optimizer state; with gradient accumulation, decay and a schedule.

    The other layer casts its weight anew in every pass, so its codes come from outside of what is tested. Under delayed
    scaling without accumulation: such a layer follows its scale then.
    """
    ours, theirs = primary(name, torch.float32), convert(plain(), name)
    mine = f8.MasterWeights(ours.parameters(), AdamW, lr=0.05, weight_decay=0.1)
    other = AdamW(theirs.parameters(), lr=0.05, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (mine, other)]
    models: list[Any] = [ours, theirs]
    if compiled:
        torch._dynamo.reset()
        models = [torch.compile(ours, backend="aot_eager", fullgraph=True), theirs]
    first = codes(ours)[0].view(torch.uint8).clone()
    for number in range(STEPS):
        parts = 1 if name == "delayed" else 2
        outputs = [step(*pair, number, parts=parts) for pair in zip(models, (mine, other), strict=True)]
        assert_same_bits(*outputs)
        for schedule in schedules:
            schedule.step()
        for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert own.grad is not None and expected.grad is not None
            assert_same_bits(own.grad, expected.grad)
        assert_same_model(ours, theirs)
    states = [optimizer.state_dict()["state"] for optimizer in (mine, other)]
    for i, state in states[1].items():
        assert states[0][i].keys() == state.keys() and all(torch.equal(states[0][i][key], state[key]) for key in state)
    assert not torch.equal(codes(ours)[0].view(torch.uint8), first)


@pytest.mark.parametrize(("name", "vectors"), [("tensorwise", (0, 0)), ("rowwise", (48, 32)), ("delayed", (0, 0))])
def test_memory(name: RecipeName, vectors: tuple[int, int]) -> None:
    """One byte an element, two where the second cast has other codes, and the scales; nothing else is a parameter.

    The values are on the host, where an optimizer finds them, and none of them is left there afterwards.
    """
    layer = f8.convert_to_float8_training(
        nn.Linear(32, 48, bias=False, dtype=torch.bfloat16, device="meta"), config=name, float8_primary_weights=True
    )
    (weight,) = weights(layer)
    held = [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]
    scales = sum(vectors) or 2
    amaxes = 1 if name == "delayed" else 0
    casts = 2 if any(vectors) else 1
    assert sum(x.numel() * x.element_size() for x in held) == casts * 48 * 32 + 4 * (scales + amaxes)
    assert {x.device.type for x in held} == {"meta"} and [x for x, _ in layer.named_parameters()] == ["weight"]
    assert not any(x.numel() > 48 for x in layer.buffers()) and weight.dtype is torch.bfloat16
    (own,) = weights(layer.to_empty(device="cpu"))
    assert own.master.dtype is torch.bfloat16
    optimizer = f8.MasterWeights([own], SGD, lr=1.0)
    assert own.master.dtype is torch.float32 and optimizer.inner.param_groups[0]["params"][0] is own.master


@pytest.mark.parametrize("name", RECIPES)
def test_every_copy_goes_on_with_the_same_bits(name: RecipeName) -> None:
    """Checkpoints of both kinds, deepcopy and pickles; none of them shares anything with what it was made from."""
    model = primary(name)
    optimizer = f8.MasterWeights(model.parameters(), AdamW, lr=0.05)
    for number in range(2):
        step(model, optimizer, number)
    states = through_file((model.state_dict(), optimizer.state_dict()))
    assert {type(value) for value in states[0].values()} == {Tensor}
    assert [value.dtype for key, value in states[0].items() if key.endswith("weight")] == [torch.float32] * 2

    copies: list[Any] = []
    for is_late, assign in ((False, False), (True, False), (True, True)):  # optimizers that are made afterwards
        loaded, resumed = restarted(name)
        loaded.load_state_dict(copy.deepcopy(states[0]), assign=assign)
        resumed = f8.MasterWeights(loaded.parameters(), AdamW, lr=1.0) if is_late else resumed
        resumed.load_state_dict(copy.deepcopy(states[1]))
        copies.append((loaded, resumed))
    distributed, its = restarted(name)
    of_model, of_optimizer = copy.deepcopy(get_state_dict(model, optimizer))
    set_state_dict(distributed, its, model_state_dict=of_model, optim_state_dict=of_optimizer)
    f8.load_delayed_state_dict(distributed, f8.delayed_state_dict(model))

    both: Any = (model, optimizer)
    copies += [(distributed, its), copy.deepcopy(both), pickle.loads(pickle.dumps(both))]
    copies.append(through_file(both, weights_only=False))
    before = [x.view(torch.uint8).clone() for x in codes(model)]
    for other, _ in copies:
        assert all(torch.equal(x.view(torch.uint8), old) for x, old in zip(codes(other), before, strict=True))
    outputs = [step(other, its, 2) for other, its in copies]
    assert all(torch.equal(x.view(torch.uint8), old) for x, old in zip(codes(model), before, strict=True))
    expected = step(model, optimizer, 2)
    for (other, _), output in zip(copies, outputs, strict=True):
        assert torch.equal(output, expected)
        assert_same_model(other, model)


def restarted(name: RecipeName) -> tuple[nn.Sequential, f8.MasterWeights]:
    """With other values."""
    model = primary(name)
    for layer in model:
        assert isinstance(layer, f8.Float8Linear)
        layer.reset_parameters()
    return model, f8.MasterWeights(model.parameters(), AdamW, lr=1.0)


@pytest.mark.parametrize("name", ["rowwise", "delayed"])
@pytest.mark.filterwarnings("ignore:Float8Linear. the state dict has no state of delayed scaling")
def test_weights_are_written_as_those_of_any_layer(name: RecipeName) -> None:
    """Written by initializations, the meta device, plain checkpoints and changes of dtype; then converted back."""

    def assert_like(observed: nn.Module, expected: nn.Module) -> None:
        assert_all_same_bits(codes(observed), codes(expected))
        assert_same_model(observed, expected)

    def initialized(model: nn.Module) -> nn.Module:
        torch.manual_seed(5)
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
        return model

    expected = convert(initialized(plain(torch.bfloat16)), name, float8_primary_weights=True)
    assert_like(initialized(primary(name)), expected)
    with torch.device("meta"):
        empty = [primary(name), primary(name)]
    assert_like(initialized(empty[0].to_empty(device="cpu")), expected)
    source = initialized(plain(torch.bfloat16)).state_dict()
    empty[1].load_state_dict(source, assign=True)
    assert_like(empty[1], expected)
    loaded = primary(name)
    loaded.load_state_dict(source)
    assert_like(loaded, expected)
    wide = primary(name, torch.float32)
    assert_like(wide.bfloat16(), convert(plain().bfloat16(), name, float8_primary_weights=True))
    assert_same_bits(weights(wide)[0].dequantize(), weights(wide)[0].rows.float() * weights(wide)[0].row_scale)
    back = f8.dequantize_float8_training(loaded)
    assert type(back.get_submodule("0")) is nn.Linear
    assert all(torch.equal(value, source[key]) for key, value in back.state_dict().items())


def test_optimizers_of_every_kind() -> None:
    """A closure that is called again, GradScaler, groups that come later, a weight that was frozen, shared weights."""

    def both(make: Callable[[nn.Module, Any], None], dtype: torch.dtype = torch.float32) -> None:
        ours, theirs = primary("rowwise", dtype), convert(plain(dtype), "rowwise")
        make(ours, f8.MasterWeights)
        make(theirs, lambda params, of, **settings: of(params, **settings))
        assert_same_model(ours, theirs)

    def closures(model: nn.Module, over: Any) -> None:
        optimizer = over(model.parameters(), LBFGS, lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(0)).float().square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def scaler(model: nn.Module, over: Any) -> None:
        optimizer, scale = over(model.named_parameters(), AdamW, lr=0.05), torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scale.scale(model(batch(0)).float().square().mean() * factor).backward()
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scale.step(optimizer)
            scale.update()

    def groups(model: nn.Module, over: Any) -> None:
        first, second = model.children()
        first.requires_grad_(False)
        optimizer = over(first.parameters(), AdamW, lr=0.05)
        optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
        step(model, optimizer, 0)
        first.requires_grad_(True)
        step(model, optimizer, 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(model, optimizer, 2)

    for make in (closures, scaler, groups):
        both(make)
    model = convert(shared(nn.Linear(32, 32)), "tensorwise", float8_primary_weights=True)
    assert model[1].weight is model[0].weight
    step(model, f8.MasterWeights(model.parameters(), SGD, lr=0.1), 0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            (name, {})
            for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop")
        ),
        *(("AdamW", {option: True}) for option in ("fused", "foreach", "amsgrad", "maximize")),
        ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "fused": True}),
        ("Adafactor", {}),
        ("Muon", {}),
    ],
)
def test_an_optimizer_steps_masters_as_it_steps_float32_weights(name: str, settings: dict[str, Any]) -> None:
    models = [nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 16, bias=False)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for is_primary, model in enumerate(models):
        f8.convert_to_float8_training(model, config="rowwise", float8_primary_weights=bool(is_primary))
        parameters, of = list(model.parameters()), getattr(torch.optim, name)
        make = functools.partial(f8.MasterWeights, parameters, of) if is_primary else functools.partial(of, parameters)
        optimizer = make(lr=0.05, **settings)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(0)).float().square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_same_model(models[1], models[0])


def shared(first: nn.Module) -> nn.Sequential:
    model = nn.Sequential(first, nn.Linear(32, 32, bias=False))
    model[1].weight = first.weight
    return model


def test_a_conversion_says_what_cannot_be_float8_alone() -> None:
    """Before it changes anything."""
    for model, settings, error, message in (
        (plain(), {"config": "blockwise"}, UnsupportedError, "under recipe 'blockwise' they cannot: block scales"),
        (shared(nn.Embedding(32, 32)), {}, UnsupportedError, "the one of 1 is 0.weight too"),
        (shared(nn.Linear(32, 32)), {"config": "delayed"}, UnsupportedError, "0 and 1 share a weight"),
        (convert(plain(), "tensorwise"), {}, OperandError, "0, 1 was converted without it"),
    ):
        kinds = [type(layer) for layer in model]
        with pytest.raises(error, match=message):
            f8.convert_to_float8_training(model, float8_primary_weights=True, **settings)  # type: ignore[arg-type]
        assert [type(layer) for layer in model] == kinds and not weights(model)
    with pytest.raises(OperandError, match="must be a class of optimizers"):
        f8.MasterWeights(plain().parameters(), SGD(plain().parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_what_would_leave_the_master_behind_is_refused(optimizer: Any) -> None:
    """Codes and masters stay as they were: other optimizers, writes past the master, high precision, averages."""
    model = primary("delayed")
    own = f8.MasterWeights(model.parameters(), SGD, lr=0.1)
    step(model, own, 0)
    (weight, _) = weights(model)
    values = weight.master.clone() * 1024
    with torch.no_grad():
        weight.copy_(values)  # cast by their own amax: they would saturate under the scale of the step before
    assert float((weight.dequantize() - values).norm() / values.norm()) < 0.05
    before = copy.deepcopy(model.state_dict())

    def assign() -> None:
        weight.data = torch.zeros(48, 32)

    model(batch(1)).float().sum().backward()
    for call in (
        optimizer(model.parameters(), lr=0.1, weight_decay=0.1).step,
        lambda: weight.data.mul_(0.9),
        torch.no_grad()(lambda: weight.mul_(0.9)),
        torch.no_grad()(lambda: torch._foreach_mul_([weight], 0.9)),  # pyright: ignore[reportPrivateImportUsage]
        lambda: weight[:16].zero_(),
        torch.no_grad()(lambda: weight.split(16)[0].zero_()),
        lambda: weight + 1,
        lambda: nn.functional.linear(batch(0), weight),
        assign,
    ):
        with pytest.raises(UnsupportedError, match=r"weight (is|holds only) float8 codes"):
            call()
    # torch takes a NotImplementedError, which an UnsupportedError is, for a parametrization without an inverse.
    with pytest.raises(OperandError, match="weight holds only float8 codes"):
        nn.utils.parametrizations.weight_norm(model[0])
    # The bias, which is no float8 weight, may have been stepped.
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before if key.endswith("weight"))


def test_a_write_by_any_route_is_a_write_to_the_master() -> None:
    """Without gradients: in place, through aliases, in lists, by assignment, by averages and by merged adapters."""
    other: Any = plain()

    def halve(weight: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_([weight], 0.5)  # pyright: ignore[reportPrivateImportUsage]
            weight.data.add_(weight.detach(), alpha=-0.5).mul_(2.0)

    def assign(weight: Any) -> None:
        weight.data = torch.ones(48, 32)

    def merge(weight: Any) -> None:  # as PEFT does, and undoes
        before = weight.data.clone()
        weight.data += torch.ones(48, 32)
        weight.data = before

    def vector(weight: Any) -> None:
        nn.utils.vector_to_parameters(torch.arange(48.0 * 32), [weight])

    def average(weight: Any) -> None:
        torch._foreach_lerp_([weight.detach()], [other[0].weight.detach()], 0.25)  # pyright: ignore[reportPrivateImportUsage]

    for is_taken in (False, True):
        for route in (halve, assign, merge, vector, average):
            models = [primary("rowwise", torch.float32), plain()]
            if is_taken:
                f8.MasterWeights(models[0].parameters(), SGD, lr=0.1)
            for model in models:
                route(model[0].weight)
            assert_same_state(models[0].state_dict(), models[1].state_dict())
            assert torch.equal(models[0](batch(0)), convert(models[1], "rowwise")(batch(0))), route
    # Averages of the model over steps; its copy has masters of its own.
    pairs: list[Any] = []
    for model in (primary("rowwise", torch.float32), convert(plain(), "rowwise")):
        optimizer = f8.MasterWeights(model.parameters(), SGD, lr=0.1)
        averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
        for number in range(STEPS):
            step(model, optimizer, number)
            for average_model in averages:
                average_model.update_parameters(model)
        pairs.append(averages)
    for ours, theirs in zip(*pairs, strict=True):
        assert_same_state(ours.state_dict(), theirs.state_dict())
        assert torch.equal(ours(batch(0)), theirs(batch(0)))


class Counting(SGD):
    """It keeps a count in its groups and other weights for evaluation, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(group["k"])


def test_what_an_optimizer_has_besides_is_there() -> None:
    """A method that writes to masters, and settings that a step changes."""
    models = [primary("rowwise", torch.float32), convert(plain(), "rowwise")]
    optimizers: list[Any] = [
        f8.MasterWeights(models[0].parameters(), Counting, lr=0.1),
        Counting(models[1].parameters(), lr=0.1),
    ]
    for number in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, number)
            optimizer.eval()
        assert optimizers[0].param_groups[0]["k"] == number + 1
        assert torch.equal(models[0](batch(0)), models[1](batch(0)))
        assert_same_model(*models)
    assert not hasattr(optimizers[0], "train") and not hasattr(optimizers[0], "_step_supports_amp_scaling")


@pytest.mark.usefixtures("one_rank")
def test_groups_of_ranks() -> None:
    """DDP trains it; what shards it says what to do instead."""
    model, alone = primary("delayed"), primary("delayed")
    replica = DistributedDataParallel(model, init_sync=False)
    step(replica, f8.MasterWeights(replica.parameters(), AdamW, lr=0.05), 0)
    step(alone, f8.MasterWeights(alone.parameters(), AdamW, lr=0.05), 0)
    assert_same_model(model, alone)
    with pytest.raises(UnsupportedError, match="under DDP pass init_sync=False"):
        DistributedDataParallel(primary("delayed"))
    sharded: Any = fully_shard(primary("delayed"))
    step(sharded, f8.MasterWeights(sharded.parameters(), AdamW, lr=0.05), 0)
    whole = {key: x.full_tensor() for key, x in sharded.state_dict().items()}
    assert_same_state(whole, alone.state_dict())
    # A bfloat16 weight has a float32 master, which no optimizer over the weight can step.
    for optimizer in (SGD, AdamW):
        with pytest.raises(UnsupportedError, match=r"step it with MasterWeights\(params, torch.optim.AdamW, ...\)"):
            step(sharded, optimizer(sharded.parameters(), lr=0.1), 1)
    # Another dtype rounds the masters; after the first pass it is refused.
    wide: Any = fully_shard(primary("rowwise", torch.float32))
    wide.to(torch.bfloat16)
    assert torch.equal(wide(batch(0)), convert(plain(), "rowwise").to(torch.bfloat16)(batch(0)))
    wide.reshard()
    late: Any = fully_shard(primary("rowwise", torch.float32))
    late(batch(0).float())
    late.reshard()
    late.to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match="change the dtype of a model before its first pass"):
        late(batch(0))

    # Any write counts: through a view, a state dict or a collective; codes are cast again at the next gather.
    def halved(x: Tensor) -> Tensor:
        return x.mul_(0.5)

    for write in (
        lambda: halved(wide[0].weight.to_local()[:7]),
        lambda: halved(wide[0].weight.to_local().t()),
        lambda: halved(wide.state_dict()["0.weight"]),
        lambda: dist.broadcast(wide[0].weight.to_local(), 0),
    ):
        with torch.no_grad():
            write()
        expected = convert(plain(torch.bfloat16), "rowwise")
        expected.load_state_dict({key: x.full_tensor() for key, x in wide.state_dict().items()})
        for i in (0, 1):
            expected[i].weight.data = wide.state_dict()[f"{i}.weight"].full_tensor() + 0
        assert torch.equal(wide(batch(0)), expected(batch(0)))
        wide.reshard()
    assert type(wide[0].weight.to_local().view(torch.int32)) is Tensor, "bits are no weight"
    # An optimizer that has the masters of whole weights would not step their parts.
    taken = primary("rowwise")
    f8.MasterWeights(taken.parameters(), SGD, lr=0.1)
    with pytest.raises(UnsupportedError, match="make MasterWeights after fully_shard"):
        fully_shard(taken)
