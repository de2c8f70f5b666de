"""`f8emu plan`: the split-K of cuBLAS."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import console, guarded, opened, text_of

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command()
    def plan(
        shapes: Annotated[
            Path,
            typer.Option(
                metavar="IN",
                help="A JSON list of objects: m, n, k, gemm (tensorwise, rowwise, bfloat16, "
                "blockwise_1x128_1x128, blockwise_1x128_128x128, blockwise_128x128_1x128), accumulation (fast, "
                "promoted; for float8 without block scales), layout (tn, nt, nn, tt; for bfloat16), out_dtype, and "
                "a_dtype and b_dtype if not both are float8_e4m3fn.",
            ),
        ],
        json_file: Annotated[
            Path | None, typer.Option("--json", metavar="OUT", help="Write the objects with split_k and source.")
        ] = None,
        plan_file: Annotated[
            Path | None, typer.Option("--plan", metavar="FILE", help="Shapes that `f8emu record --plans` recorded.")
        ] = None,
        chip: Annotated[str, typer.Option(metavar="NAME", help="Whose plan: Hopper, an H200's, or H100.")] = "Hopper",
    ) -> None:
        """Show the split-K that cuBLAS uses for these GEMMs: recorded, predicted or unknown."""
        raise typer.Exit(guarded(_plan, shapes, json_file, plan_file, chip))


def _plan(shapes: Path, json_file: Path | None, plan_file: Path | None, chip: str) -> int:
    from f8emu.spec.chips import chip_by_name
    from f8emu.split_k.plan import shipped_plan
    from f8emu.split_k.tables import gemms_from_json, plan_from_json, with_splits

    with opened("plan", json_file) as out:
        items = gemms_from_json(text_of("plan", shapes), str(shapes))
        plan = shipped_plan(chip_by_name("plan", chip).plan)
        if plan_file is not None:
            plan = plan_from_json(text_of("plan", plan_file), str(plan_file)).over(plan)
        found = with_splits(items, [plan.split_k(gemm) for _, gemm in items])
        if out is None:
            _print_plan(found, f"{plan.library} on {plan.chip}")
        else:
            out.write_json(found)
    return 0


def _print_plan(found: list[dict[str, Any]], title: str) -> None:
    from rich.table import Table

    keys = ("m", "n", "k", "gemm", "accumulation", "layout", "a_dtype", "b_dtype", "out_dtype", "split_k", "source")
    shown = [key for key in keys if any(item.get(key) for item in found)]
    table = Table(*shown, title=title)
    for item in found:
        table.add_row(*(str(item.get(key) or "") for key in shown))
    console().print(table)
