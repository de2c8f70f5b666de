"""What every benchmark shares: its options, the facts of its record, subjects that take turns, ratios, and a table.

BENCH = Bench("benchmarks.matmul", __doc__, option("tokens", 16384), DEVICE)
run = BENCH.parse(argv)
run.record(gemms=...)
"""

import argparse
import gc
import importlib
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from f8emu.environment import versions

BASELINE = "bf16"
Entry = dict[str, Any]  # what is recorded of one subject
Option = tuple[str, dict[str, Any]]  # one option of a command line, as argparse takes it
Ready = TypeVar("Ready")


class AbsentError(Exception):
    """A subject that is not installed."""


# 1 Options


def option(name: str, default: Any, help: str = "", **settings: Any) -> Option:
    """`--name`, of the type of its default: a flag for False, a list for a tuple; a type has no default."""
    of: dict[str, Any] = {"default": default, "type": type(default)}
    if default is False:
        of = {"action": "store_true"}
    elif isinstance(default, type):
        of = {"type": default}
    elif isinstance(default, tuple):
        of |= {"nargs": "+", "type": type((*default, *settings.get("choices", ()), "")[0])}
    return f"--{name}", {**of, "help": help or name, **settings}


def turns_of(rounds: int, *steps: int) -> tuple[Option, ...]:
    """`--rounds`, and `--steps` of a turn where there are any."""
    of_rounds = option("rounds", rounds, "turns of every subject")
    return (of_rounds, *(option("steps", count, "steps a turn") for count in steps))


DEVICE = option("device", "cuda" if torch.cuda.is_available() else "cpu")


