"""The settings of an inspection, and its logs: JSON lines, which survive a crash, and TensorBoard."""

import contextlib
import importlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, cast, get_args

from f8emu.shown import Shown
from f8emu.spec.errors import SpecError, required_by
from f8emu.spec.names import GemmName, RecipeName, TensorName
from f8emu.spec.recipe import GEMM_NAMES, recipe_by_name

_log = logging.getLogger("f8emu")
Record = Mapping[str, Any]
_PLACE = ("step", "rank", "layer", "gemm", "operand", "tensor", "pass", "recipe")
"""The keys of a record that say what it is of."""
Inspected = Literal[TensorName, "product"]
TENSORS: tuple[Inspected, ...] = get_args(Inspected)
_Value = Literal["amax", "nan", "inf", "zero", "mean", "std", "l1_norm", "l2_norm", "dynamic_range"]
VALUE_STATISTICS: tuple[_Value, ...] = get_args(_Value)
"""Statistics of the values before the cast, or of a product. dynamic_range: log2 of the largest over the smallest
magnitude that is not zero."""
_Cast = Literal["underflow", "saturation", "sqnr", "mse", "dynamic_range_block"]
CAST_STATISTICS: tuple[_Cast, ...] = get_args(_Cast)
"""Statistics of a cast. underflow: the share of values that are not zero and become zero. saturation: the share that
rounds beyond the format's largest. sqnr: in decibels. dynamic_range_block: the largest within 1x128 values."""
_Operand = Literal["scale_min", "scale_max", "nan_codes", "zero_codes", "saturated_codes"]
OPERAND_STATISTICS: tuple[_Operand, ...] = get_args(_Operand)
"""Statistics of the operand as the GEMM got it. A saturated code is the code of the format's largest value."""
GEMM_STATISTICS = ("error",)
"""The error of a GEMM in its three parts (`statistics.gemm_error`)."""
Statistic = Literal[_Value, _Cast, _Operand, "error"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
DEFAULT_STATISTICS: tuple[Statistic, ...] = (
    "amax",
    "nan",
    "inf",
    "underflow",
    "saturation",
    "sqnr",
    "scale_min",
    "scale_max",
)
_NAMES = {"statistics": STATISTICS, "gemms": GEMM_NAMES, "tensors": TENSORS}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class InspectConfig(Shown):
    """The settings of an inspection: layers, steps and statistics, and the files to write.

    Raises:
        SpecError: an unknown name, a pattern that does not compile, or a number out of range.
    """

    layers: str = ".*"
    """A regular expression that is searched in the names of layers: "1" matches "10" too, "^1$" does not. Names are
    those before the model was compiled or wrapped."""
    start: int = 1
    """The first step to inspect; the first step of a run is 1."""
    end: int | None = None
    """The step at which the inspection ends; None: never."""
    every: int = 1
    """Inspect steps `start`, `start + every`, ..."""
    statistics: tuple[Statistic, ...] = DEFAULT_STATISTICS
    """The statistics to take: names in STATISTICS."""
    gemms: tuple[GemmName, ...] = GEMM_NAMES
    tensors: tuple[Inspected, ...] = TENSORS
    """The tensors whose statistics are taken: the operands' tensors, and product."""
    what_if: tuple[RecipeName, ...] = ()
    """Recipes under which the casts are also tried, with dynamic scales."""
    sample: int = 16
    """How many rows and columns of a GEMM are sampled for its error."""
    saturation_event: float = 0.01
    """The share of values that may round beyond the format's largest. A larger share is an event, as NaN and infinity
    are. Under delayed scaling a few do whenever a tensor grows. This needs saturation in `statistics`. A weight that
    exists only as float8 codes (FSDP2's float8 all-gather) is checked for NaN only."""
    path: str | None = None
    """The JSONL file to write; ranks other than 0 append `.rank<number>`."""
    tensorboard: str | None = None
    """The TensorBoard folder to write."""

    def __post_init__(self) -> None:
        # 1. Names.
        for key, known in _NAMES.items():
            names: object = getattr(self, key)
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise SpecError(f"InspectConfig: {key} must be a list of names; got {names!r}")
            if unknown := [name for name in names if name not in known]:
                raise SpecError(
                    f"InspectConfig: {key} must be of {', '.join(known)}; got {', '.join(map(repr, unknown))}"
                )
            object.__setattr__(self, key, tuple(dict.fromkeys(names)))  # the dataclass is frozen once it is made
        object.__setattr__(self, "what_if", tuple(recipe_by_name(name).name for name in self.what_if))
        # 2. The pattern and the numbers.
        try:
            re.compile(self.layers)
        except (re.error, TypeError) as error:
            raise SpecError(
                f"InspectConfig: layers must be a regular expression; got {self.layers!r}: {error}; escape dots as \\."
            ) from None
        for name, least in (("start", 0), ("every", 1), ("sample", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SpecError(f"InspectConfig: {name} must be an integer of at least {least}; got {value!r}")
        if self.end is not None and (not isinstance(cast("object", self.end), int) or self.end < self.start):
            raise SpecError(f"InspectConfig: end must be an integer not before start={self.start}; got {self.end!r}")

    def is_step(self, step: int) -> bool:
        is_before_end = self.end is None or step < self.end
        return step >= self.start and is_before_end and (step - self.start) % self.every == 0


class InspectOptions(TypedDict, total=False):
    """The keys of an `InspectConfig`, as a dict has them."""

    layers: str
    start: int
    end: int | None
    every: int
    statistics: Sequence[Statistic]
    gemms: Sequence[GemmName]
    tensors: Sequence[Inspected]
    what_if: Sequence[RecipeName]
    sample: int
    saturation_event: float
    path: str | None
    tensorboard: str | None


def config_of(config: InspectConfig | InspectOptions | None) -> InspectConfig:
    """A configuration, or the keys of one."""
    if config is None or isinstance(config, InspectConfig):
        return config or InspectConfig()
    known = [field.name for field in fields(InspectConfig)]
    if unknown := [key for key in config if key not in known]:
        raise SpecError(f"inspect: unknown keys: {unknown}; known keys are {', '.join(known)}")
    options: Any = config  # a sequence becomes a tuple there
    return InspectConfig(**options)


class JsonLog:
    """A file of one JSON object a line. The lines of a step are written at once, and are on the disk when it returns.

    A file of an earlier run goes on; a line that a crash cut off is ended. NaN and infinities are strings. If the disk
    is full, one warning says so and training goes on without a file.
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
        if self._file is None:
            return
        plain = [{key: _plain(value) for key, value in record.items()} for record in records]
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in plain)
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
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """A scalar for every statistic: `layer/gemm/operand/statistic`."""

    def __init__(self, folder: str) -> None:
        with required_by("inspect: tensorboard=..."):
            tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(folder)

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            if "layer" not in record or "event" in record:
                continue
            place = "/".join(str(record[key]) for key in ("layer", "gemm", "operand", "recipe") if key in record)
            for key, value in record.items():
                if key not in _PLACE and isinstance(value, int | float):
                    self._writer.add_scalar(f"{place}/{key}", value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _plain(value: Any) -> Any:
    # A value as JSON has it; whole numbers as integers, so that counts look like counts.
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
