"""Tensor and sequence parallelism on 2, 3 and 4 ranks (gloo, emulated), against one device.

Every rank computes the layer of one device too, from the whole tensors, and compares its part with a slice of that, bit
for bit. What is a sum over ranks is compared with the same collective over partial products of the one device's codes.
Ranks hold tokens, rows and columns of different magnitudes, so that a scale of their own would show.
"""

import copy
import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec import RecipeName
from f8emu.spec.cast_plan import cast_plans
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.recipe import recipe_by_name
from f8emu.spec.scaling import Granularity
from f8emu.torch.casts import sharded
from f8emu.torch.casts.operand import cast_both, find_source
from f8emu.torch.inspection.recorder import read
from f8emu.torch.layer.matmul import gemm
from tests.torch_path.bits import assert_same_bits
from tests.torch_path.layers import both_passes, draw
from tests.torch_path.ranks import RESTS, Cases, add_at_rest, at_rest, mesh_of_all, optimizer_of, ranks_test
from tests.torch_path.states import assert_same_state, local
from tests.torch_path.streams import streamed_of_shards

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8")
GATHERED = ("tensorwise", "rowwise", "delayed")
BATCH, TOKENS, K, N = 2, 8, 32, 32


def convert(
    recipe: RecipeName, *sizes: tuple[int, int], bias: bool = False, gathers: bool = False, zeros: Any = None
) -> Any:
    """Layers [out, in] called "0", "1", ..., the same on every rank; FSDP2 gathers them as float8 if `gathers`.

    `zeros`: the index of the first weight's elements that are zero.
    """
    layers = nn.ModuleList(nn.Linear(k, n, bias=bias, dtype=torch.bfloat16) for n, k in sizes)
    for i, layer in enumerate(layers):
        for j, parameter in enumerate(layer.parameters()):
            parameter.data = draw(*parameter.shape, seed=10 * i + j) / 4
    if zeros is not None:
        next(layers.parameters()).data[zeros] = 0
    how = functools.partial(f8.convert_to_float8_training, layers, config=recipe, pad=True)
    return how(float8_primary_weights=True) if RESTS.get() else how(enable_fsdp_float8_all_gather=gathers)


def values(weight: Tensor) -> Tensor:
    """The values that a weight of one device is cast from."""
    return weight.master if isinstance(weight, f8.Float8Weight) else weight.detach()


