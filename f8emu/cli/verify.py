"""`f8emu verify`: prove that the bits agree, and report it: the verdict, a page, files, the exit status."""

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from f8emu.cli.frame import (
    ISOLATE,
    SECONDS,
    STATUSES,
    TIMEOUT,
    Arrays,
    Report,
    command_line,
    find_modules_here,
    guarded,
    opened,
    progress_bar,
    say,
    show,
    status_of,
)
from f8emu.spec import Evidence, MissingExtraError, SpecError, UnsupportedError

if TYPE_CHECKING:
    import typer

    from f8emu.conformance.run.result import Result
    from f8emu.conformance.run.subject import Subject


JOBS = "Processes. By default one per core if a subject is on a GPU, 2 for a whole run on a CPU, 1 in other cases."


class Files(NamedTuple):
    """Where reports go; None: nowhere."""

    json: Path | None
    html: Path | None


Outputs = tuple[Report | None, Report | None]  # the same, opened


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def verify(
        subjects: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[SUBJECT]...",
                help="f8ref.numpy, f8ref.jax, f8emu.native (every vector width that runs here; f8emu.native:portable "
                "is one), torch, f8emu.jax; a known kernel such as fbgemm.rowwise (--kernels lists them); or "
                "path/to/file.py:function or package.module:function, a Kernel or a function with the arguments of "
                "torch._scaled_mm (--contract). By default those of the first five whose packages are installed; "
                "f8ref.jax if JAX has a GPU.",
            ),
        ] = None,
        golden: Annotated[Path | None, typer.Option(help="Recorded GEMMs; the shipped file by default.")] = None,
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report.")] = None,
        html_file: Annotated[
            Path | None, typer.Option("--html", metavar="OUT", help="Write the report as one page with figures.")
        ] = None,
        stage: Annotated[
            list[str] | None, typer.Option(help="Run only this stage; may be repeated. All by default.")
        ] = None,
        case: Annotated[
            list[str] | None,
            typer.Option(metavar="ID", help="Run only this case, where * is any text; may be repeated. No diagnosis."),
        ] = None,
        errors: Annotated[int, typer.Option(min=0, help="How many differing cases to print for each subject.")] = 8,
        arrays: Annotated[Arrays, typer.Option(help="Framework whose arrays your own kernel takes.")] = Arrays.TORCH,
        recordings: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Replay recordings of single instructions instead of running the suite."),
        ] = None,
        chip: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=PROFILE", help="The profile for a chip in --recordings; may be repeated."),
        ] = None,
        isolate: Annotated[bool, typer.Option("--isolate", help=ISOLATE)] = False,
        timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help=SECONDS)] = None,
        kernels: Annotated[
            bool, typer.Option("--kernels", help="List the known kernels, with what each should give, and exit.")
        ] = False,
        contract: Annotated[
            bool, typer.Option("--contract", help="Show what your own kernel is given and must return, and exit.")
        ] = False,
        jobs: Annotated[int | None, typer.Option(min=1, help=JOBS)] = None,
        diagnose: Annotated[bool, typer.Option(help="Find out what a subject whose GEMMs differ computes.")] = True,
    ) -> None:
        """Prove that the bits agree: formats, scales, recorded GEMMs, generated GEMMs, layers under recipes.

        Ctrl-C ends the run, and the finished stages are reported.
        """
        if kernels or contract:
            raise typer.Exit(guarded(_list_kernels if kernels else _show_contract))
        files = Files(json_file, html_file)
        if recordings is not None or chip:
            if recordings is None or golden is not None or stage or case or isolate or timeout is not None:
                raise typer.BadParameter(
                    "--chip needs --recordings; neither goes with --golden, --stage, --case, --isolate or --timeout"
                )
            raise typer.Exit(guarded(_verify_recordings, subjects or [], recordings, chip or [], files, errors))
        seconds = TIMEOUT if isolate and timeout is None else timeout
        chosen = _Chosen(stage or [], case or [])
        options = subjects or [], golden, files, chosen, errors, arrays.value, seconds, diagnose, jobs
        raise typer.Exit(guarded(_verify, *options))


