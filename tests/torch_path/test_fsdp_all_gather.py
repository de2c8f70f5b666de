"""FSDP2 with float8 all-gather (gloo): the bits of one device that is given the batches of all ranks in turn.

Codes are cast for each gather, or rest between two steps (`float8_primary_weights`).
"""

import copy
import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import RecipeName, UnsupportedError, recipe_by_name
from f8emu.torch import torch_internals as internals
from f8emu.torch.weights import codes as weight_codes
from f8emu.torch.weights import master_weights
from f8emu.torch.weights.sharded_weight import ShardedWeight
from tests.torch_path.beside import assert_same, train_beside, whole
from tests.torch_path.delayed import by_calls_alone
from tests.torch_path.ranks import RESTS, Cases, add_at_rest, at_rest, optimizer_of, ranks_test

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
STEPS = 3
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
_MIN_CUT = "aot_eager_decomp_partition"
"""The partitioner of Inductor, without its code."""
precompute = f8.precompute_float8_dynamic_scale_for_fsdp


class Block(nn.Module):
    """Two layers around a nonlinearity, added to the input."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias)
        self.is_checkpointed = self.is_repeated = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_repeated:
            x = checkpoint(self._own, self._own(x), use_reentrant=False)
        return checkpoint(self._own, x, use_reentrant=False) if self.is_checkpointed else self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.relu(self.w1(x)))


def make(recipe: RecipeName, gather: bool, *, hidden: int = 112, bias: bool = True, rests: bool | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(48, 80, bias), Block(48, hidden, bias))
    rests = RESTS.get() if rests is None else rests
    convert = functools.partial(f8.convert_to_float8_training, model, config=recipe, pad=True)
    return convert(float8_primary_weights=True) if rests else convert(enable_fsdp_float8_all_gather=gather)


def shard(model: Any, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def prepared(model: Any, checkpoints: bool, backend: str | None) -> Any:
    """The model, each block checkpointed or compiled or both."""
    for block in model:
        block.is_checkpointed = checkpoints
        if backend is not None:
            block.compile(backend=backend, fullgraph=True)
    return model


def batch(step: int, rank: int, part: int = 0) -> Tensor:
    """Other data on every rank, of other magnitudes, 33 rows."""
    generator = torch.Generator().manual_seed(1000 * part + 100 * step + rank)
    return torch.randn(33, 48, generator=generator) * (rank + 1) * 2.0**step


def compare(
    recipe: RecipeName,
    *,
    sharded: Any = None,
    dtype: torch.dtype = torch.float32,
    precomputes: bool = True,
    optimizer: Callable[..., Any] = AdamW,
    prepare: Callable[[Any], None] = lambda model: None,
    before: Callable[[Any, int], None] = lambda model, step: None,
    before_alone: Callable[[Any, int], None] = lambda model, step: None,
    parts: int = 1,
    holds: bool = False,
    **options: Any,
) -> None:
    """Train a sharded model beside the one on one device."""
    model = make(recipe, True, **options) if sharded is None else sharded
    alone = by_calls_alone(make(recipe, False, **options), ranks=False)  # a pass of all ranks is one update
    for each in (model, alone):
        prepare(each)
    if sharded is None:
        shard(model)
    of_both = [optimizer_of(optimizer, [x for x in m.parameters() if x.requires_grad], lr=1e-2) for m in (model, alone)]

    def run(model: Any, step: int, rank: int, part: int) -> list[Tensor]:
        output = model(batch(step, rank, part).to(dtype).requires_grad_())
        output.float().square().mean().backward()
        return [output]

    def begin(step: int) -> None:
        before(model, step)
        before_alone(alone, step)

    def end(step: int) -> None:
        if precomputes:
            precompute(model)

    train_beside(model, alone, run, of_both, steps=STEPS, parts=parts, holds=holds, before=begin, after=end)


def train(model: Any, optimizer: Any, step: int, change: Callable[[Any], None] = lambda model: None) -> Tensor:
    """One step, with this rank's data."""
    optimizer.zero_grad()
    output = model(batch(step, dist.get_rank()))
    output.square().mean().backward()
    change(model)
    optimizer.step()
    return output


