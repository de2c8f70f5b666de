"""`f8emu recipes`, `doctor`, `record` (on a GPU) and `plan` (split-K)."""

import json
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import CHIP, HTML, JSON, MOST, chip_names, ending, guarded, write, write_json
from f8emu.cli.paths import InputOrNone, Output, ReportOrNone, text_of
from f8emu.cli.screen import draw, is_quiet, say
from f8emu.spec import NAMED_RECIPES, RECIPES, SERVING_RECIPES, SpecError, recipe_by_name
from f8emu.verdict import Exit

if TYPE_CHECKING:
    import typer

    from f8emu.report.page import Page

_Files = tuple[Path | None, Path | None]


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer
    from typer.core import TyperCommand

    class JsonWasAFlag(TyperCommand):
        """A command whose `--json` had no path: alone it still means standard output, with a note."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for i, word in enumerate(args, 1):
                if word == "--json" and (args[i:] == [] or args[i].startswith("--")):
                    print(f"f8emu {self.name}: --json takes a path; for standard output: --json -", file=sys.stderr)
                    args = [*args[:i], "-", *args[i:]]
                    break
            return super().parse_args(ctx, args)

    json_option = typer.Option("--json", metavar="OUT", help=JSON)
    html_option = typer.Option("--html", metavar="OUT", help=HTML)

    @app.command(
        cls=JsonWasAFlag,
        epilog=ending("f8emu recipes", "f8emu recipes rowwise", "f8emu recipes rowwise --json recipe.json"),
    )
    def recipes(
        name: Annotated[str | None, typer.Argument(help="The recipe to explain.", autocompletion=_recipe_names)] = None,
        as_toml: Annotated[bool, typer.Option("--toml", help="Print as TOML.")] = False,
        json_file: Annotated[ReportOrNone, json_option] = None,
    ) -> None:
        """List the named recipes, or explain one."""
        raise typer.Exit(guarded(_recipes, name, as_toml, json_file))

    @app.command(
        cls=JsonWasAFlag, epilog=ending("f8emu doctor", "f8emu doctor --json -", differs="an installed library fails")
    )
    def doctor(
        json_file: Annotated[ReportOrNone, json_option] = None,
        html_file: Annotated[ReportOrNone, html_option] = None,
    ) -> None:
        """Show what this machine has, which engine computes a GEMM here, and what to do next."""
        raise typer.Exit(guarded(_doctor, (json_file, html_file)))

    @app.command(
        epilog=ending(
            "f8emu record golden.safetensors --check",
            "f8emu record plan.json --plans shapes.json",
            "f8emu record instructions.safetensors --instructions --check",
            differs="f8ref.numpy differs from the new file (--check), or no S explains a shape (--plans)",
        )
    )
    def record(
        out: Annotated[
            Output, typer.Argument(help="The golden file to write; with --plans the plan, with --instructions theirs.")
        ],
        seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the operands.")] = None,
        only: Annotated[
            str | None, typer.Option(metavar="SECTION", help="One section of the cases: group-kinds, for instance.")
        ] = None,
        check: Annotated[bool, typer.Option("--check", help="Compare f8ref.numpy with the new file.")] = False,
        check_by_old_name: Annotated[bool, typer.Option("--verify", hidden=True)] = False,
        plans: Annotated[
            InputOrNone,
            typer.Option(metavar="IN", help="Instead, find the split-K of these shapes, a list as for `f8emu plan`."),
        ] = None,
        instructions: Annotated[
            bool,
            typer.Option(
                "--instructions", help="Instead, record single matrix instructions, for `f8emu verify --recordings`."
            ),
        ] = False,
    ) -> None:
        """Record golden GEMMs on this machine's GPU, the split-K of shapes, or single matrix instructions."""
        if check_by_old_name:
            say("f8emu record: --verify is called --check", sys.stderr)
        check = check or check_by_old_name
        if instructions and (only or plans):
            raise typer.BadParameter("--instructions goes with --seed and --check alone; leave --only and --plans out")
        if instructions:
            raise typer.Exit(guarded(_record_instructions, out, seed, check))
        raise typer.Exit(guarded(_record, out, seed, only, check, plans))

    @app.command(
        epilog=ending(
            "f8emu plan --shapes shapes.json",
            "f8emu plan --shapes shapes.json --chip H100 --json splits.json",
            "f8emu plan --invariance --rows 4096",
        )
    )
    def plan(
        shapes: Annotated[
            InputOrNone,
            typer.Option(
                metavar="IN",
                help="A JSON list of objects: m, n, k, gemm (tensorwise, rowwise, bfloat16, "
                "blockwise_1x128_1x128, blockwise_1x128_128x128, blockwise_128x128_1x128), accumulation (fast, "
                "promoted; for float8 without block scales), layout (tn, nt, nn, tt; for bfloat16), out_dtype, and "
                "a_dtype and b_dtype if not both are float8_e4m3fn. With --invariance only n and k, of weights; by "
                "default those of Llama-3 8B.",
            ),
        ] = None,
        invariance: Annotated[
            bool,
            typer.Option(
                "--invariance", help="Report batch invariance of every recipe and weight shape instead of split-K."
            ),
        ] = False,
        rows: Annotated[int, typer.Option(min=1, max=MOST, help="With --invariance: the most rows of a batch.")] = 8192,
        json_file: Annotated[ReportOrNone, json_option] = None,
        html_file: Annotated[ReportOrNone, html_option] = None,
        plan_file: Annotated[
            InputOrNone, typer.Option("--plan", metavar="FILE", help="Shapes that `record --plans` recorded.")
        ] = None,
        chip: Annotated[str, typer.Option(metavar="NAME", help=CHIP, autocompletion=chip_names)] = "H200",
    ) -> None:
        """Show the split-K that cuBLAS uses for these GEMMs: recorded, predicted or unknown."""
        files = json_file, html_file
        if invariance:
            raise typer.Exit(guarded(_invariance, shapes, files, plan_file, chip, rows))
        raise typer.Exit(guarded(_plan, shapes, files, plan_file, chip))


