"""`f8emu certify`: one verdict on trainer and server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import HTML, JSON, MOST, ending, guarded, run_and_show, write_json
from f8emu.cli.paths import InputOrNone, InputsOrNone, ReportOrNone

if TYPE_CHECKING:
    import typer

_TRAINER = "An export, a checkpoint in high precision (with --dialect), expected checksums, or a capture."
_SERVER = "The answer of the server's weight checker as JSON, the checkpoint that it loads, or a capture."
_CAPTURES = "Captures of trainer and server, of the same tokens."
_CHECK = "Instead: see whether this certificate, or a file that it names, was changed."


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer

    @app.command(
        epilog=ending(
            "f8emu certify exported served.json --tp 2",
            "f8emu certify bf16 served --dialect vllm_weight_block --batch 1 --batch 4096",
            "f8emu certify exported served --captures trainer server --json out.json",
            "f8emu certify --check certificate.json",
            differs="trainer and server differ; with --check, the certificate or a file was changed",
            left="nothing differs, but something that was asked for was not seen; with --check, a file is not here",
        )
    )
    def certify(
        trainer: Annotated[InputOrNone, typer.Argument(help=_TRAINER)] = None,
        server: Annotated[InputOrNone, typer.Argument(help=_SERVER)] = None,
        checksums: Annotated[
            InputOrNone, typer.Option(metavar="SERVER.json", help="Checksums of a server, beside what SERVER is.")
        ] = None,
        captures: Annotated[InputsOrNone, typer.Option(metavar="TRAINER SERVER", help=_CAPTURES)] = None,
        plan: Annotated[
            InputOrNone, typer.Option(metavar="FILE", help="Shapes that `record --plans` recorded.")
        ] = None,
        batch: Annotated[
            list[int] | None, typer.Option(min=1, max=MOST, metavar="ROWS", help="Rows of a GEMM; may be repeated.")
        ] = None,
        dialect: Annotated[str | None, typer.Option(help="The quantizer that casts TRAINER's weights.")] = None,
        engine: Annotated[str | None, typer.Option(help="vllm or sglang, if the checksums do not tell.")] = None,
        kernel: str = typer.Option("cutlass", metavar="NAME", help="The server's kernel, as for `f8emu checksums`."),
        tp: Annotated[int, typer.Option("--tp", min=1, max=1024, metavar="RANKS", help="The server's ranks.")] = 1,
        names: Annotated[
            list[str] | None,
            typer.Option("--map", metavar="REGEX=REPLACEMENT", help="Rename the trainer's layers; may be repeated."),
        ] = None,
        certificate: Annotated[InputOrNone, typer.Option("--check", metavar="CERTIFICATE", help=_CHECK)] = None,
        json_file: Annotated[ReportOrNone, typer.Option("--json", metavar="OUT", help=JSON)] = None,
        html_file: Annotated[ReportOrNone, typer.Option("--html", metavar="OUT", help=HTML)] = None,
    ) -> None:
        """Certify that a server multiplies what its trainer multiplies, or name the first difference.

        Compares weights, captures of one batch, decode with prefill, and whether bits depend on the batch. What was not
        seen is named, and is never certified. --json writes the certificate.
        """
        options: dict[str, Any] = {"checksums": checksums, "captures": captures, "plan": plan, "batch": batch or ()}
        options |= {"dialect": dialect, "engine": engine, "names": names or ()}
        files = json_file, html_file
        if certificate is not None and not any((trainer, server, *options.values())):
            raise typer.Exit(guarded(_check, certificate, files))
        if certificate is not None or trainer is None or server is None:
            raise typer.BadParameter("give TRAINER and SERVER, or --check CERTIFICATE alone")
        options |= {"kernel": kernel, "tensor_parallel": tp}
        raise typer.Exit(guarded(_certify, trainer, server, options, files))


def _certify(trainer: Path, server: Path, options: dict[str, Any], files: tuple[Path | None, Path | None]) -> int:
    from f8emu.rollout import Certificate, certify
    from f8emu.rollout.page import certificate_page

    made: list[Certificate] = []

    def run(progress: Any) -> Certificate:
        made.append(certify(trainer, server, progress=progress, **options))
        return made[0]

    status = run_and_show("certify", (None, files[1]), run, certificate_page)
    write_json("certify", files[0], made[0].to_json())
    return status


def _check(certificate: Path, files: tuple[Path | None, Path | None]) -> int:
    from f8emu.rollout import check
    from f8emu.rollout.page import checked_page

    return run_and_show("certify", files, lambda progress: check(certificate), checked_page)
