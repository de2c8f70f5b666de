"""Delayed scaling over two ranks (gloo), whose data always differ. One process group runs all cases."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import f8emu.torch as f8
from tests.torch_path.delayed import STEPS, make
from tests.torch_path.ranks import Cases, ranks_test
from tests.torch_path.states import assert_same_state, assert_updated, state_of
from tests.torch_path.test_pipelines import trains

LOUDER = 64.0
"""Rank 1's inputs are as many times rank 0's."""
sync = f8.sync_float8_amax_and_scale_history


def batch(step: int) -> Tensor:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * rank + step)
    return (torch.randn(16, 32, generator=generator) * LOUDER**rank).bfloat16()


def train(
    model: nn.Module, optimizer: Optimizer, *, explicit: bool = False, steps: range = range(STEPS)
) -> list[Tensor]:
    outputs: list[Tensor] = []
    for step in steps:
        output = model(batch(step))
        (output.float().square().mean() / LOUDER**2).backward()
        if explicit:
            sync(model)
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    return outputs


def of_ranks(model: nn.Module) -> list[dict[str, Tensor]]:
    """The scales' states on both ranks."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, f8.delayed_state_dict(model))
    return found


def ranks_with_other_numbers_of_layers() -> None:
    """First, while no number of layers is known; both ranks say so, and neither waits for the other."""
    model = make(32, 16, 16, 16) if dist.get_rank() == 0 else make(32, 16)
    with pytest.raises(f8.DelayedScalingError, match="must have the same delayed layers") as raised:
        model(batch(0)).sum().backward()
    assert f"this rank has {3 if dist.get_rank() == 0 else 1}" in str(raised.value)


def stages_of_a_pipeline() -> None:
    """Both ranks have as many layers, but other ones."""
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16()
    stage = f8.convert_to_float8_training(
        model if dist.get_rank() == 0 else nn.Sequential(model[2], model[3]), config="delayed"
    )
    with pytest.raises(f8.DelayedScalingError, match="by the same names; this rank has 2"):
        stage(batch(0)).sum().backward()
    f8.set_amax_reduction_group(stage, False)
    stage(batch(0)).sum().backward()


def ddp(compiled: bool) -> None:
    """Outputs of both ranks near those in high precision, by scales that are the same on both."""
    replica = DistributedDataParallel(make(32, 48))
    model: Any = torch.compile(replica, backend="aot_eager") if compiled else replica
    optimizer = SGD(replica.parameters(), lr=0.01, fused=True)
    errors: list[float] = []
    for step in range(STEPS):
        exact = nn.Sequential(nn.Linear(32, 48), nn.ReLU()).double()
        exact.load_state_dict({key.removeprefix("module."): value for key, value in replica.state_dict().items()})
        with torch.no_grad():
            expected = exact(batch(step).double())
        (output,) = train(model, optimizer, steps=range(step, step + 1))
        errors.append(float((output - expected).norm() / expected.norm()))
    ours, others = of_ranks(replica)
    assert_same_state(ours, others)
    assert_updated(replica, STEPS)
    assert all(error < 0.05 for error in errors), errors


def a_layer_that_one_rank_does_not_call() -> None:
    model = make()
    first = model[0]
    for step in range(STEPS):
        output = model(batch(step)) if step != 2 or dist.get_rank() == 0 else first(batch(step))
        output.float().square().mean().backward()
        sync(model)
    ours, others = of_ranks(model)
    assert_same_state(ours, others)
    assert_updated(model, STEPS)


def no_group() -> None:
    """Every rank for itself; equal to a rank alone in its group."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    states: list[dict[str, Tensor]] = []
    for group in (False, alone):
        model = make()
        f8.set_amax_reduction_group(model, group)
        train(model, SGD(model.parameters(), lr=0.01))
        ours, others = of_ranks(model)
        assert not torch.equal(ours["0.inv_scale"][0], others["0.inv_scale"][0])
        assert_updated(model, STEPS)
        states.append(state_of(model))
    assert_same_state(*states)


def steps_follow(wrap: Callable[[nn.Module], nn.Module], kind: Callable[..., Optimizer]) -> None:
    """Without a call, the bits of explicit calls; the same scales on both ranks, and an update a step."""
    states: list[dict[str, Tensor]] = []
    for explicit in (False, True):
        model = wrap(make())
        train(model, kind(model.parameters(), lr=0.01), explicit=explicit)
        ours, others = of_ranks(model)
        assert_same_state(ours, others)
        assert_updated(model, STEPS)
        states.append(state_of(model))
    assert_same_state(*states)


def shard(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model


def shard_flat(model: nn.Module, use_orig_params: bool) -> nn.Module:
    """FSDP1: the parameters of a layer are views of a flat one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = functools.partial(FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    return wrap(nn.Sequential(*(wrap(layer) for layer in model.children())))


def zero(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """On each rank an inner optimizer holds a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what is deprecated, when it is imported

    return ZeroRedundancyOptimizer(list(parameters), AdamW, lr=lr)


case = functools.partial
CASES: Cases = {
    2: {
        "ranks with other numbers of layers": ranks_with_other_numbers_of_layers,
        "stages of a pipeline": stages_of_a_pipeline,
        "ddp, eager": case(ddp, False),
        "ddp, compiled": case(ddp, True),
        "a pipeline, compiled": case(trains, "GPipe", "delayed", kind="compiled"),
        "a layer that one rank does not call": a_layer_that_one_rank_does_not_call,
        "no group": no_group,
        "fsdp2": case(steps_follow, shard, AdamW),
        "fsdp2, foreach": case(steps_follow, shard, case(SGD, foreach=True)),
        "fsdp1": case(steps_follow, case(shard_flat, use_orig_params=False), AdamW),
        "fsdp1, its parameters": case(steps_follow, case(shard_flat, use_orig_params=True), AdamW),
        "ZeroRedundancyOptimizer": case(steps_follow, DistributedDataParallel, zero),
    }
}
test_ranks = ranks_test(__name__, CASES)
