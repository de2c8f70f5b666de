"""A case of test_tensor_parallel: weights for a server's update, of four ranks, whole or each rank's part."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import f8emu.torch as f8
from f8emu.spec import F8Error


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert torch.equal(
            x.contiguous().reshape(-1).view(torch.uint8), y.contiguous().reshape(-1).view(torch.uint8)
        ), name


def layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256, bias=False), nn.Embedding(8, 256))
    return f8.convert_to_float8_training(model, config="blockwise")


def streamed_of_shards() -> None:
    """FSDP2 gives whole tensors; tensor parallelism whole ones or parts, also below FSDP2's."""
    whole = dict(f8.stream_float8(layers(), "block"))
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    assert_same(dict(f8.stream_float8(model, "block")), whole)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = layers()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert_same(dict(f8.stream_float8(model, "block")), whole)
    dims = {"0.weight": 0, "0.weight_scale_inv": 0, "0.bias": 0, "1.weight": 1, "1.weight_scale_inv": 1}
    rank = mesh["tp"].get_local_rank()
    parts = {name: x.chunk(2, dims[name])[rank] if name in dims else x for name, x in whole.items()}
    assert_same(dict(f8.stream_float8(model, "block", ranks="tp")), parts)
    with pytest.raises(F8Error, match=r"mesh dimension over which .* got 'pp', and the model's are dp, tp"):
        f8.stream_float8(model, "block", ranks="pp")
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(128, 128)), config="blockwise")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(F8Error, match=r"equal parts of whole blocks, of 128.*got 0.weight \[128, 128\]"):
        f8.stream_float8(model, "block", ranks="tp")
