"""`f8emu verify`: prove that the bits agree, and report it: the verdict, a page, files, the exit status."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from f8emu.cli import frame
from f8emu.cli.frame import Arrays, guarded
from f8emu.cli.paths import InputOrNone, ReportOrNone
from f8emu.cli.progress import progress_bar
from f8emu.cli.screen import is_quiet, say, show
from f8emu.spec import Evidence, Granularity, MissingExtraError, Overflow, SpecError, UnsupportedError
from f8emu.spec.formats import float8_format

if TYPE_CHECKING:
    import typer

    from f8emu.conformance.run.result import Result
    from f8emu.conformance.run.stages import StageName
    from f8emu.conformance.run.subject import Subject


JOBS = (
    "Processes. By default 2 for a whole run on a CPU; on a GPU one per core, up to 16 and one per 4 GiB of free GPU "
    "memory; 1 in other cases."
)


_EXAMPLES = (
    "f8emu verify torch",
    "f8emu verify my_kernels.py:scaled_mm --html report.html",
    "f8emu verify my_casts.py:to_float8 --kind cast --format float8_e4m3fn",
    "f8emu verify fbgemm.rowwise --stage gemms --json -",
)


class FunctionKind(Enum):
    """The kind of function that is verified."""

    GEMM = "gemm"
    CAST = "cast"
    QUANTIZE = "quantize"


class _Options(NamedTuple):
    """The options of the command; no subjects, stages or cases stand for all."""

    subjects: list[str]
    golden: Path | None
    json: Path | None
    html: Path | None
    stages: list[str]
    cases: list[str]
    errors: int
    arrays: str
    timeout: float | None
    here: bool
    jobs: int | None
    diagnose: bool
    start: float


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=frame.ending(*_EXAMPLES, differs="a bit differs, or a subject raised an error"))
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
        golden: Annotated[InputOrNone, typer.Option(help="Recorded GEMMs; the shipped file by default.")] = None,
        json_file: Annotated[ReportOrNone, typer.Option("--json", metavar="OUT", help=frame.JSON)] = None,
        html_file: Annotated[ReportOrNone, typer.Option("--html", metavar="OUT", help=frame.HTML)] = None,
        stage: Annotated[
            list[str] | None, typer.Option(help="Run only this stage; may be repeated. All by default.")
        ] = None,
        case: Annotated[
            list[str] | None,
            typer.Option(metavar="ID", help="Run only this case, where * is any text; may be repeated. No diagnosis."),
        ] = None,
        errors: Annotated[int, typer.Option(min=0, max=frame.MOST, help="Differing cases of a subject to print.")] = 8,
        arrays: Annotated[Arrays, typer.Option(help="Framework whose arrays your own kernel takes.")] = Arrays.TORCH,
        recordings: Annotated[
            InputOrNone,
            typer.Option(metavar="FILE", help="Replay recordings of single instructions instead of running the suite."),
        ] = None,
        chip: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=PROFILE", help="The profile for a chip in --recordings; may be repeated."),
        ] = None,
        timeout: Annotated[float | None, typer.Option(metavar="SECONDS", max=frame.MOST, help=frame.SECONDS)] = None,
        here: Annotated[bool, typer.Option("--here", help=frame.HERE)] = False,
        kind: Annotated[
            FunctionKind,
            typer.Option(
                metavar="KIND",
                help="What your own function is: gemm, cast (x -> codes) or quantize (x -> codes and scales).",
            ),
        ] = FunctionKind.GEMM,
        format: Annotated[
            str | None, typer.Option(help="Format of codes that are returned as bytes, such as float8_e4m3fn.")
        ] = None,
        overflow: Annotated[
            Overflow | None,
            typer.Option(metavar="NAME", help="What a cast must do: saturate or nonfinite. By default what it does."),
        ] = None,
        granularity: Annotated[
            Granularity | None,
            typer.Option(
                metavar="NAME",
                help="Which elements share a scale of a quantizer: tensorwise, rowwise, blockwise_1x128 or "
                "blockwise_128x128.",
            ),
        ] = None,
        kernels: Annotated[
            bool, typer.Option("--kernels", help="List the known kernels, with what each should give, and exit.")
        ] = False,
        contract: Annotated[
            bool, typer.Option("--contract", help="Show what your own kernel is given and must return, and exit.")
        ] = False,
        jobs: Annotated[int | None, typer.Option(min=1, max=max(8, os.cpu_count() or 1), help=JOBS)] = None,
        diagnose: Annotated[bool, typer.Option(help="Find out what a subject whose GEMMs differ computes.")] = True,
    ) -> None:
        """Prove that the bits agree: formats, scales, recorded GEMMs, generated GEMMs, layers under recipes.

        Ctrl-C ends the run, and the finished stages are reported.
        """
        files, chosen = (golden, json_file, html_file), (stage or [], case or [])
        options = _Options(
            subjects or [], *files, *chosen, errors, arrays.value, timeout, here, jobs, diagnose, time.perf_counter()
        )
        if kernels or contract:
            raise typer.Exit(guarded(_list_kernels) if kernels else guarded(_show_contract, kind))
        if kind is not FunctionKind.GEMM:
            if recordings is not None or chip or golden is not None or stage or jobs is not None:
                raise typer.BadParameter("--kind cast and quantize take no recordings, stages or processes")
            raise typer.Exit(guarded(_verify_functions, options, kind.value, format, overflow, granularity))
        if format or overflow or granularity:
            raise typer.BadParameter("--format, --overflow and --granularity need --kind cast or --kind quantize")
        if recordings is None and not chip:
            raise typer.Exit(guarded(_verify, options))
        if recordings is None or golden is not None or stage or case or timeout is not None:
            raise typer.BadParameter(
                "--chip needs --recordings; neither goes with --golden, --stage, --case or --timeout"
            )
        raise typer.Exit(guarded(_verify_recordings, options, recordings, chip or []))


def _list_kernels() -> int:
    from f8emu.conformance.kernels.known import KERNELS

    for kernel in KERNELS.values():
        print(kernel.name)
        for name, text in (("predicted", kernel.predicted), ("seen", kernel.seen), ("to get it", kernel.install)):
            if text:
                say(f"  {name}: {text}")
    return 0


def _show_contract(kind: FunctionKind) -> int:
    from f8emu.conformance.casts.subject import CONTRACTS
    from f8emu.conformance.kernels.loaded import CONTRACT

    print(CONTRACTS.get(kind.value, CONTRACT), end="")
    return 0


def _verify_functions(
    options: _Options, kind: str, format: str | None, overflow: Overflow | None, granularity: Granularity | None
) -> int:
    from f8emu.conformance.casts.contracts import Wanted
    from f8emu.conformance.casts.verify import Verified, verify_function

    if not options.subjects:
        raise SpecError(f"verify --kind {kind}: which function? Name it: path/to/file.py:FUNCTION")
    wanted = Wanted(float8_format("verify --format", format) if format else None, overflow, granularity)
    flags = {"--kind": kind, "--format": format}
    flags |= {"--overflow": overflow and overflow.value, "--granularity": granularity and granularity.value}
    words = [word for flag, value in flags.items() if value for word in (flag, value)]
    frame.find_modules_here()
    more = {name: getattr(options, name) for name in ("arrays", "errors", "cases", "diagnose", "timeout", "here")}
    verified: dict[str, Verified] = {}
    with progress_bar() as progress:
        for name in options.subjects:
            try:
                verified[name] = verify_function(name, kind, wanted, progress=progress, **more)
            except SpecError as error:  # of one; the others are verified
                if len(options.subjects) == 1:
                    raise
                verified[name] = Verified.of_none(name, kind, str(error))
    results = [function.result for function in verified.values()]
    result = replace(results[0], subjects=[subject for result in results for subject in result.subjects])
    source = "; ".join(dict.fromkeys(function.follows for function in verified.values() if function.follows))
    words_of = {name: [*_words_of(name, options), *words] for name in verified}
    return _conclude(options, result, source, functions=verified, asked=words_of)


def _verify(options: _Options) -> int:
    from f8emu.conformance.cases.golden import read_golden, shipped_golden
    from f8emu.conformance.diagnosis.search import diagnosed
    from f8emu.conformance.run.processes import Workers, processes_for
    from f8emu.conformance.run.subject import SUBJECTS
    from f8emu.conformance.run.verify import stages_by_name, stages_with, verify

    # 1. Bad usage is told before anything is loaded: a misspelt stage, files that cannot be read or written.
    named = stages_by_name(options.stages)
    is_whole = not (options.subjects or options.stages or options.cases)
    with ExitStack() as stack:
        begun = _begun(options)
        recorded = shipped_golden() if options.golden is None else read_golden(options.golden)
        workers = None
        if is_whole and options.jobs is None and (os.cpu_count() or 1) > 1:
            # They import torch and JAX while this process does.
            workers = stack.enter_context(Workers(2, list(SUBJECTS)))
        # 2. The subjects, and how many processes they are worth.
        loaded, not_run = _loaded(begun, options)
        subjects = list(loaded.values())
        if not options.subjects:  # the engine has GEMMs and layers alone
            subjects = [subject for subject in subjects if any(stage.is_offered_by(subject) for stage in named)]
        only = stages_with(options.cases, named, subjects, recorded) if options.cases else None
        processes = options.jobs or (processes_for(subjects, is_whole=is_whole) if only is None else 1)
        if workers and processes != 2:
            workers.close()
            workers = None
        # 3. The run, and what the subjects do that differ.
        with progress_bar() as progress:
            result = verify(
                subjects,
                stages=cast("Sequence[StageName]", options.stages),  # as `stages_by_name` found them
                only=only,
                golden=recorded,
                errors=options.errors,
                progress=progress,
                processes=processes,
                workers=workers,
            )
            probed = subjects if options.diagnose and only is None else []
            result, diagnoses = diagnosed(result, probed, progress)
        source = f"{recorded.path.name} {recorded.sha256[:12]}"
        words_of = {subject.name: _words_of(name, options) for name, subject in loaded.items()}
        return _conclude(options, result, source, not_run=not_run, diagnoses=diagnoses, asked=words_of)


def _words_of(name: str, options: _Options) -> list[str]:
    # The words that name a subject on the command line, and what its cases depend on.
    from f8emu.conformance.run.subject import SUBJECTS

    words = [name]
    if name not in SUBJECTS:
        words += [] if options.arrays == Arrays.TORCH.value else ["--arrays", options.arrays]
        words += [] if options.timeout is None else ["--timeout", f"{options.timeout:g}"]
    return words + ([] if options.golden is None else ["--golden", str(options.golden)])


def _begun(options: _Options) -> "dict[str, Callable[[], Subject]]":
    # What loads the subjects, by name, in the order in which they were named; kernels are being imported already.
    from f8emu.conformance.run.runner import begin_subject_and_call
    from f8emu.conformance.run.subject import SUBJECTS

    names = options.subjects
    if any(":" in name for name in names):
        frame.find_modules_here()
    # The engine's name stands for all its widths.
    several = {
        name: [subject for subject in SUBJECTS if subject == name or subject.startswith(f"{name}:")] for name in names
    }
    chosen = [subject for name in names for subject in several[name] or [name]] or list(SUBJECTS)
    has_kernels = any(name not in SUBJECTS for name in chosen)
    # beside kernels the others run as ever; without any, a timeout is refused
    seconds = {name: None if has_kernels and name in SUBJECTS else options.timeout for name in chosen}
    return {
        name: begin_subject_and_call(name, arrays=options.arrays, timeout=seconds[name], here=options.here)
        for name in chosen
    }


def _loaded(
    begun: "dict[str, Callable[[], Subject]]", options: _Options
) -> "tuple[dict[str, Subject], dict[str, str]]":
    # The subjects by name; and why a default one cannot run.
    from f8emu.conformance.kernels.call import absent
    from f8emu.conformance.run.subject import Subject

    loaded: dict[str, Subject] = {}
    not_run: dict[str, str] = {}
    # torch first: JAX then knows that it must leave the GPU's memory to others
    for name in sorted(begun, key=lambda name: name != "torch"):
        try:
            loaded[name] = begun[name]()
            if loaded[name].is_idle and not options.subjects:
                not_run[name] = f"{name}, which emulates on GPUs, and here is none; f8emu verify {name} runs it"
        except (MissingExtraError, UnsupportedError) as error:
            if options.subjects:
                raise
            not_run[name] = str(error)
        except SpecError as error:
            if ":" not in name or len(begun) == 1:
                raise
            loaded[name] = Subject(name=name, engine=f"{name}, which cannot be called", calls=absent(str(error)))
    return {name: loaded[name] for name in begun if name in loaded and name not in not_run}, not_run


def _verify_recordings(options: _Options, path: Path, chips: Sequence[str]) -> int:
    from f8emu.conformance.record.instructions import SUBJECTS, instruction_subject, read_recordings, replay

    file = read_recordings(path, dict(_named(chip) for chip in chips))
    subjects, not_run = [], {}
    for name in options.subjects or SUBJECTS:
        try:
            subjects.append(instruction_subject(name))
        except MissingExtraError as error:
            if options.subjects:
                raise
            not_run[name] = str(error)
    with progress_bar() as progress:
        result = replay(subjects, file, errors=options.errors, progress=progress)
    status = _conclude(options, result, f"{file.path.name} {file.sha256[:12]}", not_run=not_run)
    for name, chip in dict((recording.chip_name, recording.chip) for recording in file.recordings).items():
        evidence = "" if chip.evidence is Evidence.LITERATURE else f" ({chip.evidence.value})"
        say(f"{name}: profile {chip}{evidence}")
    return status


def _named(chip: str) -> tuple[str, str]:
    name, separator, profile = chip.partition("=")
    if not (name and separator and profile):
        raise SpecError(f"verify --chip: expected NAME=PROFILE, such as L4=Ada; got {chip!r}")
    return name, profile


def _conclude(options: _Options, result: "Result", source: str, **facts: Any) -> int:
    """The exit status, after everything was printed and written; `source` names the recording.

    Every output is written, even if another one fails. `facts` are fields of `report.verify.Run`.
    """
    from f8emu.report import verify
    from f8emu.report.page import render

    seconds = time.perf_counter() - options.start
    run = verify.Run(command=frame.command_line(), seconds=seconds, errors=options.errors, **facts)
    page = functools.cache(lambda: verify.page(result, run))
    verdict = verify.verdict(result)
    say(f"{verdict.line}; {source}; {seconds:.1f} s")
    if not is_quiet():
        print()
    with ExitStack() as afterwards:  # runs the last first, and each whatever became of the one before
        afterwards.callback(frame.write, "verify", options.html, lambda: render(verify.COMMAND, page()))
        afterwards.callback(lambda: frame.write_json("verify", options.json, verify.to_json(result, run)))
        show(page())
    return verdict.status
