"""Tensor and sequence parallelism on 2, 3 and 4 ranks (gloo, emulated), against one device.

Every rank computes the layer of one device too, from the whole tensors, and compares its part with a slice of that, bit
for bit. What is a sum over ranks is compared with the same collective over partial products of the one device's codes.
Ranks hold tokens, rows and columns of different magnitudes, so that a scale of their own would show.
"""

import datetime
import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.recipe import recipe_by_name
from f8emu.torch.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from f8emu.torch.training import sharding
from f8emu.torch.training.autograd import gemm
from f8emu.torch.training.operands import cast_both, find_source
from tests.torch_path.layers import draw

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
GATHERED = ("tensorwise", "rowwise", "delayed")
BATCH, TOKENS, K, N = 2, 8, 32, 32


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def convert(recipe: str, *sizes: tuple[int, int], bias: bool = False) -> nn.Module:
    """Layers [out, in] called "0", "1", ...; the same on every rank."""
    layers = nn.ModuleList(nn.Linear(k, n, bias=bias, dtype=torch.bfloat16) for n, k in sizes)
    for i, layer in enumerate(layers):
        for j, parameter in enumerate(layer.parameters()):
            parameter.data = draw(*parameter.shape, seed=10 * i + j) / 4
    return f8.convert_to_float8_training(layers, config=recipe)


