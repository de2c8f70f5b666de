"""`f8emu verify`: prove that the bits agree."""

import json
import os
import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import BAD_USAGE, DIFFERENT, INTERRUPTED, STATUSES, console, guarded, opened
from f8emu.spec import MissingExtraError

if TYPE_CHECKING:
    import typer

    from f8emu.conformance.subject import Subject


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
                help="f8ref.numpy, f8ref.jax, torch, f8emu.jax, or package.module:function for a kernel that is called "
                "as torch._scaled_mm is. By default those of the four whose packages are installed.",
            ),
        ] = None,
        golden: Annotated[Path | None, typer.Option(help="Recorded GEMMs; the shipped file by default.")] = None,
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report.")] = None,
        stage: Annotated[
            list[str] | None, typer.Option(help="Run this stage only; may be repeated. All by default.")
        ] = None,
        errors: Annotated[int, typer.Option(min=0, help="Mismatches to print for each subject.")] = 20,
        arrays: Annotated[Arrays, typer.Option(help="Arrays that an own kernel takes.")] = Arrays.TORCH,
        diagnose: Annotated[bool, typer.Option(help="Find out what a subject whose GEMMs differ does instead.")] = True,
    ) -> None:
        """Prove that the bits agree: formats, scales, recorded GEMMs, generated GEMMs, layers under recipes.

        Ctrl-C ends the run; the stages that were finished are reported.
        """
        raise typer.Exit(
            guarded(_verify, subjects or [], golden, json_file, stage or [], errors, arrays.value, diagnose)
        )


def _verify(
    names: list[str],
    golden: Path | None,
    json_file: Path | None,
    stages: list[str],
    errors: int,
    arrays: str,
    diagnose: bool,
) -> int:
    from f8emu.conformance import report
    from f8emu.conformance.diagnosis_report import diagnosed, diagnosis_lines
    from f8emu.conformance.golden import read_golden, shipped_golden
    from f8emu.conformance.verify import stages_by_name, verify

    start = time.perf_counter()
    stages_by_name(stages)  # a misspelt name is told before anything is loaded
    with opened("verify", json_file) as out:
        recorded = shipped_golden() if golden is None else read_golden(golden)
        subjects, not_run = _load(names, arrays)
        with report.progress_bar() as progress:
            result = verify(subjects, stages=stages, golden=recorded, errors=errors, progress=progress)
            result, diagnoses = diagnosed(result, subjects if diagnose else [], progress)
        screen = console()
        for subject in result.subjects:
            screen.print(report.table(subject))
        for line in (*report.mismatch_lines(result, errors), *diagnosis_lines(diagnoses)):
            print(line)
        for reason in not_run.values():
            print(f"not run: {reason}")
        seconds = time.perf_counter() - start
        print(f"{report.verdict(result)}; {recorded.path.name} {recorded.sha256[:12]}; {seconds:.1f} s")
        if out is not None:
            command = ["f8emu", *sys.argv[1:]]
            data = report.to_json(
                result, command=command, seconds=seconds, errors=errors, not_run=not_run, diagnoses=diagnoses
            )
            out.write(json.dumps(data, indent=1) + "\n")
    if result.is_interrupted:
        return INTERRUPTED
    return DIFFERENT if result.has_difference else 0 if result.is_equal else BAD_USAGE


def _load(names: list[str], arrays: str) -> "tuple[list[Subject], dict[str, str]]":
    """The subjects in the order of `names`; and, of the default ones, why those that are missing cannot run."""
    from f8emu.conformance.subject import SUBJECTS, load_subject

    if any(":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an own kernel in the current directory, as for `python -m`
    chosen = names or list(SUBJECTS)
    # torch first: JAX then knows that it must leave the GPU's memory to others
    loaded: dict[str, Subject] = {}
    not_run: dict[str, str] = {}
    for name in sorted(chosen, key=lambda name: name != "torch"):
        try:
            loaded[name] = load_subject(name, arrays=arrays)
        except MissingExtraError as error:
            if names:
                raise
            not_run[name] = str(error)
    return [loaded[name] for name in chosen if name in loaded], not_run