def part(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a tensor of one device."""
    parts = torch.chunk(x, mesh.size(), dim)
    return parts[mesh.get_local_rank()] if mesh.get_local_rank() < len(parts) else x.narrow(dim, 0, 0)


def same(observed: Tensor, expected: Tensor) -> None:
    """This rank's part is as expected."""
    assert_same_bits(local(observed), expected)


class Passes(NamedTuple):
    """The results of a layer, on one device or on a rank."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Any = None


def passes(layer: Any, x: Tensor, grad_output: Tensor) -> Passes:
    output, *grads = both_passes(layer, x, grad=grad_output, parameters=layer.parameters())
    if isinstance(grads[1], DTensor):  # torch 2.11 replicates the gradient of a weight with unequal shards of K
        grads[1] = grads[1].redistribute(placements=layer.weight.placements)
    return Passes(output, *grads)


def partial(a: Tensor, b: Tensor, gemm_name: str, recipe_name: str, mesh: DeviceMesh) -> Tensor:
    """`a @ b^T` over this rank's part of K, from the codes of one device.

    a [M, K] is input or grad_output; b is the weight [N, K], or transposed.
    """
    recipe = recipe_by_name(recipe_name)
    spec = recipe.gemms[gemm_name]
    operands = []
    for x, cast in ((a, spec.a), (b, spec.b)):
        plan = cast_plans(cast, cast, recipe.scale_rule, 0).rows
        operand, _ = cast_both(x.contiguous(), plan, find_source(x.contiguous(), plan))
        assert operand is not None
        block = None if operand.scale is None else operand.scale.shape[1]
        codes = part(operand.codes.view(torch.uint8), 1, mesh).contiguous().view(operand.codes.dtype)
        scale = operand.scale
        if block is not None and block > 1 and scale is not None:
            scale = part(scale, 1, mesh)
            scale = scale.t().contiguous().t() if x is a else scale.contiguous()
        operands.append(operand._replace(codes=codes, scale=scale))
    return gemm(operands[0], operands[1], spec, torch.bfloat16, "auto", recipe.chip)


def summed(product: Tensor, mesh: DeviceMesh, dim: int | None = None) -> Tensor:
    """The sum over ranks, or this rank's part of it along `dim`, as torch's own parallel styles take it."""
    place = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(product, mesh, [Partial()]).redistribute(placements=[place]).to_local()


def largest_part(dim: int, mesh: DeviceMesh) -> int:
    """The rows that every rank sends, padded."""
    size = (BATCH, TOKENS)[dim]
    return BATCH * TOKENS // size * -(-size // mesh.size())


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def sizes_of(recipe: str) -> tuple[int, int, int]:
    """Tokens, K and N: whole blocks on each rank."""
    return (TOKENS, 256, 256) if recipe == "blockwise" else (TOKENS, 64, 64) if recipe == "mxfp8" else (TOKENS, K, N)


def updated(alone: nn.Module, ours: nn.Module) -> None:
    """The update of delayed scaling: all ranks have the states of one device."""
    for model in (alone, ours):
        model.zero_grad()
        f8.sync_float8_amax_and_scale_history(model)
    assert_same_state(f8.delayed_state_dict(ours), f8.delayed_state_dict(alone))


def prepared_input(dim: int = 1) -> ParallelStyle:
    return f8.PrepareFloat8ModuleInput(input_layouts=Shard(dim), desired_input_layouts=Replicate())


class Several(nn.Module):
    """Layers that share an input."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers.children()]


class Traffic(TorchDispatchMode):
    """The collectives of a rank: name, dtype and bytes of what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "_c10d_functional_autograd") and "wait" not in func.__name__:
            self.sent.append((func.__name__.split(".")[0], args[0].dtype, args[0].nbytes))
        return func(*args, **(kwargs or {}))

    def bytes_of(self, name: str) -> int:
        return sum(size for kind, _, size in self.sent if kind == name)


def parallel(recipe: RecipeName, by: str, dim: int | None = None, bias: bool = False, size: int | None = None) -> None:
    """A layer by rows or by columns: slices, and a sum over ranks (the output or grad_input).

    With `dim` the output is scattered along tokens by f8emu's style, and its gradient gathered as float8. Three steps
    under delayed scaling. `size` is that of the dimension that is sharded.
    """
    mesh, is_row = mesh_of_all(), by == "row"
    tokens, k, n = (TOKENS, K, size) if size is not None else sizes_of(recipe)
    # The first feature of what is sharded is its amax, and shows in no product.
    sizes, zeros = ((k, n), (slice(None), 0)) if is_row else ((n, k), 0)
    alone, ours = (convert(recipe, sizes, bias=bias, zeros=zeros) for _ in range(2))
    row_style = RowwiseParallel() if dim is None else f8.Float8RowwiseParallel(output_layouts=Shard(dim))
    parallelize_module(ours, mesh, {"0": row_style if is_row else ColwiseParallel()})
    for step in range(3 if recipe == "delayed" else 1):
        whole, wide = draw(BATCH, tokens, k, seed=20 + step), draw(BATCH, tokens, n, seed=30 + step)
        wide[..., 0] = 1024
        own = whole if dim is None else part(whole, dim, mesh)
        expected = passes(alone[0], *((wide, whole) if is_row else (whole, wide)))
        with Traffic() as traffic:
            sharded = part(wide, 2, mesh)
            observed = passes(ours[0], *((sharded, own) if is_row else (own, sharded)))
        if dim is not None:
            rows = largest_part(dim, mesh)
            gathered = 2 * rows * k + 4 * rows if recipe == "rowwise" else rows * k
            assert traffic.bytes_of("all_gather_into_tensor") == gathered
        # 1. Slices.
        slices = (expected.grad_input, observed.grad_input) if is_row else (expected.output, observed.output)
        same(slices[1], part(slices[0], 2, mesh))
        same(observed.grad_weight, part(expected.grad_weight, int(is_row), mesh))
        # 2. Sums.
        if recipe != "delayed" or step == 0:  # in the first step, delayed scaling is tensorwise
            weight = values(alone[0].weight) if is_row else values(alone[0].weight).t()
            like, gemm_name = "tensorwise" if recipe == "delayed" else recipe, "output" if is_row else "grad_input"
            total = summed(partial(flat(wide), weight, gemm_name, like, mesh).view(BATCH, tokens, k), mesh, dim)
            total = total + alone[0].bias if bias and is_row else total
            same(observed.output if is_row else observed.grad_input, total)
        if bias:
            of_rows = expected.grad_bias if dim is None else own.sum((0, 1))
            same(observed.grad_bias, of_rows if is_row else part(expected.grad_bias, 0, mesh))
        updated(alone, ours)


def sequence_parallel_input(recipe: RecipeName, dim: int = 1) -> None:
    """Two layers share an input that is sharded along tokens; it is gathered once, one byte an element."""
    mesh = mesh_of_all()
    alone, ours = (Several(convert(recipe, (N, K), (2 * N, K))) for _ in range(2))
    parallelize_module(ours, mesh, prepared_input(dim))
    parallelize_module(ours, mesh, {f"layers.{i}": f8.Float8ColwiseParallel() for i in range(2)})
    for step in range(3 if recipe == "delayed" else 1):
        tokens, grads = draw(BATCH, TOKENS, K, seed=20 + step), [draw(BATCH, TOKENS, n, seed=n) for n in (N, 2 * N)]
        x, own = tokens.clone().requires_grad_(), part(tokens, dim, mesh).clone()
        if own.shape[dim] * mesh.size() != tokens.shape[dim]:  # torch takes shards of a plain tensor for equal ones
            own = distribute_tensor(tokens, mesh, [Shard(dim)])
        own.requires_grad_()
        # 1. Forward, with the bytes that travel. An input with a grad_fn, as in a model.
        expected = alone(x * 1)
        with Traffic() as traffic:
            observed = ours(own * 1)
        rows = largest_part(dim, mesh)
        gathers = {"tensorwise": rows * K, "rowwise": 2 * rows * K + 4 * rows, "delayed": 2 * rows * K}[recipe]
        assert traffic.bytes_of("all_gather_into_tensor") == gathers
        for mine, whole in zip(observed, expected, strict=True):
            same(mine, part(whole, 2, mesh))
        # 2. Backward.
        torch.autograd.backward(expected, grads)
        with Traffic() as traffic:
            torch.autograd.backward(observed, [part(g, 2, mesh) for g in grads])
        scatters = [sent for sent in traffic.sent if sent[0] == "reduce_scatter_tensor"]
        assert len(scatters) == (2 if recipe == "delayed" else 1) and not traffic.bytes_of("all_gather_into_tensor")
        for mine, whole in zip(ours.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None and whole.grad is not None
            same(mine.grad, part(whole.grad, 0, mesh))
        if recipe != "delayed":
            weights = [values(parameter).t() for parameter in alone.parameters()]
            total = partial(flat(grads[0]), weights[0], "grad_input", recipe, mesh)
            total = total + partial(flat(grads[1]), weights[1], "grad_input", recipe, mesh)
            assert own.grad is not None
            same(own.grad, summed(total.view(BATCH, TOKENS, K), mesh, dim))
        updated(alone, ours)


class FeedForward(nn.Module):
    """SwiGLU's shape, without its arithmetic."""

    def __init__(self, recipe: RecipeName, gathers: bool = False) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = convert(recipe, (N, K), (K, N), (N, K), gathers=gathers)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.relu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """The module that is compiled: a compiler traces its own hooks apart, those of its children with it."""

    def __init__(self, feed_forward: FeedForward) -> None:
        super().__init__()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(x)


def sequence_parallel(model: FeedForward, mesh: DeviceMesh) -> FeedForward:
    parallelize_module(model, mesh, prepared_input())
    columns, rows = f8.Float8ColwiseParallel(), f8.Float8RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, {"w1": columns, "w3": columns, "w2": rows})
    return model


