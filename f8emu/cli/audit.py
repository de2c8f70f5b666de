"""`f8emu audit`: what is wrong with a float8 checkpoint."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import HTML, JSON, MOST, ending, guarded, run_and_show
from f8emu.cli.paths import Input, InputOrNone, ReportOrNone

if TYPE_CHECKING:
    import typer

_CHECKPOINT = "A .safetensors file, or a directory with config.json, index and shards."
_SOURCE = "The model in high precision that was quantized."
_CONSUMER = "What will serve it: vllm, sglang, deep_gemm or transformers; with a GPU, vllm:h200."
_TP = "The tensor-parallel size: report blocks that its ranks cut."


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(
        epilog=ending(
            "f8emu audit DeepSeek-V3",
            "f8emu audit served --source trained --consumer vllm:h200",
            "f8emu audit model.safetensors --json findings.json --html findings.html",
            differs="an error or a warning, notes are no fault",
            left="a weight has no scale that can be checked, or could not be compared with the source",
        )
    )
    def audit(
        checkpoint: Annotated[Input, typer.Argument(help=_CHECKPOINT)],
        source: Annotated[InputOrNone, typer.Option(metavar="MODEL", help=_SOURCE)] = None,
        consumer: Annotated[str | None, typer.Option(metavar="STACK[:CHIP]", help=_CONSUMER)] = None,
        tp: Annotated[int | None, typer.Option("--tp", min=1, max=1024, metavar="RANKS", help=_TP)] = None,
        json_file: Annotated[ReportOrNone, typer.Option("--json", metavar="OUT", help=JSON)] = None,
        html_file: Annotated[ReportOrNone, typer.Option("--html", metavar="OUT", help=HTML)] = None,
        errors: Annotated[int, typer.Option(min=0, max=MOST, help="How many findings to print.")] = 20,
    ) -> None:
        """Find what is wrong with a float8 checkpoint before it is served: names, scales, codes.

        With --source it names the quantizer that wrote every byte, or
        the first block that none explains. Ctrl-C ends it, and the findings so far are reported.
        """
        options = {"source": source, "consumer": consumer, "tp": tp}
        raise typer.Exit(guarded(_audit, checkpoint, options, (json_file, html_file), errors))


def _audit(checkpoint: Path, options: dict[str, Any], reports: tuple[Path | None, Path | None], errors: int) -> int:
    from f8emu.audit import audit
    from f8emu.audit.page import audit_page

    run = partial(audit, checkpoint, **options)
    page_of = partial(audit_page, errors=errors)
    return run_and_show("audit", reports, lambda progress: run(progress=progress), page_of)
