"""Processes that the suite starts: one runs a function that gets the other end of a connection, and is ended with it.

A worker has a session of its own, so Ctrl-C reaches the parent alone, and ending it ends what it started.
"""

import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO

_SHOWN = 200


class Worker:
    """One process, from its start to its end."""

    def __init__(
        self,
        function: str,
        *arguments: object,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        keeps_prints: bool = False,
    ) -> None:
        """Starts `function(connection, *arguments)`, a `module:name`, in a Python with `flags`.

        With `keeps_prints` what it prints is kept for `fate`.
        """
        module, _, name = function.partition(":")
        self.connection, theirs = Pipe()
        self._printed = tempfile.TemporaryFile() if keeps_prints else None
        program = (
            f"from multiprocessing.connection import Connection; from {module} import {name}; "
            f"{name}(Connection({theirs.fileno()}), *{arguments!r})"
        )
        places = [os.path.abspath(place) for place in sys.path]  # "" is the current directory
        self.process = subprocess.Popen(
            [sys.executable, *flags, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=(theirs.fileno(),),
            env={**(os.environ if environment is None else environment), "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,
        )
        theirs.close()
        # also where nobody called end(), at the latest at the interpreter's exit
        self._finalizer = weakref.finalize(self, _end, self.process, self.connection, self._printed)

    def end(self) -> None:
        """Kills the process, and those that it started."""
        self._finalizer()

    def fate(self) -> str:
        """How the process ended, and the line that says most of it."""
        try:
            status = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "its process closed its connection"
        if status < 0:
            fate = f"its process was ended by {signal.Signals(-status).name}"
        else:
            fate = f"its process exited with status {status}"
        assert self._printed is not None, "whoever asks keeps what was printed"
        self._printed.seek(0)
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        frames = [line for line in lines[current:] if line.startswith("File ")]  # faulthandler: most recent call first
        told = (frames or lines[-1:])[:1]
        return f"{fate}; {told[0][:_SHOWN]}" if told else fate


def _end(process: subprocess.Popen[bytes], connection: Connection, printed: IO[bytes] | None) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    connection.close()
    if printed is not None:
        printed.close()
