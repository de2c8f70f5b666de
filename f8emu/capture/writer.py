"""Writes a captured step so that a crash, a full disk or a limit costs no more than it must.

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

_ALIGNED = 8
LONGEST_REASON = 300
"""Characters, each of six bytes at most."""
_REST_OF_INDEX = 400
"""Bytes: brackets and keys, and the entry that says how many are not listed."""
_REST_OF_RECORD = 1200
"""Bytes: the entries of five arrays, name, size and hash of the file."""


class Stored(NamedTuple):
    """One array to be written."""

    dtype: str
    """The dtype in safetensors' words: U8 (codes), F32, F16, BF16."""
    shape: tuple[int, ...]
    data: memoryview
    """Row-major bytes."""


class Budget:
    """How many bytes the steps of a capture may take together, with indexes and headers; None: no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0

    def refusal(self, size: int) -> str:
        """Why `size` more bytes are not allowed; empty if they are."""
        if self.limit is None or self.used + size <= self.limit:
            return ""
        return f"limit_bytes={self.limit} is reached: {self.used} bytes are taken, and this has {size}"


class StepWriter:
    """One step of one rank."""

    def __init__(self, root: Path, header: StepHeader, budget: Budget) -> None:
        self.left_out: list[LeftOut] = []
        self._header, self._budget = header, budget
        self._final = root / header.name
        self._path = root / (header.name + UNFINISHED)
        self._entries: list[dict[str, Any]] = []
        self._listed: list[LeftOut] = []
        self._not_listed = 0
        self._room = room_for_index(header)
        """The bytes that the index may take, reserved in the budget."""
        self._fault = budget.refusal(self._room)
        self._is_full = bool(self._fault)
        if self._is_full:
            return
        budget.used += self._room
        try:
            make_directory(self._path)
            self._write_index(is_complete=False)
        except OSError as error:
            self._fault = _text(error)

    @property
    def name(self) -> str:
        return self._header.name

    @property
    def fault(self) -> str:
        """Why the step could not be finished; empty without a fault."""
        return self._fault

    @property
    def is_refused(self) -> bool:
        """Whether the limit had no room for a single record of the step."""
        return self._is_full and not self._entries

    def refusal(self, record: Record, size: int) -> str:
        """Why a record whose arrays have this many bytes is not written; empty if it may be."""
        if self._fault:
            return self._fault
        reason = self._budget.refusal(size + room_for(record))
        self._is_full = self._is_full or bool(reason)
        return reason

    def add(self, record: Record, arrays: Mapping[str, Stored]) -> bool:
        """Write a record. If that is impossible return False, and add an entry to `left_out`."""
        size = size_of(arrays)
        reason = self.refusal(record, size)
        if not reason:
            name = f"{record.order:06d}.safetensors"
            text = {"record": json.dumps(record.to_json()), "step": self._header.name}
            try:
                written, digest = _write(self._path / name, _container(arrays, text))
            except OSError as error:
                reason = _text(error)
            else:
                entry = {"file": name, "bytes": written, "sha256": digest, **record.to_json()}
                self._entries.append(entry)
                self._reserve(_listed_size(entry))
                self._budget.used += written
                return True
        self.leave_out(LeftOut(place=record.place, size=size, reason=reason))
        return False

    def leave_out(self, record: LeftOut) -> None:
        """List a record that its owner could not keep. The index has it only while the limit has room for that."""
        self.left_out.append(record)
        room = _listed_size(asdict(record))
        if self._budget.refusal(room):
            self._not_listed += 1
        else:
            self._listed.append(record)
            self._reserve(room)

    def close(self, *, interrupted_by: str = "") -> Path | None:
        """Finish the step: index, then the final name. None: it stays unfinished, and `fault` says why.

        Args:
            interrupted_by: what ended the step before it was complete; it then stays unfinished, with that reason.
        """
        if self._fault:
            return None
        if interrupted_by:
            self._header = replace(self._header, reason=interrupted_by[:LONGEST_REASON])
        while True:
            try:
                size = self._write_index(is_complete=not interrupted_by)
                break
            except OSError as error:
                if not self._entries:
                    self._fault = _text(error)
                    return None
                self._give_up_last(_text(error))  # on a full disk the index needs room
        self._budget.used += size - self._room
        if interrupted_by:
            self._fault = interrupted_by
            return None
        try:
            self._path.rename(self._final)
            _sync_directory(self._final.parent)
        except OSError as error:
            self._fault = _text(error)
            return None
        return self._final

    def _reserve(self, room: int) -> None:
        self._room += room
        self._budget.used += room

    def _give_up_last(self, reason: str) -> None:
        entry = self._entries.pop()
        (self._path / entry["file"]).unlink(missing_ok=True)
        self._budget.used -= entry["bytes"]
        place = f"{entry['layer']} {entry.get('gemm') or entry.get('tensor')}"
        self.leave_out(
            LeftOut(place=place, size=entry["bytes"], reason=f"{reason}; removed to make room for the index")
        )

    def _write_index(self, *, is_complete: bool) -> int:
        """Gives its bytes."""
        left_out = [asdict(one) for one in self._listed]
        if self._not_listed:
            reason = f"limit_bytes={self._budget.limit} is reached: not listed one by one"
            left_out.append(asdict(LeftOut(place=f"{self._not_listed} more", size=0, reason=reason)))
        index = {"is_complete": is_complete, "records": self._entries, "left_out": left_out}
        text = json.dumps(self._header.to_json() | index, indent=1).encode()
        size, _ = _write(self._path / INDEX, iter((text,)))
        _sync_directory(self._path)
        return size


def room_for_index(header: StepHeader) -> int:
    """Bytes that the index of a step takes at most, without records; a reason that is known later has room."""
    return len(json.dumps(header.to_json(), indent=1)) + 6 * LONGEST_REASON + _REST_OF_INDEX


def room_for(record: Record) -> int:
    """Bytes that a record takes at most besides its arrays: the header of its file, its place in the index."""
    return 3 * _listed_size(record.to_json()) + _REST_OF_RECORD


def make_directory(path: Path) -> None:
    """A directory, and those above it that are missing; each lasts, as its name in the one above does."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        _sync_directory(one.parent)


def _listed_size(entry: Mapping[str, Any]) -> int:
    """Bytes of an entry in a list of the index, with its indentation."""
    lines = json.dumps(entry, indent=1).splitlines()
    return sum(len(line) + len("  ,\n") for line in lines)


def size_of(arrays: Mapping[str, Stored]) -> int:
    """Bytes of the arrays."""
    return sum(array.data.nbytes for array in arrays.values())


def _container(arrays: Mapping[str, Stored], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces, so that no array is copied."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.data.nbytes
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield struct.pack("<Q", len(text)) + text
    for array in arrays.values():
        yield array.data


def _write(path: Path, pieces: Iterator[bytes | memoryview]) -> tuple[int, str]:
    """Writes a file whole; gives its size and SHA-256."""
    temporary = path.with_name(path.name + ".writing")
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece) if isinstance(piece, bytes) else piece.nbytes
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk it would keep the room that others need
        raise
    return size, digest.hexdigest()


def _sync_directory(path: Path) -> None:
    """Makes the names in a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(error: OSError) -> str:
    return error.strerror or type(error).__name__
