"""`f8emu run`: a program of anybody's, whose torch GEMMs have the bits of a chip."""

import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import CHIP, chip_names, ending, guarded
from f8emu.spec import SpecError
from f8emu.spec.chips import chip_by_name
from f8emu.startup import environment

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(
        epilog=ending(
            "f8emu run -- python train.py",
            "f8emu run --chip H200 --bf16 -- python -m pytest",
            statuses="that of the program; 2 also for bad usage, or where there is no such program",
        ),
        context_settings={"allow_interspersed_args": False},
    )
    def run(
        program: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
        chip: Annotated[str, typer.Option(metavar="NAME", help=CHIP, autocompletion=chip_names)] = "H100",
        bf16: Annotated[bool, typer.Option("--bf16", help="Also mm, addmm and bmm in bfloat16.")] = False,
    ) -> None:
        """Run a program whose torch GEMMs in float8 have the bits of a chip.

        python is the one on PATH, or else the one that runs f8emu. Its child processes have the bits too, except a
        Python that ignores PYTHONPATH, as python -I does. On a machine whose GPU is the chip, nothing changes.
        """
        raise typer.Exit(guarded(execute, program, chip, bf16))


def execute(program: list[str], chip: str, bf16: bool) -> int:
    """Become the program; it returns where that fails alone."""
    chip_by_name("run", chip)
    path = shutil.which(program[0])
    if path is None and program[0] in ("python", "python3"):
        path = sys.executable
    if path is None:
        raise SpecError(f"run: {program[0]} is no program here; for a script: f8emu run -- python {program[0]}")
    return os.execve(path, program, environment(chip, bf16))
