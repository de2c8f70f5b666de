"""The steps of a capture, whatever framework shows them: which are wanted, which are held in a ring, what is written.

Nothing here raises once it has begun: what cannot be kept is listed, and a warning says it once a step.
"""

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from f8emu.capture.record import CaptureError, LeftOut, Record, StepHeader
from f8emu.capture.writer import LONGEST_REASON, StepWriter, Stored, make_directory
from f8emu.spec.errors import SpecError

Arrays = Mapping[str, Stored]


class Session:
    """The capture of one rank.

    Raises:
        SpecError: both `steps` and `ring`, or numbers out of range.
        CaptureError: `path` cannot be created, or this rank has captured into it before.
    """

    def __init__(
        self,
        call: str,
        path: str | Path,
        header: Callable[[int, str], StepHeader],
        *,
        rank: int,
        steps: Iterable[int] | None,
        ring: int | None,
        first_step: int,
    ) -> None:
        numbers = {first_step} if steps is None else set(steps)
        if ring is not None and (steps is not None or ring < 1):
            raise SpecError(f"{call}: give steps, or a ring of at least 1 step; got steps={steps!r} and ring={ring!r}")
        if not numbers or min(numbers) < first_step:
            raise SpecError(f"{call}: steps must be some, from {first_step} (first_step) on; got {sorted(numbers)}")
        self.path = Path(path)
        try:
            make_directory(self.path)
        except OSError as error:
            why = f"{error.strerror}; give another path"
            raise CaptureError(f"{call}: cannot make the directory {self.path}: {why}") from None
        if any(self.path.glob(f"step-*-rank-{rank:05d}*")):
            raise CaptureError(f"{call}: {self.path} has captured steps of rank {rank} already; give another path")
        self.number = first_step
        """The number of the step in progress."""
        self.written: list[Path] = []
        self.left_out: list[LeftOut] = []
        self.reason = ""
        """Why a ring is written; empty while it is not."""
        self.is_over = False
        self.lock = threading.RLock()  # backward passes have threads of their own
        self._call, self._header = call, header
        self._steps = None if ring is not None else numbers
        self._held: deque[_Held] = deque(maxlen=ring)
        self._current: StepWriter | _Held | None = None
        self._turns: dict[tuple[str, str], int] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether the records of the step in progress are kept."""
        return not self.is_over and (self._steps is None or self.number in self._steps)

    @property
    def is_ring(self) -> bool:
        """Whether steps are held in memory until they are requested."""
        return self._steps is None

    @property
    def looks(self) -> bool:
        """Whether a value that is not finite makes a difference."""
        return self.is_ring and not self.reason and not self.is_over

    def next(self, layer: str, name: str) -> dict[str, int]:
        """`order` and `turn` of the next record."""
        # The number of records so far: records that are left out count too, so that two captures can be matched.
        order = sum(self._turns.values())
        turn = self._turns[layer, name] = self._turns.get((layer, name), 0) + 1
        return {"order": order, "turn": turn}

    def add(self, record: Record, size: int, arrays: Callable[[], Arrays]) -> None:
        """Keep a record; `arrays` copies it to the host, or raises MemoryError."""
        if self._current is None:
            self._current = _Held(self.number) if self.looks else self._writer(self.number)
        current = self._current
        # 1. Whether it may be kept, before anything is copied from the device.
        refusal = current.fault if isinstance(current, StepWriter) else ""
        # 2. The copy; a device or host without memory costs this record, not the training.
        try:
            if not refusal:
                current.add(record, arrays())
        except MemoryError as error:
            refusal = f"no memory for a copy: {error!s:.80}"
        if refusal:
            current.left_out.append(LeftOut(place=record.place, size=size, reason=refusal))

    def end(self) -> None:
        """End the current step."""
        # A ring goes on until it is written; listed steps end with the last of them.
        current, self._current = self._current, None
        self._turns = {}
        self.number += 1
        if self.reason or (self._steps is not None and self.number > max(self._steps)):
            self._stop()
        if isinstance(current, StepWriter):
            self._finish(current)
        elif current is not None:
            self._held.append(current)

    def write(self, reason: str) -> None:
        """Write the steps that the ring holds, and the step in progress once it ends. Without a ring, do nothing."""
        if not self.looks:
            return
        self.reason = reason[:LONGEST_REASON]
        # The steps that the ring holds are finished; the one in progress goes on as a file.
        current, self._current = self._current, None
        while self._held:
            self._finish(self._moved(self._held.popleft()))
        if isinstance(current, _Held):
            self._current = self._moved(current)

    def close(self) -> None:
        """End the capture. A step in progress is written as far as it got."""
        if not self.is_over:
            self.end()
            self._stop()

    def abandon(self, error: BaseException) -> None:
        """End the capture in the middle of a step. The steps of a ring are written; this step stays unfinished."""
        if self.is_over:
            return
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        self.write(reason)
        current, self._current = self._current, None
        self._stop()
        if isinstance(current, StepWriter):
            current.close(interrupted_by=reason)
            self.left_out += current.left_out

    def _stop(self) -> None:
        self.is_over = True
        self._held.clear()

    def _writer(self, number: int) -> StepWriter:
        return StepWriter(self.path, self._header(number, self.reason))

    def _moved(self, held: "_Held") -> StepWriter:
        writer = self._writer(held.number)
        for record, arrays in held.records:
            writer.add(record, arrays)
        writer.left_out += held.left_out
        return writer

    def _finish(self, writer: StepWriter) -> None:
        final = writer.close()
        self.left_out += writer.left_out
        if final is not None:
            self.written.append(final)
        if final is not None and not writer.left_out:
            return
        end = "is not finished" if final is None else f"lacks {len(writer.left_out)} records"
        reason = writer.fault or writer.left_out[0].reason
        text = (
            f"{self._call}: {writer.name} {end}: {reason}; training goes on. Free some space, or capture fewer layers "
            "or steps, or without tensors"
        )
        try:
            warnings.warn(text, stacklevel=3)
        except Exception:  # where warnings are errors: nothing here ends training
            print(text, file=sys.stderr)


class _Held:
    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[tuple[Record, Arrays]] = []
        self.left_out: list[LeftOut] = []

    def add(self, record: Record, arrays: Arrays) -> None:
        self.records.append((record, arrays))