def _recipe_names(incomplete: str) -> list[str]:
    return [name for name in NAMED_RECIPES if name.startswith(incomplete)]


def _recipes(name: str | None, as_toml: bool, json_file: Path | None) -> int:
    from f8emu.report.recipes import recipes_page

    chosen = [*NAMED_RECIPES.values()] if name is None else [recipe_by_name(name)]
    if as_toml and json_file is not None:
        raise SpecError("recipes: --toml and --json exclude each other; pass one of them")
    if name is None and str(json_file) in NAMED_RECIPES:
        raise SpecError(f"recipes: --json takes a path; for standard output: f8emu recipes {json_file} --json -")
    if json_file is not None:
        dicts = [recipe.to_dict() for recipe in chosen]
        write("recipes", json_file, lambda: json.dumps(dicts if name is None else dicts[0], indent=2) + "\n")
    elif as_toml:
        print("\n".join(recipe.to_toml() for recipe in chosen), end="")
    elif name is not None:
        for line in chosen[0].explain().splitlines():
            say(line)
    else:
        draw(recipes_page(chosen))
    return 0


def _doctor(files: _Files) -> int:
    from f8emu.doctor import diagnose
    from f8emu.report.doctor import doctor_json, doctor_page

    diagnosis = diagnose()
    page = doctor_page(diagnosis)
    _conclude("doctor", page, doctor_json(diagnosis), files)
    return Exit.DIFFERENT if diagnosis.problems else 0


def _conclude(command: str, page: "Page", data: object, files: _Files) -> None:
    # Text, JSON and HTML of a command without a verdict that is an exit status.
    from f8emu.report.page import render

    if is_quiet() and page.verdict is not None:
        say(page.verdict.text)
    else:
        draw(page)
    write_json(command, files[0], data)
    write(command, files[1], lambda: render(f"f8emu {command}", page))


