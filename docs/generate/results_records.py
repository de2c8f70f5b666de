"""The recorded JSON files of `benchmarks/results`, and how a page shows one: its figures, device, versions, command."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from f8emu.report.svg import Svg, style

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
"""The rows of most tables, in this order."""

NO_FIGURE = "-"

_MOVED = {"benchmarks.exhaustive": "benchmarks.proofs.exhaustive"}
"""Programs that a file names as they were called when it was recorded."""

_OUR_OWN = re.compile(r" --(json|plot|wheels|logs?|seconds|least) \S+")
"""Arguments of a recorded command that say only where files lay and how long the machine was free."""

_REMOVED = re.compile(r" f8emu/\w+/feed_forward\b")
"""Subjects of a recorded command that no longer exist."""

_PLACEHOLDERS = {"/root/out/recorded_layers.json": "FILE", "/tmp/h200caps": "FOLDER"}

Entry = dict[str, Any]


@cache
def record(name: str) -> Entry:
    """The contents of one recorded file, by its name without `.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def names() -> list[str]:
    """All recorded files, sorted, without `.json`."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def subject(run: Entry, name: str, mode: str | None = None) -> Entry:
    """The figures of one subject of a run; empty if the run did not have it."""
    found = (s for s in run["subjects"] if s["subject"] == name and mode in (None, s.get("mode")))
    return next(found, {})


def workload(file: str | Entry, name: str = "feed_forward", checkpointing: str = "none") -> Entry:
    """One workload of a recording of `benchmarks.linear`."""
    run = record(file) if isinstance(file, str) else file
    return next(w for w in run["workloads"] if (w["name"], w["checkpointing"]) == (name, checkpointing))


# How figures are written


_SUFFIXES = {"+all-gather": ", all-gather", "+at-rest": ", at rest", "+recompute": ", `recompute_casts=True`"}


def shown_as(name: str) -> str:
    """The name of what was timed, as a page has it."""
    for mark, words in {"/": " ", "bf16": "bfloat16", **_SUFFIXES}.items():
        name = name.replace(mark, words)
    return name


def times(value: float | None) -> str:
    """A ratio to bfloat16, or a dash."""
    return NO_FIGURE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share of one."""
    return NO_FIGURE if value is None else f"{100 * value:.0f} %"


def count(value: int) -> str:
    """An integer with its thousands apart."""
    return f"{value:,}"


def of(part: int, whole: int) -> str:
    """How many of how many."""
    return f"{part:,} of {whole:,}"


def span(values: Iterable[float | None], form: str = ".2f") -> str:
    """The least and the greatest of several runs, or the one figure if they read the same."""
    found = [v for v in values if v is not None]
    if not found:
        return NO_FIGURE
    least, greatest = format(min(found), form), format(max(found), form)
    return least if least == greatest else f"{least} to {greatest}"


def middle(values: Iterable[float | None], form: str = ".2f") -> str:
    """The median of several runs, with their range behind it."""
    found = [v for v in values if v is not None]
    if len(found) < 2:
        return span(found, form)
    return f"{median(found):{form}} ({span(found, form)})"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; columns of figures stand to the right."""
    rows = list(rows)
    sides = ("---:" if all(map(_is_figure, cells)) else "---" for cells in zip(*rows, strict=True))
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(sides) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _is_figure(cell: str) -> bool:
    return not re.search(r"[a-zA-Z]", re.sub(r"\b(of|to|x)\b", "", cell))


# What stands beside figures


def last_run(name: str) -> Entry:
    """The recording itself, or the last of its runs where a file holds several with a command each."""
    held = record(name)
    return held["runs"][-1] if "command" in held.get("runs", [{}])[-1] else held.get("from_the_end", held)


def command(name: str) -> str:
    """The command of a recording as one can run it again: the last one where a file holds several runs."""
    held = last_run(name)
    found = held["command"] if isinstance(held["command"], str) else shlex.join(held["command"])
    found = _OUR_OWN.sub("", _REMOVED.sub("", re.split(r"[,;] ", found)[0].replace("python3 ", "python ")))
    for before, now in (_MOVED | _PLACEHOLDERS).items():
        found = found.replace(before, now)
    return found if found.startswith(("python ", "torchrun ", "f8emu ")) else ""


def device(name: str) -> str:
    """The machine of a recording."""
    held = record(name)
    if held.get("jax_device") == "cpu" and "cores" in held:
        return f"{held['device']}, {held['cores']} cores"
    if "device" in held:
        return held["device"].replace("cpu,", "CPU,")
    if "devices" in held:
        return next((names[0] for kind, names in held["devices"].items() if kind != "cpu"), "CPU")
    if "from_the_end" in held:
        return held["from_the_end"]["device"]
    return f"CPU ({held['cpu']}, {held['cores']} cores)" if "cpu" in held else f"CPU ({held['machine']})"


def versions(name: str, packages: Sequence[str]) -> str:
    """The versions of these packages, those that the recording has."""
    held = record(name)
    found = held.get("packages", {}) | (held.get("versions") or last_run(name).get("versions") or held)
    held_versions = [(package, found.get(package)) for package in packages]
    if "library" in held:
        held_versions.append(("", held["library"]))
    return ", ".join(f"{package} {version}".strip() for package, version in held_versions if isinstance(version, str))


def commits(name: str) -> str:
    """The commits at which a recording was made, if it says so."""
    held = record(name)
    entries = (held, held.get("from_the_end", {}), *held.get("runs", []))
    texts = [str(entry.get(key, "")) for entry in entries for key in ("recorded_at", "note")]
    found = list(dict.fromkeys(c for text in texts for c in re.findall(r"\b[0-9a-f]{7}\b", text)))
    return ", ".join(found) if len(found) < 4 else f"{len(found)} commits, the last {found[-1]}"


def source(name: str, packages: Sequence[str] = ("torch", "torchao", "triton")) -> str:
    """What is under a table: the machine, and folded the record with the command that measures it again."""
    facts = [device(name), versions(name, packages), f"f8emu at {commits(name)}" if commits(name) else ""]
    record_of = f"[{name}.json](data/{name}.json)."
    again = command(name)
    runs = len(record(name)["runs"]) if last_run(name) is not record(name) and "runs" in record(name) else 1
    which = f" (the last of {runs} runs)" if runs > 1 else ""
    measured = f" Measure again{which}: `{again}`" if again else ""
    head = "; ".join(filter(None, facts))
    return f'<details class="source" markdown="span"><summary>{head}</summary>{record_of}{measured}</details>'


def lines(*files: str, packages: Sequence[str] = ("torch", "torchao", "triton")) -> str:
    """The lines under a table that several recordings make."""
    return "\n".join(source(name, packages) for name in files)


def inline(chart: Svg, title: str) -> str:
    """A chart as a block of a markdown page, where it takes the page's own text colour."""
    return f'<figure style="margin:1em 0;width:100%;max-width:520px">{chart.html(title, css=style())}</figure>'
