"""`f8emu fit`: which rules a kernel follows."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import (
    BAD_USAGE,
    DIFFERENT,
    INTERRUPTED,
    ISOLATE,
    SECONDS,
    STATUSES,
    TIMEOUT,
    Arrays,
    console,
    find_modules_here,
    guarded,
    opened,
    progress_bar,
    say,
)
from f8emu.spec import SpecError

if TYPE_CHECKING:
    import typer

_KINDS = (
    *(
        f"{granularity} {chain}{bias}"
        for granularity in ("tensorwise", "rowwise")
        for bias in ("", " with bias")
        for chain in ("fast", "promoted")
    ),
    "blockwise_1x128 x blockwise_1x128",
    "blockwise_1x128 x blockwise_128x128",
    "blockwise_128x128 x blockwise_1x128",
)
"""The names of `diagnosis.probes.KINDS`, which the help names without loading it."""
MISSED = 3
_STATUSES = f"{STATUSES} {MISSED}: random GEMMs confirm the rules, and a GEMM with another M, N or K misses them."


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=_STATUSES)
    def fit(
        kernel: Annotated[str, typer.Argument(help="A subject of `f8emu verify`: package.module:function, torch, ...")],
        json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the findings.")] = None,
        arrays: Annotated[Arrays, typer.Option(help="Framework whose arrays your own kernel takes.")] = Arrays.TORCH,
        kind: Annotated[
            list[str] | None,
            typer.Option(help=f"Fit only this kind of GEMM; may be repeated. All by default: {', '.join(_KINDS)}."),
        ] = None,
        m: Annotated[
            list[int] | None, typer.Option(min=1, help="Number of rows to try instead of 1 to 4112; may be repeated.")
        ] = None,
        isolate: Annotated[bool, typer.Option("--isolate", help=ISOLATE)] = False,
        timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help=SECONDS)] = None,
    ) -> None:
        """Measure the unknown rules of a kernel, and confirm them by bits, also at other sizes.

        Ctrl-C ends it, and the findings so far are reported. Status 1 means unconfirmed rules, a row whose bits depend
        on M, or a kernel that contradicts itself. A size at which confirmed rules do not hold has its own status.
        """
        seconds = TIMEOUT if isolate and timeout is None else timeout
        raise typer.Exit(guarded(_fit, kernel, json_file, arrays.value, kind or [], m or [], seconds))


def _fit(
    kernel: str, json_file: Path | None, arrays: str, kinds: list[str], ms: list[int], timeout: float | None
) -> int:
    from f8emu.conformance.diagnosis import report as diagnosis_report
    from f8emu.conformance.diagnosis.fit import fit
    from f8emu.conformance.diagnosis.probes import KINDS
    from f8emu.conformance.run.runner import load_and_call

    start = time.perf_counter()
    # 1. Bad usage is told before the kernel is loaded.
    known = {kind.name: kind for kind in KINDS}
    unknown = [name for name in kinds if name not in known]
    if unknown:
        raise SpecError(f"fit: unknown kind {unknown[0]!r}; known kinds are {', '.join(known)}")
    if ":" in kernel:
        find_modules_here()
    # 2. The fit, its tables, and the JSON.
    with opened("fit", json_file) as out:
        subject = load_and_call(kernel, arrays=arrays, timeout=timeout)
        chosen = [known[name] for name in kinds] or KINDS
        with progress_bar() as progress:
            found = fit(subject, kinds=chosen, ms=ms, progress=progress)
        screen = console()
        say(f"{found.subject}   engine: {found.engine}")
        for one in found.kinds:
            if one.measured:
                screen.print(diagnosis_report.fit_table(one))
            for line in diagnosis_report.fit_lines(one):
                say(line)
        seconds = time.perf_counter() - start
        say(f"{diagnosis_report.fit_verdict(found)}; {seconds:.1f} s")
        if out is not None:
            data = diagnosis_report.fit_json(found, command=["f8emu", *sys.argv[1:]], seconds=seconds)
            out.write_json(data)
    # 3. The status: confirmed rules that miss another size have one of their own.
    if found.is_interrupted:
        return INTERRUPTED
    if not found.kinds:
        return BAD_USAGE
    if found.misses:
        return MISSED
    varies = any(one.is_batch_invariant is False for one in found.kinds)
    return 0 if found.is_confirmed and not varies else DIFFERENT
