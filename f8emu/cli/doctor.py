"""`f8emu doctor`: what this machine does on the known traps."""

from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import guarded

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command()
    def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
        """Show how this machine's torch, JAX and GPU behave on the known traps, and which engine would run."""
        raise typer.Exit(guarded(_doctor, as_json))


def _doctor(as_json: bool) -> int:
    from f8emu.doctor import run

    return run(as_json=as_json)
