"""`f8emu record`: new golden GEMMs of this GPU, or the split-K of shapes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import DIFFERENT, guarded, text_of
from f8emu.spec import SpecError

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
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
    from f8emu.split_k.tables import gemms_from_json

    gemms = [gemm for _, gemm in gemms_from_json(text_of("record", plans), str(plans))]
    recording = record_plans(out, gemms)
    print("\n".join(recording.lines()))
    return DIFFERENT if recording.not_found else 0