class _Chosen(NamedTuple):
    """What of the suite runs; all of it where there are no names."""

    stages: list[str]
    cases: list[str]


def _list_kernels() -> int:
    from f8emu.conformance.kernels.known import KERNELS

    for kernel in KERNELS.values():
        print(kernel.name)
        for name, text in (("predicted", kernel.predicted), ("seen", kernel.seen), ("to get it", kernel.install)):
            if text:
                say(f"  {name}: {text}")
    return 0


def _show_contract() -> int:
    from f8emu.conformance.kernels.loaded import CONTRACT

    print(CONTRACT, end="")
    return 0


def _verify(
    names: list[str],
    golden: Path | None,
    files: Files,
    chosen: _Chosen,
    errors: int,
    arrays: str,
    timeout: float | None,
    diagnose: bool,
    jobs: int | None,
) -> int:
    from f8emu.conformance.cases.golden import read_golden, shipped_golden
    from f8emu.conformance.diagnosis.report import diagnosed
    from f8emu.conformance.run.processes import Workers, parts_of, processes_for
    from f8emu.conformance.run.stages import STAGES
    from f8emu.conformance.run.subject import SUBJECTS
    from f8emu.conformance.run.verify import stages_by_name, stages_with, verify

    start = time.perf_counter()
    named = stages_by_name(chosen.stages)  # a misspelt name is told before anything is loaded
    is_whole = not (names or chosen.stages or chosen.cases)
    with _opened_files(files) as outputs, ExitStack() as stack:
        recorded = shipped_golden() if golden is None else read_golden(golden)
        workers = None
        if is_whole and jobs is None and (os.cpu_count() or 1) > 1:
            # They import torch and JAX while this process does.
            workers = stack.enter_context(Workers(2, parts_of(list(STAGES), list(SUBJECTS))))
        loaded, not_run = _load(names, arrays, timeout)
        subjects = list(loaded.values())
        if not names:  # the engine has GEMMs and layers alone
            subjects = [one for one in subjects if any(stage.is_offered_by(one) for stage in named)]
        only = stages_with(chosen.cases, named, subjects, recorded) if chosen.cases else None
        processes = jobs or (processes_for(subjects, is_whole=is_whole) if only is None else 1)
        if workers and processes != 2:
            workers.close()
            workers = None
        with progress_bar() as progress:
            result = verify(
                subjects,
                stages=chosen.stages,
                only=only,
                golden=recorded,
                errors=errors,
                progress=progress,
                processes=processes,
                workers=workers,
            )
            result, diagnoses = diagnosed(result, subjects if diagnose and only is None else [], progress)
        return _conclude(
            result,
            outputs,
            source=f"{recorded.path.name} {recorded.sha256[:12]}",
            start=start,
            errors=errors,
            not_run=not_run,
            diagnoses=diagnoses,
            asked=_asked(loaded, golden, arrays, timeout),
        )


def _asked(
    subjects: "Mapping[str, Subject]", golden: Path | None, arrays: str, timeout: float | None
) -> dict[str, list[str]]:
    """Name of a subject -> the words that name it on the command line, and what its cases depend on."""
    from f8emu.conformance.run.subject import SUBJECTS

    shared = [] if golden is None else ["--golden", str(golden)]
    own = [] if arrays == Arrays.TORCH.value else ["--arrays", arrays]
    own += [] if timeout is None else ["--timeout", f"{timeout:g}"]
    return {one.name: [name, *shared, *([] if name in SUBJECTS else own)] for name, one in subjects.items()}


