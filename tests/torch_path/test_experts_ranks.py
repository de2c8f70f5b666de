"""Experts on 2 and 4 ranks (gloo): FSDP2 and expert parallelism, the bits of one device that has all tokens.

Every rank has tokens of its own, of other magnitudes, in groups of odd sizes and none; some ranks' experts get nothing.
"""

import functools
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import functional_call
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import OperandError, RecipeName, UnsupportedError
from f8emu.torch.parallel import expert_parallel as expert_parallel_module
from f8emu.torch.weights.coded_weight import CodedWeight
from tests.torch_path.beside import assert_same, assert_same_states, train_beside
from tests.torch_path.delayed import by_calls_alone
from tests.torch_path.layers import draw
from tests.torch_path.ranks import Cases, ranks_test

DIM, HIDDEN, EXPERTS, STEPS = 32, 48, 4, 3
BEHIND = 3
"""Rows behind the last group."""
RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise", "delayed")


def sizes_of(step: int, rank: int) -> list[int]:
    """The rows of each expert. In the second step those of the last rank of all get none from anybody."""
    sizes = [(5 * step + 3 * rank + 7 * expert) % 18 for expert in range(EXPERTS)]
    sizes[(step + rank) % EXPERTS] = 0
    return [0 if step == 1 and expert >= EXPERTS - 2 else size for expert, size in enumerate(sizes)]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens of a rank, and the ends of their groups."""
    sizes = torch.tensor(sizes_of(step, rank))
    x = draw(int(sizes.sum()) + BEHIND, DIM, seed=10 * step + rank) * (rank + 1) * 2.0**step
    return x.requires_grad_(), sizes.cumsum(0).int()


def gradient(step: int, rank: int) -> Tensor:
    """That of a rank's output."""
    return draw(sum(sizes_of(step, rank)) + BEHIND, DIM, seed=500 + 10 * step + rank)


def adamw(module: nn.Module) -> Any:
    return AdamW(module.parameters(), lr=1e-2, foreach=False)


def make(recipe: RecipeName) -> Any:
    torch.manual_seed(0)
    return f8.Float8Experts(EXPERTS, DIM, HIDDEN, recipe=recipe, dtype=torch.bfloat16)


class Mixture(nn.Module):
    """Blocks of experts, each added to its input."""

    def __init__(self, recipe: RecipeName) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(recipe) for _ in range(2)])
        self.is_checkpointed = False

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, offs, use_reentrant=False) if self.is_checkpointed else block(x, offs))
        return x


def fsdp(
    recipe: RecipeName,
    *,
    dim: int = 0,
    gathers: bool = False,
    checkpoints: bool = False,
    backend: Any = None,
    **options: Any,
) -> None:
    """FSDP2, beside one device that is given the batches of the ranks in turn; weights may be gathered as float8."""
    alone, model = Mixture(recipe), Mixture(recipe)
    model.is_checkpointed = checkpoints
    if gathers:
        f8.convert_to_float8_training(model, config=recipe, enable_fsdp_float8_all_gather=True)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda own, *_: _require_codes(own.down_proj))
    if backend:
        model.blocks[0].compile(backend=backend, dynamic=True)
    for module in (*model.blocks, model):
        fully_shard(module, shard_placement_fn=(lambda _: Shard(dim)) if dim else None, **options)
    by_calls_alone(alone, ranks=False)  # a pass of all ranks is one update
    precompute = f8.precompute_float8_dynamic_scale_for_fsdp

    def after(step: int) -> None:
        if step == 1:
            precompute(model)

    train_beside(model, alone, run, [adamw(module) for module in (alone, model)], steps=STEPS, after=after)


def run(model: Any, step: int, rank: int, part: int = 0) -> list[Any]:
    """Output and input gradient of a rank's tokens."""
    x, offs = batch(step, rank)
    output = model(x, offs)
    output.backward(gradient(step, rank))
    return [output, x.grad]


def _require_codes(weight: Any) -> None:
    assert type(weight) is CodedWeight, type(weight)