def results(model: nn.Module, x: Tensor, grad_output: Tensor | None = None) -> list[Tensor]:
    """A pass: the output and all gradients, of this rank. An input with a grad_fn, as in a model."""
    grad = torch.ones_like(x) if grad_output is None else grad_output
    return [local(y) for y in both_passes(lambda x: model(x * 1), x, grad=grad, parameters=model.parameters())]


def compiled(recipe: RecipeName) -> None:
    """Compiled as one graph, sequence-parallel layers have the bits of eager ones; the input is gathered once."""
    mesh = mesh_of_all()
    found: list[list[Tensor]] = []
    for backend in (None, "aot_eager"):
        model = Block(sequence_parallel(FeedForward(recipe), mesh))
        run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        found.append([])
        for step in range(2):
            x, grad_output = (part(draw(BATCH, TOKENS, K, seed=seed + step), 1, mesh) for seed in (20, 30))
            found[-1] += results(run, x, grad_output)
            model.zero_grad()
            f8.sync_float8_amax_and_scale_history(model)
    for eager, traced in zip(*found, strict=True):
        same(traced, eager)


def scale_of_one_rank_is_caught() -> None:
    """A rank that takes the amax of its own shard gives other bits, and only that rank."""
    mesh = mesh_of_all()
    own = sharded.reduce_amax
    alone, ours = (convert("tensorwise", (N, K)) for _ in range(2))
    with torch.no_grad():
        for layers in (alone, ours):
            layers[0].weight[: N // mesh.size()] *= 64  # the amax is rank 0's
    parallelize_module(ours, mesh, {"0": ColwiseParallel()})
    x = draw(BATCH, TOKENS, K, seed=20)
    expected = part(alone[0](x), 2, mesh)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(sharded, "reduce_amax", lambda amax, groups: own(amax, groups) * 0 + amax)
        observed = ours[0](x)
    assert torch.equal(observed, expected) == (dist.get_rank() != 1)


def not_finite_on_one_rank(value: float) -> None:
    """All ranks see it in the scale, as one device does."""
    mesh = mesh_of_all()
    for recipe in ("tensorwise", "rowwise"):
        alone, ours = (convert(recipe, (N, K), (K, N)) for _ in range(2))
        for layers in (alone, ours):
            with torch.no_grad():
                layers[0].weight[-1, -1] = value
        parallelize_module(ours, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        x, h = draw(BATCH, TOKENS, K, seed=20), draw(BATCH, TOKENS, N, seed=30)
        expected, observed = part(alone[0](x), 2, mesh), ours[0](x)
        assert torch.equal(observed.isnan(), expected.isnan()) and bool(observed.isnan().any()) == (
            recipe == "tensorwise" or dist.get_rank() == mesh.size() - 1
        )
        h[0, 0, -1] = value
        assert torch.equal(ours[1](part(h, 2, mesh)).isnan(), alone[1](h).isnan())


def unusual_steps() -> None:
    """A frozen weight; a layer that is used twice; an activation checkpoint. Gradients are those of one device."""
    mesh = mesh_of_all()
    for recipe in GATHERED:
        alone, ours = (Several(convert(recipe, (N, K), (N, K))) for _ in range(2))
        parallelize_module(ours, mesh, prepared_input())
        parallelize_module(ours, mesh, {f"layers.{i}": f8.Float8ColwiseParallel() for i in range(2)})
        for model in (alone, ours):
            next(model.parameters()).requires_grad_(False)
        for is_own, model in enumerate((alone, ours)):
            for use in range(2):
                x = draw(BATCH, TOKENS, K, seed=20 + use)
                x = (part(x, 1, mesh) if is_own else x).clone().requires_grad_()
                outputs: Any = checkpoint(model, x * 1, use_reentrant=False)
                grads = [draw(BATCH, TOKENS, N, seed=40 + i) for i in range(2)]
                torch.autograd.backward(outputs, [part(g, 2, mesh) for g in grads] if is_own else grads)
        (_, expected), (frozen, observed) = (list(model.parameters()) for model in (alone, ours))
        assert frozen.grad is None and observed.grad is not None and expected.grad is not None
        same(observed.grad, part(expected.grad, 0, mesh))


def refusals() -> None:
    """Every rank refuses what cannot be done, before a collective."""
    mesh = mesh_of_all()
    x = draw(BATCH, TOKENS, K, seed=20)

    def refused(
        message: str, plan: Any, recipe: RecipeName = "tensorwise", *, n: int = N, k: int = K, x: Any = None
    ) -> None:
        """The style, or a call with `x`."""
        layers = convert(recipe, (n, k))
        with pytest.raises((OperandError, UnsupportedError), match=message):
            parallelize_module(layers, mesh, plan)
            layers[0](x)

    reasons: dict[RecipeName, str] = {
        "rowwise_with_gw_hp": "operands in high precision",
        "blockwise": "blocks of tokens",
    }
    for recipe, reason in reasons.items():
        for style in (f8.Float8ColwiseParallel(), f8.Float8RowwiseParallel()):
            refused(rf"Float8.*Parallel: recipe {recipe} has .*{reason}", {"0": style}, recipe)
        refused(f"PrepareFloat8ModuleInput: recipe {recipe}", prepared_input(), recipe)
        tokens = DTensor.from_local(draw(1, 4, 256, seed=1), mesh, [Shard(1)])
        gathers = rf"Float8Linear: recipe {recipe}.*gather in bfloat16"
        refused(gathers, {"0": ColwiseParallel()}, recipe, n=256, k=256, x=tokens)
    for style in (ColwiseParallel(), RowwiseParallel()):
        uneven = r"32 neighbouring .* share a scale.*got 16 of 2 ranks"
        x = draw(1, 4, 32 if isinstance(style, ColwiseParallel) else 16, seed=1)
        refused(uneven, {"0": style}, "mxfp8", n=32, k=32, x=x)
    for style, k in ((ColwiseParallel(), 128), (RowwiseParallel(), 64)):
        said = r"128 neighbouring .* share a scale.*got 64 of 2 ranks"
        refused(said, {"0": style}, "blockwise", n=128, k=128, x=draw(1, 4, k, seed=1))
    by_k = f8.Float8ColwiseParallel(input_layouts=Shard(2))
    refused("redistribute the input before", {"0": by_k}, x=part(x, 2, mesh))
    refused(r"input_layouts must be Shard\(-1\)", {"0": f8.Float8RowwiseParallel(input_layouts=Shard(1))})
    with pytest.raises(OperandError, match=r"DTensors of the same mesh, or plain tensors; got a DTensor.*plain tensor"):
        convert("tensorwise", (N, K))[0](DTensor.from_local(part(x, 1, mesh), mesh, [Shard(1)]))
    with pytest.raises(OperandError, match="must be a Float8Linear; got Linear; convert the model first"):
        parallelize_module(nn.ModuleList([nn.Linear(K, N)]), mesh, {"0": f8.Float8ColwiseParallel()})
    of_e5m2 = f8.PrepareFloat8ModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), float8_dtype=torch.float8_e5m2
    )
    refused("float8_dtype must be what the layers cast their input to", of_e5m2)
    with pytest.raises(UnsupportedError, match="use_local_output must be False"):
        parallelize_module(convert("tensorwise", (N, K)), mesh, f8.PrepareFloat8ModuleInput(use_local_output=True))


