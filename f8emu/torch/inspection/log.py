"""Where records go: JSON lines, which survive a crash, and TensorBoard."""

import contextlib
import importlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

from f8emu.spec.errors import SpecError, UnsupportedError

_log = logging.getLogger("f8emu")
Record = Mapping[str, Any]
_PLACE = ("step", "rank", "layer", "gemm", "operand", "tensor", "pass", "recipe")
"""The keys of a record that say what it is of."""


class JsonLog:
    """A file of one JSON object a line. The lines of a step are written at once, and are on the disk when it returns.

    A file of an earlier run goes on; a line that a crash cut off is ended. NaN and infinities are strings. If the disk
    is full, one warning says so and training goes on without a file.

    Raises:
        SpecError: a file that cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file: Any = open(path, "ab+")
        except OSError as error:
            raise SpecError(f"inspect: cannot write {path}: {error}; give a path in a directory that exists") from None
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, records: Iterable[Record]) -> None:
        """Append the records."""
        if self._file is None:
            return
        text = "".join(json.dumps(_plain(r), allow_nan=False) + "\n" for r in records)
        try:
            self._file.write(text.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "what follows is not recorded; free some space"
            _log.warning("inspect: cannot write %s: %s; %s", self.path, error, remedy)
            with contextlib.suppress(OSError):  # what it could not flush is lost, as was said
                self.close()
            self._file = None

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """A scalar for every statistic: `layer/gemm/operand/statistic`.

    Raises:
        UnsupportedError: tensorboard is not installed.
    """

    def __init__(self, folder: str) -> None:
        try:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise UnsupportedError(
                "inspect: tensorboard=... needs the package 'tensorboard', which is not installed; install it with: "
                "pip install tensorboard"
            ) from None
        self._writer = tensorboard.SummaryWriter(folder)

    def write(self, records: Iterable[Record]) -> None:
        """Add the scalars."""
        for record in records:
            if "layer" not in record or "event" in record:
                continue
            place = "/".join(str(record[key]) for key in ("layer", "gemm", "operand", "recipe") if key in record)
            for key, value in record.items():
                if key not in _PLACE and isinstance(value, int | float):
                    self._writer.add_scalar(f"{place}/{key}", value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()


def _plain(value: Any) -> Any:
    # A value as JSON has it; whole numbers as integers, so that counts look like counts.
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Record", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
