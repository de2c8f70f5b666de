"""The safetensors container, read and written with numpy alone.

The library's numpy reader knows no float8 and no bfloat16, and the core of f8emu depends on numpy and ml_dtypes alone.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from f8emu.environment import write_beside
from f8emu.spec.errors import GoldenFileError
from f8emu.strict import faults_as, read_header, read_regular, require

REMEDY = "copy the file again, record one with `f8emu record OUT`, or leave --golden out to use the shipped file"
LARGEST_FILE = 1 << 30  # bytes of a file of recordings: what is larger is not one of them

_DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Container(NamedTuple):
    """The content of a file."""

    tensors: dict[str, np.ndarray]  # read-only
    metadata: dict[str, str]
    sha256: str


def read_container(path: Path, call: str, remedy: str = REMEDY) -> Container:
    """A file of recordings; what is wrong with it is a GoldenFileError that names call and remedy."""
    with faults_as(GoldenFileError, call, path, remedy):
        blob = read_regular(path, LARGEST_FILE)
        return Container(*decode_container(blob), hashlib.sha256(blob).hexdigest())


def decode_container(blob: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (read-only views of `blob`) and metadata; whatever is wrong is a Fault."""
    start, entries, metadata = read_header(memoryview(blob), len(blob))
    tensors: dict[str, np.ndarray] = {}
    for name, entry in entries.items():
        require(entry.dtype in _DTYPES, f"tensor {name!r} of a dtype among {', '.join(_DTYPES)}", entry.dtype)
        data = memoryview(blob)[start + entry.begin : start + entry.end]
        tensors[name] = np.frombuffer(data, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)
    return tensors, metadata


def encode_container(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file; arrays are stored row-major."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    parts, offset = [], 0
    for name, array in tensors.items():
        parts.append(np.array(array, order="C").tobytes())
        end = offset + len(parts[-1])
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write_container(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the file whole: a name appears only once its bytes are there."""
    write_beside(path, encode_container(tensors, metadata))
