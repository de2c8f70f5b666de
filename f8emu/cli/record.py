"""`f8emu record`: new golden GEMMs of this GPU, or the split-K of shapes. `f8emu plan`: the split-K that is known."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import DIFFERENT, console, guarded, opened, text_of
from f8emu.spec import SpecError

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the two commands."""
    import typer

    @app.command()
    def record(
        out: Annotated[Path, typer.Argument(help="The golden file to write; with --plans the plan file.")],
        seed: Annotated[int | None, typer.Option(help="Seed of the operands.")] = None,
        check: Annotated[bool, typer.Option("--verify", help="Compare f8ref.numpy with the new file.")] = False,
        plans: Annotated[
            Path | None,
            typer.Option(metavar="IN", help="Instead, find the split-K of these shapes, a list as for `f8emu plan`."),
        ] = None,
    ) -> None:
        """Record new golden GEMMs on this machine's GPU, with the kernels that ran; or the split-K of shapes."""
        raise typer.Exit(guarded(_record, out, seed, check, plans))

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


def _record(out: Path, seed: int | None, check: bool, plans: Path | None) -> int:
    if plans is not None:
        if seed is not None or check:
            raise SpecError("record: --seed and --verify go with a golden file, not with --plans; leave them out")
        return _record_plans(out, plans)
    from f8emu.conformance.record.record import SEED, record

    recording = record(out, seed=SEED if seed is None else seed, verify=check)
    print("\n".join(recording.lines()))
    return DIFFERENT if recording.has_difference else 0


def _record_plans(out: Path, plans: Path) -> int:
    from f8emu.conformance.record.plans import record_plans
    from f8emu.split_k.plan import gemms_from_json

    gemms = [gemm for _, gemm in gemms_from_json(text_of("record", plans), str(plans))]
    recording = record_plans(out, gemms)
    print("\n".join(recording.lines()))
    return DIFFERENT if recording.not_found else 0


def _plan(shapes: Path, json_file: Path | None, plan_file: Path | None, chip: str) -> int:
    from f8emu.spec.chips import chip_by_name
    from f8emu.split_k.plan import gemms_from_json, plan_from_json, shipped_plan, with_splits

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
