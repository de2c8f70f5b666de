"""The one reader of files that people hand us: JSON by the type hints of a dataclass, headers of safetensors files.

Nothing in a file is trusted, and nothing in it is run. Whatever is wrong is a `Fault`, "expected X; found Y";
`faults_as` turns it into the error of a reader, with the place and the remedy. A bool is no integer here, a name may
not appear twice in an object, and an unknown key is a fault, since a misspelt one would silently mean its default.
"""

import errno
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from io import BufferedReader
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

CHECK_PATH = "check the path, and who may read it"
"""The remedy where the system does not read what a user named."""
Readers = Mapping[Any, Callable[[Any, str], Any]]
"""Type -> what reads a value of it, given its place; it raises Fault or another ValueError."""
_T = TypeVar("_T")


class Fault(ValueError):
    """What was expected of a file, and what was found."""


def require(is_right: bool, expected: str, found: object) -> None:
    """Raise Fault unless it is right."""
    if not is_right:
        raise Fault(f"expected {expected}; found {str(found)[:80]}")


@contextmanager
def faults_as(
    error: type[Exception], call: str, place: object = "", remedy: str = "", *, unread: str = CHECK_PATH
) -> Iterator[None]:
    """Turn a Fault into `error`, which names call, place and remedy; of a file that cannot be read, `unread`."""
    try:
        yield
    except Fault as fault:
        raise error(": ".join(filter(None, (call, str(place), str(fault)))) + (remedy and f"; {remedy}")) from None
    except OSError as fault:
        raise error(f"{call}: cannot read {place}: {fault.strerror}; {unread}") from None


# 1 Regular files


def open_regular(path: Path, *, follows_links: bool = True) -> BufferedReader:
    """A regular file, to read: a pipe is not waited for, a device not read without end."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int = 1 << 28) -> bytes:
    """A whole regular file of at most `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"expected a file of at most {most} bytes; found {size}", str(path))
        return file.read(most)


# 2 JSON


def parsed(text: str | bytes, expected: str) -> Any:
    """The content of a JSON text without repeated names."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if isinstance(error, Fault):
            raise
        raise Fault(f"expected {expected}; found no JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        require(name not in table, f"the name {name!r:.60} once", "it twice")
        table[name] = value
    return table


def read(kind: Any, value: Any, place: str, readers: Readers | None = None) -> Any:
    """`value` as a field of type `kind` holds it.

    `kind` is int, float, str, bool, a Literal, an Enum, a dataclass, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`,
    `Mapping[str, X]` or Any; `readers` add types, or replace these.
    """
    readers = readers or {}
    if kind in readers:
        return _at(place, readers[kind], value, place)
    if kind is Any:
        return value
    if isinstance(kind, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
        return None if value is None else read(kind, value, place, readers)
    if isinstance(kind, type) and is_dataclass(kind):
        return part(kind, value, place, readers)
    match get_origin(kind), get_args(kind):
        case origin, _ if origin is Literal:  # which of its names, the dataclass checks
            return read(str, value, place, readers)
        case None, _ if issubclass(kind, Enum):
            return choice(value, {member.value: member for member in kind}, place)
        case None, _:
            # JSON and TOML may write 1 for 1.0.
            is_number = kind is float and type(value) is int
            require(is_number or type(value) is kind, f"{place} of type {kind.__name__}", repr(value))
            return value
        case origin, (element, *others) if origin is tuple:
            require(type(value) is list, f"{place} of type list", repr(value))
            elements = [element] * len(value) if others == [...] else [element, *others]
            require(len(value) == len(elements), f"{place} with {len(elements)} elements", repr(value))
            return tuple(
                read(one, x, f"{place}[{i}]", readers) for i, (one, x) in enumerate(zip(elements, value, strict=True))
            )
        case _, (_, element):
            require(type(value) is dict, f"{place} of type object", repr(value))
            return {name: read(element, x, f"{place}.{name:.60}", readers) for name, x in value.items()}
    raise TypeError(f"no reader of {kind}")


def part(
    kind: Callable[..., _T], value: Any, place: str = "", readers: Readers | None = None, *, knows_all: bool = True
) -> _T:
    """The result of `kind`, a dataclass or a function, whose parameters are the keys of an object.

    Other keys are faults where it `knows_all`.
    """
    require(isinstance(value, dict), f"{place or 'the whole'} of type object", repr(value))
    hints = _hints(kind)
    unknown = [key for key in value if key not in hints] if knows_all else []
    require(not unknown, f"{place or 'an object'} with no keys but {', '.join(hints)}", repr(unknown[:1])[1:-1])
    values: dict[str, Any] = {}
    for name, (hint, is_needed) in hints.items():
        where = f"{place}.{name}" if place else name
        require(name in value or not is_needed, f"the key {where}", "none")
        if name in value:
            values[name] = read(hint, value[name], where, readers)
    return _at(place, kind, **values)


@cache
def _hints(kind: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    # Parameter -> its type, and whether it must be there.
    hints = get_type_hints(kind)
    parameters = signature(kind).parameters.values()
    return {parameter.name: (hints[parameter.name], parameter.default is Parameter.empty) for parameter in parameters}


def choice(value: Any, known: Mapping[Any, _T], place: str) -> _T:
    """What `value` names among `known`."""
    is_known = isinstance(value, str) and value in known
    require(is_known, f"{place} to be one of {', '.join(map(str, known))}", repr(value))
    return known[value]


def _at(place: str, build: Callable[..., _T], /, *args: Any, **values: Any) -> _T:
    # What a type itself refuses is a fault at its place.
    try:
        return build(*args, **values)
    except Fault:
        raise
    except ValueError as error:
        raise Fault(": ".join(filter(None, (place, str(error))))) from None


# 3 safetensors: 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data

_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 4096
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys("BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E5M2FNUZ F8_E4M3FNUZ".split(), 8),
    **dict.fromkeys("U16 I16 F16 BF16".split(), 16),
    **dict.fromkeys("U32 I32 F32".split(), 32),
    **dict.fromkeys("U64 I64 F64 C64".split(), 64),
}
"""Every dtype of the format -> the bits of an element."""


class Entry(NamedTuple):
    """A tensor as the header describes it: `begin` and `end` are bytes of the data, which begins after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1][2:]):
        require(entry.begin == needed, f"tensor {name!r} at byte {needed}, behind another", f"byte {entry.begin}")
        needed = entry.end
    is_all = needed == available
    require(is_all, f"{needed} bytes of data", f"{available}: cut short, or with something appended")
    return _LENGTH + length, entries, metadata


def _head(blob: memoryview | BinaryIO, begin: int, length: int) -> bytes | memoryview:
    # Of a file what follows is read: its position is `begin`.
    return blob[begin : begin + length] if isinstance(blob, memoryview) else blob.read(length)


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


def _are_sizes(numbers: list[object]) -> bool:
    return all(type(n) is int and n >= 0 for n in numbers)
