"""A float8 checkpoint as a directory: safetensors, their index, config.json, and the manifest of what was written.

The manifest, `f8emu_manifest.json`, has the recipe and the SHA-256 of every tensor's bytes.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from f8emu import __version__
from f8emu.environment import require_new, whole_directory
from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import Recipe
from f8emu.strict import CHECK_PATH, open_regular, read_regular
from f8emu.torch.layer.float8_layer import shortened
from f8emu.torch.parallel.checkpoints import require_safetensors
from f8emu.torch.serving.formats import quantization_config

_log = logging.getLogger("f8emu")
CONFIG, INDEX, MANIFEST = "config.json", "model.safetensors.index.json", "f8emu_manifest.json"
SCHEMA = 1
"""Version of the layout of a manifest."""


class Export:
    """A checkpoint that is written one tensor at a time, under another name until it is complete.

    Every rank has one, and one of them `writes`.
    """

    def __init__(
        self,
        call: str,
        path: str | os.PathLike[str],
        format: str,
        recipe: Recipe,
        *,
        max_shard_bytes: int,
        writes: bool = True,
    ) -> None:
        self.path, self.format, self.recipe = Path(path), format, recipe
        self.most, self.writes, self.save = max_shard_bytes, writes, require_safetensors(call).torch.save_file
        require_new(call, self.path)
        self.directory, self.whole = self.path, whole_directory(self.path) if writes else nullcontext(self.path)
        self.shards: list[list[str]] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self.waiting: dict[str, Tensor] = {}
        self.bytes = self.flushed = 0

    def __enter__(self) -> "Export":
        self.directory = self.whole.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.whole.__exit__(*error)

    def add(self, name: str, value: Tensor) -> None:
        """A tensor, as it is."""
        if not self.writes:
            return
        value = value.detach().cpu().contiguous()
        if self.waiting and self.bytes - self.flushed + value.nbytes > self.most:
            self._flush()
        self.waiting[name], self.tensors[name] = value, described(value)
        self.bytes += value.nbytes

    def _flush(self) -> None:
        self.shards.append(list(self.waiting))
        self.save(self.waiting, self.directory / f"{len(self.shards)}.safetensors", metadata={"format": "pt"})
        self.waiting, self.flushed = {}, self.bytes

    def finish(self, config: dict[str, Any], left: Sequence[str]) -> None:
        """Write what names the tensors; `left` stay in high precision."""
        if not self.writes:
            return
        self._flush()
        for number, names in enumerate(self.shards, 1):
            file = f"model-{number:05}-of-{len(self.shards):05}.safetensors"
            file = file if len(self.shards) > 1 else "model.safetensors"
            (self.directory / f"{number}.safetensors").rename(self.directory / file)
            self.tensors |= {name: {"file": file, **self.tensors[name]} for name in names}
        versions = {"f8emu": __version__, **{name: version(name) for name in ("torch", "safetensors")}}
        known = {"format": self.format, "recipe": self.recipe.to_dict(), "recipe_hash": self.recipe.content_hash}
        written = {
            CONFIG: {**config, "quantization_config": quantization_config(self.format, self.recipe, left)},
            MANIFEST: {"schema": SCHEMA, **known, "versions": versions, "tensors": self.tensors},
        }
        if len(self.shards) > 1:
            files = {name: known["file"] for name, known in self.tensors.items()}
            written[INDEX] = {"metadata": {"total_size": self.bytes}, "weight_map": files}
        for name, data in written.items():
            (self.directory / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        if left:
            _log.warning("%s: in high precision: %s", self.path, shortened(left))


def verify_export(path: str | os.PathLike[str]) -> list[str]:
    """The differences between an exported directory and its manifest, in words; an empty list if there is none.

    Every tensor is read, one at a time.

    Raises:
        OperandError: no manifest, or one that is malformed; a file that is no safetensors file.
    """
    call, directory = "verify_export", Path(path)
    manifest = json_of(call, directory, MANIFEST)
    expected = manifest.get("tensors")
    if manifest.get("schema") != SCHEMA or not isinstance(expected, dict):
        schema = manifest.get("schema")
        raise OperandError(f"{call}: {MANIFEST} must have schema {SCHEMA}; got {schema!r}; use the f8emu that wrote it")
    differences: list[str] = []
    for file, name, content in read(call, directory):
        known, stored = expected.pop(name, None), {"file": file, **described(content.get_tensor(name))}
        if not isinstance(known, dict):
            differences.append(f"{name}: in {file}, and not in the manifest")
            continue
        wrong = [key for key in stored if known.get(key) != stored[key]]
        differences += [f"{name}: {key} is {stored[key]}; expected {known.get(key)}" for key in wrong]
    return differences + [f"{name}: in the manifest, and in no file" for name in expected]


def described(value: Tensor) -> dict[str, Any]:
    """The dtype, shape and SHA-256 of the bytes of a tensor, as the manifest has them."""
    content = memoryview(value.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "sha256": hashlib.sha256(content).hexdigest()}


def read(call: str, directory: Path) -> Iterator[tuple[str, str, Any]]:
    """The tensors of a checkpoint, unread: for each the name of its file, its own name, and the open file."""
    package, files = require_safetensors(call), sorted(directory.glob("*.safetensors"))
    if not files:
        raise OperandError(f"{call}: {directory} must be a directory with safetensors files; got none")
    for file in files:
        try:
            open_regular(file).close()
            content = package.safe_open(file, framework="pt")
        except (package.SafetensorError, OSError) as error:
            raise OperandError(f"{call}: {file} must be a safetensors file; {error}; copy it again") from None
        with content:
            for name in content.keys():
                yield file.name, name, content


def json_of(call: str, directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint."""
    remedy = "give a complete checkpoint" if directory.is_dir() else CHECK_PATH
    try:
        content = json.loads(read_regular(directory / name))
    except (OSError, ValueError, RecursionError) as error:
        raise OperandError(f"{call}: {directory} must have a {name}; {error}; {remedy}") from None
    if not isinstance(content, dict):
        raise OperandError(f"{call}: {name} of {directory} must be an object; got {type(content).__name__}")
    return content
