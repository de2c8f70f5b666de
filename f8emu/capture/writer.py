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
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from f8emu.capture.record import INDEX, UNFINISHED, LeftOut, Record, StepHeader

_ALIGNED = 8


class Stored(NamedTuple):
    """One array on its way to the disk."""

    dtype: str
    """As safetensors names it: U8 (codes), F32, F16, BF16."""
    shape: tuple[int, ...]
    data: memoryview
    """Row-major bytes."""


class Budget:
    """How many bytes the steps of a capture may have together; None: no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0

    def refusal(self, size: int) -> str:
        """Why `size` bytes more are not allowed; empty where they are."""
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
        self._fault = ""
        try:
            self._path.mkdir(parents=True)
            self._write_index(is_complete=False)
        except OSError as error:
            self._fault = _text(error)

    @property
    def name(self) -> str:
        return self._header.name

    @property
    def fault(self) -> str:
        """Why the step could not be finished; empty if nothing is wrong with it."""
        return self._fault

    def refusal(self, size: int) -> str:
        """Why a record of so many bytes is not written; empty if it may be."""
        return self._fault or self._budget.refusal(size)

    def add(self, record: Record, arrays: Mapping[str, Stored]) -> bool:
        """Write a record; False, and an entry in `left_out`, where that is impossible."""
        size = size_of(arrays)
        reason = self.refusal(size)
        if not reason:
            name = f"{record.order:06d}.safetensors"
            text = {"record": json.dumps(record.to_json()), "step": self._header.name}
            try:
                written, digest = _write(self._path / name, _container(arrays, text))
            except OSError as error:
                reason = _text(error)
            else:
                self._budget.used += written
                self._entries.append({"file": name, "bytes": written, "sha256": digest, **record.to_json()})
                return True
        self.leave_out(LeftOut(place=record.place, size=size, reason=reason))
        return False

    def leave_out(self, record: LeftOut) -> None:
        """List a record that its owner could not keep."""
        self.left_out.append(record)

    def close(self) -> Path | None:
        """Finish the step: index, then the final name. None: it stays unfinished, and `fault` says why."""
        if self._fault:
            return None
        while True:
            try:
                self._write_index(is_complete=True)
                break
            except OSError as error:
                if not self._entries:
                    self._fault = _text(error)
                    return None
                self._give_up_last(_text(error))  # on a full disk the index needs room
        try:
            self._path.rename(self._final)
            _sync_directory(self._final.parent)
        except OSError as error:
            self._fault = _text(error)
            return None
        return self._final

    def _give_up_last(self, reason: str) -> None:
        entry = self._entries.pop()
        (self._path / entry["file"]).unlink(missing_ok=True)
        place = f"{entry['layer']} {entry.get('gemm') or entry.get('tensor')}"
        self.leave_out(
            LeftOut(place=place, size=entry["bytes"], reason=f"{reason}; removed to make room for the index")
        )

    def _write_index(self, *, is_complete: bool) -> None:
        index = self._header.to_json() | {
            "is_complete": is_complete,
            "records": self._entries,
            "left_out": [asdict(one) for one in self.left_out],
        }
        _write(self._path / INDEX, iter((json.dumps(index, indent=1).encode(),)))
        _sync_directory(self._path)


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
