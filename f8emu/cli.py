"""The command line: verify | recipes | doctor | record | plan.

typer and rich come with the extra [cli] and are imported when the commands are built; torch and JAX when a subject
needs them. The exit statuses are `_STATUSES`.
"""

import importlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from f8emu import __version__
from f8emu.spec import RECIPE_ALIASES, RECIPES, F8Error, MissingExtraError, SpecError, recipe_by_name

if TYPE_CHECKING:
    import typer

    from f8emu.conformance.subject import Subject

_DIFFERENT = 1
_BAD_USAGE = 2
_INTERRUPTED = 130
"""As a shell reports a process that Ctrl-C ended."""
_STATUSES = (
    "Exit status: 0 all equal, or done; 1 a difference, or an error in a subject; 2 bad usage, a missing package, a "
    "file that cannot be read or written, or a failure of f8emu itself; 130 interrupted by Ctrl-C."
)
_PIPE_WIDTH = 160
"""Of a table that goes to a file; a terminal's own width otherwise."""


def main() -> None:
    """The entry point `f8emu`."""
    try:
        app = build_app()
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        sys.exit(_BAD_USAGE)
    app()


class Arrays(Enum):
    """Whose arrays an own kernel takes."""

    TORCH = "torch"
    NUMPY = "numpy"
    JAX = "jax"