def bits(recipe: RecipeName, reshards: bool, precomputes: bool) -> None:
    compare(recipe, sharded=shard(make(recipe, True), reshard_after_forward=reshards), precomputes=precomputes)


def mixed_precision(recipe: RecipeName) -> None:
    """Weights are cast from float32, gradients are bfloat16; two microbatches, of which the second is reduced."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make(recipe, True, bias=False), mp_policy=policy)
    compare(recipe, sharded=model, dtype=torch.bfloat16, parts=2, bias=False)


def hybrid() -> None:
    """Two replicas, each on ranks of its own."""
    shards = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    compare("rowwise", sharded=shard(make("rowwise", True), mesh=mesh))


def from_meta(recipe: RecipeName) -> None:
    """Converted and sharded without memory, then filled."""
    with torch.device("meta"):
        model = make(recipe, True)
    shard(model)
    model.to_empty(device="cpu")
    values: Any = make(recipe, False).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(distribute_tensor(values[name], parameter.device_mesh, [Shard(0)]).to_local())
    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear) and layer.delayed is not None:
            layer.delayed.reset()
    compare(recipe, sharded=model)


def hidden_of(backend: str | None) -> int:
    """The second block's size: the first one's where they are compiled, which takes seconds for each size."""
    return 112 if backend is None else 80


def checkpointed(recipe: RecipeName, backend: str | None, **options: Any) -> None:
    """The recomputed forward pass reads other codes than the backward pass around it."""
    hidden = hidden_of(backend)
    compare(recipe, sharded=shard(prepared(make(recipe, True, hidden=hidden), True, backend)), hidden=hidden, **options)


def skipped() -> None:
    """Ranks gather the same, whatever one of them computes: one skips a frozen layer, and keeps a graph."""
    model = make("rowwise", True)
    model[1].w2.weight.requires_grad_(False)
    model[1].is_checkpointed = True
    shard(model)
    kept: list[Tensor] = []
    for step in range(STEPS):
        x = batch(step, dist.get_rank())
        if dist.get_rank() == 0:
            model[1].forward = model[1]._own
            kept.append(model(x).sum())
            del model[1].forward
        else:
            model[1].forward = lambda x, block=model[1]: block.w1(x).sum(1, keepdim=True) + x
            model(x)
            del model[1].forward
        model(x).square().mean().backward()


def recomputed_on_one_rank(backend: str | None) -> None:
    """From the second step on one rank alone recomputes; it keeps what it needs, and gathers no more than the other."""

    def change(model: Any, step: int) -> None:
        if (step, dist.get_rank()) == (1, 1):
            prepared(model, True, backend)

    compare("rowwise", before=change, hidden=hidden_of(backend))


def unusual_weights(recipe: RecipeName) -> None:
    """A frozen weight, a block that is used twice in a step, one that is recomputed in one of its two uses only."""

    def prepare(model: Any) -> None:
        model[0].w2.weight.requires_grad_(False)  # its input has a gradient, on one device too
        model[1].is_repeated = True

    def use_again(model: Any, step: int) -> None:
        if step == 0:
            model.append(model[0])

    compare(recipe, prepare=prepare, before=use_again, before_alone=use_again)


def traffic(recipe: RecipeName, part: float, *, checkpoints: bool = False, backend: str | None = None) -> None:
    """Bytes that are gathered in a step, beside those of the same model in bfloat16; nothing but the codes."""
    found: list[int] = []
    count = 0
    for gather in (True, False):
        model = make(recipe, gather, bias=False, hidden=hidden_of(backend), rests=RESTS.get() and gather)
        model = prepared(model, checkpoints, backend if gather else None)  # bytes of bfloat16 depend on no compiler
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        for step in range(2):
            count = 0
            names = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
            real = {name: getattr(dist, name) for name in names}

            def counted(out: Tensor, *args: Any, real: Any, **options: Any) -> Any:
                nonlocal count
                count += out.numel() * out.element_size()
                return real(out, *args, **options)

            with pytest.MonkeyPatch.context() as patch:
                for name in names:
                    patch.setattr(dist, name, functools.partial(counted, real=real[name]))
                x = batch(step, dist.get_rank()).bfloat16().requires_grad_()  # as from an embedding
                model(x).square().mean().backward()
        found.append(count)
    assert found[0] == part * found[1] > 0, found


def beside_one_that_casts(change: Callable[[Any], None] = lambda model: None, **options: Any) -> None:
    """Weights at rest, stepped with the model's own AdamW, beside weights that are cast for each gather.

    The norm by which gradients are clipped is a sum in the order of the ranks, not that of one device.
    """
    models = [shard(make("rowwise", True, rests=rests), **options) for rests in (False, True)]
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, step, change)
        assert_same(list(models[1].parameters()), list(models[0].parameters()), f"step {step}, weight")


def clip(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def offloaded() -> None:
    """Masters that `MasterWeights` steps on the host, where codes are cast on the device of the gather."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedWeight, "is_refilled_here", False)
        compare("rowwise", sharded=shard(make("rowwise", True), offload_policy=OFFLOAD), precomputes=False)


