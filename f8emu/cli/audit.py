"""`f8emu audit`: what is wrong with a float8 checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import STATUSES, guarded, opened, run_and_show

if TYPE_CHECKING:
    import typer

    from f8emu.audit import Audit
    from f8emu.report.page import Page


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def audit(
        checkpoint: Annotated[
            Path, typer.Argument(help="A .safetensors file, or a directory with config.json, index and shards.")
        ],
        source: Annotated[
            Path | None, typer.Option(metavar="MODEL", help="The model in high precision that was quantized.")
        ] = None,
        consumer: Annotated[
            str | None,
            typer.Option(
                metavar="STACK[:CHIP]",
                help="What will serve it: vllm, sglang, deep_gemm or transformers; on h100, b200, ...",
            ),
        ] = None,
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write all findings.")] = None,
        html_file: Annotated[
            Path | None, typer.Option("--html", metavar="OUT", help="Write the report as one page.")
        ] = None,
        errors: Annotated[int, typer.Option(min=0, help="How many findings to print.")] = 20,
    ) -> None:
        """Find what is wrong with a float8 checkpoint before it is served: names, scales, codes.

        Errors and warnings give status 1, notes do not. With --source it names the quantizer that gives every byte, and
        the first block where none does. Ctrl-C ends it, and the findings so far are reported.
        """
        raise typer.Exit(guarded(_audit, checkpoint, source, consumer, json_file, html_file, errors))


def _audit(
    checkpoint: Path,
    source: Path | None,
    consumer: str | None,
    json_file: Path | None,
    html_file: Path | None,
    errors: int,
) -> int:
    from f8emu.audit import audit
    from f8emu.audit.page import audit_page
    from f8emu.report.page import render

    with opened("audit", html_file) as html:

        def shown(found: "Audit") -> "tuple[Page, str]":
            page, verdict = audit_page(found, errors)
            if html is not None:
                html.write(render("f8emu audit", page))
            return page, verdict

        return run_and_show(
            "audit",
            json_file,
            lambda progress: audit(checkpoint, source=source, consumer=consumer, progress=progress),
            shown,
        )
