"""Sound checkpoints of eleven tools under `f8emu audit`, with and without their source: nothing is found.

    python -m benchmarks.proofs.sound_checkpoints --json OUT

Ten random models of every tool, in the layouts of `tests/audit/sound.py`; and, where the packages of
constraints/stacks.txt are installed (`make install`), ten that those packages write. A finding above a note, a weight
that was not compared, and a dialect that was not named count as wrong. Exit status 1 if there is one.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.runner import Bench, draw_entries, option, say
from tests.audit.sound import TOOLS, accused, sound
from tests.audit.written import WRITERS

STACKS = Path(sys.prefix, "stacks")
BENCH = Bench("benchmarks.proofs.sound_checkpoints", __doc__, option("seeds", 10, "models of every tool"))


def in_layouts(seeds: int) -> Iterator[tuple[str, str, list[str]]]:
    """Tool, its layout, and what is wrong."""
    for tool in TOOLS:
        for seed in range(seeds):
            made = sound(tool, seed)
            with tempfile.TemporaryDirectory() as folder:
                yield tool, f"seed {seed}, {made.variant}", accused(*made.write(Path(folder)), made.dialect)


def by_packages(seeds: int) -> Iterator[tuple[str, str, list[str]]]:
    """The same of what packages write, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(STACKS)])}
        command = [sys.executable, "-m", "tests.audit.written", folder, str(seeds)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        for name in WRITERS:
            for seed in range(seeds):
                at = Path(folder, str(seed))
                yield f"package: {name}", f"seed {seed}", accused(at / name, at / "source", name)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, device="cpu")
    audited = [*in_layouts(run.arguments.seeds), *(by_packages(run.arguments.seeds) if STACKS.exists() else ())]
    for tool, layout, wrong in audited:
        if wrong:
            say(f"{tool}, {layout}: {wrong[0]}; {len(wrong)} in all")
    tools = dict.fromkeys(tool for tool, _, _ in audited)
    of = {tool: [wrong for name, _, wrong in audited if name == tool] for tool in tools}
    entries = [{"tool": tool, "checkpoints": len(all), "accused": sum(map(bool, all))} for tool, all in of.items()]
    draw_entries("audited with and without a source", entries, "checkpoints: accused:", of="tool")
    run.record(tools=entries)
    return int(any(wrong for _, _, wrong in audited))


if __name__ == "__main__":
    sys.exit(main())