class Bench:
    """A script: how it is called, and its options; `--json` is one of every script."""

    def __init__(self, module: str, document: str | None, *options: Option) -> None:
        self.module, self.document = module, document or ""
        self.options = (*options, option("json", Path, "where to record"))

    def parse(self, argv: Sequence[str] | None, device: str | None = None) -> "Run":
        """What was asked for, on the device of `--device` or the one given."""
        given = list(sys.argv[1:] if argv is None else argv)
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=self.document.partition("\n")[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        for name, settings in self.options:
            parser.add_argument(name, **settings)
        cut = given.index("--") if "--" in given else len(given)
        arguments = parser.parse_args(given[:cut], argparse.Namespace(passed_on=given[cut + 1 :]))
        torch.manual_seed(0)
        return Run(self.module, given, arguments, torch.device(device or arguments.device))


class Run:
    """One run of a script: its arguments, its device and its record."""

    def __init__(self, module: str, given: Sequence[str], arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        found = versions() | {package: package_version(package) for package in ("torchao", "triton")}
        self.report: dict[str, Any] = {
            "command": shlex.join(["python", "-m", module, *given]),
            "device": f"cpu, {torch.get_num_threads()} threads",
            "versions": found | {"cuda": torch.version.cuda},
        }
        if device.type == "cuda":
            self.report["device"] = torch.cuda.get_device_name(device)

    def announce(self, more: str = "") -> None:
        """The device and the version of torch, in a line."""
        say(f"{self.report['device']}{more}, torch {self.report['versions']['torch']}")

    def record(self, **more: Any) -> None:
        """Adds to the record, and writes it where `--json` says."""
        self.report |= more
        if self.arguments.json:
            write_json(self.arguments.json, self.report)


# 2 The record


def package_version(package: str) -> str | None:
    """None is not installed. A package that only lies on the path has its own `__version__`."""
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(package), "__version__", "unknown")
    except ImportError:
        return None


def write_json(path: Path, report: dict[str, Any]) -> None:
    """The report, whole or not at all: a run that is cut off leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


# 3 Subjects


def compile_without_limits() -> None:
    """One model under many subjects is many compilations of one forward(), each of them wanted."""
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024


@contextmanager
def attempt(entry: Entry) -> Iterator[None]:
    """One subject that fails costs its row, not the run: the entry says why."""
    try:
        yield
    except AbsentError as error:
        entry["absent"] = str(error)
    except Exception as error:  # whatever it is
        entry["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        say(f"{entry.get('subject', '')} {entry.get('mode', '')} failed: {error}")


def race(
    entries: Iterable[Entry], prepare: Callable[[Entry], Ready], turn: Callable[[Ready], float], rounds: int
) -> list[tuple[Entry, Ready]]:
    """Prepares a subject for each entry, then lets all take turns, so that they see the same clocks and temperature.

    An entry gets the figures of its turns, which give milliseconds, or the reason why there are none. The result is
    the entries that have figures, with their subjects.
    """
    ready: list[tuple[Entry, Ready, list[float]]] = []
    for entry in entries:
        start = time.perf_counter()
        with attempt(entry):
            ready.append((entry, prepare(entry), []))
            entry["warmup_s"] = round(time.perf_counter() - start, 2)
    # A full collection walks through the compiled code of all subjects, in the turn of one.
    gc.collect()
    gc.freeze()
    for entry, subject, ms in ready * rounds:
        if "failed" not in entry:
            with attempt(entry):
                compiled = graphs_compiled()
                ms.append(turn(subject))
                entry |= spread(ms)
                if graphs_compiled() != compiled:
                    entry["compiled_while_timed"] = True
    gc.unfreeze()
    return [(entry, subject) for entry, subject, _ in ready if "failed" not in entry]


def graphs_compiled() -> int:
    """Since the process began."""
    stats: Any = torch._dynamo.utils.counters["stats"]
    return stats["unique_graphs"]


def spread(ms: Sequence[float]) -> Entry:
    """The median over rounds, the least and the greatest."""
    return {"ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms)}


def add_ratios(entries: Sequence[Entry], ratios: Mapping[str, str], baseline: str = BASELINE) -> None:
    """Adds `speed`, the baseline's `ms` over the entry's, and each of `ratios`: its name -> the figure divided by the
    baseline's. Entries are compared in one `mode`.
    """
    for entry in entries:
        same = [e for e in entries if e["subject"] == baseline and e.get("mode") == entry.get("mode") and "ms" in e]
        if "ms" not in entry or not same:
            continue
        entry["speed"] = same[0]["ms"] / entry["ms"]
        for name, key in ratios.items():
            if entry.get(key) and same[0].get(key):
                entry[name] = entry[key] / same[0][key]
        if "losses" in entry and len(entry["losses"]) == len(same[0]["losses"]):
            entry["last_loss_less_bf16"] = entry["losses"][-1] - same[0]["losses"][-1]


def is_wrong(entry: Entry) -> bool:
    """A subject of f8emu or the baseline that has no figures, or something that is not finite."""
    is_finite = entry.get("is_finite", True) and all(map(math.isfinite, entry.get("losses", ())))
    return not entry["subject"].startswith(("torchao/", "flax/")) and not ("ms" in entry and is_finite)


# 4 Tables


def draw(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; the first column is a name, the others are figures."""
    table = Table(title=Text(title, style="bold"), title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        table.add_row(*map(Text, row))
    # A pipe has no width of its own, and a table cut to 80 columns says nothing.
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(table)


def draw_entries(title: str, entries: Sequence[Entry], columns: str, *, of: str = "subject") -> None:
    """A table of entries, by the figures that `columns` names; below it why an entry has none, or none to believe."""
    rows, notes = [], []
    for e in entries:
        label = f"{e[of]} {e['mode']}" if "mode" in e else e[of]
        if missing := e.get("absent") or e.get("failed"):
            rows.append([label, "absent" if "absent" in e else "FAILED"])
            notes.append(f"{label}: {missing}")
            continue
        rows.append([label, *(figure(e, column) for column in columns.split())])
        if not e.get("is_finite", True):
            notes.append(f"{label}: an output or gradient is not finite")
        if e.get("compiled_while_timed"):
            notes.append(f"{label}: something was compiled while it was timed: do not use its figures")
    keys = (column.partition(":") for column in columns.split())
    heads = [f"{key} in {form}" if form in ("GiB", "us") else key for key, _, form in keys]
    draw(title, [of, *(head.replace("_", " ") for head in heads)], rows)
    for note in notes:
        say(note)


def figure(entry: Entry, column: str) -> str:
    """A figure of an entry for a table, as `key:format`; GiB and us are formats of bytes and milliseconds.

    `bounds` are the least and the greatest of the rounds. A list shows its first and last.
    """
    key, _, form = column.partition(":")
    if key == "bounds":
        return f"{entry['ms_min']:.3f} - {entry['ms_max']:.3f}"
    value = entry.get(key)
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"{value[0]:.4f} {value[-1]:.4f}"
    if form == "GiB":
        return f"{value / 2**30:.2f}"
    return f"{1e3 * value:.1f}" if form == "us" else format(value, form)


def say(line: str) -> None:
    """A line at once, also into a pipe: a run takes minutes."""
    print(line, file=sys.stdout, flush=True)
