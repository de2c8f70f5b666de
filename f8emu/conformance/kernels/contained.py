"""Code of others run in this process: what would end the process or split it in two is a fault of theirs.

What Python cannot see, `os._exit` and crashes, needs a process of its own: `isolation`, and the command line's.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from f8emu.conformance.kernels.faults import Forked, ProcessEnded

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


def contained(what: str, function: Callable[..., _T]) -> Callable[..., _T]:
    """The function, called so that it returns, raises an `Exception`, or is interrupted; nothing else.

    Raises:
        ProcessEnded: it raised SystemExit, or another exception that would pass by every handler.
        Forked: it forked. Its child ends at once.
    """

    def call(*args: object, **keywords: object) -> _T:
        thread = threading.get_ident()
        is_outermost = thread not in _CALLS.running
        streams = sys.stdout, sys.stderr
        _CALLS.running.add(thread)
        try:
            with np.errstate():  # what it sets is its own
                found = function(*args, **keywords)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise ProcessEnded(
                f"{what} raised {type(error).__name__}({error}), which ends a process; it must return, or raise an "
                "Exception"
            ) from None
        finally:
            sys.stdout, sys.stderr = streams  # or the verdict is printed nowhere
            if is_outermost:
                _CALLS.running.discard(thread)
        if thread in _CALLS.forked:
            _CALLS.forked.discard(thread)
            raise Forked(f"{what} forked this process; start a program of its own instead")
        return found

    return call
