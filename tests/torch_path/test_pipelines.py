"""Pipelines of torch over 2 and 4 ranks (gloo), against the same passes in one process, bit for bit."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import f8emu.torch as f8
from f8emu.spec import RECIPES, RecipeName
from tests.torch_path.beside import whole
from tests.torch_path.ranks import Cases, ranks_test
from tests.torch_path.states import assert_same_state

MICROBATCHES = 4
Parts = Sequence[nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Fused(nn.Module):
    """A block with autograd functions of its own: SiLU in the casts, of one feed-forward block and of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = f8.Float8FeedForward(32, 48, recipe="delayed")
        self.experts = f8.Float8Experts(2, 32, 48, recipe="delayed")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.shared(x), torch.tensor([7, x.shape[0]], dtype=torch.int32))


def make(recipe: RecipeName, stages: int, block: Callable[[], nn.Module] = Block) -> list[nn.Module]:
    """A converted model, cut into stages."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(block() for _ in range(stages))).bfloat16()
    f8.convert_to_float8_training(model, config=recipe)
    return list(model)


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * part + step)
    x, y = torch.randn(2, 16 * MICROBATCHES, 32, generator=generator)
    return x.bfloat16() * 4 ** (step + part), y.bfloat16()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


@contextlib.contextmanager
def empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def watch(stage: Any, done: list[tuple[int, int, bool]]) -> None:
    """Note each pass of a stage: its index, the microbatch, whether it is a forward pass."""

    def noting(name: str, is_forward: bool, is_one: Callable[[dict[str, Any]], bool]) -> None:
        call = getattr(stage, name)

        def run(index: int, *args: Any, **options: Any) -> Any:
            if is_one(options):
                done.append((stage.stage_index, index, is_forward))
            return call(index, *args, **options)

        setattr(stage, name, run)

    # A backward pass in two parts counts where torch computes most: the first, but the second in the first stage.
    noting("forward_one_chunk", True, lambda _: True)
    noting("backward_one_chunk", False, lambda options: options.get("full_backward", True) or not stage.is_first)
    noting("backward_weight_one_chunk", False, lambda _: stage.is_first)


def one_process(stages: Parts, orders: list[Any], x: Tensor, y: Tensor) -> list[Tensor]:
    """The passes of all ranks, each in its order; backward passes are whole."""
    xs, ys, last = x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), len(stages) - 1
    inputs, outputs, grads = dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()

    def run(stage: int, index: int, is_forward: bool) -> bool:
        key, before, after = (stage, index), (stage - 1, index), (stage + 1, index)
        if (before not in outputs and stage > 0) if is_forward else (after not in grads and stage < last):
            return False
        if is_forward:
            inputs[key] = outputs[before].detach().requires_grad_() if stage > 0 else xs[index]
            output = stages[stage](inputs[key])
            outputs[key] = loss_of(output, ys[index]) if stage == last else output
        else:
            outputs[key].backward(grads.get(after))
            grads[key] = inputs[key].grad
        return True

    while any(orders):
        for order in orders:
            while order and run(*order[0]):
                order.pop(0)
    for parameter in itertools.chain(*(stage.parameters() for stage in stages)):
        assert parameter.grad is not None
        parameter.grad /= MICROBATCHES
    return [outputs[last, i].detach() for i in range(MICROBATCHES)]


def placed(schedule: str, ranks: int) -> list[list[int]]:
    """The stages of each rank."""
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [[rank] if schedule in ("GPipe", "1F1B") else [rank, ranks + rank] for rank in range(ranks)]


def trains(
    schedule: str, recipe: RecipeName, block: Callable[[], nn.Module] = Block, kind: str = "", steps: int = 1
) -> None:
    """Losses, gradients and states of one process. Of some kinds each stage is that of two ranks."""
    is_spread = kind in ("fsdp2", "tp", "ddp")
    pipe, inner = [mesh.get_group() for mesh in meshes()] if is_spread else (dist.group.WORLD, None)
    rank, ranks = dist.get_rank(pipe), dist.get_world_size(pipe)
    mine = placed(schedule, ranks)[rank]
    number = ranks * len(mine)
    alone, parts = make(recipe, number, block), make(recipe, number, block)
    for i in mine:
        parts[i] = parts[i] if kind == "compiled" and i == 0 else spread(parts[i], kind)
    for i, part in enumerate(alone):  # each is updated by its own backward passes, over the ranks of its stage
        alone[i] = spread(part, kind) if kind == "tp" else part
        f8.set_amax_reduction_group(part, inner or False)
    stages: Any = [PipelineStage(parts[i], i, number, torch.device("cpu"), group=pipe) for i in mine]
    done: list[Any] = []
    for stage in stages:
        watch(stage, done)
    made: Any = pipelining.schedules.get_schedule_class(schedule)
    run = made(stages if number > ranks else stages[0], MICROBATCHES, loss_fn=loss_of)
    has_own_data = inner is not None and kind != "tp"
    for step in range(steps):
        x, y = batch(step, dist.get_rank(inner) if has_own_data else 0)
        observed: list[Tensor] = []
        with empty_memory_is_nan():
            run.step(*[x] * (0 in mine), **({"target": y, "losses": observed} if number - 1 in mine else {}))
        orders: list[Any] = [None] * ranks
        dist.all_gather_object(orders, done, pipe)
        done.clear()
        losses = one_process(alone, orders, x, y)
        assert not observed or torch.equal(torch.stack(observed), torch.stack(losses))
        for i in range(number):
            for own, other in zip(parts[i].parameters(), alone[i].parameters(), strict=True):
                expected = whole(other.grad)
                if has_own_data:
                    dist.all_reduce(expected, group=inner)
                    expected /= 2
                # DDP rounds its sums of bfloat16 otherwise, with plain layers too.
                assert i not in mine or kind == "ddp" or torch.equal(whole(own.grad), expected), (step, i)
            if i in mine:
                assert_same_state(f8.delayed_state_dict(parts[i]), f8.delayed_state_dict(alone[i]))
            with torch.no_grad():
                for parameter in itertools.chain(parts[i].parameters(), alone[i].parameters()):
                    parameter -= 0.01 * (0 if parameter.grad is None else parameter.grad)
                    parameter.grad = None


@functools.cache
def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of a pipeline's stages, and that of the ranks of each stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "stage"))
    return mesh["pipeline"], mesh["stage"]


def spread(stage: nn.Module, kind: str) -> nn.Module:
    if kind == "fsdp2":
        fully_shard(stage, mesh=meshes()[1])
    elif kind == "tp":
        parallelize_module(stage, meshes()[1], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "compiled":
        stage.get_submodule("down").compile(backend="aot_eager")
    return DistributedDataParallel(stage, process_group=meshes()[1].get_group()) if kind == "ddp" else stage


def unknown_ranks() -> None:
    """Weights that two ranks train by means of their own: no rank begins what the others do not end."""
    (pipe, _), like = meshes(), torch.zeros(16, 32, dtype=torch.bfloat16)
    index = dist.get_rank(pipe.get_group())
    module = make("delayed", 2)[index]
    stage: Any = PipelineStage(module, index, 2, torch.device("cpu"), like, like, group=pipe.get_group())
    stage._retrieve_recv_activations = lambda _: (like,)  # of a second stage, without the first
    stage._validate_fwd_input = lambda *_: None  # torch 2.11 knows shapes in a schedule alone
    with pytest.raises(RuntimeError) as raised:
        stage.forward_one_chunk(0, (like,))
    message = f"the ranks that train stage {index} of a pipeline must be known; .* 4 ranks, of which the pipeline has 2"
    assert re.search(message, str(raised.value.__cause__))


def hand_written(is_cut_first: bool) -> None:
    """Without torch's stages, and alike but for the weights where each rank converts its part alone."""
    torch.manual_seed(dist.get_rank() if is_cut_first else 0)
    model = nn.Sequential(*(Block() for _ in range(1 if is_cut_first else 2)))
    f8.convert_to_float8_training(model, config="delayed")
    stage: Any = model[0 if is_cut_first else dist.get_rank()]
    del model  # the layers of the other part
    x = torch.randn(16, 32, requires_grad=True)
    if dist.get_rank() == 0:
        output = stage(x)
        dist.send(output.detach(), 1)
        grad = torch.empty_like(output)
        dist.recv(grad, 1)
        with pytest.raises(
            f8.DelayedScalingError, match=r"this rank has 2, .* and rank 1 other ones, or other weights"
        ):
            output.backward(grad)
        return
    dist.recv(x.detach(), 0)
    with pytest.raises(f8.DelayedScalingError, match="and rank 0 other ones, or other weights in them; name the ranks"):
        stage(x).sum().backward()  # at once, while the other waits for a gradient
    dist.send(torch.ones(16, 32), 0)


case = functools.partial
# Neighbouring stages lie on one rank, and gloo of torch 2.11 sends a rank nothing from itself, float8 or not.
zero_bubbles = (
    {} if torch.__version__ < "2.13" else {name: (name, Block) for name in RECIPES} | {"fused": ("delayed", Fused)}
)
CASES: Cases = {
    2: {
        "a pipeline by hand": case(hand_written, False),
        "a pipeline by hand, cut and then converted": case(hand_written, True),
        **{f"{schedule}, delayed": case(trains, schedule, "delayed", steps=2) for schedule in ("GPipe", "1F1B")},
        "Interleaved1F1B, delayed": case(trains, "Interleaved1F1B", "delayed"),
        **{f"ZBVZeroBubble, {name}": case(trains, "ZBVZeroBubble", *of) for name, of in zero_bubbles.items()},
    },
    4: {
        "1F1B": case(trains, "1F1B", "delayed"),
        "unknown ranks": unknown_ranks,
        **{kind: case(trains, "1F1B", "delayed", kind=kind) for kind in ("fsdp2", "tp", "ddp")},
    },
}
test_ranks = ranks_test(__name__, CASES)
