"""Captures read back, checked strictly: nothing in one is trusted, and nothing in one is run.

A path is a step of a rank (`step-00000040-rank-00000`) or a directory of such. Arrays are read one record at a time
and mapped, not loaded; sizes are compared with the file and with the record before anything is made of them. Links,
pipes and devices are refused.
"""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Mapping
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
    require_types,
)
from f8emu.conformance.cases.container import decode_container
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.environment import CHECK_PATH, open_regular
from f8emu.spec import FLOAT32, GoldenFileError, Granularity, SpecError, format_by_name

REMEDY = "copy the capture again, or make another with f8emu.torch.capture"
_LARGEST_INDEX = 256 * 2**20
_BEGUN = re.compile(STEP_NAME.pattern + re.escape(UNFINISHED))
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRecord:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
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


def read_capture(path: str | Path) -> tuple[CapturedStep, ...]:
    """The steps of a capture, by step and rank. The arrays stay on the disk."""
    path = Path(path)
    try:
        # 1. The path of one step, or a directory of steps.
        if (path / INDEX).exists():
            return (_step(path, is_alone=True),)
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CaptureError(f"read_capture: cannot read {path}: {error.strerror}; {CHECK_PATH}") from None
    # 2. A finished step has an index: one without it has been tampered with, or copied in part.
    has_index = {name: (path / name / INDEX).exists() for name in names}
    for name in names:
        if STEP_NAME.fullmatch(name) and not has_index[name]:
            raise _fault(path / name, f"the {INDEX} of a step that was finished", "none")
    steps = [_step(path / name) for name in names if name.startswith("step-") and has_index[name]]
    if not steps:
        raise CaptureError(
            f"read_capture: expected a captured step, or a directory of such, at {path}; found no step-*/{INDEX} in "
            f"it; give the path that was given to f8emu.torch.capture, or {REMEDY}"
        )
    # 3. A step that died before its first index is told as left out.
    begun = [name for name in names if _BEGUN.fullmatch(name) and not has_index[name]]
    told = tuple(LeftOut(place=name, size=0, reason="it was begun, and has no index") for name in begun)
    steps[0] = replace(steps[0], left_out=(*steps[0].left_out, *told))
    return tuple(sorted(steps, key=lambda step: (step.header.step, step.header.rank)))


def _step(path: Path, *, is_alone: bool = False) -> CapturedStep:
    # 1. The index: header, list of records, what was left out.
    source = path / INDEX
    index = _index(source)
    try:
        header = StepHeader.from_json(index)
        require_types(index, {"records": list, "left_out": list, "is_complete": bool})
        left_out = tuple(LeftOut(**one) for one in index["left_out"])
    except (SpecError, TypeError) as error:
        raise CaptureError(f"read_capture: {source}: {error}; {REMEDY}") from None
    is_complete = index["is_complete"] and not path.name.endswith(UNFINISHED)
    damaged: list[str] = []
    # 2. A finished step has what its index lists; of any other, each file that holds a whole record counts.
    if is_complete:
        records = [_entry(path, entry, f"{source}: record {i}") for i, entry in enumerate(index["records"])]
    else:
        records = []
        for name in sorted(filter(FILE_NAME.fullmatch, os.listdir(path))):
            try:
                records.append(_unlisted(path / name))
            except CaptureError as error:
                damaged.append(str(error))
    # 3. In the order in which they happened, which must tell them apart.
    records.sort(key=lambda one: one.record.order)
    if len({one.record.order for one in records}) != len(records):
        raise CaptureError(f"read_capture: {source}: expected an 'order' of its own in every record; {REMEDY}")
    return CapturedStep(
        path=path,
        header=header,
        records=tuple(records),
        left_out=left_out,
        is_complete=is_complete,
        damaged=tuple(damaged),
        is_alone=is_alone,
    )


def _index(source: Path) -> dict[str, Any]:
    with _opened(source) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST_INDEX:
            raise _fault(source, f"an index of at most {_LARGEST_INDEX} bytes", f"{size} bytes")
        text = file.read()
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _fault(source, "a JSON index", f"{error}") from None
    if not isinstance(index, dict):
        raise _fault(source, "a JSON object", type(index).__name__)
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


def _entry(path: Path, entry: object, source: str) -> CapturedRecord:
    try:
        rest = dict(entry) if isinstance(entry, dict) else {}
        require_types(rest, {"file": str, "bytes": int, "sha256": str})
        name, size, digest = rest.pop("file"), rest.pop("bytes"), rest.pop("sha256")
        # The name may not lead out of the directory, and the size is compared before the file is mapped.
        if not FILE_NAME.fullmatch(name) or len(digest) != 64:
            raise SpecError(
                f"expected a name like 000000.safetensors, and a SHA-256; found {name!r:.60}, {digest!r:.70}"
            )
        record = record_from_json(rest)
    except SpecError as error:
        raise CaptureError(f"read_capture: {source}: {error}; {REMEDY}") from None
    return CapturedRecord(record=record, path=path / name, size=size, sha256=digest)


def _unlisted(path: Path) -> CapturedRecord:
    # A record of a step that was never finished, by the text in its own file.
    _, metadata = _decoded(path)
    try:
        record = record_from_json(json.loads(metadata.get("record", "null")))
    except (ValueError, RecursionError) as error:
        raise _fault(path, "a record in the metadata", str(error)) from None
    return CapturedRecord(record=record, path=path, size=None, sha256="")


def _decoded(path: Path, size: int | None = None) -> tuple[Arrays, dict[str, str]]:
    # Tensors and metadata of a file, which is mapped: however large it is, it is not loaded.
    with _opened(path, size) as file:
        size = os.fstat(file.fileno()).st_size
        blob: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    try:
        return decode_container(blob, str(path), call="read_capture", remedy=REMEDY)
    except GoldenFileError as error:
        raise CaptureError(str(error)) from None


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
                shape = Granularity(granularity).scale_shape(rows, record.k)
                expected[f"{side}.scale"] = (dtype_of(FLOAT32), shape)
    else:
        value = tensors.get("value")
        expected["value"] = (_dtype(record.dtype), value.shape if value is not None and value.ndim == 2 else (0, 0))
    # 2. Exactly that, no more and no less: sizes are compared before anything is computed with them.
    if set(tensors) != set(expected):
        raise _fault(source, f"the tensors {', '.join(sorted(expected))}", ", ".join(sorted(tensors)) or "none")
    for name, (dtype, shape) in expected.items():
        array, stored = tensors[name], np.dtype(np.uint8) if dtype.itemsize == 1 else dtype
        if array.dtype != stored or array.shape != shape:
            raise _fault(source, f"{name} {stored.name}{list(shape)}", f"{array.dtype.name}{list(array.shape)}")
    return {name: tensors[name].view(dtype) for name, (dtype, _) in expected.items()}


def _dtype(name: str) -> np.dtype:
    return dtype_of(format_by_name(name))


def _opened(path: Path, size: int | None = None) -> BufferedReader:
    # A regular file, of `size` bytes where that is known: no link is followed, and no pipe waited for.
    try:
        file = open_regular(path, follows_links=False)
    except OSError as error:
        raise CaptureError(f"read_capture: cannot read {path}: {error.strerror}; {REMEDY}") from None
    found = os.fstat(file.fileno()).st_size
    if size not in (None, found):
        file.close()
        raise _fault(path, f"{size} bytes", f"{found}: cut short, or changed")
    return file


def _fault(source: Path, expected: str, observed: str) -> CaptureError:
    return CaptureError(f"read_capture: {source}: expected {expected}; found {observed}; {REMEDY}")