def dies_between_master_and_codes() -> None:
    """A step that fails on one rank after its masters were stepped: a run that resumes has the bits of one that ran on.

    A checkpoint has masters alone, from which the codes are cast.
    """

    def begin() -> tuple[Any, Any]:
        model = shard(make("rowwise", True, rests=True))
        return model, f8.MasterWeights(model.parameters(), AdamW, lr=1e-2)

    model, optimizer = begin()
    train(model, optimizer, 0)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(master_weights, "refill_all", lambda weights: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, 1)
    found: list[Any] = []
    for is_resumed in (False, True):
        model, optimizer = begin()
        if is_resumed:
            set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        for step in range(is_resumed, STEPS):
            train(model, optimizer, step)
        found.append(list(model.parameters()))
    assert_same(found[0], found[1], "weight")


def scale_of_one_rank() -> None:
    """A planted bug: ranks that scale by their own rows are noticed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_codes, "reduce_amax", lambda amax, groups: amax)
        with pytest.raises(AssertionError):
            compare("tensorwise", precomputes=False)


def not_a_number(recipe: RecipeName) -> None:
    """A NaN in the weight of one rank: all ranks have what one device has."""

    def plant(model: Any) -> None:
        weight = model[0].w1.weight
        value = whole(weight).clone()
        value[70, 3] = float("nan")
        with torch.no_grad():
            weight.copy_(value)

    compare(recipe, prepare=plant)


def what_was_precomputed_is_forgotten() -> None:
    """After a write to the weight, whatever writes."""
    model, alone = shard(make("rowwise", True)), make("rowwise", False)
    rank = dist.get_rank()
    model(batch(0, rank))
    for factor in (3.0, 5.0):
        precompute(model)
        with torch.no_grad():
            for one in (model, alone):
                for parameter in one.parameters():
                    if isinstance(parameter, f8.Float8Weight):
                        parameter.copy_(parameter.master * factor)
                    else:
                        parameter.mul_(factor)
        assert_same([model(batch(0, rank))], [alone(batch(0, rank))], "output")


def loaded(recipe: RecipeName) -> None:
    """Between steps a state dict is loaded, for which FSDP2 pads the shard of the last rank anew."""

    def load(model: Any, step: int) -> None:
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})

    compare(recipe, hidden=17, before=load)


def what_was_not_gathered() -> None:
    """Resharding that is turned off after the first step is an error, not other codes."""
    model = shard(make("rowwise", True), reshard_after_forward=True)
    for _ in range(2):
        model(batch(0, dist.get_rank())).sum().backward()
    model.set_reshard_after_forward(False)
    with pytest.raises(UnsupportedError, match="before the first step"):
        model(batch(0, dist.get_rank())).sum().backward()
    model = shard(make("rowwise", True))
    output = model(batch(0, dist.get_rank()))
    output.sum().backward()
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert_same([model(batch(0, dist.get_rank()))], [output], "output")


def codes_are_no_values() -> None:
    model = shard(make("tensorwise", True), reshard_after_forward=False)
    model(batch(0, 0))
    with pytest.raises(UnsupportedError, match="gathered as float8 codes"):
        _ = model[0].w1.weight + 1
    with pytest.raises(UnsupportedError, match="enable_fsdp_float8_all_gather"):
        make("blockwise", True)
    block = nn.Sequential(f8.Float8FeedForward(16, 32, recipe="delayed"))  # its layers are converted already
    f8.convert_to_float8_training(block, config="delayed", enable_fsdp_float8_all_gather=True)
    assert all(isinstance(parameter, ShardedWeight) for parameter in block.parameters())


def by_accelerate(recipe: RecipeName, **settings: Any) -> None:
    """accelerate knows the optimizer's parameters by their addresses: all train, with the losses of torch's FSDP2."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    found: list[Any] = []
    for is_accelerated in (False, True):
        model = make(recipe, True)
        before = {name: whole(value).clone() for name, value in model.state_dict().items()}
        if is_accelerated:
            options = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1, "fsdp_version": 2, **settings}
            names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
            names |= {"MASTER_ADDR": "none", "MASTER_PORT": 0, "ACCELERATE_USE_CPU": "true"}
            with pytest.MonkeyPatch.context() as patch:
                for name, value in names.items():
                    patch.setenv(name, str(value))
                AcceleratorState._reset_state(True)
                accelerator = Accelerator(cpu=True)
                # FSDP is for accelerators only: what Accelerator() would have set there.
                accelerator.state.distributed_type = DistributedType.FSDP
                accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
                model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
        else:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(model)
            optimizer = AdamW(model.parameters(), lr=1e-2)
        outputs = [train(model, optimizer, step) for step in range(STEPS)]
        after = {name: whole(value) for name, value in model.state_dict().items()}
        assert not [name for name in after if torch.equal(after[name], before[name])]
        found.append([*outputs, *after.values()])
    assert_same(found[1], found[0], "output or weight")


