"""The command line, one file a command.

typer and rich are imported when the commands are built, torch and JAX when a subject needs them. The exit statuses are
`frame.STATUSES`.

A command that runs a kernel does so in a child, so that a kernel that ends its process does not prevent the verdict:
`os._exit`, the exit of a C library and a crash pass by every handler of Python. The parent knows whether the child came
to its end, and says so where it did not. A closed pipe does not prevent the verdict either.
"""

import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TextIO

from f8emu import __version__
from f8emu.cli import audit, captures, export, fit, recipes, verify
from f8emu.cli.frame import BAD_USAGE, STATUSES
from f8emu.cli.paths import checked

if TYPE_CHECKING:
    import typer
    from _typeshed import ReadableBuffer

_COMMANDS = (verify, fit, captures, audit, export, recipes)
"""The commands, in the order of the help."""
_WITH_KERNELS = (["verify"], ["fit"])
"""Commands that run other people's code, which may end the process."""
_ONE_KEY = 0.3
"""Seconds within which two signals are one: the terminal sends it to both processes, and the parent hands it on."""
_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def main() -> None:
    """The entry point `f8emu`."""
    outlive_readers()
    app = build_app()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was finished is reported
    if sys.argv[1:2] in _WITH_KERNELS:
        run_supervised(app)
    app()


def build_app() -> "typer.Typer":
    """The commands."""
    import typer

    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="float8 training recipes, with the bits of a Hopper GPU on any machine.",
        epilog=STATUSES,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"f8emu {__version__}")
            raise typer.Exit

    @app.callback()
    def _options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        pass

    for command in _COMMANDS:
        command.add_to(app)
    for info in app.registered_commands:
        info.callback = checked(info.callback)
    return app


def run_supervised(command: Callable[[], None]) -> None:
    """Runs a command that ends in SystemExit, and ends as it did; in this process where there is no `os.fork`."""
    if not hasattr(os, "fork") or threading.current_thread() is not threading.main_thread():
        command()
    sys.stdout.flush()
    # 1. The child runs the command, and tells its status through the pipe only where it came to its end.
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reading)
        _end_with(parent)
        try:
            command()
        except SystemExit as end:
            os.write(writing, bytes([end.code if isinstance(end.code, int) else BAD_USAGE]))
            raise
    # 2. The parent hands signals on, and waits.
    os.close(writing)
    os.set_blocking(reading, False)  # a child of the child may hold the other end
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        told = os.read(reading, 1)
    except BlockingIOError:
        told = b""
    # 3. Without a status on the pipe something ended the process.
    if told:
        sys.exit(told[0])
    fate = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    print(
        f"NOT VERIFIED: the process {fate} before the verdict: a kernel, what it imports, or lack of memory ended it. "
        "With --isolate the case is named"
    )
    sys.exit(BAD_USAGE)


def _end_with(parent: int) -> None:
    # The child's side: signals are Ctrl-C, two at once are one, and on Linux nothing outlives the parent.
    from f8emu.conformance.kernels.faults import INTERRUPTS  # loads NumPy

    INTERRUPTS.are_noted = True
    last = -_ONE_KEY

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        is_one, last = time.monotonic() - last < _ONE_KEY, time.monotonic()
        if not is_one:
            INTERRUPTS.has_come = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(BAD_USAGE)


class _Pipe(io.FileIO):
    # A pipe that its reader may close, as `| head` does: what is left is dropped, and the status is kept.

    def write(self, data: "ReadableBuffer", /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Prints of this process, and of those that it forks, no longer raise BrokenPipeError."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # a test's, or none
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
