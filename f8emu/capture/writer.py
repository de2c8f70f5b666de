"""Writes a captured step so that a crash or a full disk costs no more than it must.

A file has its name only once its bytes are on the disk: written under a temporary name, fsynced, renamed. So has the
directory of the step: `step-00000040-rank-00000.partial` until it is whole. What could not be written is listed in the
index with the reason; nothing here raises into a training loop.
"""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from f8emu.capture.record import INDEX, UNFINISHED, LeftOut, Record, StepHeader

RESERVED = 1 << 20
"""Bytes that a step keeps free on the disk for its index."""
_RESERVE = "reserved"
"""A file that holds the room of the index until the index needs it."""
_MOST_LISTED = 1000
"""Records left out that the index lists one by one."""
LONGEST_REASON = 300
_ALIGNED = 8


class Stored(NamedTuple):
    """One array to be written."""

    dtype: str
    """The dtype in safetensors' words: U8 (codes), F32, F16, BF16."""
    shape: tuple[int, ...]
    data: memoryview
    """Row-major bytes."""


class StepWriter:
    """One step of one rank."""

    def __init__(self, root: Path, header: StepHeader) -> None:
        self.left_out: list[LeftOut] = []
        self._header = header
        self._final = root / header.name
        self._path = root / (header.name + UNFINISHED)
        self._entries: list[dict[str, Any]] = []
        self.fault = ""
        """Why the step could not be finished; empty without a fault."""
        # Room for the index is taken first: a full disk must not cost the records that were written before.
        try:
            make_directory(self._path)
            # after a crash this index says what step the files belong to
            self._write_index(is_complete=False)
            _write(self._path / _RESERVE, iter((bytes(RESERVED),)))
        except OSError as error:
            self.fault = _text(error)

    @property
    def name(self) -> str:
        return self._header.name

    def add(self, record: Record, arrays: Mapping[str, Stored]) -> bool:
        """Write a record. If that is impossible return False, and add an entry to `left_out`."""
        size, name = size_of(arrays), f"{record.order:06d}.safetensors"
        text = {"record": json.dumps(record.to_json()), "step": self._header.name}
        reason = self.fault
        try:
            if not reason:
                written, digest = _write(self._path / name, _container(arrays, text))
                self._entries.append({"file": name, "bytes": written, "sha256": digest, **record.to_json()})
                return True
        except OSError as error:
            reason = _text(error)
        self.left_out.append(LeftOut(place=record.place, size=size, reason=reason))
        return False

    def close(self, *, interrupted_by: str = "") -> Path | None:
        """Finish the step: index, then the final name. None: it stays unfinished, and `fault` says why.

        Args:
            interrupted_by: what ended the step before it was complete; it then stays unfinished, with that reason.
        """
        if self.fault:
            return None
        if interrupted_by:
            self._header = replace(self._header, reason=interrupted_by[:LONGEST_REASON])
        try:
            # 1. The index, in place of the room that was kept for it: the disk may be full.
            (self._path / _RESERVE).unlink()
            self._write_index(is_complete=not interrupted_by)
            # 2. The final name, which only a whole step has.
            if not interrupted_by:
                self._path.rename(self._final)
                _sync_directory(self._final.parent)
        except OSError as error:
            interrupted_by = _text(error)
        self.fault = interrupted_by
        return None if self.fault else self._final

    def _write_index(self, *, is_complete: bool) -> None:
        # A list without end would not fit the room that was kept for the index.
        left_out = self.left_out[:_MOST_LISTED]
        if more := len(self.left_out) - len(left_out):
            left_out.append(LeftOut(place=f"{more} more", size=0, reason="not listed one by one"))
        index = {
            "is_complete": is_complete,
            "records": self._entries,
            "left_out": [asdict(record) for record in left_out],
        }
        text = json.dumps(self._header.to_json() | index, indent=1).encode()
        _write(self._path / INDEX, iter((text,)))
        _sync_directory(self._path)


def make_directory(path: Path) -> None:
    """A directory, and those above it that are missing; each lasts, as its name in the one above does."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        _sync_directory(directory.parent)


def size_of(arrays: Mapping[str, Stored]) -> int:
    """Bytes of the arrays."""
    return sum(array.data.nbytes for array in arrays.values())


def _container(arrays: Mapping[str, Stored], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    # A safetensors file in pieces, so that no array is copied.
    # 1. The header: dtype, shape and place of each array, padded so that the arrays are aligned.
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.data.nbytes
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield struct.pack("<Q", len(text)) + text
    # 2. The arrays, where they are.
    for array in arrays.values():
        yield array.data


def _write(path: Path, pieces: Iterator[bytes | memoryview]) -> tuple[int, str]:
    temporary = path.with_name(path.name + ".writing")
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece) if isinstance(piece, bytes) else piece.nbytes
            # the name must not come before the bytes
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)  # within a directory, so that it happens whole or not at all
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk it would keep the room that others need
        raise
    return size, digest.hexdigest()


def _sync_directory(path: Path) -> None:
    # Makes the names in a directory last.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(error: OSError) -> str:
    return error.strerror or type(error).__name__
