"""`f8emu recipes`, `doctor`, `record` (on a GPU) and `plan` (split-K)."""

import json
from dataclasses import asdict, replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import MOST, console, guarded, write_json
from f8emu.cli.paths import InputOrNone, Output, OutputOrNone, text_of
from f8emu.spec import RECIPE_ALIASES, RECIPES, SERVING_RECIPES, Recipe, SpecError, recipe_by_name
from f8emu.verdict import Exit

if TYPE_CHECKING:
    import typer

    from f8emu.split_k.invariance import Invariance


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer

    @app.command()
    def recipes(
        name: Annotated[str | None, typer.Argument(help="The recipe to explain.")] = None,
        as_toml: Annotated[bool, typer.Option("--toml", help="Print as TOML.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    ) -> None:
        """List the named recipes, or explain one."""
        raise typer.Exit(guarded(_recipes, name, as_toml, as_json))

    @app.command()
    def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
        """Show what this machine has, which engine computes a GEMM here, and what to do next."""
        raise typer.Exit(guarded(_doctor, as_json))

    @app.command()
    def record(
        out: Annotated[Output, typer.Argument(help="The golden file to write; with --plans the plan file.")],
        seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the operands.")] = None,
        only: Annotated[
            str | None, typer.Option(metavar="SECTION", help="One section of the cases: group-kinds, for instance.")
        ] = None,
        check: Annotated[bool, typer.Option("--verify", help="Compare f8ref.numpy with the new file.")] = False,
        plans: Annotated[
            InputOrNone,
            typer.Option(metavar="IN", help="Instead, find the split-K of these shapes, a list as for `f8emu plan`."),
        ] = None,
    ) -> None:
        """Record new golden GEMMs on this machine's GPU, with the kernels that ran; or the split-K of shapes."""
        raise typer.Exit(guarded(_record, out, seed, only, check, plans))

    @app.command()
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
                "--invariance", help="Instead: do a row's bits depend on the other rows? Of every recipe and weight."
            ),
        ] = False,
        rows: Annotated[int, typer.Option(min=1, max=MOST, help="With --invariance: the most rows of a batch.")] = 8192,
        json_file: Annotated[
            OutputOrNone, typer.Option("--json", metavar="OUT", help="Write the objects with split_k and source.")
        ] = None,
        plan_file: Annotated[
            InputOrNone, typer.Option("--plan", metavar="FILE", help="Shapes that `record --plans` recorded.")
        ] = None,
        chip: Annotated[str, typer.Option(metavar="NAME", help="Whose plan: Hopper, an H200's, or H100.")] = "Hopper",
    ) -> None:
        """Show the split-K that cuBLAS uses for these GEMMs: recorded, predicted or unknown."""
        if invariance:
            raise typer.Exit(guarded(_invariance, shapes, json_file, plan_file, chip, rows))
        raise typer.Exit(guarded(_plan, shapes, json_file, plan_file, chip))


def _recipes(name: str | None, as_toml: bool, as_json: bool) -> int:
    chosen = [*RECIPES.values(), *SERVING_RECIPES.values()] if name is None else [recipe_by_name(name)]
    if as_toml and as_json:
        raise SpecError("recipes: --toml and --json exclude each other; pass one of them")
    if as_json:
        dicts = [recipe.to_dict() for recipe in chosen]
        print(json.dumps(dicts if name is None else dicts[0], indent=2))
    elif as_toml:
        print("\n".join(recipe.to_toml() for recipe in chosen), end="")
    elif name is not None:
        print(chosen[0].explain())
    else:
        _print_recipes(chosen)
    return 0


