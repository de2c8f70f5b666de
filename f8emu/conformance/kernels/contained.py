"""Code of others run in this process: what would end the process or split it in two is a fault of theirs.

What Python cannot see, `os._exit` and crashes, needs a process of its own: `isolation`, and the command line's. A fork
by `os.fork` is a fault. One by the C library is not seen in the parent; its child ends where the call returns.
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from f8emu.conformance.kernels.faults import Forked, ProcessEnded
from f8emu.conformance.words import text_of

_T = TypeVar("_T")


class _Calls:
    """Which threads run code of others, and which of them have forked meanwhile.

    Programs that are started, as a compiler is, are no forks to Python.
    """

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.forked: set[int] = set()
        os.register_at_fork(after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _in_parent(self) -> None:
        if threading.get_ident() in self.running:
            self.forked.add(threading.get_ident())

    def _in_child(self) -> None:
        """The child would go on with the suite, or wait for ever for threads that it does not have."""
        if threading.get_ident() in self.running:
            os._exit(0)


_CALLS = _Calls()


@dataclass(slots=True, kw_only=True)
class _Interrupts:
    """Where a handler of signals notes them, a KeyboardInterrupt without a signal is raised by the kernel itself."""

    are_noted: bool = False
    has_come: bool = False


INTERRUPTS = _Interrupts()


def contained(
    what: str, function: Callable[..., _T], remedy: str = "return an output, or raise an Exception"
) -> Callable[..., _T]:
    """The function, called so that it returns, raises an `Exception`, or is interrupted; nothing else.

    Raises:
        ProcessEnded: it raised SystemExit, or another exception that would pass by every handler; KeyboardInterrupt
            is one where `INTERRUPTS` are noted and none has come.
        Forked: it forked. Its child ends at once.
    """

    def call(*args: object, **keywords: object) -> _T:
        thread, process = threading.get_ident(), os.getpid()
        is_outermost = thread not in _CALLS.running
        streams = sys.stdout, sys.stderr
        _CALLS.running.add(thread)
        try:
            with np.errstate():  # what it sets is its own
                found = function(*args, **keywords)
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (INTERRUPTS.has_come or not INTERRUPTS.are_noted):
                raise
            raise ProcessEnded(
                f"{what} raised {type(error).__name__}({text_of(error)}), which ends a process; {remedy}"
            ) from None
        finally:
            if os.getpid() != process:  # forked by the C library: the child would go on with the suite
                os._exit(0)
            sys.stdout, sys.stderr = streams  # or the verdict is printed nowhere
            if is_outermost:
                _CALLS.running.discard(thread)
        if thread in _CALLS.forked:
            _CALLS.forked.discard(thread)
            raise Forked(f"{what} forked this process; start a separate program instead")
        return found

    return call