def build_app() -> "typer.Typer":
    """The commands.

    Raises:
        MissingExtraError: typer or rich is not installed.
    """
    for package in ("typer", "rich"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise MissingExtraError("f8emu", package, "cli") from None
    import typer

    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="float8 training recipes, with the bits of a Hopper GPU on any machine.",
        epilog=_STATUSES,
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

    @app.command(epilog=_STATUSES)
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
    ) -> None:
        """Prove that the bits agree: formats, scales, recorded GEMMs, generated GEMMs, layers under recipes.

        Ctrl-C ends the run; the stages that were finished are reported.
        """
        raise typer.Exit(_guarded(_verify, subjects or [], golden, json_file, stage or [], errors, arrays.value))

    @app.command()
    def recipes(
        name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None,
        as_toml: Annotated[bool, typer.Option("--toml", help="As TOML.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    ) -> None:
        """List the named recipes, or explain one."""
        raise typer.Exit(_guarded(_recipes, name, as_toml, as_json))

    @app.command()
    def doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
        """Say what this machine's torch, JAX and GPU do on the known traps, and which engine would be used."""
        raise typer.Exit(_guarded(_doctor, as_json))

    @app.command()
    def record(
        out: Annotated[Path, typer.Argument(help="The golden file to write; with --plans the plan file.")],
        seed: Annotated[int | None, typer.Option(help="Of the operands.")] = None,
        check: Annotated[bool, typer.Option("--verify", help="Compare f8ref.numpy with the new file.")] = False,
        plans: Annotated[
            Path | None,
            typer.Option(
                metavar="IN", help="Instead, find the split of K of these shapes, a list as `f8emu plan` reads."
            ),
        ] = None,
    ) -> None:
        """Record new golden GEMMs on this machine's GPU, with the kernels that ran; or splits of K."""
        raise typer.Exit(_guarded(_record, out, seed, check, plans))

    @app.command()
    def plan(
        shapes: Annotated[
            Path,
            typer.Option(
                metavar="IN",
                help="A JSON list of objects: m, n, k, gemm (tensorwise, rowwise, bfloat16, "
                "blockwise_1x128_1x128, blockwise_1x128_128x128, blockwise_128x128_1x128), accumulation (fast, "
                "promoted; of float8 without block scales), layout (tn, nt, nn, tt; of bfloat16), out_dtype, and "
                "a_dtype and b_dtype if not both are float8_e4m3fn.",
            ),
        ],
        json_file: Annotated[
            Path | None, typer.Option("--json", metavar="OUT", help="Write the objects with split_k and source.")
        ] = None,
        plan_file: Annotated[
            Path | None, typer.Option("--plan", metavar="FILE", help="Shapes that `f8emu record --plans` recorded.")
        ] = None,
    ) -> None:
        """Say into how many slices cuBLAS cuts K of these GEMMs: recorded, predicted or unknown."""
        raise typer.Exit(_guarded(_plan, shapes, json_file, plan_file))

    return app


def _guarded(command: Callable[..., int], *args: object) -> int:
    """The exit status of a command; an error of ours is a message and bad usage, not a traceback."""
    try:
        return command(*args)
    except (F8Error, OSError) as error:
        print(error, file=sys.stderr)
        return _BAD_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception:  # Python would exit with the status of a difference
        traceback.print_exc()
        return _BAD_USAGE


def _verify(
    names: list[str], golden: Path | None, json_file: Path | None, stages: list[str], errors: int, arrays: str
) -> int:
    from rich.console import Console

    from f8emu.conformance import report
    from f8emu.conformance.golden import read_golden, shipped_golden
    from f8emu.conformance.verify import stages_by_name, verify

    start = time.perf_counter()
    stages_by_name(stages)  # a misspelt name is told before anything is loaded
    with _opened("verify", json_file) as out:
        recorded = shipped_golden() if golden is None else read_golden(golden)
        subjects, not_run = _load(names, arrays)
        with report.progress_bar() as progress:
            result = verify(subjects, stages=stages, golden=recorded, errors=errors, progress=progress)
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        for subject in result.subjects:
            console.print(report.table(subject))
        for line in report.mismatch_lines(result, errors):
            print(line)
        for reason in not_run.values():
            print(f"not run: {reason}")
        seconds = time.perf_counter() - start
        print(f"{report.verdict(result)}; {recorded.path.name} {recorded.sha256[:12]}; {seconds:.1f} s")
        if out is not None:
            command = ["f8emu", *sys.argv[1:]]
            data = report.to_json(result, command=command, seconds=seconds, errors=errors, not_run=not_run)
            out.write(json.dumps(data, indent=1) + "\n")
    if result.is_interrupted:
        return _INTERRUPTED
    return _DIFFERENT if result.has_difference else 0 if result.is_equal else _BAD_USAGE


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


def _recipes(name: str | None, as_toml: bool, as_json: bool) -> int:
    chosen = list(RECIPES.values()) if name is None else [recipe_by_name(name)]
    if as_toml and as_json:
        raise SpecError("recipes: --toml and --json exclude each other; give one of them")
    if as_json:
        dicts = [recipe.to_dict() for recipe in chosen]
        print(json.dumps(dicts if name is None else dicts[0], indent=2))
    elif as_toml:
        print("\n".join(recipe.to_toml() for recipe in chosen), end="")
    elif name is not None:
        print(chosen[0].explain())
    else:
        _print_recipes()
    return 0


def _print_recipes() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "output", "grad_input", "grad_weight", "scales", "hash")
    for recipe in RECIPES.values():
        gemms = [f"{gemm.a}\n{gemm.b}" + ("\nfast" if gemm.use_fast_accum else "") for gemm in recipe.gemms.values()]
        scales = ["delayed" if recipe.delayed else "dynamic"] + ["power of two"] * recipe.scale_rule.power_of_two
        older = [f"= {alias}" for alias, target in RECIPE_ALIASES.items() if target == recipe.name]
        table.add_row("\n".join([recipe.name, *older]), *gemms, "\n".join(scales), recipe.content_hash[:12])
        table.add_section()
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    print("f8emu recipes NAME explains one; --toml and --json print the text that f8emu reads")


def _doctor(as_json: bool) -> int:
    from f8emu.doctor import run

    return run(as_json=as_json)


def _record(out: Path, seed: int | None, check: bool, plans: Path | None) -> int:
    if plans is not None:
        if seed is not None or check:
            raise SpecError("record: --seed and --verify go with a golden file, not with --plans; leave them out")
        return _record_plans(out, plans)
    from f8emu.conformance.record import SEED, record

    recording = record(out, seed=SEED if seed is None else seed, verify=check)
    print("\n".join(recording.lines()))
    return _DIFFERENT if recording.has_difference else 0


def _record_plans(out: Path, plans: Path) -> int:
    from f8emu.conformance.record_plans import record_plans
    from f8emu.spec.plan_file import gemms_from_json

    gemms = [gemm for _, gemm in gemms_from_json(_text_of("record", plans), str(plans))]
    recording = record_plans(out, gemms)
    print("\n".join(recording.lines()))
    return _DIFFERENT if recording.not_found else 0


def _plan(shapes: Path, json_file: Path | None, plan_file: Path | None) -> int:
    from f8emu.spec.plan import shipped_plan
    from f8emu.spec.plan_file import gemms_from_json, plan_from_json, with_splits

    with _opened("plan", json_file) as out:
        items = gemms_from_json(_text_of("plan", shapes), str(shapes))
        plan = shipped_plan()
        if plan_file is not None:
            plan = plan_from_json(_text_of("plan", plan_file), str(plan_file)).over(plan)
        found = with_splits(items, [plan.split_k(gemm) for _, gemm in items])
        if out is None:
            _print_plan(found, f"{plan.library} on {plan.chip}")
        else:
            out.write(json.dumps(found, indent=1) + "\n")
    return 0


def _print_plan(found: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    keys = ("m", "n", "k", "gemm", "accumulation", "layout", "a_dtype", "b_dtype", "out_dtype", "split_k", "source")
    shown = [key for key in keys if any(item.get(key) for item in found)]
    table = Table(*shown, title=title)
    for item in found:
        table.add_row(*(str(item.get(key) or "") for key in shown))
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _text_of(command: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{command}: cannot read {path}: {error}; give the path of a JSON file") from None


@contextmanager
def _opened(command: str, path: Path | None) -> Iterator[TextIO | None]:
    """The file to write, opened before any work; its old text is kept until the new one is complete."""
    if path is None:
        yield None
        return
    text = io.StringIO()
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{command}: cannot write {path}: {error}; give a path in a directory that exists") from None
    with file:
        yield text
        if file.seekable():
            file.truncate(0)
        file.write(text.getvalue())
