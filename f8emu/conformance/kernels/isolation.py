"""A kernel in its own process: a crash, an exit or a hang is the error of one case, and the next one runs.

The child is asked through a socket, GEMM by GEMM, and lives until it fails; then a fresh one is started. It has a
session of its own, so Ctrl-C reaches the parent alone, and it ends when the parent does.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import numpy as np

from f8emu.conformance.cases.gemm import NotOffered
from f8emu.conformance.kernels import faults
from f8emu.conformance.kernels.faults import KernelFault, ProcessEnded, TimedOut
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.conformance.words import text_of
from f8emu.spec import SpecError

_START_SECONDS = 300.0
"""For imports, of which some build what they import."""
_SHOWN = 200
_HANGS = 3
_ENDS = 5
"""After so many hangs, or ends of its process, in a row the remaining cases are not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the parent must know of the subject in the child."""

    engine: str
    verbs: tuple[str, ...]
    runs_full_size: bool
    kernel: Kernel
    """Its outline: which cases it is asked is decided in the parent, where nothing hangs."""


class IsolatedKernel:
    """The parent's side."""

    about: About

    def __init__(self, name: str, arrays: str, timeout: float) -> None:
        self._name, self._arrays, self._timeout = name, arrays, timeout
        self._child: _Child | None = None
        self._hangs = self._ends = 0
        """The number of hangs in a row. A hang is an end too: the process is stopped."""
        self._running()

    def run(self, verb: str, *args: Any, **options: Any) -> np.ndarray:
        """The output of a verb in the child.

        Raises:
            NotOffered: as the kernel.
            SpecError: its process was started anew, and loading it failed.
            KernelFault: it crashed, exited, gave nothing in time, or what the child found out.
        """
        if self._hangs == _HANGS:
            raise TimedOut(f"not run: {_HANGS} GEMMs in a row gave no output within {self._timeout:g} s")
        if self._ends == _ENDS:
            raise ProcessEnded(f"not run: {_ENDS} GEMMs in a row ended or broke their process")
        try:
            kind, *found = self._running().ask(("run", verb, args, options), self._timeout)
        except BaseException as error:  # also Ctrl-C: what the child would answer later belongs to no question
            self._hangs = self._hangs + 1 if isinstance(error, TimedOut) else 0
            self._ends += 1
            self.close()
            raise
        self._hangs = 0
        if kind == "raised":
            name, text, is_spoilt = found
            fault = getattr(faults, name, None)
            if is_spoilt or fault is not None:  # a fault may have spoilt the child's memory too
                self._ends += 1
                self.close()
            else:
                self._ends = 0
            raise (fault or type(name, (KernelFault,), {}))(text)
        self._ends = 0
        if kind == "not offered":
            raise NotOffered(found[0])
        return found[0]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _running(self) -> "_Child":
        if self._child is None:
            child = _Child()
            try:
                kind, *found = child.ask(("load", self._name, self._arrays), _START_SECONDS)
            except BaseException:
                child.end()
                raise
            if kind != "done":
                child.end()
                raise SpecError(found[1] if kind == "raised" else found[0])
            self._child, self.about = child, found[0]
        return self._child


class _Child:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._printed = tempfile.TemporaryFile()
        program = f"from f8emu.conformance.kernels.isolation import serve; serve({theirs.fileno()})"
        places = [os.path.abspath(place) for place in sys.path]  # "" is the current directory
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,
        )
        theirs.close()
        # also where nobody called end(), at the latest at the interpreter's exit
        self._finalizer = weakref.finalize(self, _ended, self._process, self._connection, self._printed)

    def ask(self, request: tuple[Any, ...], seconds: float) -> tuple[Any, ...]:
        """The answer.

        Raises:
            ProcessEnded: the process is gone.
            TimedOut: no answer in time.
        """
        try:
            self._connection.send(request)
            if not self._connection.poll(seconds):
                raise TimedOut(f"no output within {seconds:g} s; its process was stopped")
            return self._connection.recv()
        except (EOFError, OSError):
            raise ProcessEnded(self._fate()) from None

    def end(self) -> None:
        """Kills the process, and those that it started."""
        self._finalizer()

    def _fate(self) -> str:
        """How the process ended, and the line that says most of it."""
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "its process closed its connection"
        if status < 0:
            fate = f"its process was ended by {signal.Signals(-status).name}"
        else:
            fate = f"its process exited with status {status}"
        self._printed.seek(0)
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        frames = [line for line in lines[current:] if line.startswith("File ")]  # faulthandler: most recent call first
        told = (frames or lines[-1:])[:1]
        return f"{fate}; {told[0][:_SHOWN]}" if told else fate


def _ended(process: subprocess.Popen[bytes], connection: Connection, printed: IO[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    connection.close()
    printed.close()


def isolated(name: str, arrays: str, timeout: float) -> IsolatedKernel:
    """The kernel of that name in its own process, started.

    Raises:
        SpecError: what loading it raised; it may crash or hang there too.
    """
    try:
        return IsolatedKernel(name, arrays, timeout)
    except KernelFault as fault:
        raise SpecError(f"f8emu verify {name}: while it was imported: {fault}") from None


def serve(descriptor: int) -> None:
    """The child's side: answers requests until the parent is gone, even while a kernel runs."""
    connection = Connection(descriptor)
    requests: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def receive() -> None:
        while True:
            try:
                requests.put(connection.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    subject: Any = None
    while True:
        action, *rest = requests.get()
        try:
            if action == "load":
                kernel, subject = _loaded(*rest)
                about = About(
                    engine=subject.engine,
                    verbs=tuple(subject.verbs),
                    runs_full_size=subject.runs_full_size,
                    kernel=kernel.outline(),
                )
                answer: tuple[Any, ...] = ("done", about)
            else:
                verb, args, options = rest
                answer = ("done", subject.verbs[verb](*args, **options))
        except NotOffered as reason:
            answer = ("not offered", str(reason))
        except Exception as error:  # of the kernel: the parent reports it
            is_spoilt = getattr(subject, "runs_full_size", False) and not _gpu_computes()
            answer = ("raised", type(error).__name__, text_of(error), is_spoilt)
        connection.send(answer)


def _gpu_computes() -> bool:
    """Whether this process can still use its GPU: after an access out of bounds it cannot. Only torch is asked."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        return int(torch.arange(4, device="cuda").sum()) == 6
    except RuntimeError:
        return False


def _loaded(name: str, arrays: str) -> tuple[Kernel, Any]:
    from f8emu.conformance.run.subject import kernel_subject, load_kernel

    kernel = load_kernel(name)
    return kernel, kernel_subject(kernel, arrays)
