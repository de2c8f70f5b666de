"""A trained model, sharded or not, as one plain file for other libraries."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from f8emu.spec.errors import required_by
from f8emu.spec.exports import public
from f8emu.torch.torch_internals import named_modules, own_parameters, rank_of_process
from f8emu.torch.weights.sharded_weight import ShardedWeight


@torch.no_grad()
def export_safetensors(model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the weights of `model` to a safetensors file, under the names of the model before its conversion.

    Every rank calls it. Shards are gathered one tensor at a time, and rank 0 writes. The file appears when it is
    complete. A tied weight is stored once, under its first name. The state of delayed scaling is not stored: only a
    resumed training needs it, and `torch.distributed.checkpoint` saves all of that.

    Args:
        model: converted or not, whole or sharded by FSDP2 and tensor parallelism, compiled or wrapped.
        path: the file; an existing one is replaced.
        dtype: the dtype of the floating-point tensors in the file; other tensors keep theirs.

    Returns:
        `path`; the file is there once the call of rank 0 returns.

    Exactness: each weight is rounded once, to nearest even, from its own dtype to `dtype`.

    Raises:
        MissingExtraError: safetensors is not installed.
    """
    save_file = require_safetensors("export_safetensors").torch.save_file
    # 1. Of all ranks the first keeps what it writes.
    is_first = rank_of_process()[0] == 0
    tensors: dict[str, Tensor] = {}
    for name, value in whole_tensors(model, dtype):
        if is_first:
            tensors[name] = value.cpu().contiguous()
    # 2. Under another name until it is complete.
    if is_first:
        unfinished = Path(f"{os.fspath(path)}.unfinished")
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(path)
    return Path(path)


def require_safetensors(call: str) -> Any:
    """The package, with its part for torch; a MissingExtraError without it."""
    with required_by(call, "torch"):
        import safetensors.torch
    return safetensors


def whole_tensors(model: nn.Module, dtype: torch.dtype, keep: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the state dict, whole, by the names of the model before its conversion; tied ones once.

    Floating-point tensors are rounded to `dtype`, but those in `keep`. Every rank iterates: shards are gathered one
    tensor at a time, so that no rank has to hold more.
    """
    repeated = {name for names in names_of_parameters(model).values() for name in names[1:]}
    for name, value in get_model_state_dict(model).items():
        if not isinstance(value, Tensor) or name in repeated:
            continue
        chosen = dtype if value.is_floating_point() and name not in keep else value.dtype
        value = value.to(chosen)  # before ranks send it
        whole = _plain(value.full_tensor() if isinstance(value, DTensor) else value).detach()
        yield name, whole.to(chosen)  # torch 2.11 gives values of `chosen` in the dtype that a weight at rest had


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The id of each parameter -> all its names."""
    names: dict[int, list[str]] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        for name, parameter in own_parameters(module).items():
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    return names


def _plain(x: Any) -> Any:
    return x.plain if isinstance(x, ShardedWeight) else x


__all__, __dir__ = public(__name__)