def inspected() -> None:
    """Taps under tensor and sequence parallelism, and under FSDP2 with float8 gather: bits, counts, and statistics.

    An input that was gathered from both ranks has the statistics of this rank's part.
    """
    mesh = mesh_of_all()
    x = draw(1, TOKENS, K, seed=20)
    for is_fsdp in (False, True):
        found: list[list[Tensor]] = []
        for is_watched in (False, True):
            model: Any = FeedForward("rowwise", is_fsdp)
            model = fully_shard(model, mesh=mesh) if is_fsdp else sequence_parallel(model, mesh)
            with f8.inspect(model, {"start": 1 if is_watched else 9}) as inspector:
                found.append(results(model, x * (1 + dist.get_rank()) if is_fsdp else part(x, 1, mesh)))
                pending = read(inspector._recorder.pending)
            if not is_watched:
                assert not pending
                continue
            records = {(r["layer"], r["gemm"], r["operand"]): (r, set(named)) for r, named in pending}
            assert len(records) == len(pending) == 3 * len(dict(model.named_parameters())) * 3
            for place, (record, named) in records.items():
                assert record["rank"] == dist.get_rank() and record["pass"] == 1
                is_known = not (is_fsdp and record["tensor"] == "weight")
                assert ("nan" in named) == is_known and ("nan_codes" in named) != is_known, place
        for watched, plain in zip(*found, strict=True):
            same(watched, plain)


