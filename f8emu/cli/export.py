"""`f8emu export`: a checkpoint in high precision as a float8 one, for a server; and the check of an exported one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import DIFFERENT, STATUSES, guarded, progress_bar, say
from f8emu.spec import SpecError

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=STATUSES)
    def export(
        model: Annotated[Path, typer.Argument(help="A checkpoint: config.json and safetensors, in high precision.")],
        out: Annotated[Path | None, typer.Argument(help="The directory to write; it must not exist.")] = None,
        format: Annotated[
            str | None, typer.Option(metavar="NAME", help="block, compressed-tensors or per-channel.")
        ] = None,
        recipe: Annotated[
            str | None, typer.Option(metavar="NAME", help="The recipe that the model was trained with.")
        ] = None,
        skip: Annotated[
            list[str] | None,
            typer.Option(
                metavar="PATTERN",
                help="Modules in high precision, as in training; repeat it for more. "
                "By default heads, embeddings and routers.",
            ),
        ] = None,
        verify: Annotated[
            bool, typer.Option("--verify", help="Instead, compare MODEL, an exported one, with its manifest.")
        ] = False,
    ) -> None:
        """Write a trained checkpoint as a float8 one that transformers, vLLM and SGLang load.

        Codes and scales are those that the layers of the recipe multiply in the forward pass, for weights in the dtype
        of the checkpoint.
        """
        raise typer.Exit(guarded(_export, model, out, format, recipe, skip, verify))


def _export(
    model: Path, out: Path | None, format: str | None, recipe: str | None, skip: list[str] | None, verify: bool
) -> int:
    from f8emu.torch.serving import directory, export

    if verify:
        if (out, format, recipe, skip) != (None, None, None, None):
            raise SpecError("export: --verify takes MODEL alone; leave OUT and the other options out")
        differences = directory.verify_export(model)
        for line in differences:
            say(line)
        say(f"{model}: {len(differences) or 'no'} difference{'s' * (len(differences) != 1)} from its manifest")
        return DIFFERENT if differences else 0
    if out is None or format is None or recipe is None:
        raise SpecError("export: OUT, --format and --recipe are needed; for example --format block --recipe blockwise")
    with progress_bar() as bar:

        def progress(done: int, total: int) -> None:
            if done == 1:
                bar.begin(str(model), "export", total)
            bar.advance()

        options = {"skip": export.SKIPPED if skip is None else skip, "progress": progress}
        export.export_checkpoint(model, out, format=format, config=recipe, **options)
    say(f"{out}: written; `f8emu export {out} --verify` compares it with its manifest")
    return 0
