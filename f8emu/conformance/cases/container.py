"""The safetensors container, read and written with numpy alone.

Layout: 8 bytes of header length (little endian), a JSON header `{name: {dtype, shape, data_offsets}}`, the data.
The library's numpy reader knows no float8 and no bfloat16, and the core of f8emu depends on numpy and ml_dtypes alone.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from f8emu.spec.errors import GoldenFileError

REMEDY = "copy the file again, record one with `f8emu record OUT`, or leave --golden out to use the shipped file"

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
_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""The longest header, which is the format's own limit."""
_MOST_DIMENSIONS = 64
"""The most dimensions, which is numpy's own limit."""
LARGEST_FILE = 1 << 30
"""Bytes of a file of recordings: what is larger is not one of them."""


class _Source(NamedTuple):
    """What an error says of the file."""

    call: str
    path: str
    remedy: str


def decode_container(
    blob: bytes, path: str, *, call: str = "read_golden", remedy: str = REMEDY
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (read-only views of `blob`) and metadata.

    Raises:
        GoldenFileError: not a safetensors file, or one cut short; it names `call` and `path` and ends in `remedy`.
    """
    # 1. The header, whose length is checked before anything is read of it.
    source = _Source(call, path, remedy)
    if len(blob) < _LENGTH:
        raise _fault(source, f"at least {_LENGTH} bytes of header length", f"{len(blob)} bytes")
    (length,) = struct.unpack_from("<Q", blob)
    if length > min(_LONGEST_HEADER, len(blob) - _LENGTH):
        raise _fault(source, f"a header of {length} bytes", f"a file of {len(blob)} bytes: cut short, or foreign")
    try:
        header = json.loads(blob[_LENGTH : _LENGTH + length])
    except (ValueError, RecursionError) as error:
        raise _fault(source, "a JSON header", str(error)) from None
    if not isinstance(header, dict):
        raise _fault(source, "a JSON object as header", type(header).__name__)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _fault(source, "metadata of strings", repr(metadata)[:80])
    # 2. Tensors: each within the data, and together all of it. A file that is cut short or padded is refused.
    data = memoryview(blob)[_LENGTH + length :]
    tensors = {name: _tensor(name, entry, data, source) for name, entry in header.items()}
    needed = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if needed != len(data):
        raise _fault(source, f"{needed} bytes of data", f"{len(data)}: cut short, or with something appended")
    return tensors, metadata


def encode_container(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file; arrays are stored row-major."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    parts: list[bytes] = []
    offset = 0
    for name, array in tensors.items():
        data = np.array(array, order="C").tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write_container(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the file whole: a name appears only once its bytes are there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(encode_container(tensors, metadata))
    partial.replace(path)


def _tensor(name: str, entry: object, data: memoryview, source: _Source) -> np.ndarray:
    match entry:
        case {"dtype": str(dtype_name), "shape": [*shape], "data_offsets": [begin, end]} if _are_sizes([begin, end]):
            pass
        case _:
            raise _fault(source, f"dtype, shape and data_offsets of tensor {name!r}", repr(entry)[:80])
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise _fault(source, f"tensor {name!r} of a dtype among {', '.join(_DTYPES)}", dtype_name[:80])
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise _fault(source, f"tensor {name!r} with a shape of sizes", repr(shape)[:80])
    size = math.prod(shape) * dtype.itemsize
    if not begin <= end <= len(data):
        raise _fault(source, f"tensor {name!r} at bytes {begin} to {end}", f"{len(data)} bytes of data: cut short")
    if end - begin != size:
        raise _fault(source, f"{size} bytes for tensor {name!r} {dtype_name}{shape}", f"{end - begin} bytes")
    try:
        return np.frombuffer(data[begin:end], dtype=dtype).reshape(shape)
    except (ValueError, OverflowError):  # without elements it may be said to have sizes that no array can have
        raise _fault(source, f"tensor {name!r} with a shape that an array can have", repr(shape)[:80]) from None


def _are_sizes(found: list[object]) -> bool:
    return all(type(n) is int and n >= 0 for n in found)


def _fault(source: _Source, expected: str, observed: str) -> GoldenFileError:
    return GoldenFileError(f"{source.call}: {source.path}: expected {expected}; found {observed}; {source.remedy}")
