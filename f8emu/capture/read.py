"""Captures read back, checked strictly: nothing in one is trusted, and nothing in one is run.

A path is a step of a rank (`step-00000040-rank-00000`) or a directory of such. Arrays are read one record at a time
and mapped, not loaded; sizes are compared with the file and with the record before anything is made of them. Links,
pipes and devices are refused.
"""

import hashlib
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from f8emu.capture.record import (
    FILE_NAME,
    INDEX,
    SCHEMA,
    STEP_NAME,
    UNFINISHED,
    CaptureError,
    ForeignRecord,
    GemmRecord,
    LeftOut,
    Record,
    StepHeader,
    TensorRecord,
    record_from_json,
)
from f8emu.conformance.cases.container import decode_container
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.shown import Shown
from f8emu.spec import Granularity, format_by_name
from f8emu.strict import Fault, faults_as, open_regular, parsed, part, require

REMEDY = "copy the capture again, or make another with f8emu.torch.capture"
_LARGEST_INDEX = 256 * 2**20
_BEGUN = re.compile(STEP_NAME.pattern + re.escape(UNFINISHED))
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CapturedRecord(Shown):
    """One record, and where its arrays are."""

    record: Record
    path: Path
    size: int | None
    """Bytes of the file; None in a step that was never finished."""
    sha256: str
    """Empty in a step that was never finished."""

    def load(self) -> Arrays:
        """Its arrays, typed and read-only.

        Of a GEMM a.codes, a.scale, b.codes, b.scale and product, no scales in high precision, of another stack's layer
        what it shows; of a tensor its value.
        """
        tensors, _ = _decoded(self.path, self.size)
        return _typed(self.record, tensors, self.path)

    @property
    def named(self) -> str:
        """The file, and what of the step it holds."""
        return f"{self.path}: {self.record.place}"

    def is_intact(self) -> bool:
        """Whether the file is what was written, by its SHA-256; true where that is not known."""
        if not self.sha256:
            return True
        with _opened(self.path, self.size) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CapturedStep(Shown):
    """One step of one rank."""

    path: Path
    header: StepHeader
    records: tuple[CapturedRecord, ...]
    """All records, in the order in which they happened."""
    left_out: tuple[LeftOut, ...]
    is_complete: bool
    """False: the process ended, or the disk was full, before the step was finished."""
    damaged: tuple[str, ...] = ()
    """Files of a step that was never finished in which there is no record, and why."""
    is_alone: bool = False
    """It was given by its own path: nothing is said of other ranks."""

    @property
    def name(self) -> str:
        return f"step {self.header.step}" + (f" rank {self.header.rank}" if self.header.world_size > 1 else "")


def steps_of(capture: str | Path | Sequence[CapturedStep]) -> Sequence[CapturedStep]:
    """The steps of a capture at a path, or steps that were read."""
    return read_capture(capture) if isinstance(capture, str | Path) else capture


