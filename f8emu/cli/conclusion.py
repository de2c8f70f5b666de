"""How a run of the suite ends: tables, lines and files of what was found, and the exit status."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from f8emu.cli.frame import Report, console, opened, say, status_of
from f8emu.untrusted import printable

if TYPE_CHECKING:
    from f8emu.conformance.diagnosis.report import Diagnoses
    from f8emu.conformance.run.verify import Result


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


def conclude(
    result: "Result",
    outputs: Outputs,
    *,
    source: str,
    start: float,
    errors: int,
    not_run: Mapping[str, str],
    diagnoses: "Diagnoses | None" = None,
    asked: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """The exit status, after everything was printed and written; `source` names the recording.

    Every output is written, even if another one fails. `asked` is that of `report.paste_lines`; None where no
    case can be run alone.
    """
    found: Diagnoses = diagnoses or {}
    seconds = time.perf_counter() - start
    facts: dict[str, Any] = {
        "command": ["f8emu", *sys.argv[1:]],
        "seconds": seconds,
        "errors": errors,
        "not_run": not_run,
        "diagnoses": found,
    }
    with ExitStack() as afterwards:  # runs the last first, and each whatever became of the one before
        afterwards.callback(_write_html, result, outputs.html, {**facts, "asked": asked or {}})
        afterwards.callback(_write_json, result, outputs.json, facts)
        _print(result, facts, source, asked or {})
    return status_of(result)


def _print(result: "Result", facts: Mapping[str, Any], source: str, asked: Mapping[str, Sequence[str]]) -> None:
    """The verdict, why, an output of each case, what ran, and what can be pasted."""
    from f8emu.conformance.breakdown.tables import breakdown_tables
    from f8emu.conformance.diagnosis.report import diagnosis_lines
    from f8emu.conformance.run import report

    say(f"{report.verdict(result)}; {source}; {facts['seconds']:.1f} s")
    for part in (diagnosis_lines(facts["diagnoses"]), report.mismatch_lines(result, facts["errors"])):
        _paragraph(part)
    screen = console()
    for subject in result.subjects:
        _paragraph(report.subject_lines(subject))
        for part in breakdown_tables(subject):
            if isinstance(part, str):
                say(part)
            else:
                screen.print(part, markup=False)
    for reason in facts["not_run"].values():
        say(f"not run: {reason}")
    for i, line in enumerate(report.paste_lines(result, asked)):
        print("\n" * (i == 0) + printable(line))


def _paragraph(lines: Iterable[str]) -> None:
    """The lines after an empty one; nothing of none."""
    for i, line in enumerate(lines):
        if i == 0:
            print()
        say(line)


def _write_json(result: "Result", file: Report | None, facts: Mapping[str, Any]) -> None:
    from f8emu.conformance.run.report import to_json

    if file is not None:
        file.write_json(to_json(result, **facts))


def _write_html(result: "Result", file: Report | None, facts: Mapping[str, Any]) -> None:
    from f8emu.report.verify import to_html

    if file is not None:
        file.write(to_html(result, **facts))
