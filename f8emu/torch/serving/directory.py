"""A checkpoint as a directory: shards of safetensors, their index, config.json, and the manifest of what was written.

The manifest, `f8emu_manifest.json`, has the recipe and the SHA-256 of every tensor's bytes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from f8emu import __version__
from f8emu.spec.errors import MissingExtraError, OperandError
from f8emu.spec.recipe import Recipe

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MANIFEST = "f8emu_manifest.json"
SCHEMA = 1
"""Version of the layout of a manifest."""


class Writer:
    """A directory that is written one tensor at a time, under another name until it is complete."""

    def __init__(self, call: str, path: str | os.PathLike[str], max_shard_bytes: int) -> None:
        self.path, self.most = Path(path), max_shard_bytes
        if self.path.exists():
            raise OperandError(f"{call}: path must not exist; got {self.path}; remove it, or choose another")
        self.save = safetensors(call).torch.save_file
        self.directory = Path(f"{self.path}.unfinished")
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.shards: list[list[str]] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self.waiting: dict[str, Tensor] = {}
        self.total = 0

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().cpu().contiguous()
        if self.waiting and value.nbytes + sum(x.nbytes for x in self.waiting.values()) > self.most:
            self._flush()
        self.waiting[name], self.tensors[name] = value, described(value)
        self.total += value.nbytes

    def _flush(self) -> None:
        self.shards.append(list(self.waiting))
        self.save(self.waiting, self.directory / f"{len(self.shards)}.safetensors", metadata={"format": "pt"})
        self.waiting = {}

    def finish(self, config: dict[str, Any], format: str, recipe: Recipe) -> None:
        """Write what names the tensors, and give the directory its name."""
        self._flush()
        count = len(self.shards)
        for number, names in enumerate(self.shards, 1):
            file = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self.directory / f"{number}.safetensors").rename(self.directory / file)
            for name in names:
                self.tensors[name] = {"file": file, **self.tensors[name]}
        if count > 1:
            files = {name: x["file"] for name, x in self.tensors.items()}
            self._json(INDEX, {"metadata": {"total_size": self.total}, "weight_map": files})
        self._json(CONFIG, config)
        versions = {"f8emu": __version__, **{name: version(name) for name in ("torch", "safetensors")}}
        facts = {"format": format, "recipe": recipe.to_dict(), "recipe_hash": recipe.content_hash, "versions": versions}
        self._json(MANIFEST, {"schema": SCHEMA, **facts, "tensors": self.tensors})
        self.directory.rename(self.path)

    def _json(self, name: str, data: object) -> None:
        (self.directory / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def verify_export(path: str | os.PathLike[str]) -> list[str]:
    """What differs between an exported directory and its manifest, in words; an empty list if nothing does.

    Every tensor is read, one at a time.

    Raises:
        OperandError: no manifest, or one that is malformed; a file that is no safetensors file.
    """
    call, directory = "verify_export", Path(path)
    manifest = json_of(call, directory, MANIFEST)
    expected = manifest.get("tensors")
    if manifest.get("schema") != SCHEMA or not isinstance(expected, dict):
        found = manifest.get("schema")
        raise OperandError(f"{call}: {MANIFEST} must have schema {SCHEMA}; got {found!r}; use the f8emu that wrote it")
    differences: list[str] = []
    for file in files_of(call, directory):
        for name, value in tensors_of(call, file):
            known, found = expected.pop(name, None), {"file": file.name, **described(value)}
            if not isinstance(known, dict):
                differences.append(f"{name}: in {file.name}, and not in the manifest")
                continue
            wrong = [key for key in found if known.get(key) != found[key]]
            differences += [f"{name}: {key} is {found[key]}; expected {known.get(key)}" for key in wrong]
    return differences + [f"{name}: in the manifest, and in no file" for name in expected]


def described(value: Tensor) -> dict[str, Any]:
    """The dtype, shape and SHA-256 of the bytes of a tensor, as the manifest has them."""
    content = memoryview(value.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "sha256": hashlib.sha256(content).hexdigest()}


def safetensors(call: str) -> Any:
    """The package, with its part for torch."""
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise MissingExtraError(call, "safetensors", "torch") from error
    return safetensors


def files_of(call: str, directory: Path) -> Sequence[Path]:
    """The safetensors files of a checkpoint."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise OperandError(f"{call}: {directory} must be a directory with safetensors files; got none")
    return files


def tensors_of(call: str, file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors file, one at a time."""
    with _opened(call, file) as content:
        for name in content.keys():
            yield name, content.get_tensor(name)


def shapes_of(call: str, file: Path) -> dict[str, list[int]]:
    """Names and shapes of a safetensors file, of which only the header is read."""
    with _opened(call, file) as content:
        return {name: content.get_slice(name).get_shape() for name in content.keys()}


def _opened(call: str, file: Path) -> Any:
    package = safetensors(call)
    try:
        return package.safe_open(file, framework="pt")
    except (package.SafetensorError, OSError) as error:
        raise OperandError(f"{call}: {file} must be a safetensors file; {error}; copy it again") from None


def json_of(call: str, directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint."""
    try:
        found = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OperandError(f"{call}: {directory} must have a {name}; {error}; give a complete checkpoint") from None
    if not isinstance(found, dict):
        raise OperandError(f"{call}: {name} of {directory} must be an object; got {type(found).__name__}")
    return found
