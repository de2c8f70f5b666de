"""The command line, one file a command.

typer and rich are imported when the commands are built, torch and JAX when a subject needs them. The exit statuses are
`frame.STATUSES`.
"""

import signal
import sys
import threading
from typing import TYPE_CHECKING, Annotated

from f8emu import __version__
from f8emu.cli import captures, fit, recipes, verify
from f8emu.cli.frame import STATUSES
from f8emu.cli.process import outlive_readers, run_supervised

if TYPE_CHECKING:
    import typer

_COMMANDS = (verify, fit, captures, recipes)
"""The commands, in the order of the help."""
_WITH_KERNELS = (["verify"], ["fit"])
"""Commands that run other people's code, which may end the process."""


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
    return app