def _record(out: Path, seed: int | None, only: str | None, check: bool, plans: Path | None) -> int:
    if plans is None:
        from f8emu.conformance.record.record import SEED, record

        recording = record(out, seed=SEED if seed is None else seed, only=only, verify=check)
        is_bad = recording.has_difference
    elif seed is not None or only is not None or check:
        raise SpecError("record: --seed, --only and --check go with a golden file, not with --plans; leave them out")
    else:
        from f8emu.conformance.record.record import record_plans
        from f8emu.split_k.plan import gemms_from_json

        recording = record_plans(out, [gemm for _, gemm in gemms_from_json(text_of("record", plans), str(plans))])
        is_bad = bool(recording.not_found)
    print("\n".join(recording.lines()))
    return Exit.DIFFERENT if is_bad else 0


def _record_instructions(out: Path, seed: int | None, check: bool) -> int:
    from f8emu.conformance.record.record import SEED
    from f8emu.conformance.record.single import record_instructions

    recording = record_instructions(out, seed=SEED if seed is None else seed, check=check)
    print("\n".join(recording.lines()))
    return Exit.DIFFERENT if recording.has_difference else 0


def _plan(shapes: Path | None, files: _Files, plan_file: Path | None, chip: str) -> int:
    from f8emu.report.plan import plan_page
    from f8emu.spec.chips import CHIPS, chip_by_name
    from f8emu.split_k.plan import gemms_from_json, plan_from_json, shipped_plan, with_splits

    if shapes is None:
        example = (
            '[{"m": 16, "n": 4096, "k": 4096, "gemm": "rowwise", "accumulation": "fast", "out_dtype": "bfloat16"}]'
        )
        raise SpecError(
            f"plan: --shapes is missing; give a file with a JSON list of GEMMs, as {example}; or --invariance"
        )
    items = gemms_from_json(text_of("plan", shapes), str(shapes))
    profile = chip_by_name("plan", chip)
    if not profile.plan:
        planned = " or ".join(f"--chip {known.name}" for known in CHIPS.values() if known.plan)
        raise SpecError(f"plan: no split-K plan of {profile.name} was recorded; pass {planned}")
    plan = shipped_plan(profile.plan)
    if plan_file is not None:
        plan = plan_from_json(text_of("plan", plan_file), str(plan_file)).over(plan)
    splits = with_splits(items, [plan.split_k(gemm) for _, gemm in items])
    page = plan_page(splits, f"{plan.library} on {plan.chip}")
    _conclude("plan", page, [{"schema": 1, **item} for item in splits], files)
    return 0


def _invariance(shapes: Path | None, files: _Files, plan_file: Path | None, chip: str, rows: int) -> int:
    from f8emu.report.plan import invariance_page
    from f8emu.spec.chips import chip_by_name
    from f8emu.split_k.invariance import GEMMS, LLAMA_3_8B, invariance
    from f8emu.split_k.plan import weights_from_json

    if plan_file is not None:
        raise SpecError("plan: --plan goes without --invariance; leave one of them out")
    on = chip_by_name("plan", chip).name
    weights = LLAMA_3_8B if shapes is None else weights_from_json(text_of("plan", shapes), str(shapes))
    recipes = [replace(recipe, chip=on) for recipe in (RECIPES | SERVING_RECIPES).values()]
    invariances = [
        invariance(recipe, n, k, gemm=gemm, rows=rows)
        for recipe, gemm, (n, k) in product(recipes, GEMMS, dict.fromkeys(weights))
    ]
    page = invariance_page(invariances, f"Does a row's bits depend on the other rows, up to {rows}? {on}")
    _conclude("plan", page, [{"schema": 1, **asdict(one), "verdict": one.verdict.value} for one in invariances], files)
    return 0
