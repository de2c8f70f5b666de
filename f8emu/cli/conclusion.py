"""How a run of the suite ends: tables, lines and files of what was found, and the exit status."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from f8emu.cli.frame import BAD_USAGE, DIFFERENT, INTERRUPTED, console, opened

if TYPE_CHECKING:
    from f8emu.conformance.diagnosis.report import Diagnoses
    from f8emu.conformance.verify import Result


class Files(NamedTuple):
    """Where reports go; None: nowhere."""

    json: Path | None
    html: Path | None


class Outputs(NamedTuple):
    """The same, opened."""

    json: TextIO | None
    html: TextIO | None


@contextmanager
def opened_files(files: Files) -> Iterator[Outputs]:
    """Both files, opened before any work.

    Raises:
        MissingExtraError: a page is wanted and plotly is not installed.
        SpecError: a file cannot be written.
    """
    from f8emu.conformance.page.html import require_plotly

    if files.html is not None:
        require_plotly("f8emu verify --html")
    with opened("verify", files.json) as out, opened("verify", files.html) as page:
        yield Outputs(out, page)


def conclude(
    result: "Result",
    outputs: Outputs,
    *,
    source: str,
    start: float,
    errors: int,
    not_run: Mapping[str, str],
    diagnoses: "Diagnoses | None" = None,
) -> int:
    """The exit status, after everything was printed and written; `source` names the recording."""
    from f8emu.conformance import report
    from f8emu.conformance.breakdown.tables import breakdown_tables
    from f8emu.conformance.diagnosis.report import diagnosis_lines
    from f8emu.conformance.page.report import to_html

    found: Diagnoses = diagnoses or {}
    screen = console()
    for subject in result.subjects:
        screen.print(report.table(subject))
        for part in breakdown_tables(subject):
            screen.print(part, markup=False)
    for line in (*report.mismatch_lines(result, errors), *diagnosis_lines(found)):
        print(line)
    for reason in not_run.values():
        print(f"not run: {reason}")
    seconds = time.perf_counter() - start
    print(f"{report.verdict(result)}; {source}; {seconds:.1f} s")
    command = ["f8emu", *sys.argv[1:]]
    if outputs.json is not None:
        data = report.to_json(result, command=command, seconds=seconds, errors=errors, not_run=not_run, diagnoses=found)
        outputs.json.write(json.dumps(data, indent=1) + "\n")
    if outputs.html is not None:
        outputs.html.write(
            to_html(result, command=command, seconds=seconds, errors=errors, not_run=not_run, diagnoses=found)
        )
    if result.is_interrupted:
        return INTERRUPTED
    return DIFFERENT if result.has_difference else 0 if result.is_equal else BAD_USAGE
