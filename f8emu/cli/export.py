"""`f8emu export`: a checkpoint in high precision as a float8 one, for a server; and the check of an exported one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import ending, guarded
from f8emu.cli.paths import Input, NewOrNone
from f8emu.cli.progress import progress_bar
from f8emu.cli.screen import say
from f8emu.spec import SpecError, recipe_by_name
from f8emu.verdict import Exit

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    verify_help = "Instead, compare MODEL, an exported one, with its manifest."
    from_help = "parameter (by default) or bfloat16: what the training cast of weights in float32."
    skip_help = "Modules in high precision, as in training; may be repeated. By default heads, embeddings and routers."

    @app.command(
        epilog=ending(
            "f8emu export trained served --format block --recipe blockwise",
            "f8emu export trained served --format per-channel --recipe rowwise",
            "f8emu export served --verify",
            differs="with --verify, a tensor differs from its manifest",
        )
    )
    def export(
        model: Annotated[Input, typer.Argument(help="A checkpoint: config.json and safetensors, in high precision.")],
        out: Annotated[NewOrNone, typer.Argument(help="The directory to write; it must not exist.")] = None,
        format: str | None = typer.Option(None, metavar="NAME", help="block, compressed-tensors or per-channel."),
        recipe: str | None = typer.Option(None, metavar="NAME", help="The recipe of the training."),
        cast_weight_from: str | None = typer.Option(None, metavar="NAME", help=from_help),
        skip: list[str] | None = typer.Option(None, metavar="PATTERN", help=skip_help),  # noqa: B008
        verify: bool = typer.Option(False, "--verify", help=verify_help),
    ) -> None:
        """Write a trained checkpoint as a float8 one that transformers, vLLM and SGLang load.

        It writes the codes and scales that training layers with these weights would multiply.
        """
        raise typer.Exit(guarded(_verify if verify else _export, model, out, format, recipe, cast_weight_from, skip))


def _verify(model: Path, *others: object) -> int:
    from f8emu.torch.serving.checkpoint import verify_export

    if any(other is not None for other in others):
        raise SpecError("export: --verify takes MODEL alone; leave OUT and the other options out")
    differences = verify_export(model)
    for line in differences:
        say(line)
    ending = "" if len(differences) == 1 else "s"
    say(f"{model}: {len(differences) or 'no'} difference{ending} from its manifest")
    return Exit.DIFFERENT if differences else 0


def _export(model: Path, out: Path | None, format: str | None, recipe: str | None, *chosen: Any) -> int:
    from f8emu.torch.serving import export

    if out is None or format is None or recipe is None:
        raise SpecError("export: OUT, --format and --recipe are needed; for example --format block --recipe blockwise")
    with progress_bar() as bar:

        def progress(done: int, total: int) -> None:
            if done == 1:
                bar.begin(str(model), "export", total)
            bar.advance()

        cast_weight_from, skip = chosen
        how = {"cast_weight_from": cast_weight_from, "skip": export.SKIPPED if skip is None else skip}
        export.export_checkpoint(model, out, format=format, config=recipe_by_name(recipe), **how, progress=progress)
    say(f"{out}: written; `f8emu export {out} --verify` compares it with its manifest")
    return 0