def read_capture(path: str | Path) -> tuple[CapturedStep, ...]:
    """The steps of a capture, by step and rank. The arrays stay on the disk."""
    path = Path(path)
    with faults_as(CaptureError, "read_capture", path):
        # 1. The path of one step, or a directory of steps.
        if (path / INDEX).exists():
            return (_step(path, is_alone=True),)
        names = sorted(os.listdir(path))
    # 2. A finished step has an index: one without it has been tampered with, or copied in part.
    has_index = {name: (path / name / INDEX).exists() for name in names}
    for name in names:
        with _faults_of(path / name):
            is_whole = has_index[name] or not STEP_NAME.fullmatch(name)
            require(is_whole, f"the {INDEX} of a step that was finished", "none")
    steps = [_step(path / name) for name in names if name.startswith("step-") and has_index[name]]
    if not steps:
        raise CaptureError(
            f"read_capture: expected a captured step, or a directory of such, at {path}; found no step-*/{INDEX} in "
            f"it; give the path that was given to f8emu.torch.capture, or {REMEDY}"
        )
    # 3. A step that died before its first index is told as left out.
    begun = [name for name in names if _BEGUN.fullmatch(name) and not has_index[name]]
    unindexed = tuple(LeftOut(place=name, size=0, reason="it was begun, and has no index") for name in begun)
    steps[0] = replace(steps[0], left_out=(*steps[0].left_out, *unindexed))
    return tuple(sorted(steps, key=lambda step: (step.header.step, step.header.rank)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    # What an index has beside the header.
    records: tuple[dict[str, Any], ...]
    left_out: tuple[LeftOut, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    # What a record of an index says of its file.
    file: str
    bytes: int
    sha256: str


def _step(path: Path, *, is_alone: bool = False) -> CapturedStep:
    # 1. The index: header, list of records, what was left out.
    source = path / INDEX
    with _faults_of(source):
        index = _index(source)
        header, lists = StepHeader.from_json(index), part(_Lists, index, knows_all=False)
    is_complete = lists.is_complete and not path.name.endswith(UNFINISHED)
    damaged: list[str] = []
    # 2. A finished step has what its index lists; of any other, each file that holds a whole record counts.
    if is_complete:
        records = [_entry(path, entry, f"{source}: record {i}") for i, entry in enumerate(lists.records)]
    else:
        records = []
        for name in sorted(filter(FILE_NAME.fullmatch, os.listdir(path))):
            try:
                records.append(_unlisted(path / name))
            except CaptureError as error:
                damaged.append(str(error))
    # 3. In the order in which they happened, which must tell them apart.
    records.sort(key=lambda captured: captured.record.order)
    with _faults_of(source):
        orders = {captured.record.order for captured in records}
        require(len(orders) == len(records), "an 'order' of its own in every record", "one twice")
    return CapturedStep(
        path=path,
        header=header,
        records=tuple(records),
        left_out=lists.left_out,
        is_complete=is_complete,
        damaged=tuple(damaged),
        is_alone=is_alone,
    )


def _index(source: Path) -> dict[str, Any]:
    with _opened(source) as file:
        size = os.fstat(file.fileno()).st_size
        require(size <= _LARGEST_INDEX, f"an index of at most {_LARGEST_INDEX} bytes", f"{size} bytes")
        index = parsed(file.read(), "a JSON index")
    require(isinstance(index, dict), "a JSON object", type(index).__name__)
    # before anything else is read: another layout may mean something else by the same key
    if index.get("schema") != SCHEMA:
        made_by = index.get("versions")
        version = made_by.get("f8emu") if isinstance(made_by, dict) else None
        raise CaptureError(
            f"read_capture: {source}: expected schema {SCHEMA}, which this version of f8emu reads; found "
            f"{index.get('schema')!r:.60}; read it with the version that wrote it"
            + (f", f8emu {version!s:.60}" if version else "")
        )
    return index


def _entry(path: Path, entry: dict[str, Any], source: str) -> CapturedRecord:
    with _faults_of(source):
        stored = part(_File, entry, knows_all=False)
        # The name may not lead out of the directory, and the size is compared before the file is mapped.
        is_name = FILE_NAME.fullmatch(stored.file) is not None
        require(is_name, "a file with a name like 000000.safetensors", repr(stored.file))
        require(len(stored.sha256) == 64, "a SHA-256", repr(stored.sha256))
        record = record_from_json({key: value for key, value in entry.items() if key not in _File.__annotations__})
    return CapturedRecord(record=record, path=path / stored.file, size=stored.bytes, sha256=stored.sha256)


def _unlisted(path: Path) -> CapturedRecord:
    # A record of a step that was never finished, by the text in its own file.
    _, metadata = _decoded(path)
    with _faults_of(path):
        record = record_from_json(parsed(metadata.get("record", "null"), "a record in the metadata"))
    return CapturedRecord(record=record, path=path, size=None, sha256="")


def _decoded(path: Path, size: int | None = None) -> tuple[Arrays, dict[str, str]]:
    # Tensors and metadata of a file, which is mapped: however large it is, it is not loaded.
    with _opened(path, size) as file:
        size = os.fstat(file.fileno()).st_size
        blob: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    with _faults_of(path):
        return decode_container(blob)


def _typed(record: Record, tensors: Mapping[str, np.ndarray], source: Path) -> Arrays:
    # 1. What the record says that its file holds.
    expected: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    if not isinstance(record, TensorRecord):
        expected["product"] = (_dtype(record.out_dtype), (record.m, record.n))
    if isinstance(record, ForeignRecord):
        for side, rows in (("a", record.m), ("b", record.n)):
            block_rows, block_columns = record.block(side)
            if name := getattr(record, f"{side}_format"):
                expected[f"{side}.codes"] = (_dtype(name), (rows, record.k))
            if name := getattr(record, f"{side}_scale"):
                expected[f"{side}.scale"] = (_dtype(name), (-(-rows // block_rows), -(-record.k // block_columns)))
    elif isinstance(record, GemmRecord):
        for side, name, granularity, rows in (
            ("a", record.a_format, record.granularity_a, record.m),
            ("b", record.b_format, record.granularity_b, record.n),
        ):
            expected[f"{side}.codes"] = (_dtype(name), (rows, record.k))
            if _dtype(name).itemsize == 1:
                kind = Granularity(granularity)
                shape = kind.scale_shape(rows, record.k)
                expected[f"{side}.scale"] = (_dtype(kind.scale_format.name), shape)
    else:
        value = tensors.get("value")
        expected["value"] = (_dtype(record.dtype), value.shape if value is not None and value.ndim == 2 else (0, 0))
    # 2. Exactly that, no more and no less: sizes are compared before anything is computed with them.
    with _faults_of(source):
        there = ", ".join(sorted(tensors)) or "none"
        require(set(tensors) == set(expected), f"the tensors {', '.join(sorted(expected))}", there)
        for name, (dtype, shape) in expected.items():
            array, stored = tensors[name], np.dtype(np.uint8) if dtype.itemsize == 1 else dtype
            is_right = array.dtype == stored and array.shape == shape
            require(is_right, f"{name} {stored.name}{list(shape)}", f"{array.dtype.name}{list(array.shape)}")
    return {name: tensors[name].view(dtype) for name, (dtype, _) in expected.items()}


def _dtype(name: str) -> np.dtype:
    return dtype_of(format_by_name(name))


def _opened(path: Path, size: int | None = None) -> BufferedReader:
    # A regular file, of `size` bytes where that is known: no link is followed, and no pipe waited for.
    with _faults_of(path):
        file = open_regular(path, follows_links=False)
        there = os.fstat(file.fileno()).st_size
        if size not in (None, there):
            file.close()
            raise Fault(f"expected {size} bytes; found {there}: cut short, or changed")
    return file


def _faults_of(source: object) -> AbstractContextManager[None]:
    # What is wrong with a file, as the error that names it.
    return faults_as(CaptureError, "read_capture", source, REMEDY, unread=REMEDY)