def _print_recipes(recipes: list[Recipe]) -> None:
    from rich.table import Column, Table

    table = Table(Column("recipe", overflow="fold"), "output", "grad_input", "grad_weight", "scales")
    for recipe in recipes:
        gemms = [f"{gemm.a}\n{gemm.b}" + ("\nfast" if gemm.use_fast_accum else "") for gemm in recipe.gemms.values()]
        scales = ["delayed" if recipe.delayed else "dynamic"]
        scales += ["power of two"] if recipe.scale_rule.power_of_two else []
        older = [f"= {alias}" for alias, target in RECIPE_ALIASES.items() if target == recipe.name]
        table.add_row("\n".join([recipe.name, *older]), *gemms, "\n".join(scales))
        table.add_section()
    console().print(table)
    print("f8emu recipes NAME explains one; --toml and --json print the text that f8emu reads")


def _doctor(as_json: bool) -> int:
    from f8emu.doctor import run

    return run(as_json=as_json)


def _record(out: Path, seed: int | None, only: str | None, check: bool, plans: Path | None) -> int:
    if plans is None:
        from f8emu.conformance.record.record import SEED, record

        recording = record(out, seed=SEED if seed is None else seed, only=only, verify=check)
        is_bad = recording.has_difference
    elif seed is not None or only is not None or check:
        raise SpecError("record: --seed, --only and --verify go with a golden file, not with --plans; leave them out")
    else:
        from f8emu.conformance.record.record import record_plans
        from f8emu.split_k.plan import gemms_from_json

        recording = record_plans(out, [gemm for _, gemm in gemms_from_json(text_of("record", plans), str(plans))])
        is_bad = bool(recording.not_found)
    print("\n".join(recording.lines()))
    return Exit.DIFFERENT if is_bad else 0


def _plan(shapes: Path | None, json_file: Path | None, plan_file: Path | None, chip: str) -> int:
    from f8emu.spec.chips import chip_by_name
    from f8emu.split_k.plan import gemms_from_json, plan_from_json, shipped_plan, with_splits

    if shapes is None:
        raise SpecError("plan: --shapes is missing; give a JSON list of GEMMs, or --invariance")
    items = gemms_from_json(text_of("plan", shapes), str(shapes))
    plan = shipped_plan(chip_by_name("plan", chip).plan)
    if plan_file is not None:
        plan = plan_from_json(text_of("plan", plan_file), str(plan_file)).over(plan)
    planned = with_splits(items, [plan.split_k(gemm) for _, gemm in items])
    if json_file is None:
        _print_plan(planned, f"{plan.library} on {plan.chip}")
    else:
        write_json("plan", json_file, [{"schema": 1, **item} for item in planned])
    return 0


def _invariance(shapes: Path | None, json_file: Path | None, plan_file: Path | None, chip: str, rows: int) -> int:
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
    if json_file is None:
        _print_invariance(invariances, f"does a row's bits depend on the other rows, up to {rows}? {on}")
    else:
        write_json(
            "plan", json_file, [{"schema": 1, **asdict(one), "verdict": one.verdict.value} for one in invariances]
        )
    return 0


def _print_invariance(results: "list[Invariance]", title: str) -> None:
    from rich.table import Table

    table = Table("recipe", "gemm", "weights [n, k]", "verdict", "because", title=title)
    for (recipe, gemm, verdict, because, splits), group in groupby(
        results, key=lambda result: (result.recipe, result.gemm, result.verdict.value, result.because, result.splits)
    ):
        weights = [f"{member.n} x {member.k}" for member in group]
        changes = ", ".join(f"{s} from M = {m}" for m, s in splits[:4]) + (", ..." if len(splits) > 4 else "")
        why = f"{because}: S = {changes}" if len(splits) > 1 else because
        table.add_row(recipe, gemm, "\n".join(weights), verdict, why)
    console().print(table)
    print("grad_weight is a sum over the rows: it depends on all of them")


def _print_plan(items: list[dict[str, Any]], title: str) -> None:
    from rich.table import Table

    keys = ("m", "n", "k", "gemm", "accumulation", "layout", "a_dtype", "b_dtype", "out_dtype", "split_k", "source")
    shown = [key for key in keys if any(item.get(key) for item in items)]
    table = Table(*shown, title=title)
    for item in items:
        table.add_row(*(str(item.get(key) or "") for key in shown))
    console().print(table)
