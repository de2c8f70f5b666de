"""Captured training steps: the format on disk, its writer, and what compares and replays them.

    f8emu.capture.replay("capture/")                     # a step computed again: Replay
    f8emu.capture.diff("trainer/", "server/")            # two captures side by side: CaptureDiff

`f8emu.torch.capture` writes with the standard library alone; `diff` and `replay` are loaded when they are used.
"""

import typing as _typing
from importlib import import_module as _import_module

from f8emu.capture.record import CaptureError as CaptureError
from f8emu.capture.record import ForeignRecord as ForeignRecord
from f8emu.capture.record import GemmRecord as GemmRecord
from f8emu.capture.record import LeftOut as LeftOut
from f8emu.capture.record import StepHeader as StepHeader
from f8emu.capture.record import TensorRecord as TensorRecord
from f8emu.capture.session import Session as Session
from f8emu.capture.writer import StepWriter as StepWriter
from f8emu.capture.writer import Stored as Stored
from f8emu.spec.exports import public as _public

if _typing.TYPE_CHECKING:
    from f8emu.capture.diffing import CaptureDiff as CaptureDiff
    from f8emu.capture.diffing import diff as diff
    from f8emu.capture.replaying import Replay as Replay
    from f8emu.capture.replaying import replay as replay

_LATE = {"CaptureDiff": "diffing", "Replay": "replaying", "diff": "diffing", "replay": "replaying"}
"""Loaded on first use, each from its file: they need the suite."""


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"f8emu.capture.{_LATE[name]}"), name)


__all__, __dir__ = _public(__name__, *_LATE)
