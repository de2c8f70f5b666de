"""`f8emu verify --recordings FILE`: instructions recorded by anybody, replayed by the profiles of chips."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from f8emu.cli.frame import BAD_USAGE, DIFFERENT, INTERRUPTED, console, opened
from f8emu.spec import Evidence, MissingExtraError, SpecError


def verify_recordings(
    names: Sequence[str], path: Path, chips: Sequence[str], files: tuple[Path | None, Path | None], errors: int
) -> int:
    """The exit status of the command; `chips` are `NAME=PROFILE`."""
    from f8emu.conformance import report
    from f8emu.conformance.instructions import SUBJECTS, instruction_subject, read_recordings, replay

    start = time.perf_counter()
    with opened("verify", files[0]) as out:
        file = read_recordings(path, dict(_named(chip) for chip in chips))
        subjects, not_run = [], {}
        for name in names or SUBJECTS:
            try:
                subjects.append(instruction_subject(name))
            except MissingExtraError as error:
                if names:
                    raise
                not_run[name] = str(error)
        with report.progress_bar() as progress:
            result = replay(subjects, file, errors=errors, progress=progress)
        screen = console()
        for name, chip in dict((recording.chip_name, recording.chip) for recording in file.recordings).items():
            print(
                f"{name}: profile {chip}"
                + ("" if chip.evidence is Evidence.LITERATURE else f" ({chip.evidence.value})")
            )
        for subject in result.subjects:
            screen.print(report.table(subject))
        for line in report.mismatch_lines(result, errors):
            print(line)
        for reason in not_run.values():
            print(f"not run: {reason}")
        seconds = time.perf_counter() - start
        print(f"{report.verdict(result)}; {file.path.name} {file.sha256[:12]}; {seconds:.1f} s")
        if out is not None:
            command = ["f8emu", *sys.argv[1:]]
            data = report.to_json(result, command=command, seconds=seconds, errors=errors, not_run=not_run)
            out.write(json.dumps(data, indent=1) + "\n")
    if result.is_interrupted:
        return INTERRUPTED
    return DIFFERENT if result.has_difference else 0 if result.is_equal else BAD_USAGE


def _named(chip: str) -> tuple[str, str]:
    name, separator, profile = chip.partition("=")
    if not (name and separator and profile):
        raise SpecError(f"verify --chip: expected NAME=PROFILE, such as L4=Ada; got {chip!r}")
    return name, profile