def _load(names: list[str], arrays: str, timeout: float | None) -> "tuple[dict[str, Subject], dict[str, str]]":
    """The subjects by name, in the order of `names`; and, of the default ones, why a missing one cannot run."""
    from f8emu.conformance.run.runner import load_and_call
    from f8emu.conformance.run.subject import SUBJECTS

    if any(":" in name for name in names):
        find_modules_here()
    # The engine's name stands for all its widths.
    several = {name: [one for one in SUBJECTS if one == name or one.startswith(f"{name}:")] for name in names}
    chosen = [one for name in names for one in several[name] or [name]] or list(SUBJECTS)
    has_kernels = any(name not in SUBJECTS for name in chosen)
    # torch first: JAX then knows that it must leave the GPU's memory to others
    loaded: dict[str, Subject] = {}
    not_run: dict[str, str] = {}
    for name in sorted(chosen, key=lambda name: name != "torch"):
        try:
            # beside kernels the others run as ever; without any, a timeout is refused
            seconds = None if has_kernels and name in SUBJECTS else timeout
            loaded[name] = load_and_call(name, arrays=arrays, timeout=seconds)
            if loaded[name].is_idle and not names:
                not_run[name] = f"{name}, which emulates on GPUs, and here is none; f8emu verify {name} runs it"
        except (MissingExtraError, UnsupportedError) as error:
            if names:
                raise
            not_run[name] = str(error)
    return {name: loaded[name] for name in chosen if name in loaded and name not in not_run}, not_run


def _verify_recordings(names: Sequence[str], path: Path, chips: Sequence[str], files: Files, errors: int) -> int:
    from f8emu.conformance.record.instructions import SUBJECTS, instruction_subject, read_recordings, replay

    start = time.perf_counter()
    with _opened_files(files) as outputs:
        file = read_recordings(path, dict(_named(chip) for chip in chips))
        subjects, not_run = [], {}
        for name in names or SUBJECTS:
            try:
                subjects.append(instruction_subject(name))
            except MissingExtraError as error:
                if names:
                    raise
                not_run[name] = str(error)
        with progress_bar() as progress:
            result = replay(subjects, file, errors=errors, progress=progress)
        source = f"{file.path.name} {file.sha256[:12]}"
        status = _conclude(result, outputs, source=source, start=start, errors=errors, not_run=not_run)
        for name, chip in dict((recording.chip_name, recording.chip) for recording in file.recordings).items():
            evidence = "" if chip.evidence is Evidence.LITERATURE else f" ({chip.evidence.value})"
            say(f"{name}: profile {chip}{evidence}")
        return status


def _named(chip: str) -> tuple[str, str]:
    name, separator, profile = chip.partition("=")
    if not (name and separator and profile):
        raise SpecError(f"verify --chip: expected NAME=PROFILE, such as L4=Ada; got {chip!r}")
    return name, profile


@contextmanager
def _opened_files(files: Files) -> Iterator[Outputs]:
    """Both files, opened before any work; a SpecError says which cannot be written."""
    with opened("verify", files.json) as out, opened("verify", files.html) as page:
        yield out, page


def _conclude(result: "Result", outputs: Outputs, *, source: str, start: float, **facts: Any) -> int:
    """The exit status, after everything was printed and written; `source` names the recording.

    Every output is written, even if another one fails. `facts` are fields of `report.verdict.Run`.
    """
    from f8emu.report import verdict, verify
    from f8emu.report.html import render

    seconds, (json, html) = time.perf_counter() - start, outputs
    page = functools.cache(lambda: verify.page(result, run))
    run = verdict.Run(command=command_line(), seconds=seconds, **facts)
    say(f"{verdict.verdict(result)}; {source}; {seconds:.1f} s")
    print()
    with ExitStack() as afterwards:  # runs the last first, and each whatever became of the one before
        if html is not None:
            afterwards.callback(lambda: html.write(render(verify.COMMAND, page())))
        if json is not None:
            afterwards.callback(lambda: json.write_json(verdict.to_json(result, run)))
        show(page())
    return status_of(result)
