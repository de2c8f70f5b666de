"""`f8emu verify --recordings FILE`: recorded instructions, replayed by the profiles of chips."""

import time
from collections.abc import Sequence
from pathlib import Path

from f8emu.cli.conclusion import Files, conclude, opened_files
from f8emu.cli.frame import say
from f8emu.spec import Evidence, MissingExtraError, SpecError


def verify_recordings(names: Sequence[str], path: Path, chips: Sequence[str], files: Files, errors: int) -> int:
    """The exit status of the command; `chips` are `NAME=PROFILE`."""
    from f8emu.conformance.record.instructions import SUBJECTS, instruction_subject, read_recordings, replay
    from f8emu.conformance.run.report import progress_bar

    start = time.perf_counter()
    with opened_files(files) as outputs:
        file = read_recordings(path, dict(_named(chip) for chip in chips))
        subjects, not_run = [], {}
        for name in names or SUBJECTS:
            try:
                subjects.append(instruction_subject(name))
            except MissingExtraError as error:
                if names:
                    raise
                not_run[name] = str(error)
        with progress_bar() as progress:
            result = replay(subjects, file, errors=errors, progress=progress)
        source = f"{file.path.name} {file.sha256[:12]}"
        status = conclude(result, outputs, source=source, start=start, errors=errors, not_run=not_run)
        for name, chip in dict((recording.chip_name, recording.chip) for recording in file.recordings).items():
            evidence = "" if chip.evidence is Evidence.LITERATURE else f" ({chip.evidence.value})"
            say(f"{name}: profile {chip}{evidence}")
        return status


def _named(chip: str) -> tuple[str, str]:
    name, separator, profile = chip.partition("=")
    if not (name and separator and profile):
        raise SpecError(f"verify --chip: expected NAME=PROFILE, such as L4=Ada; got {chip!r}")
    return name, profile