def with_fsdp2(recipe: RecipeName, gathers: bool = False, backend: str | None = None) -> None:
    """FSDP2, gathering float8 or not, over one dimension of the mesh, tensor and sequence parallelism over the other.

    Equal to tensor parallelism alone with the gradients averaged over the other dimension, whose ranks have other data.
    """
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    found: list[list[Tensor]] = []
    for is_sharded in (False, True):
        model = Block(sequence_parallel(FeedForward(recipe, gathers and is_sharded), tp))
        if is_sharded:
            if backend is not None:
                model.compile(backend=backend)
            fully_shard(model, mesh=dp)
        elif recipe == "delayed":
            f8.set_amax_reduction_group(model, dist.group.WORLD)
        optimizer = optimizer_of(torch.optim.SGD, model.parameters(), lr=0.125)
        found.append([])
        for step in range(2):
            seed = 20 + 10 * dp.get_local_rank() + step
            x, grad_output = (part(draw(BATCH, TOKENS, K, seed=seed + i), 1, tp) for i in (0, 5))
            found[-1] += results(model, x, grad_output)[:2]
            for parameter in model.parameters():
                grad: Any = parameter.grad
                if not is_sharded:
                    dist.all_reduce(grad.to_local(), group=dp.get_group())
                    grad.to_local().div_(2)
                found[-1].append(grad.full_tensor().clone())
            optimizer.step()
            optimizer.zero_grad()
    for observed, expected in zip(found[1], found[0], strict=True):
        same(observed, expected)


