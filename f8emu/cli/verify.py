"""`f8emu verify`: prove that the bits agree."""

import os
import time
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.conclusion import Files, conclude, opened_files
from f8emu.cli.frame import STATUSES, console, find_modules_here, guarded
from f8emu.spec import MissingExtraError

if TYPE_CHECKING:
    import typer

    from f8emu.conformance.subject import Subject


TIMEOUT = 120.0
"""Seconds for one GEMM of an isolated kernel: some compile it first."""
ISOLATE = "Run kernels in a process of their own: a crash or a hang fails one case."
JOBS = "Processes. By default one for each core where a subject is on a GPU, 2 for a whole run on a CPU, otherwise 1."
SECONDS = f"For one GEMM, compilation included; isolates. {TIMEOUT:g} if not given."


class Arrays(Enum):
    """Whose arrays an own kernel takes."""

    TORCH = "torch"
    NUMPY = "numpy"
    JAX = "jax"


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def verify(
        subjects: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[SUBJECT]...",
                help="f8ref.numpy, f8ref.jax, torch, f8emu.jax; a known kernel, as fbgemm.rowwise (--kernels lists "
                "them); or package.module:attribute, a Kernel or a function that is called as torch._scaled_mm is. By "
                "default those of the four whose packages are installed.",
            ),
        ] = None,
        golden: Annotated[Path | None, typer.Option(help="Recorded GEMMs; the shipped file by default.")] = None,
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report.")] = None,
        html_file: Annotated[
            Path | None,
            typer.Option("--html", metavar="OUT", help="Write the report as one page with figures."),
        ] = None,
        stage: Annotated[
            list[str] | None, typer.Option(help="Run this stage only; may be repeated. All by default.")
        ] = None,
        errors: Annotated[int, typer.Option(min=0, help="Mismatches to print for each subject.")] = 20,
        arrays: Annotated[Arrays, typer.Option(help="Arrays that an own kernel takes.")] = Arrays.TORCH,
        recordings: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Replay recordings of single instructions, in place of the suite."),
        ] = None,
        chip: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=PROFILE", help="Which profile a chip of --recordings has; may be repeated."),
        ] = None,
        isolate: Annotated[
            bool,
            typer.Option("--isolate", help=ISOLATE),
        ] = False,
        timeout: Annotated[
            float | None,
            typer.Option(metavar="SECONDS", help=SECONDS),
        ] = None,
        kernels: Annotated[
            bool, typer.Option("--kernels", help="List the known kernels, with what each should give, and exit.")
        ] = False,
        jobs: Annotated[
            int | None,
            typer.Option(min=1, help=JOBS),
        ] = None,
        diagnose: Annotated[bool, typer.Option(help="Find out what a subject whose GEMMs differ does instead.")] = True,
    ) -> None:
        """Prove that the bits agree: formats, scales, recorded GEMMs, generated GEMMs, layers under recipes.

        Ctrl-C ends the run; the stages that were finished are reported.
        """
        if kernels:
            raise typer.Exit(guarded(_list_kernels))
        files = Files(json_file, html_file)
        if recordings is not None or chip:
            from f8emu.cli.recordings import verify_recordings

            if recordings is None or golden is not None or stage or isolate or timeout is not None:
                raise typer.BadParameter(
                    "--chip goes with --recordings, and neither with --golden, --stage, --isolate or --timeout"
                )
            raise typer.Exit(guarded(verify_recordings, subjects or [], recordings, chip or [], files, errors))
        seconds = TIMEOUT if isolate and timeout is None else timeout
        options = subjects or [], golden, files, stage or [], errors, arrays.value, seconds, diagnose, jobs
        raise typer.Exit(guarded(_verify, *options))


def _list_kernels() -> int:
    from rich.table import Table
    from rich.text import Text

    from f8emu.conformance.kernels.known import KERNELS

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("kernel", "predicted", "seen", "how to get it"):
        table.add_column(name, no_wrap=name == "kernel")
    for kernel in KERNELS.values():
        table.add_row(*map(Text, (kernel.name, kernel.predicted, kernel.seen, kernel.install)))
    console().print(table)
    return 0


def _verify(
    names: list[str],
    golden: Path | None,
    files: Files,
    stages: list[str],
    errors: int,
    arrays: str,
    timeout: float | None,
    diagnose: bool,
    jobs: int | None,
) -> int:
    from f8emu.conformance.diagnosis.report import diagnosed
    from f8emu.conformance.golden import read_golden, shipped_golden
    from f8emu.conformance.report import progress_bar
    from f8emu.conformance.side_by_side import Workers, parts_of, processes_for
    from f8emu.conformance.stages import STAGES
    from f8emu.conformance.subject import SUBJECTS
    from f8emu.conformance.verify import stages_by_name, verify

    start = time.perf_counter()
    stages_by_name(stages)  # a misspelt name is told before anything is loaded
    with opened_files(files) as outputs, ExitStack() as stack:
        recorded = shipped_golden() if golden is None else read_golden(golden)
        workers = None
        if not names and not stages and jobs is None and (os.cpu_count() or 1) > 1:
            # They import torch and JAX while this process does.
            workers = stack.enter_context(Workers(2, parts_of(list(STAGES), list(SUBJECTS))))
        subjects, not_run = _load(names, arrays, timeout)
        processes = jobs or processes_for(subjects, is_whole=not names and not stages)
        if workers and processes != 2:
            workers.close()
            workers = None
        with progress_bar() as progress:
            result = verify(
                subjects,
                stages=stages,
                golden=recorded,
                errors=errors,
                progress=progress,
                processes=processes,
                workers=workers,
            )
            result, diagnoses = diagnosed(result, subjects if diagnose else [], progress)
        return conclude(
            result,
            outputs,
            source=f"{recorded.path.name} {recorded.sha256[:12]}",
            start=start,
            errors=errors,
            not_run=not_run,
            diagnoses=diagnoses,
        )


def _load(names: list[str], arrays: str, timeout: float | None) -> "tuple[list[Subject], dict[str, str]]":
    """The subjects in the order of `names`; and, of the default ones, why those that are missing cannot run."""
    from f8emu.conformance.subject import SUBJECTS, load_subject

    if any(":" in name for name in names):
        find_modules_here()
    chosen = names or list(SUBJECTS)
    has_kernels = any(name not in SUBJECTS for name in chosen)
    # torch first: JAX then knows that it must leave the GPU's memory to others
    loaded: dict[str, Subject] = {}
    not_run: dict[str, str] = {}
    for name in sorted(chosen, key=lambda name: name != "torch"):
        try:
            # beside kernels the others run as ever; without any, a timeout is refused
            seconds = None if has_kernels and name in SUBJECTS else timeout
            loaded[name] = load_subject(name, arrays=arrays, timeout=seconds)
        except MissingExtraError as error:
            if names:
                raise
            not_run[name] = str(error)
    return [loaded[name] for name in chosen if name in loaded], not_run
