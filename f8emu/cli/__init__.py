"""The command line, one file a command.

typer and rich are imported when the commands are built, torch and JAX when a subject needs them. The exit statuses are
`frame.STATUSES`.

A closed pipe does not prevent the verdict.
"""

import io
import signal
import sys
import threading
from typing import TYPE_CHECKING, Annotated, TextIO

from f8emu import __version__
from f8emu.cli import audit, captures, checksums, export, fit, recipes, rollout, run, vectors, verify
from f8emu.cli.frame import STATUSES
from f8emu.cli.paths import checked

if TYPE_CHECKING:
    import typer
    from _typeshed import ReadableBuffer

_COMMANDS = (verify, fit, captures, audit, export, checksums, rollout, run, recipes, vectors)
"""The commands, in the order of the help."""


def main() -> None:
    """The entry point `f8emu`."""
    outlive_readers()
    app = build_app()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was finished is reported
    app()


def build_app() -> "typer.Typer":
    """The commands."""
    import typer

    app = typer.Typer(
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


class _Pipe(io.FileIO):
    # A pipe that its reader may close, as `| head` does: what is left is dropped, and the status is kept.

    def write(self, data: "ReadableBuffer", /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Prints of this process no longer raise BrokenPipeError."""
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
