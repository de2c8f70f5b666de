"""A float8 checkpoint with the very codes and scales that the layers multiply in their GEMM `output`."""

import fnmatch
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from f8emu.spec.errors import OperandError
from f8emu.spec.exports import public
from f8emu.spec.names import CastFromName
from f8emu.spec.recipe import CastFrom
from f8emu.torch.chip import CHIP, name_of
from f8emu.torch.conversion.filters import HEADS
from f8emu.torch.recipes import RecipeLike, resolve_recipe
from f8emu.torch.serving.checkpoint import CONFIG, INDEX, Export, json_of, read
from f8emu.torch.serving.coding import WeightCoder
from f8emu.torch.serving.formats import CheckpointFormat
from f8emu.torch.serving.stream import ModelStream
from f8emu.torch.torch_internals import rank_of_process

SKIPPED = (*HEADS, "*embed*", "*.wte", "*.wpe", "*.gate", "*_gate", "*router*")
"""Modules of a checkpoint that stay in high precision unless `skip` says otherwise: heads, embeddings and routers."""
MAX_SHARD_BYTES = 5 << 30
_SKIP = f"--skip MODULE for each of them, and for {', '.join(SKIPPED)}, which it replaces"


@torch.no_grad()
def export_float8(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: CheckpointFormat,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a converted model as a float8 checkpoint, which transformers, vLLM and SGLang load.

    The weight of every `Float8Linear` becomes codes and scales. Every rank calls it: shards of FSDP2 and tensor
    parallelism are gathered one tensor at a time, and rank 0 writes. A tied weight is stored once, under its first
    name. config.json is that of `model.config`, if there is one, with the `quantization_config` of the format; this
    lists the linear layers that are in high precision. `f8emu_manifest.json` has the hash of every tensor
    (`verify_export`). The directory appears when it is complete.

    Args:
        model: converted, whole or sharded, with float8 primary weights or without, compiled or wrapped.
        path: the directory; it must not exist.
        format: "block" for 128x128 scales, `weight_scale_inv`, as DeepSeek has them; "compressed-tensors" for
            tensorwise, rowwise and 128x128 scales, `weight_scale`; "per-channel" for rowwise scales with FBGEMM's
            configuration.
        dtype: the dtype of the other floating-point tensors.
        max_shard_bytes: the most bytes of a shard, unless one tensor has more.

    Returns:
        `path`, for `verify_export` or a server; the directory is there once the call of rank 0 returns.

    Shapes:
        weight [N, K] -> float8_e4m3fn [N, K], and float32 [ceil(N / 128), ceil(K / 128)], [N, 1] or [1].

    Exactness: codes and scales are those of the operand `weight` of `output` in the next forward pass, bit for bit. If
    FSDP2 gathers weights in bfloat16 (`param_dtype`), that needs the recipe's `cast_weight_from` to be "bfloat16": the
    shards, which are written, are float32. Other tensors are rounded once, to nearest even.

    Raises:
        SpecError: an unknown format.
        OperandError: a model without float8 layers or with several recipes; a directory that exists; 128x128 scales and
            sizes that are not multiples of 128, whose blocks readers would cut elsewhere.
        UnsupportedError: a recipe that the format cannot hold; experts; a weight with several names.
        MissingExtraError: safetensors is not installed.
    """
    stream = ModelStream("export_float8", model, format, dtype=dtype)
    is_first = rank_of_process()[0] == 0
    how: Any = {"max_shard_bytes": max_shard_bytes, "writes": is_first}
    with Export(stream.call, path, format, stream.recipe, **how) as export:
        for name, value in stream.tensors():
            export.add(name, value)
        export.finish(_config_of(model, dtype), stream.left)
    return export.path


@torch.no_grad()
def export_checkpoint(
    model: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str,
    config: RecipeLike,
    cast_weight_from: CastFrom | CastFromName | None = None,
    skip: Sequence[str] = SKIPPED,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """`export_float8` of a checkpoint of transformers: a directory with config.json and safetensors files.

    Every matrix `*.weight` whose sizes are multiples of 16 becomes codes, unless a pattern of `skip` fits its module:
    the layers in high precision must be those of the training. Tensors are read one at a time, and other files copied.

    Exactness: codes and scales are those of layers whose weights have the values and the dtype of the checkpoint. So
    that of a model with float32 weights must hold them in float32, unless `cast_weight_from` is "bfloat16".

    Raises:
        OperandError: no such checkpoint; one that is quantized already; otherwise as `export_float8`.
    """
    call, source = "export_checkpoint", Path(model)
    of_model = json_of(call, source, CONFIG)
    if "quantization_config" in of_model:
        raise OperandError(f"{call}: {source} must be in high precision; got one with a quantization_config")
    # 1. Which matrices stay in high precision.
    shapes = {name: content.get_slice(name).get_shape() for _, name, content in read(call, source)}
    matrices = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    left = [
        name.removesuffix(".weight")
        for name, shape in matrices.items()
        if any(fnmatch.fnmatchcase(name.removesuffix(".weight"), pattern) for pattern in skip)
        or any(size % CHIP.size_multiple for size in shape)
    ]
    coded = {name: shape for name, shape in matrices.items() if name.removesuffix(".weight") not in left}
    # 2. One tensor at a time, and what else lies there.
    recipe = resolve_recipe(call, config, cast_weight_from)
    coder = WeightCoder(call, format, recipe, coded, _SKIP)
    with Export(call, path, format, recipe, max_shard_bytes=max_shard_bytes) as export:
        for done, (_, name, content) in enumerate(read(call, source), 1):
            for stored_as, value in coder.of(name, content.get_tensor(name)):
                export.add(stored_as, value)
            progress(done, len(shapes))
        for file in source.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (CONFIG, INDEX):
                shutil.copyfile(file, export.directory / file.name)
        export.finish(of_model, left)
    return export.path


def _config_of(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    # As transformers' save_pretrained writes it: servers find a model by the name of its class.
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    name = type(getattr(model, "_orig_mod", model)).__name__.removeprefix("FSDP")
    return {**config.to_dict(), "architectures": config.architectures or [name], "dtype": name_of(dtype)}


__all__, __dir__ = public(__name__)