def offloaded_from_a_gpu() -> None:
    """FSDP2 keeps the shards of a GPU's mesh on the host; so does what an optimizer steps in their place."""
    mesh = DeviceMesh("cuda", list(range(dist.get_world_size())), _init_backend=False)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([8, 16]), (16, 1), torch.bfloat16))
    weight = DTensor(torch.zeros(4, 16).bfloat16(), spec, requires_grad=True)
    found = internals.like_dtensor(weight, torch.ones(4, 16))
    assert (found.device.type, found.dtype, found.shape) == ("cpu", torch.float32, (8, 16))
    assert (found.device_mesh, found.placements, found.requires_grad) == (mesh, (Shard(0),), False)


case = functools.partial
TWO = ("rowwise", "delayed")
CASES: Cases = {
    2: {
        **{f"{r}, reshards {on}": case(bits, r, on, on == (r < "s")) for r in RECIPES for on in (True, False)},
        **{f"mixed precision, {r}": case(mixed_precision, r) for r in RECIPES},
        "hybrid": hybrid,
        **{f"from meta, {r}": case(from_meta, r) for r in TWO},
        **{f"checkpointed, {r}": case(checkpointed, r, None) for r in RECIPES},
        "compiled, delayed": case(checkpointed, "delayed", "aot_eager"),
        "fused": case(compare, "tensorwise", optimizer=case(AdamW, fused=True)),
        "foreach": case(compare, "rowwise", optimizer=case(AdamW, foreach=True)),
        **{f"unusual, {r}": case(unusual_weights, r) for r in TWO},
        **{f"traffic, {r}": case(traffic, r, 0.5) for r in ("tensorwise", *TWO)},
        "traffic, compiled": case(traffic, "rowwise", 0.5, backend=_MIN_CUT),
        "traffic, recomputed": case(traffic, "rowwise", 0.75, checkpoints=True),
        # Of the two layers of a block only the first one's product is recomputed.
        "traffic, compiled, recomputed": case(traffic, "rowwise", 0.625, checkpoints=True, backend=_MIN_CUT),
        "held": case(compare, "rowwise", parts=2, holds=True),
        "held, compiled": case(checkpointed, "rowwise", _MIN_CUT, parts=2, holds=True),
        "skipped": skipped,
        "recomputed on one rank": case(recomputed_on_one_rank, None),
        "recomputed on one rank, compiled": case(recomputed_on_one_rank, _MIN_CUT),
        "the scale of one rank": scale_of_one_rank,
        **{f"NaN, {r}": case(not_a_number, r) for r in ("tensorwise", "rowwise")},
        "forgotten": what_was_precomputed_is_forgotten,
        "loaded": case(loaded, "rowwise"),
        "codes are no values": codes_are_no_values,
        "not gathered": what_was_not_gathered,
    },
    3: {f"unequal and empty shards, {r}": case(compare, r, hidden=2) for r in ("tensorwise", *TWO)},
    4: {"hybrid": hybrid, "rowwise": case(bits, "rowwise", True, True)},
}
_AT_REST = {
    *(f"{recipe}, reshards True" for recipe in ("tensorwise", *TWO)),
    *("mixed precision, delayed", "from meta, rowwise", "checkpointed, rowwise", "unusual, delayed"),
    *("hybrid", "compiled, delayed", "fused", "traffic, rowwise", "traffic, recomputed", "held", "skipped"),
    *("NaN, rowwise", "forgotten", "loaded", "not gathered", "rowwise", "unequal and empty shards, delayed"),
}
if importlib.util.find_spec("accelerate"):
    _RAM = {"cpu_ram_efficient_loading": True}
    CASES[2] |= {
        "accelerate": case(by_accelerate, "delayed"),
        "accelerate, meta": case(by_accelerate, "rowwise", **_RAM),
    }
    _AT_REST.add("accelerate, meta")
