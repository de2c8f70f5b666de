"""Processes that the suite starts: each answers requests over a connection, and ends with its parent.

A worker has a session of its own, so Ctrl-C reaches the parent alone, and ending it ends what it started.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

_SHOWN = 200


class Worker:
    """One process, from its start to its end: what is sent to its `connection` it answers there, in order."""

    def __init__(
        self,
        answers: str,
        *arguments: object,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        keeps_prints: bool = False,
    ) -> None:
        """Starts a Python with `flags`, in which `answers(*arguments)`, a `module:name`, gives the answering function.

        It has this process's `sys.path`. With `keeps_prints` what it prints is kept for `fate`.
        """
        module, _, name = answers.partition(":")
        self.connection, theirs = Pipe()
        self._printed = tempfile.TemporaryFile() if keeps_prints else None
        places = [os.path.abspath(place) for place in sys.path]  # "" is the current directory
        program = (
            f"import sys; sys.path[:] = {places!r}; from multiprocessing.connection import Connection; "
            f"from {__name__} import serve; from {module} import {name}; "
            f"serve(Connection({theirs.fileno()}), {name}, {arguments!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, *flags, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=(theirs.fileno(),),
            env=environment,
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
        ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        assert self._printed is not None, "whoever asks keeps what was printed"
        self._printed.seek(0)
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        frames = [line for line in lines[current:] if line.startswith("File ")]  # faulthandler: most recent call first
        return "; ".join([f"its process {ended}", *(line[:_SHOWN] for line in (frames or lines[-1:])[:1])])


def _end(process: subprocess.Popen[bytes], connection: Connection, printed: IO[bytes] | None) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    connection.close()
    if printed is not None:
        printed.close()


def serve(connection: Connection, answers: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    """The worker's side: answers requests until the parent is gone, even while it works on one.

    A process that the answering function forks ends where the function returns.
    """
    requests: queue.Queue[tuple[Any, ...]] = queue.Queue()
    process = os.getpid()

    def receive() -> None:
        while True:
            try:
                requests.put(connection.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    answer = answers(*arguments)
    while os.getpid() == process:
        result = answer(*requests.get())
        try:
            if os.getpid() == process:
                connection.send(result)
        except OSError:
            break
    os._exit(0)
