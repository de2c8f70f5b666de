"""`f8emu checksums`: the bytes that a server must hold of a checkpoint, as hashes; a server's answer beside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from f8emu.cli.frame import JSON, MOST, ending, guarded, write_json
from f8emu.cli.paths import Input, InputOrNone, ReportOrNone
from f8emu.cli.progress import progress_bar
from f8emu.cli.screen import say
from f8emu.spec import OperandError, SpecError
from f8emu.strict import faults_as, parsed, read_regular
from f8emu.verdict import Exit

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer

    source_help = "A checkpoint: config.json and safetensors, in float8 or in high precision."
    dialect_help = (
        "What quantizes a source in high precision: vllm_weight_channel, torchao_rowwise, ... (f8emu.dialects)."
    )
    kernel_help = "What the engine multiplies with: cutlass, triton, deepgemm, deepgemm-blackwell or marlin."
    compare_help = "The JSON of the engine's checker, to compare with."

    @app.command(
        epilog=ending(
            "f8emu checksums served --engine vllm --tp 2 --form engine --json baseline.json",
            "f8emu checksums trained --engine vllm --dialect vllm_weight_channel",
            "f8emu checksums served --engine sglang --compare weights_checker.json",
            differs="with --compare, a tensor differs, is missing, or was not expected",
            left="a tensor is not predicted, or the engine shows no digest of it",
        )
    )
    def checksums(
        source: Annotated[Input, typer.Argument(help=source_help)],
        engine: str = typer.Option(..., metavar="NAME", help="vllm or sglang."),
        dialect: Annotated[str | None, typer.Option(metavar="NAME", help=dialect_help)] = None,
        tp: Annotated[int, typer.Option("--tp", min=1, max=1024, metavar="RANKS", help="Tensor-parallel size.")] = 1,
        kernel: str = typer.Option("cutlass", metavar="NAME", help=kernel_help),
        dtype: str = typer.Option("bfloat16", metavar="NAME", help="The engine's dtype of other tensors."),
        device: str = typer.Option("cuda", metavar="NAME", help="Where the engine runs: cuda or cpu."),
        json_file: Annotated[ReportOrNone, typer.Option("--json", metavar="OUT", help=JSON)] = None,
        form: str = typer.Option("f8emu", metavar="NAME", help="What --json has: f8emu, or the engine's own."),
        compare: Annotated[InputOrNone, typer.Option(metavar="SERVER.json", help=compare_help)] = None,
        errors: Annotated[int, typer.Option(min=0, max=MOST, help="How many lines to print.")] = 20,
    ) -> None:
        """Compute the bytes that vLLM or SGLang must hold after loading a checkpoint, as hashes of every tensor.

        They are fused, sharded by rank, padded and requantized as the engine does. What
        follows from no checkpoint, such as the packing of a kernel, is listed as not predicted.
        """
        options = {"engine": engine, "dialect": dialect, "tensor_parallel": tp, "kernel": kernel}
        options |= {"dtype": dtype, "device": device}
        raise typer.Exit(guarded(_checksums, source, options, json_file, form, compare, errors))


def _checksums(
    source: Path, options: dict[str, Any], json_file: Path | None, form: str, compare: Path | None, errors: int
) -> int:
    from f8emu.conformance.compare import counted
    from f8emu.rollout import expected_checksums

    if form not in ("f8emu", "engine"):
        raise SpecError(f"checksums: --form must be f8emu or engine; got {form!r}")
    with faults_as(OperandError, "checksums", compare or "", "give the answer of the engine's checker"):
        answer = None if compare is None else parsed(read_regular(compare), "JSON")
    with progress_bar() as progress:
        expected = expected_checksums(source, **options, progress=progress)
    write_json("checksums", json_file, expected.to_json() if form == "f8emu" else expected.engine_json())
    lines = [f"not predicted: {name}: {why}" for name, why in expected.not_predicted]
    mismatches = () if answer is None else expected.compare(answer)
    if answer is not None:
        lines = [mismatch.text for mismatch in sorted(mismatches, key=lambda mismatch: not mismatch.outcome.is_fault)]
    for line in lines[:errors]:
        say(line)
    if len(lines) > errors:
        say(f"and {len(lines) - errors} more; --errors prints them")
    for note in expected.notes:
        say(f"note: {note}")
    say(f"{expected.engine}: {expected.engine_versions}; kernel {expected.kernel}; digests: {expected.digests}")
    faults = sum(mismatch.outcome.is_fault for mismatch in mismatches)
    left = len(mismatches) - faults if answer is not None else len(expected.not_predicted)
    compared = "" if answer is None else f", {faults} differ"
    ranks = counted(expected.tensor_parallel, "rank")
    tensors = f"{counted(len(expected.tensors), 'tensor')} on {ranks}{compared}"
    say(f"{tensors}, {left} not predicted or not shown")
    return Exit.DIFFERENT if faults else Exit.INCOMPLETE if left else Exit.EQUAL
