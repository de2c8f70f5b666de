"""The format of a captured step on disk: its records as data, and the writer. The standard library alone.

`f8emu.torch.capture` writes with it; `f8emu.capture.read` reads the files.
"""

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

__all__, __dir__ = _public(__name__)
