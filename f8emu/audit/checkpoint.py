"""Checkpoints on the disk: configuration, index and shards, checked strictly; nothing in one is trusted, or run.

Tensors are read in parts into memory of the reader, and never mapped: a file that is cut short meanwhile is an error,
and no signal. Links are followed, since the cache of Hugging Face holds nothing else.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.spec import F8Error
from f8emu.strict import CHECK_PATH, faults_as, open_regular, parsed, read_header, read_regular, require

CONFIG, MODELOPT, MANIFEST = "config.json", "hf_quant_config.json", "f8emu_manifest.json"
_INDEX, _SHARDS = "*.safetensors.index.json", "*.safetensors"
_REMEDY = "copy the checkpoint again, or export it anew"
_LARGEST_TEXT = 1 << 26
"""The most bytes of a configuration or an index; that of DeepSeek-V3 has 9 million."""
BAND = 1 << 20
"""Elements that are read at a time, so that they stay in the cache of a core."""
FLOATS = ("F32", "BF16", "F16")
_OTHERS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "U8": np.uint8}
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
DTYPES = {name: np.dtype(dtype) for name, dtype in (_OTHERS | _FLOAT8).items()}
"""Name of a dtype in a file -> numpy's, of the dtypes that are read."""


class CheckpointError(F8Error, ValueError):
    """A checkpoint that is missing, cut short, foreign or inconsistent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a shard."""

    name: str
    file: Path
    begin: int
    """The byte of the file at which its data begin."""
    nbytes: int
    dtype: str
    """As the file names it: F8_E4M3, F32, ..."""
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Two or more dimensions, none of them empty."""
        return len(self.shape) >= 2 and self.size > 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def sha256(self) -> str:
        """The hash of its bytes, which are read for it."""
        digest = hashlib.sha256()
        for part in replace(self, dtype="U8", shape=(self.nbytes,)).parts():
            digest.update(part.data)
        return digest.hexdigest()

    def read(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Its elements from `begin` to `end`, flat."""
        dtype = DTYPES[self.dtype]
        elements = np.empty(((self.size if end is None else end) - begin) * dtype.itemsize, np.uint8)
        with _faults_of(self.file), open_regular(self.file) as file:
            file.seek(self.begin + begin * dtype.itemsize)
            is_whole = file.readinto(elements.data) == elements.size
            require(is_whole, f"{elements.size} bytes of {self.name!r}", "fewer: it was cut short while it was read")
        return elements.view(dtype)

    def parts(self, most: int | None = None) -> Iterator[np.ndarray]:
        """Its first `most` elements, or all, a band at a time."""
        end = self.size if most is None else min(most, self.size)
        return (self.read(i, min(i + BAND, end)) for i in range(0, end, BAND))


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Tensors of one dtype, one behind the other, that are read as one."""

    parts: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        """Its elements from `begin` to `end`, flat."""
        pieces, at = list[np.ndarray](), 0
        for part in self.parts:
            first, last = max(begin - at, 0), min(end - at, part.size)
            pieces += [part.read(first, last)] if first < last else []
            at += part.size
        return np.concatenate(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The names of a checkpoint; the tensors stay on the disk."""

    tensors: Mapping[str, Tensor]
    """Every tensor of every shard."""
    unlisted: frozenset[str] = frozenset()
    """Tensors of a shard that the index does not list."""
    has_config: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, and what it says of the language model where that is a part of it."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of config.json or of a part of it, or what hf_quant_config.json says; empty: none."""
    second: Mapping[str, Any] = field(default_factory=dict)
    """What hf_quant_config.json says, where both say something."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """The tensors of f8emu's own manifest, each with its `sha256`."""


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A .safetensors file, or a directory of such with its index and configuration."""
    path = Path(path)
    with _faults_of(path, is_part=False):
        path.stat()
    if not path.is_dir():
        return Checkpoint(tensors=_shard(path))
    # 1. The shards: those of the index, or all that are there.
    index = min(path.glob(_INDEX), default=None)
    listed = {} if index is None else _object(index, "weight_map", is_needed=True)
    for tensor, name in listed.items():  # a file is a name, and leads nowhere else
        with _faults_of(index or path):
            is_name = isinstance(name, str) and Path(name).name == name and "\0" not in name
            is_file = is_name and name.endswith(".safetensors")
            require(is_file, f"a .safetensors file of this directory for {tensor!r:.60}", f"{name!r}")
    names = sorted(set(listed.values())) or sorted(shard.name for shard in path.glob(_SHARDS))
    with _faults_of(path):
        require(bool(names), "a .safetensors file, or a directory of such", "none in it")
    # 2. Their tensors, each of them once, and where the index says.
    tensors: dict[str, Tensor] = {}
    for name in names:
        with _faults_of(path / name):
            for tensor, stored in _shard(path / name).items():
                first = tensors.setdefault(tensor, stored)
                require(first is stored, f"the tensor {tensor!r:.60} once", f"it in {first.file.name} too")
    for tensor, name in listed.items():
        with _faults_of(path / name):
            is_there = tensor in tensors and tensors[tensor].file.name == name
            require(is_there, f"the tensor {tensor!r:.60}, as the index says", "none")
    # 3. What the configurations say.
    config = _json(path / CONFIG)
    # A model of several models has a configuration for each.
    parts = [config, *(section for section in config.values() if isinstance(section, dict))]
    keys = ("quantization_config", "compression_config")
    declared = (_object(path / CONFIG, key, part) for part in parts for key in keys)
    quantization = next(filter(None, declared), {})
    second = _object(path / MODELOPT, "quantization")
    second = {"quant_method": "modelopt", **second} if second else {}
    return Checkpoint(
        tensors=tensors,
        unlisted=frozenset(tensors) - frozenset(listed or tensors),
        has_config=(path / CONFIG).exists(),
        config=config | next((one for key, one in config.items() if key == "text_config" and one in parts), {}),
        quantization=quantization or second,
        second=second if quantization else {},
        manifest=_object(path / MANIFEST, "tensors"),
    )


def _faults_of(file: Path, *, is_part: bool = True) -> AbstractContextManager[None]:
    # What is wrong with a file, as the error that names it.
    unread = f"{CHECK_PATH}, or {_REMEDY}" if is_part else CHECK_PATH
    return faults_as(CheckpointError, "audit", file, _REMEDY, unread=unread)


def _shard(path: Path) -> dict[str, Tensor]:
    with _faults_of(path), open_regular(path) as file:
        start, entries, _ = read_header(file, os.fstat(file.fileno()).st_size)
    return {
        name: Tensor(name=name, file=path, begin=start + begin, nbytes=end - begin, dtype=dtype, shape=shape)
        for name, (dtype, shape, begin, end) in entries.items()
    }


def _json(path: Path) -> dict[str, Any]:
    # A JSON file that is an object; empty where there is none.
    with _faults_of(path):
        whole = parsed(read_regular(path, _LARGEST_TEXT), "a JSON object") if os.path.lexists(path) else {}
        require(isinstance(whole, dict), "a JSON object", type(whole).__name__)
    return whole


def _object(path: Path, key: str, whole: dict[str, Any] | None = None, *, is_needed: bool = False) -> dict[str, Any]:
    # An object in that of a JSON file, or in a part of it; empty where there is none, unless it is needed.
    whole = _json(path) if whole is None else whole
    table = whole.get(key) or {}
    with _faults_of(path):
        is_right = isinstance(table, dict) and (bool(table) or not is_needed)
        require(is_right, f"{key} as a JSON object", f"{whole.get(key)!r}")
    return table
