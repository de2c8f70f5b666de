"""Pages, tables and pictures of results, and the log of an inspected run as one: `inspect`."""

from f8emu.report.inspection import Inspection as Inspection
from f8emu.report.inspection import inspect as inspect
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)
