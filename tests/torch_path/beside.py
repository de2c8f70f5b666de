"""One process equals N ranks: a model over ranks beside the same model on one device, step by step, bit for bit."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import f8emu.torch as f8
from tests.torch_path.bits import assert_same_bits

Run = Callable[[Any, int, int, int], Sequence[Tensor]]
"""Both passes of a model, with the data of a step, a rank and a part of the step; what ranks and one device share."""


def whole(x: Any) -> Tensor:
    """The whole of a tensor that may be sharded, and the values of a weight that holds codes."""
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return getattr(x, "master" if isinstance(x, f8.Float8Weight) else "plain", x).detach()


def assert_same(observed: Iterable[Any], expected: Iterable[Any], name: str) -> None:
    for i, (x, y) in enumerate(zip(observed, expected, strict=True)):
        assert_same_bits(whole(x), whole(y), name=f"{name} {i}")


def assert_same_states(model: Any, alone: Any) -> None:
    """The states of delayed scaling."""
    observed, expected = f8.delayed_state_dict(model), f8.delayed_state_dict(alone)
    assert observed.keys() == expected.keys()
    for name, state in observed.items():
        assert torch.equal(state, expected[name]), name


def in_turn(alone: Any, run: Run, step: int, ranks: Iterable[int], parts: int) -> tuple[list[Any], list[Tensor]]:
    """This rank's results, part by part, of one device that gets the batches of ranks in turn; the means of gradients.

    Gradients are added in the order of the ranks. Each part is one update of delayed scaling.
    """
    results: list[Any] = []
    sums: dict[int, list[Tensor]] = {}
    for part in range(parts):
        for rank in ranks:
            alone.zero_grad()
            of_rank = run(alone, step, rank, part)
            results += [of_rank] if rank == dist.get_rank() else []
            grads = [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]
            sums[rank] = [x + y for x, y in zip(sums[rank], grads, strict=True)] if rank in sums else grads
        f8.sync_float8_amax_and_scale_history(alone)
    count = dist.get_world_size()
    return results, [functools.reduce(torch.add, grads) / count for grads in zip(*sums.values(), strict=True)]


def train_beside(
    model: Any,
    alone: Any,
    run: Run,
    optimizers: Sequence[Any],
    *,
    steps: int,
    parts: int = 1,
    holds: bool = False,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Train a model that FSDP2 shards beside one on one device: results, gradients, weights and states of every step.

    Of more than two ranks, whose gradients are added in another order, one device steps by the sharded gradients.
    `holds`: weights stay gathered from one part of a step to the next.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    is_every_rank_run = count == 2 or bool(f8.delayed_state_dict(alone))
    for step in range(steps):
        before(step)
        expected, means = in_turn(alone, run, step, range(count) if is_every_rank_run else [rank], parts)
        for part in range(parts):
            model.set_requires_gradient_sync(part == parts - 1)
            model.set_reshard_after_backward(part == parts - 1 or not holds)
            assert_same(run(model, step, rank, part), expected[part], f"step {step}, result")
        grads = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        if count == 2:
            assert_same(grads, means, f"step {step}, gradient")
        trained = [parameter for parameter in alone.parameters() if parameter.requires_grad]
        for parameter, grad in zip(trained, grads, strict=True):
            parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after(step)
        assert_same(model.parameters(), alone.parameters(), f"step {step}, weight")
        assert_same_states(model, alone)
