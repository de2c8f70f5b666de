"""Which shards of DTensors a GEMM multiplies without communication, for DTensor to choose from.

A rank computes rows or columns of the product, with the bits of the whole: shards of K would be added in another order,
so DTensor gathers these first. S [CHAIN-3] of an emulated GEMM is that of the whole sizes; tensor cores choose S by
those of the rank.
"""

import math
from functools import cache
from typing import Any

import torch

_MULTIPLE = 16  # of the columns that a rank multiplies: the hardware's rule


@cache
def register() -> None:
    """Tell DTensor of the GEMMs, once, when one gets a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole = Replicate()

    def acceptable(a: Any, b: Any, scales: tuple[Any, ...], bias: tuple[Any, ...], options: Any) -> list[Any]:
        def placed(dim: int | None) -> list[Any]:
            """Of a, b, their scales, the bias and the options, if the product is sharded along `dim`."""
            found = [Shard(0) if dim == 0 else whole, Shard(1) if dim == 1 else whole]
            # A scale of its own for each row or column goes with it; one scale for all is on every rank.
            found += [Shard(dim) if dim == i and not _is_one(scale) else whole for i, scale in enumerate(scales)]
            found += [None if x is None else Shard(0) if dim == 1 else whole for x in bias]
            return [*found, *[None] * len(options)]

        sizes, ranks = (a.shape[0], b.shape[1]), a.mesh.size()
        dims = [i for i in (0, 1) if not scales or _is_one(scales[i]) or scales[i].shape[i] == sizes[i]]
        dims = [i for i in dims if i == 0 or sizes[1] % (_MULTIPLE * ranks) == 0]
        return [([whole], placed(None)), *(([Shard(i)], placed(i)) for i in dims)]

    @register_sharding(torch.ops.f8emu.run_scaled_mm.default)
    def _(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, *options: Any) -> list[Any]:
        return acceptable(a, b, (scale_a, scale_b), (bias,), options)

    @register_sharding(torch.ops.f8emu.run_mm.default)
    def _(a: Any, b: Any, *options: Any) -> list[Any]:
        return acceptable(a, b, (), (), options)


def _is_one(scale: Any) -> bool:
    return math.prod(scale.shape) == 1