def float8_gather(recipe: RecipeName, *, experts: int = EXPERTS, **options: Any) -> None:
    """Weights that FSDP2 gathers as float8: of any number of experts, of which a rank may have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "EXPERTS", experts)
        fsdp(recipe, gathers=True, **options)


def expert_parallel(
    recipe: RecipeName, *, replicas: int = 1, checkpoints: bool = False, backend: str | None = None
) -> None:
    """Experts over ranks, and FSDP2 over replicas of those ranks, beside one device with all tokens of a replica."""
    rank, ranks = dist.get_rank(), dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "expert"))
    alone, experts = make(recipe), make(recipe)
    parallelize_module(experts, mesh["expert"], f8.ExpertParallel())
    if replicas > 1:
        fully_shard(experts, mesh=mesh["replicate"])
    call = functools.partial(checkpoint, experts, use_reentrant=False) if checkpoints else experts
    if backend is not None:
        experts.compile(backend=backend, dynamic=True)
    by_calls_alone(alone, ranks=False)
    optimizers = [adamw(module) for module in (alone, experts)]
    for step in range(1 if backend else STEPS):
        expected: tuple[Tensor, ...] = ()
        of_replicas: list[list[Any]] = []
        for replica in range(replicas):
            alone.zero_grad()
            members = range(replica * ranks, (replica + 1) * ranks)
            observed = together(alone, step, members)
            expected = observed[rank - members.start] if rank in members else expected
            of_replicas.append(grads_of(alone))
        assert_same(run(call, step, rank), expected, f"step {step}, output and input gradient")
        for theirs, *grads in zip(alone.parameters(), *of_replicas, strict=True):
            theirs.grad = functools.reduce(torch.add, grads) / replicas
        assert_same(grads_of(experts), grads_of(alone), f"step {step}, gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        f8.sync_float8_amax_and_scale_history(alone)
        assert_same_states(experts, alone)
        assert_same(experts.parameters(), alone.parameters(), f"step {step}, weight")


def grads_of(module: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in module.parameters()]


def together(experts: Any, step: int, ranks: range) -> list[tuple[Tensor, Tensor]]:
    """(output, input gradient) of each rank, from one device with the tokens of all, by expert and rank."""
    tokens, grads = [batch(step, rank)[0] for rank in ranks], [gradient(step, rank) for rank in ranks]
    sizes = torch.tensor([sizes_of(step, rank) for rank in ranks])  # [ranks, EXPERTS]
    parts = [[*x[:-BEHIND].split(own.tolist())] for x, own in zip(tokens, sizes, strict=True)]
    grad_parts = [[*g[:-BEHIND].split(own.tolist())] for g, own in zip(grads, sizes, strict=True)]
    x, g = (torch.cat([own[e] for e in range(EXPERTS) for own in of]) for of in (parts, grad_parts))
    output = experts(x, sizes.sum(0).cumsum(0).int())
    output.backward(g)
    pieces = output.detach().split(sizes.T.flatten().tolist())  # expert by expert, rank by rank
    found: list[tuple[Tensor, Tensor]] = []
    for i, x in enumerate(tokens):
        own = torch.cat([pieces[e * len(ranks) + i] for e in range(EXPERTS)])
        assert x.grad is not None
        found.append((torch.cat([own, own.new_zeros(BEHIND, DIM)]), x.grad))
    return found


def expert_parallel_of_transformers() -> None:
    """Converted experts under the expert parallelism of transformers, which shards, sends and weighs tokens itself."""
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = MixtralConfig(hidden_size=DIM, num_local_experts=EXPERTS)
    config.intermediate_size, config._experts_implementation = HIDDEN, "grouped_mm"
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("expert", "tensor"))
    plan = {"0.gate_up_proj": "grouped_gemm", "0.down_proj": "grouped_gemm", "0": "ep_dispatch_experts"}

    def made(recipe: RecipeName) -> Any:
        model = nn.Sequential(MixtralExperts(config).to(torch.bfloat16))
        for i, parameter in enumerate(model.parameters()):
            parameter.data = draw(*parameter.shape, seed=i) / 8
        return f8.convert_to_float8_training(model, config=recipe)

    # 1. Two of the first experts for each token of the first rank, two of all for others; tokens that all ranks know.
    rows, choices = 9, torch.tensor([[0, 1], [1, 2], [3, 1], [0, 2], [2, 3]])
    index = torch.cat([choices[torch.arange(rows) % (2 + 3 * (i > 0))] for i in range(ranks)])
    x, weights, grad = (draw(ranks * rows, n, seed=50 + i) for i, n in enumerate((DIM, 2, DIM)))
    own = slice(rank * rows, (rank + 1) * rows)
    alone, experts = made("rowwise"), made("rowwise")
    apply_expert_parallelism(experts, mesh["expert"], mesh["tensor"], plan)
    found: list[list[Any]] = []
    with pytest.raises(UnsupportedError, match="must be whole tensors"):  # a write to them would go unseen
        experts[0].precompute_weights()
    for module, run in ((experts, own), (alone, slice(None))):
        leaves = [t[run].clone().requires_grad_() for t in (x, weights)]
        output = module[0](leaves[0], index[run], leaves[1])
        output.backward(grad[run])
        found.append([output, *(t.grad for t in leaves)])
    assert_same(found[0], [t[own] for t in found[1]], "output and input gradients")
    assert_same(grads_of(experts), grads_of(alone), "gradient")
    # 2. Where this rank's experts lie among all is not seen, so neither is their part of a state.
    experts = made("delayed")
    apply_expert_parallelism(experts, mesh["expert"], mesh["tensor"], plan)
    with pytest.raises(UnsupportedError, match="or ExpertParallel"):
        experts[0](leaves[0][:rows], index[:rows], leaves[1][:rows])

    # 3. A style that takes a part of each expert, as torchtitan's TensorParallel does, is refused by the module of the
    #    experts; the style looks for weights in its submodules too. Parts of rows are for FSDP2 to gather.
    def by_rows(name: str, module: Any, mesh: Any) -> None:
        part = distribute_tensor(module.gate_up_proj, mesh, [Shard(1)])
        module.register_parameter("gate_up_proj", nn.Parameter(part))

    with pytest.raises(UnsupportedError, match=r"Float8MixtralExperts: .* not parts of each expert"):
        distribute_module(made("rowwise")[0], mesh["expert"], by_rows)
    experts = fully_shard(made("rowwise")[0], shard_placement_fn=lambda parameter: Shard(1))
    experts.load_state_dict(experts.state_dict(), assign=True)


def order_of_ranks() -> None:
    """A planted bug: rows of an expert that lie in another order, or at another expert, are noticed."""
    find = expert_parallel_module.find_route

    def reversed_ranks(*args: Any) -> Any:
        route, ends = find(*args)
        order = route.order.flip(0)
        return route._replace(order=order, inverse=order.argsort()), ends

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel_module, "find_route", reversed_ranks)
        with pytest.raises(AssertionError):
            expert_parallel("rowwise")


def refusals() -> None:
    with pytest.raises(UnsupportedError, match="sharded along its experts, dimension 0"):
        float8_gather("rowwise", dim=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    style = f8.ExpertParallel()
    with pytest.raises(OperandError, match="must be a Float8Experts"):
        parallelize_module(nn.Linear(16, 16), mesh, style)
    with pytest.raises(OperandError, match="3 experts and 2 ranks"):
        parallelize_module(f8.Float8Experts(3, 16, 16), mesh, style)
    experts, (x, offs) = make("rowwise"), batch(0, dist.get_rank())
    for parameter, dim in ((experts.gate_up_proj, 1), (experts.down_proj, 2)):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
        with pytest.raises(UnsupportedError, match="not parts of each expert"):
            functional_call(experts, {"gate_up_proj" if dim == 1 else "down_proj": part}, (x, offs))
    parallelize_module(experts, mesh, style)
    with pytest.raises(OperandError, match=r"offs must be int32 \[4\]"):
        experts(x, offs[:2])


case = functools.partial
# Releases before 5.23 shard experts in another module.
has_transformers = bool(find_spec("transformers") and find_spec("transformers.distributed.expert_parallel"))
# Dynamo 2.11 fails on the gathered weight as an argument of an autograd function.
compiled_gather = (
    {}
    if torch.__version__ < "2.13"
    else {"float8 gather, compiled": case(float8_gather, "rowwise", backend="aot_eager")}
)
CASES: Cases = {
    2: {
        **{f"FSDP2, {recipe}": case(fsdp, recipe) for recipe in RECIPES},
        **{f"float8 gather, {recipe}": case(float8_gather, recipe) for recipe in RECIPES[:3]},
        "float8 gather, not resharded": case(float8_gather, "rowwise", experts=3, reshard_after_forward=False),
        "float8 gather, checkpointed": case(float8_gather, "rowwise", experts=3, checkpoints=True),
        **compiled_gather,
        "FSDP2 by rows": case(fsdp, "rowwise", dim=1),
        **{f"expert parallel, {recipe}": case(expert_parallel, recipe) for recipe in RECIPES},
        "checkpointed": case(expert_parallel, "rowwise", checkpoints=True),
        "compiled": case(expert_parallel, "delayed", backend="eager"),
        **({"transformers": expert_parallel_of_transformers} if has_transformers else {}),
        "order of ranks": order_of_ranks,
        "refusals": refusals,
    },
    4: {
        "FSDP2": case(fsdp, "rowwise", reshard_after_forward=False),
        "float8 gather": case(float8_gather, "rowwise", experts=5),
        "float8 gather, tensorwise": case(float8_gather, "tensorwise", experts=5, reshard_after_forward=False),
        "expert parallel": case(expert_parallel, "rowwise"),
        "expert parallel and FSDP2": case(expert_parallel, "delayed", replicas=2),
    },
}
test_ranks = ranks_test(__name__, CASES)