def copied(recipe: RecipeName) -> None:
    """A copy of a model at rest has codes and scales of its own: training of one leaves the other as it was."""
    mesh = mesh_of_all()
    model: Any = parallelize_module(convert(recipe, (N, K)), mesh, {"0": ColwiseParallel()})
    x, h = draw(BATCH, TOKENS, K, seed=1), part(draw(BATCH, TOKENS, N, seed=2), 2, mesh)
    passes(model[0], x, h)
    other = copy.deepcopy(model)
    before = other[0](x)
    with torch.no_grad():
        model[0].weight.mul_(0.125)
    passes(model[0], 4 * x, h)
    f8.sync_float8_amax_and_scale_history(model)
    assert torch.equal(other[0](x), before) and not torch.equal(model[0](x), before)


def empty_parts() -> None:
    """Five rows over four ranks leave the last without any."""
    x = draw(5, 64, seed=1)
    for granularity in Granularity:
        found: Any = f8.amax(distribute_tensor(x, mesh_of_all(), [Shard(0)]), granularity)
        assert torch.equal(found.full_tensor(), f8.amax(x, granularity)), granularity


def verbs() -> None:
    """DTensors are operands of the verbs: codes, amaxes and products are parts of those of one device."""
    mesh, placements = mesh_of_all(), (Shard(0), Shard(1), Replicate())

    def over_ranks(x: Tensor, place: Any) -> Tensor:
        own = x if place.is_replicate() else part(x, place.dim, mesh)
        return DTensor.from_local(own, mesh, [place], run_check=False)

    def whole(x: Any) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def equal(observed: Any, expected: Tensor) -> bool:
        as_bytes = [x.contiguous().view(torch.uint8) for x in (observed, expected)]
        return observed.dtype == expected.dtype and torch.equal(*as_bytes)

    # 1. Amaxes, with a NaN on one rank, of an empty part too, and casts.
    row = draw(1, 64, seed=1)
    assert equal(whole(f8.amax(distribute_tensor(row, mesh, [Shard(0)]))), f8.amax(row))
    x, weight = draw(32, 8192, seed=1), draw(64, 8192, seed=2)
    x[-1, -1] = math.nan
    for place in placements:
        for granularity in Granularity:
            assert equal(whole(f8.amax(over_ranks(x, place), granularity)), f8.amax(x, granularity)), granularity
        for granularity in Granularity:
            inv_scale = f8.scale_from_amax(f8.amax(weight, granularity), "float8_e4m3fn").inv_scale
            own_scale = over_ranks(inv_scale, Replicate())
            codes = f8.quantize(over_ranks(weight, place), own_scale, "float8_e4m3fn", granularity)
            expected = f8.quantize(weight, inv_scale, "float8_e4m3fn", granularity)
            assert equal(local(codes), expected if place.is_replicate() else part(expected, place.dim, mesh)), (
                granularity
            )
    # 2. Products. The plan splits K of the parts by 3 and that of the whole not at all.
    a, b = (f8.cast(draw(n, 8192, seed=n), "float8_e4m3fn") for n in (256, 512))
    for of_a, of_b in ((Shard(0), Replicate()), (Replicate(), Shard(1))):
        operands = over_ranks(a, of_a), over_ranks(b.t(), of_b)
        expected = f8.scaled_mm(a, b.t(), *(torch.ones(1, 1),) * 2, out_dtype=torch.float32, use_fast_accum=True)
        one = over_ranks(torch.ones(1, 1), Replicate())
        observed = f8.scaled_mm(*operands, one, one, out_dtype=torch.float32, use_fast_accum=True)
        assert equal(whole(observed), expected)
        scales, bias = [draw(*size, seed=5).float().abs() for size in ((256, 1), (1, 512))], draw(512, seed=4)
        expected = f8.scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.bfloat16)
        scales = [over_ranks(scale, place) for scale, place in zip(scales, (of_a, of_b), strict=True)]
        observed = f8.scaled_mm(*operands, *scales, bias=over_ranks(bias, Replicate()), out_dtype=torch.bfloat16)
        assert equal(whole(observed), expected)
        high = a[:, :512].bfloat16(), b[:, :512].bfloat16().t()
        assert equal(whole(f8.mm(over_ranks(high[0], of_a), over_ranks(high[1], of_b))), f8.mm(*high))