def part(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a tensor of one device."""
    parts = torch.chunk(x, mesh.size(), dim)
    return parts[mesh.get_local_rank()] if mesh.get_local_rank() < len(parts) else x.narrow(dim, 0, 0)


def same(observed: Tensor, expected: Tensor) -> None:
    observed = (observed.to_local() if isinstance(observed, DTensor) else observed).detach()
    expected = expected.detach()
    assert observed.shape == expected.shape and observed.dtype == expected.dtype, (observed.shape, expected.shape)
    wrong = int((observed.contiguous().view(torch.int16) != expected.contiguous().view(torch.int16)).sum())
    assert not wrong, f"{wrong} of {expected.numel()} differ"


class Passes(NamedTuple):
    """What a layer computes, of one device or of a rank."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None


def passes(layer: Any, x: Tensor, grad_output: Tensor, call: Callable[..., Any] | None = None) -> Passes:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output = (layer if call is None else call)(x)
    output.backward(grad_output)
    assert x.grad is not None
    bias = None if layer.bias is None else layer.bias.grad
    return Passes(output.detach(), x.grad, layer.weight.grad, bias)


def summed(a: Tensor, b: Tensor, gemm_name: str, recipe_name: str, mesh: DeviceMesh) -> Tensor:
    """`a @ b^T` as the sum over ranks of products over their parts of K, from the codes of one device.

    a [M, K] is input or grad_output; b is the weight [N, K], or transposed.
    """
    recipe = recipe_by_name(recipe_name)
    spec = recipe.gemms[gemm_name]
    operands = []
    for x, cast in ((a, spec.a), (b, spec.b)):
        operand, _ = cast_both(x.contiguous(), cast, None, find_source(x.contiguous(), cast, None), recipe.scale_rule)
        assert operand is not None
        block = None if operand.scale is None else operand.scale.shape[1]
        codes = part(operand.codes.view(torch.uint8), 1, mesh).contiguous().view(operand.codes.dtype)
        scale = operand.scale
        if block is not None and block > 1 and scale is not None:
            scale = part(scale, 1, mesh)
            scale = scale.t().contiguous().t() if x is a else scale.contiguous()
        operands.append(operand._replace(codes=codes, scale=scale))
    product = gemm(operands[0], operands[1], spec, torch.bfloat16, "auto")
    dist.all_reduce(product)
    return product


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def sizes_of(recipe: str) -> tuple[int, int, int]:
    """Tokens, K and N: whole blocks on each rank."""
    return (TOKENS, 256, 256) if recipe == "blockwise" else (TOKENS, K, N)


def torch_styles(recipe: str, bias: bool = False) -> None:
    """A column-parallel and a row-parallel layer under torch's own styles; three steps under delayed scaling."""
    mesh = mesh_of_all()
    tokens, k, n = sizes_of(recipe)
    alone, ours = (convert(recipe, (n, k), (k, n), bias=bias) for _ in range(2))
    parallelize_module(ours, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for step in range(3 if recipe == "delayed" else 1):
        x, h = draw(BATCH, tokens, k, seed=20 + step), draw(BATCH, tokens, n, seed=30 + step)
        by_col, by_row = passes(alone[0], x, h), passes(alone[1], h, x)
        col, row = passes(ours[0], x, part(h, 2, mesh)), passes(ours[1], part(h, 2, mesh), x)
        # 1. Column-parallel: slices; grad_input is a sum.
        same(col.output, part(by_col.output, 2, mesh))
        same(col.grad_weight, part(by_col.grad_weight, 0, mesh))
        # 2. Row-parallel: slices; output is a sum, to which the bias is added.
        same(row.grad_input, part(by_row.grad_input, 2, mesh))
        same(row.grad_weight, part(by_row.grad_weight, 1, mesh))
        if recipe != "delayed" or step == 0:  # in the first step, delayed scaling is tensorwise
            like = "tensorwise" if recipe == "delayed" else recipe
            same(flat(col.grad_input), summed(flat(h), alone[0].weight.detach().t(), "grad_input", like, mesh))
            output = summed(flat(h), alone[1].weight.detach(), "output", like, mesh)
            same(flat(row.output), output + alone[1].bias if bias else output)
        if bias:
            assert col.grad_bias is not None and row.grad_bias is not None
            assert by_col.grad_bias is not None and by_row.grad_bias is not None
            same(col.grad_bias, part(by_col.grad_bias, 0, mesh))
            same(row.grad_bias, by_row.grad_bias)
        if recipe == "delayed":
            f8.sync_float8_amax_and_scale_history(alone)
            f8.sync_float8_amax_and_scale_history(ours)
            expected, observed = f8.delayed_state_dict(alone), f8.delayed_state_dict(ours)
            assert all(torch.equal(observed[key], expected[key]) for key in expected)


CASES_OF_2: dict[str, Callable[[], None]] = {
    **{f"torch's styles, {recipe}": functools.partial(torch_styles, recipe) for recipe in RECIPES},
    "torch's styles, a bias": functools.partial(torch_styles, "tensorwise", True),
}
CASES_OF_3: dict[str, Callable[[], None]] = {}
CASES_OF_4: dict[str, Callable[[], None]] = {}
CASES = {2: CASES_OF_2, 3: CASES_OF_3, 4: CASES_OF_4}


def run_rank(rank: int, ranks: int, directory: Path) -> None:
    """All cases of a number of ranks; what each of them raised goes to the parent, by a file."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    raised: dict[str, str] = {}
    import time
    for name, case in CASES[ranks].items():
        begin = time.time()
        try:
            case()
            raised[name] = ""
        except BaseException:  # pytest.raises raises no Exception
            raised[name] = traceback.format_exc()
        torch._dynamo.reset()
        dist.barrier()
        if rank == 0: print(name, round(time.time() - begin, 1), flush=True)
    torch.save(raised, directory / f"raised_{rank}")
    dist.destroy_process_group()


def raised_of(ranks: int, directory: Path) -> list[dict[str, str]]:
    mp.spawn(run_rank, (ranks, directory), nprocs=ranks)  # type: ignore[no-untyped-call]
    return [torch.load(directory / f"raised_{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module", params=[ranks for ranks, cases in CASES.items() if cases])
def raised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every case raised, on all ranks."""
    return raised_of(request.param, tmp_path_factory.mktemp("ranks"))


def test_ranks(raised: list[dict[str, str]]) -> None:
    """All cases, each on all ranks."""
    failed = [f"{name}, rank {rank}: {why}" for rank, one in enumerate(raised) for name, why in one.items() if why]
    assert not failed, "\n".join(failed)
