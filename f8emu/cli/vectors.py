"""`f8emu vectors`: test vectors as files, for simulators and hardware."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import CHIP, MOST, chip_names, ending, guarded, unwritable
from f8emu.cli.paths import New
from f8emu.cli.progress import progress_bar
from f8emu.cli.screen import is_quiet, say
from f8emu.environment import require_new
from f8emu.spec.chips import chip_by_name

if TYPE_CHECKING:
    import typer

_MOST_CASTS, _LARGEST_SEED = 1 << 22, (1 << 32) - 1


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    gemms_help = "Outputs of GEMMs, whole GEMMs, and single instructions."
    sets_help = (
        "Only this set of GEMMs: tensorwise, rowwise, grouped, blockwise, bfloat16, whole or instructions; may be "
    )

    @app.command(epilog=ending("f8emu vectors vectors", "f8emu vectors vectors --casts --casts-per-pair 1000 --seed 1"))
    def vectors(
        out: Annotated[New, typer.Argument(help="The directory to write; it must not exist.")],
        casts: Annotated[bool, typer.Option("--casts", help="Codes decoded, and casts to float8.")] = False,
        scales: Annotated[bool, typer.Option("--scales", help="Scales of amaxes, by every rule.")] = False,
        gemms: Annotated[bool, typer.Option("--gemms", help=gemms_help)] = False,
        chip: Annotated[str, typer.Option(metavar="NAME", help=CHIP, autocompletion=chip_names)] = "H100",
        seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED, help="Draws other random inputs.")] = 0,
        casts_per_pair: Annotated[
            int, typer.Option(min=0, max=_MOST_CASTS, help="Random inputs of a cast of float32, beside its boundaries.")
        ] = 150_000,
        gemms_per_kind: Annotated[
            int, typer.Option(min=1, max=MOST, help="Outputs of each kind of GEMM, and of each instruction.")
        ] = 96,
        gemm_set: Annotated[
            list[str] | None, typer.Option(metavar="NAME", help=f"{sets_help}repeated. All of the chip by default.")
        ] = None,
    ) -> None:
        """Write test vectors for simulators and RTL: inputs and expected bits of casts, scales and GEMMs.

        All of these unless some are named. A line of a text file is one case in hexadecimal, with the rules of NUMERICS
        that it needs; a safetensors file has the same. The same options give the same bytes on every machine.
        """
        if gemm_set and (casts or scales) and not gemms:
            raise typer.BadParameter("--gemm-set needs --gemms beside --casts or --scales")
        kinds = (casts, scales, gemms) if casts or scales or gemms else (not gemm_set, not gemm_set, True)
        raise typer.Exit(guarded(_write, out, kinds, chip, seed, casts_per_pair, gemms_per_kind, gemm_set or []))


def _write(
    out: Path, kinds: tuple[bool, bool, bool], chip: str, seed: int, casts: int, gemms: int, gemm_sets: list[str]
) -> int:
    profile = chip_by_name("vectors", chip)
    from f8emu.conformance.vectors import folder
    from f8emu.conformance.vectors.gemms import sets_for

    # 1. Everything is refused before anything is computed.
    sets = sets_for(profile, gemm_sets)
    require_new("vectors", out, "OUT")
    makers = folder.makers(profile, sets, seed, casts, gemms)
    # 2. The command of the manifest is the one that gives these bytes.
    command = ["f8emu", "vectors", "OUT", "--chip", chip, "--seed", seed, "--casts-per-pair", casts]
    command += ["--gemms-per-kind", gemms, *(word for name in gemm_sets for word in ("--gemm-set", name))]
    command += [flag for flag, is_asked in zip(("--casts", "--scales", "--gemms"), kinds, strict=True) if is_asked]
    asked = [make for group, is_asked in zip(makers, kinds, strict=True) if is_asked for make in group]
    try:
        with progress_bar() as progress:
            files = folder.write_vectors(out, asked, profile, seed, [str(word) for word in command], progress)
    except OSError as error:
        raise unwritable("vectors", out, error) from None
    for name, summary in files.items() if not is_quiet() else ():
        say(f"{name}: {summary.cases:,} cases, {summary.outputs:,} outputs")
    say(f"{out}: written; `cd {out} && sha256sum -c SHA256SUMS` checks the files")
    return 0
