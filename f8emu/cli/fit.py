"""`f8emu fit`: which rules a kernel follows."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from f8emu.cli import frame
from f8emu.cli.frame import HTML, JSON, Arrays, guarded
from f8emu.cli.paths import ReportOrNone
from f8emu.cli.progress import progress_bar
from f8emu.cli.screen import say, show
from f8emu.spec import SpecError

if TYPE_CHECKING:
    import typer

_DIFFERS = "a rule is unconfirmed, a row's bits depend on M, or results contradict each other"
_LEFT = "random GEMMs confirm the rules, and a GEMM with another M, N or K misses them"
_EXAMPLES = (
    "f8emu fit torch --kind 'rowwise fast'",
    "f8emu fit my_kernels.py:scaled_mm --m 1 --m 4096 --html fit.html",
)


def add_to(app: "typer.Typer") -> None:
    """Add the command."""
    import typer

    @app.command(epilog=frame.ending(*_EXAMPLES, differs=_DIFFERS, left=_LEFT))
    def fit(
        kernel: Annotated[str, typer.Argument(help="A subject of `f8emu verify`: package.module:function, torch, ...")],
        json_file: Annotated[ReportOrNone, typer.Option("--json", metavar="OUT", help=JSON)] = None,
        html_file: Annotated[ReportOrNone, typer.Option("--html", metavar="OUT", help=HTML)] = None,
        arrays: Annotated[Arrays, typer.Option(help="Framework whose arrays your own kernel takes.")] = Arrays.TORCH,
        kind: Annotated[
            list[str] | None,
            typer.Option(help="Fit only this kind of GEMM, 'rowwise fast'; may be repeated. A wrong name lists them."),
        ] = None,
        m: Annotated[
            list[int] | None,
            typer.Option(min=1, max=frame.MOST, help="Rows to try instead of 1 to 4112; may be repeated."),
        ] = None,
        timeout: Annotated[float | None, typer.Option(metavar="SECONDS", max=frame.MOST, help=frame.SECONDS)] = None,
        here: Annotated[bool, typer.Option("--here", help=frame.HERE)] = False,
    ) -> None:
        """Measure the unknown rules of a kernel, and confirm them by bits, also at other sizes.

        Ctrl-C ends it, and the findings so far are reported.
        """
        raise typer.Exit(
            guarded(_fit, kernel, (json_file, html_file), arrays.value, kind or [], m or [], timeout, here)
        )


def _fit(
    kernel: str,
    files: tuple[Path | None, Path | None],
    arrays: str,
    kinds: list[str],
    ms: list[int],
    timeout: float | None,
    here: bool,
) -> int:
    from f8emu.conformance.diagnosis.fit import fit
    from f8emu.conformance.diagnosis.probes import KINDS
    from f8emu.conformance.run.runner import begin_subject_and_call
    from f8emu.report.diagnosis import fit_json, fit_page, fit_verdict
    from f8emu.report.page import render

    start = time.perf_counter()
    # 1. Bad usage is told before the kernel is loaded.
    known = {kind.name: kind for kind in KINDS}
    unknown = [name for name in kinds if name not in known]
    if unknown:
        raise SpecError(f"fit: unknown kind {unknown[0]!r}; known kinds are {', '.join(known)}")
    if ":" in kernel:
        frame.find_modules_here()
    # 2. The fit, its tables, its verdict, and the JSON.
    subject = begin_subject_and_call(kernel, arrays=arrays, timeout=timeout, here=here)()
    with progress_bar() as progress:
        result = fit(subject, kinds=[known[name] for name in kinds] or KINDS, ms=ms, progress=progress)
    words = [kernel, "--arrays", arrays] if ":" in kernel else [kernel]
    page = fit_page(result, words)
    show(page)
    seconds, verdict = time.perf_counter() - start, fit_verdict(result)
    say(f"{verdict.line}; {seconds:.1f} s")
    frame.write("fit", files[1], lambda: render("f8emu fit", page))
    frame.write_json("fit", files[0], fit_json(result, command=frame.command_line(), seconds=seconds))
    return verdict.status