case = functools.partial
CASES: Cases = {
    2: {
        **{f"by column, {r}": case(parallel, r, "column") for r in RECIPES},
        **{f"by row, {r}": case(parallel, r, "row") for r in RECIPES},
        "by column, a bias": case(parallel, "tensorwise", "column", bias=True),
        "by row, a bias": case(parallel, "tensorwise", "row", bias=True),
        **{f"gathered input, {r}": case(sequence_parallel_input, r) for r in GATHERED},
        "gathered input, first dimension": case(sequence_parallel_input, "rowwise", 0),
        **{f"scattered output, {r}": case(parallel, r, "row", 1) for r in GATHERED},
        "scattered output, a bias": case(parallel, "tensorwise", "row", 0, True),
        # Dynamo takes seconds for each: one with ordinary weights, one with weights at rest
        "compiled, delayed": case(compiled, "delayed"),
        "compiled, rowwise, at rest": case(at_rest, case(compiled, "rowwise")),
        "a scale of one rank": scale_of_one_rank_is_caught,
        **{f"{value} on one rank": case(not_finite_on_one_rank, value) for value in (math.nan, math.inf)},
        "unusual steps": unusual_steps,
        "refusals": refusals,
        "inspected": inspected,
        "verbs": verbs,
        **{f"copied, {r}, at rest": case(at_rest, case(copied, r)) for r in ("rowwise", "delayed")},
    },
    3: {
        "unequal shards of N": case(parallel, "tensorwise", "column", bias=True, size=40),
        "unequal shards of K": case(parallel, "tensorwise", "row", bias=True, size=40),
        "an empty shard of N": case(parallel, "rowwise", "column", size=4),
        "an empty shard of K": case(parallel, "rowwise", "row", size=4),
        "unequal shards of tokens": case(sequence_parallel_input, "rowwise"),
        "an empty shard of tokens": case(sequence_parallel_input, "tensorwise", 0),
        "unequal shards of an output": case(parallel, "rowwise", "row", 1),
        "an empty shard of an output": case(parallel, "delayed", "row", 0),
    },
    4: {
        "empty parts": empty_parts,
        "streamed": streamed_of_shards,
        **{f"with FSDP2, {r}, gathers {on}": case(with_fsdp2, r, on) for r in GATHERED for on in (True, False)},
        "with FSDP2, compiled": case(with_fsdp2, "tensorwise", False, "aot_eager"),
    },
}
_AT_REST = {
    *("by column, delayed", "by row, rowwise", "gathered input, tensorwise", "scattered output, delayed"),
    *("unequal shards of N", "an empty shard of K"),
    *(f"with FSDP2, {recipe}, gathers False" for recipe in GATHERED),
}
add_at_rest(CASES, _AT_REST)
test_ranks = ranks_test(__name__, CASES)
