"""The safetensors container, read and written with numpy alone; and how a fault of a file is told.

Layout: 8 bytes of header length (little endian), a JSON header `{name: {dtype, shape, data_offsets}}`, the data.
The library's numpy reader knows no float8 and no bfloat16, and the core of f8emu depends on numpy and ml_dtypes alone.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from f8emu.environment import read_regular
from f8emu.spec.errors import GoldenFileError

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
_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 64


class Fault(ValueError):
    """What is wrong with a file: what was expected of it, and what was found."""


def require(is_right: bool, expected: str, found: object) -> None:
    """Raise Fault unless it is right."""
    if not is_right:
        raise Fault(f"expected {expected}; found {str(found)[:80]}")


@contextmanager
def told(call: str, place: str, remedy: str = REMEDY) -> Iterator[None]:
    """Turns a Fault into the GoldenFileError that names call, place and remedy."""
    try:
        yield
    except Fault as fault:
        raise GoldenFileError(f"{call}: {place}: {fault}; {remedy}") from None


class Container(NamedTuple):
    """The content of a file."""

    tensors: dict[str, np.ndarray]  # read-only
    metadata: dict[str, str]
    sha256: str


def read_container(path: Path, call: str, remedy: str = REMEDY) -> Container:
    """A file of recordings; it raises as `decode_container`."""
    try:
        blob = read_regular(path, LARGEST_FILE)
    except OSError as error:
        raise GoldenFileError(f"{call}: cannot read {path}: {error.strerror}; {remedy}") from None
    return Container(*decode_container(blob, str(path), call=call, remedy=remedy), hashlib.sha256(blob).hexdigest())


def decode_container(
    blob: bytes, path: str, *, call: str = "read_golden", remedy: str = REMEDY
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (read-only views of `blob`) and metadata.

    Raises:
        GoldenFileError: not a safetensors file, or one cut short; it names `call` and `path` and ends in `remedy`.
    """
    with told(call, path, remedy):
        # 1. The header, whose length is checked before anything is read of it.
        require(len(blob) >= _LENGTH, f"at least {_LENGTH} bytes of header length", f"{len(blob)} bytes")
        (length,) = struct.unpack_from("<Q", blob)
        is_within = length <= min(_LONGEST_HEADER, len(blob) - _LENGTH)
        require(is_within, f"a header of {length} bytes", f"a file of {len(blob)} bytes: cut short, or foreign")
        header = parsed(blob[_LENGTH : _LENGTH + length], "a JSON header")
        require(isinstance(header, dict), "a JSON object as header", type(header).__name__)
        metadata = header.pop("__metadata__", {})
        is_text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        require(is_text, "metadata of strings", repr(metadata))
        # 2. Tensors: each within the data, and together all of it. A file that is cut short or padded is refused.
        data = memoryview(blob)[_LENGTH + length :]
        tensors = {name: _tensor(name, entry, data) for name, entry in header.items()}
        needed = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        is_all = needed == len(data)
        require(is_all, f"{needed} bytes of data", f"{len(data)}: cut short, or with something appended")
        return tensors, metadata


def parsed(text: str | bytes, expected: str) -> Any:
    """What is in a JSON text; a Fault if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault(f"expected {expected}; found no JSON: {error}") from None


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
    text += b" " * (-len(text) % _LENGTH)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write_container(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the file whole: a name appears only once its bytes are there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(encode_container(tensors, metadata))
    partial.replace(path)


def _tensor(name: str, entry: Any, data: memoryview) -> np.ndarray:
    match entry:
        case {"dtype": str(dtype_name), "shape": [*shape], "data_offsets": [begin, end]} if _are_sizes([begin, end]):
            pass
        case _:
            raise Fault(f"expected dtype, shape and data_offsets of tensor {name!r}; found {entry!r:.80}")
    require(dtype_name in _DTYPES, f"tensor {name!r} of a dtype among {', '.join(_DTYPES)}", dtype_name)
    dtype = _DTYPES[dtype_name]
    # numpy's own limits, which hold without elements too.
    is_shape = _are_sizes(shape) and len(shape) <= _MOST_DIMENSIONS and math.prod(n or 1 for n in shape) < 1 << 60
    require(is_shape, f"tensor {name!r} with a shape that an array can have", shape)
    is_within = begin <= end <= len(data)
    require(is_within, f"tensor {name!r} at bytes {begin} to {end}", f"{len(data)} bytes of data: cut short")
    size = math.prod(shape) * dtype.itemsize
    require(end - begin == size, f"{size} bytes for tensor {name!r} {dtype_name}{shape}", f"{end - begin} bytes")
    return np.frombuffer(data[begin:end], dtype=dtype).reshape(shape)


def _are_sizes(found: list[object]) -> bool:
    return all(type(n) is int and n >= 0 for n in found)
