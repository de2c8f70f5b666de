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
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from f8emu.environment import CHECK_PATH, read_regular, write_beside
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
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys("BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E5M2FNUZ F8_E4M3FNUZ".split(), 8),
    **dict.fromkeys("U16 I16 F16 BF16".split(), 16),
    **dict.fromkeys("U32 I32 F32".split(), 32),
    **dict.fromkeys("U64 I64 F64 C64".split(), 64),
}
"""Every dtype of the format -> the bits of an element. `_DTYPES` are those that a recording or a capture may have."""
_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 4096


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
        raise GoldenFileError(f"{call}: cannot read {path}: {error.strerror}; {CHECK_PATH}") from None
    return Container(*decode_container(blob, str(path), call=call, remedy=remedy), hashlib.sha256(blob).hexdigest())


def decode_container(
    blob: bytes, path: str, *, call: str = "read_golden", remedy: str = REMEDY
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (read-only views of `blob`) and metadata."""
    with told(call, path, remedy):
        start, entries, metadata = read_header(memoryview(blob), len(blob))
        for name, entry in entries.items():
            require(entry.dtype in _DTYPES, f"tensor {name!r} of a dtype among {', '.join(_DTYPES)}", entry.dtype)
        data = memoryview(blob)[start:]
        return {name: entry.of(data) for name, entry in entries.items()}, metadata


class Entry(NamedTuple):
    """A tensor as the header describes it: `begin` and `end` are bytes of the data, which begins after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, data: memoryview) -> np.ndarray:
        """The array, a view of the data."""
        return np.frombuffer(data[self.begin : self.end], dtype=_DTYPES[self.dtype]).reshape(self.shape)


def read_header(blob: memoryview | BinaryIO, size: int) -> tuple[int, dict[str, Entry], dict[str, str]]:
    """Where the data begins, the tensors, and the metadata of a safetensors file of `size` bytes, or of its content."""
    # 1. The header, whose length is checked before anything is read of it.
    require(size >= _LENGTH, f"at least {_LENGTH} bytes of header length", f"{size} bytes")
    (length,) = struct.unpack("<Q", _head(blob, 0, _LENGTH))
    is_within = length <= min(_LONGEST_HEADER, size - _LENGTH)
    require(is_within, f"a header of {length} bytes", f"a file of {size} bytes: cut short, or foreign")
    header = parsed(bytes(_head(blob, _LENGTH, length)), "a JSON header")
    require(isinstance(header, dict), "a JSON object as header", type(header).__name__)
    metadata = header.pop("__metadata__", {})
    is_text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    require(is_text, "metadata of strings", repr(metadata))
    # 2. Tensors: one behind the other, and together all of the data. A file that is cut short or padded is refused.
    available = size - _LENGTH - length
    longest = max(map(len, header), default=0)
    require(longest <= _LONGEST_NAME, f"names of tensors of at most {_LONGEST_NAME} characters", f"one of {longest}")
    entries = {name: _entry(name, entry, available) for name, entry in header.items()}
    needed = 0
    for name, entry in sorted(entries.items(), key=lambda one: one[1][2:]):
        require(entry.begin == needed, f"tensor {name!r} at byte {needed}, behind another", f"byte {entry.begin}")
        needed = entry.end
    is_all = needed == available
    require(is_all, f"{needed} bytes of data", f"{available}: cut short, or with something appended")
    return _LENGTH + length, entries, metadata


def _head(blob: memoryview | BinaryIO, begin: int, length: int) -> bytes | memoryview:
    # Of a file what follows is read: its position is `begin`.
    return blob[begin : begin + length] if isinstance(blob, memoryview) else blob.read(length)


def parsed(text: str | bytes, expected: str) -> Any:
    """What is in a JSON text; a Fault if it is none, or has an object in which a name is twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise Fault(f"expected {expected}; found no JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        require(name not in found, f"the name {name!r:.60} once", "it twice")
        found[name] = value
    return found


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
    write_beside(path, encode_container(tensors, metadata))


def _entry(name: str, entry: Any, available: int) -> Entry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if _are_sizes([begin, end]):
            pass
        case _:
            raise Fault(f"expected dtype, shape and data_offsets of tensor {name!r}; found {entry!r:.80}")
    require(dtype in _BITS, f"tensor {name!r} of a dtype among {', '.join(_BITS)}", dtype)
    # numpy's own limits, which hold without elements too.
    is_shape = _are_sizes(shape) and len(shape) <= _MOST_DIMENSIONS and math.prod(n or 1 for n in shape) < 1 << 60
    require(is_shape, f"tensor {name!r} with a shape that an array can have", shape)
    is_within = begin <= end <= available
    require(is_within, f"tensor {name!r} at bytes {begin} to {end}", f"{available} bytes of data: cut short")
    size = math.prod(shape) * _BITS[dtype] // 8
    require(end - begin == size, f"{size} bytes for tensor {name!r} {dtype}{shape}", f"{end - begin} bytes")
    return Entry(dtype, tuple(shape), begin, end)


def _are_sizes(found: list[object]) -> bool:
    return all(type(n) is int and n >= 0 for n in found)
