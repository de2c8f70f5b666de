"""Checkpoints on the disk: configuration, index and shards, checked strictly; nothing in one is trusted, or run.

Tensors are read in parts into memory of the reader, and never mapped: a file that is cut short meanwhile is an error,
and no signal. Links are followed, since the cache of Hugging Face holds nothing else.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.container import Entry, Fault, parsed, read_header, require
from f8emu.environment import open_regular, read_regular
from f8emu.spec import F8Error

REMEDY = "copy the checkpoint again, or export it anew"
_INDEX = "*.safetensors.index.json"
_SECTIONS = ("quantization_config", "compression_config")  # the second of old compressed-tensors
_LARGEST_TEXT = 1 << 26
"""The most bytes of a configuration or an index; that of DeepSeek-V3 has 9 million."""
DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Name of a dtype in a file -> numpy's, of the dtypes that a quantized Linear is made of."""


class CheckpointError(F8Error, ValueError):
    """A checkpoint that is missing, cut short, foreign or inconsistent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of a shard."""

    name: str
    file: Path
    begin: int
    """The byte of the file at which its data begin."""
    dtype: str
    """As the file names it: F8_E4M3, F32, ..."""
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Two or more dimensions, none of them empty."""
        return len(self.shape) >= 2 and min(self.shape) > 0

    def read(self) -> np.ndarray:
        """The whole tensor.

        Raises:
            CheckpointError: the file has changed.
        """
        return next(self.parts(max(self.size, 1), None)) if self.size else np.empty(self.shape, DTYPES[self.dtype])

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def parts(self, elements: int, out: np.ndarray | None, *, begin: int = 0, end: int | None = None) -> Iterator[Any]:
        """Runs of `elements` elements, of those from `begin` to `end`, in order; the whole tensor has its shape.

        Each is read into `out`, bytes that the next one overwrites, or without it into an array of its own.

        Raises:
            CheckpointError: the file has changed.
        """
        dtype, stop = DTYPES[self.dtype], self.size if end is None else end
        with _opened(self.file) as file:
            for first in range(begin, stop, elements):
                count = min(elements, stop - first)
                size = count * dtype.itemsize
                target = np.empty(size, np.uint8) if out is None else out[:size]
                file.seek(self.begin + first * dtype.itemsize)
                if file.readinto(target) != size:
                    raise fault(
                        self.file, f"{size} bytes of {self.name!r}", "fewer: it was cut short while it was read"
                    )
                yield target.view(dtype).reshape(self.shape if count == self.size else count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The names of a checkpoint; the tensors stay on the disk."""

    path: Path
    tensors: Mapping[str, Stored]
    """Every tensor of every shard."""
    unlisted: frozenset[str] = frozenset()
    """Tensors of a shard that the index does not list."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of config.json, or what hf_quant_config.json says; empty where there is none."""
    has_config: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of all shards together."""


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A .safetensors file, or a directory of such with its index and configuration.

    Raises:
        CheckpointError: missing, cut short, foreign, an index that leads elsewhere or does not fit the shards.
    """
    path = Path(path)
    if not path.is_dir():
        tensors, metadata = _shard(path)
        return Checkpoint(path=path, tensors=tensors, metadata=metadata)
    # 1. The shards: those of the index, or all that are there.
    indices = sorted(path.glob(_INDEX))[:1]
    listed = _weight_map(indices[0]) if indices else {}
    names = sorted(set(listed.values())) or sorted(one.name for one in path.glob("*.safetensors"))
    if not names:
        raise fault(path, "a .safetensors file, or a directory of such", "none in it")
    # 2. Their tensors, each of them once.
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for name in names:
        of_shard, texts = _shard(path / name)
        metadata |= texts
        for tensor, stored in of_shard.items():
            if tensor in tensors:
                raise fault(stored.file, f"the tensor {tensor!r:.60} once", f"it in {tensors[tensor].file.name} too")
            tensors[tensor] = stored
    for tensor, name in listed.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise fault(indices[0], f"the tensor {tensor!r:.60} in {name}", "it is not there")
    # 3. What the configuration says.
    config = _json(path / "config.json")
    quantization: Any = next((config[key] for key in _SECTIONS if config and config.get(key)), {})
    if not quantization and (other := _json(path / "hf_quant_config.json")) is not None:
        quantization = other.get("quantization", {})
        if isinstance(quantization, dict):
            quantization = {"quant_method": "modelopt", **quantization}
    if not isinstance(quantization, dict):
        raise fault(path / "config.json", "quantization_config as a JSON object", type(quantization).__name__)
    unlisted = frozenset(tensors) - frozenset(listed) if listed else frozenset[str]()
    return Checkpoint(
        path=path,
        tensors=tensors,
        unlisted=unlisted,
        quantization=quantization,
        has_config=config is not None,
        metadata=metadata,
    )


def fault(source: Path, expected: str, observed: str) -> CheckpointError:
    """The error that names what is wrong with a file."""
    return CheckpointError(f"audit: {source}: expected {expected}; found {observed}; {REMEDY}")


def _shard(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    with _opened(path) as file:
        try:
            start, entries, metadata = read_header(file, os.fstat(file.fileno()).st_size)
        except Fault as wrong:
            raise CheckpointError(f"audit: {path}: {wrong}; {REMEDY}") from None

    def stored(name: str, entry: Entry) -> Stored:
        return Stored(name=name, file=path, begin=start + entry.begin, dtype=entry.dtype, shape=entry.shape)

    return {name: stored(name, entry) for name, entry in entries.items()}, metadata


def _opened(path: Path) -> Any:
    try:
        return open_regular(path)
    except OSError as error:
        raise CheckpointError(f"audit: cannot read {path}: {error.strerror}; {REMEDY}") from None


def _json(path: Path) -> dict[str, Any] | None:
    # A JSON object; None where there is no such file.
    try:
        text = read_regular(path, _LARGEST_TEXT)
        found = parsed(text, "a JSON object")
        require(isinstance(found, dict), "a JSON object", type(found).__name__)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"audit: cannot read {path}: {error.strerror}; {REMEDY}") from None
    except Fault as wrong:
        raise CheckpointError(f"audit: {path}: {wrong}; {REMEDY}") from None
    return found


def _weight_map(source: Path) -> dict[str, str]:
    # Tensor -> file; a file is a name, and leads nowhere else.
    listed = (_json(source) or {}).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise fault(source, "a weight_map with names of tensors and files", f"{listed!r:.60}")
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise fault(source, f"a .safetensors file of this directory for {tensor!r:.60}", f"{name!r:.80}")
    return listed