add_at_rest(CASES, _AT_REST)
CASES[2] |= {
    "clipped, at rest": case(beside_one_that_casts, clip),
    "offloaded, masters, at rest": case(at_rest, offloaded),
    "offloaded, at rest": case(beside_one_that_casts, offload_policy=OFFLOAD),
    "dies between master and codes": dies_between_master_and_codes,
    "offloaded from a GPU": offloaded_from_a_gpu,
}


test_ranks = ranks_test(__name__, CASES)


def test_the_first_gather_takes_memory_where_the_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 calls the first hook in the stream of its copies, whose memory no other stream could use again."""
    monkeypatch.setattr(internals, "all_gather", lambda out, own, group: out.copy_(own))
    x = torch.randn(32, 48)
    recipe = recipe_by_name("rowwise")
    weight: Any = ShardedWeight(x, recipe)
    weight.state.own = weight_codes.OwnRows(n=32)
    module = SimpleNamespace(delayed=None)
    (codes,), found = weight.fsdp_pre_all_gather(None, x.shape, x.stride(), module, None)
    assert weight.state.memory is None
    _, memory = weight.fsdp_post_all_gather((codes.view(-1).clone().view(32, 48),), found, torch.bfloat16)
    assert memory is weight.state.memory and list(memory) == [memory.cols, memory.rows]
