"""Checkpoints on the disk: configuration, index and shards, checked strictly; nothing in one is trusted, or run.

Tensors are read in parts into memory of the reader, and never mapped: a file that is cut short meanwhile is an error,
and no signal. Links are followed, since the cache of Hugging Face holds nothing else.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.container import Fault, parsed, read_header
from f8emu.environment import open_regular, read_regular
from f8emu.spec import F8Error

REMEDY = "copy the checkpoint again, or export it anew"
_LARGEST_TEXT = 1 << 26
"""The most bytes of a configuration or an index; that of DeepSeek-V3 has 9 million."""
FLOATS = ("F32", "BF16", "F16")
DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Name of a dtype in a file -> numpy's, of the dtypes that are read."""


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
        return len(self.shape) >= 2 and self.size > 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read(self, begin: int = 0, end: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Its elements from `begin` to `end`, flat: in `out`, if it is given, which has room for their bytes.

        Raises:
            CheckpointError: the file has changed.
        """
        dtype = DTYPES[self.dtype]
        size = ((self.size if end is None else end) - begin) * dtype.itemsize
        target = np.empty(size, np.uint8) if out is None else out[:size]
        with _opened(self.file) as file:
            file.seek(self.begin + begin * dtype.itemsize)
            if file.readinto(target.data) != size:
                raise _fault(self.file, f"{size} bytes of {self.name!r}", "fewer: it was cut short while it was read")
        return target.view(dtype)

    def parts(self, elements: int) -> Iterator[np.ndarray]:
        """Runs of so many elements, in order."""
        return (self.read(i, min(i + elements, self.size)) for i in range(0, self.size, elements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The names of a checkpoint; the tensors stay on the disk."""

    tensors: Mapping[str, Stored]
    """Every tensor of every shard."""
    unlisted: frozenset[str] = frozenset()
    """Tensors of a shard that the index does not list."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of config.json, or what hf_quant_config.json says; empty where there is none."""
    has_config: bool = False


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A .safetensors file, or a directory of such with its index and configuration.

    Raises:
        CheckpointError: missing, cut short, foreign, an index that leads elsewhere or does not fit the shards.
    """
    path = Path(path)
    if not path.is_dir():
        return Checkpoint(tensors=_shard(path))
    # 1. The shards: those of the index, or all that are there.
    index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None)
    listed = _weight_map(index) if index is not None else {}
    names = sorted(set(listed.values())) or sorted(one.name for one in path.glob("*.safetensors"))
    if not names:
        raise _fault(path, "a .safetensors file, or a directory of such", "none in it")
    # 2. Their tensors, each of them once, and where the index says.
    tensors: dict[str, Stored] = {}
    for name in names:
        for tensor, stored in _shard(path / name).items():
            if tensors.setdefault(tensor, stored) is not stored:
                raise _fault(stored.file, f"the tensor {tensor!r:.60} once", f"it in {tensors[tensor].file.name} too")
    for tensor, name in listed.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise _fault(path / name, f"the tensor {tensor!r:.60}, as the index says", "none")
    # 3. What the configuration says.
    config = _json(path / "config.json")
    found = (config or {}).get("quantization_config") or (config or {}).get("compression_config")
    if not found:
        found = (_json(path / "hf_quant_config.json") or {}).get("quantization") or {}
        found = {"quant_method": "modelopt", **found} if found and isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise _fault(path / "config.json", "quantization_config as a JSON object", type(found).__name__)
    unlisted = frozenset(tensors) - frozenset(listed or tensors)
    return Checkpoint(tensors=tensors, unlisted=unlisted, quantization=found, has_config=config is not None)


def _fault(source: Path, expected: str, observed: str) -> CheckpointError:
    return CheckpointError(f"audit: {source}: expected {expected}; found {observed}; {REMEDY}")


def _shard(path: Path) -> dict[str, Stored]:
    with _opened(path) as file:
        try:
            start, entries, _ = read_header(file, os.fstat(file.fileno()).st_size)
        except Fault as wrong:
            raise CheckpointError(f"audit: {path}: {wrong}; {REMEDY}") from None
    return {
        name: Stored(name=name, file=path, begin=start + entry.begin, dtype=entry.dtype, shape=entry.shape)
        for name, entry in entries.items()
    }


def _opened(path: Path) -> BufferedReader:
    try:
        return open_regular(path)
    except OSError as error:
        raise CheckpointError(f"audit: cannot read {path}: {error.strerror}; {REMEDY}") from None


def _json(path: Path) -> dict[str, Any] | None:
    # A JSON object; None where there is no such file.
    try:
        found = parsed(read_regular(path, _LARGEST_TEXT), "a JSON object")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"audit: cannot read {path}: {error.strerror}; {REMEDY}") from None
    except Fault as wrong:
        raise CheckpointError(f"audit: {path}: {wrong}; {REMEDY}") from None
    if not isinstance(found, dict):
        raise _fault(path, "a JSON object", type(found).__name__)
    return found


def _weight_map(source: Path) -> dict[str, str]:
    # Tensor -> file; a file is a name, and leads nowhere else.
    listed = (_json(source) or {}).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise _fault(source, "a weight_map with names of tensors and files", f"{listed!r:.60}")
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise _fault(source, f"a .safetensors file of this directory for {tensor!r:.60}", f"{name!r:.80}")
    return listed
