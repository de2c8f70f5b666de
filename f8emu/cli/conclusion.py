"""How a run of the suite ends: the verdict, a page, files of what was found, and the exit status."""

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from f8emu.cli.frame import Report, command_line, opened, say, show, status_of

if TYPE_CHECKING:
    from f8emu.conformance.run.result import Result


class Files(NamedTuple):
    """Where reports go; None: nowhere."""

    json: Path | None
    html: Path | None


class Outputs(NamedTuple):
    """The same, opened."""

    json: Report | None
    html: Report | None


@contextmanager
def opened_files(files: Files) -> Iterator[Outputs]:
    """Both files, opened before any work.

    Raises:
        SpecError: a file cannot be written.
    """
    with opened("verify", files.json) as out, opened("verify", files.html) as page:
        yield Outputs(out, page)


def conclude(result: "Result", outputs: Outputs, *, source: str, start: float, **facts: Any) -> int:
    """The exit status, after everything was printed and written; `source` names the recording.

    Every output is written, even if another one fails. `facts` are fields of `report.verify.Run`.
    """
    from f8emu.report import verify, verify_json
    from f8emu.report.html import render

    seconds = time.perf_counter() - start
    page = functools.cache(lambda: verify.page(result, run))
    run = verify.Run(command=command_line(), seconds=seconds, **facts)
    say(f"{verify.verdict(result)}; {source}; {seconds:.1f} s")
    print()
    with ExitStack() as afterwards:  # runs the last first, and each whatever became of the one before
        if html := outputs.html:
            afterwards.callback(lambda: html.write(render(verify.COMMAND, page())))
        if json := outputs.json:
            afterwards.callback(lambda: json.write_json(verify_json.to_json(result, run)))
        show(page())
    return status_of(result)
