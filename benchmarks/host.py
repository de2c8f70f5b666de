"""Host time and step time of small feed-forward blocks: what a float8 layer adds to bfloat16's launch.

    python -m benchmarks.host --json OUT

Blocks of RMSNorm, w1, w3, SiLU, product, w2 and residual, forward and backward, compiled, eager, and compiled and
captured in a CUDA graph. Host time is a clock around steps that nothing waits for: at dim 512 the GPU is ahead, and it
is what the host needs; at dim 2048 the launch queue may fill, and the host then waits for the GPU. Step time is between
two events. Subjects take turns, a few steps each; the figure is the median over rounds.

Delayed scaling's update is part of the step, in a CUDA graph too.
Exit status 1 if f8emu fails, gives a number that is not finite, or compiled layers differ from eager ones.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from benchmarks import workloads
from benchmarks.equality import equal_compiled
from benchmarks.measure import forget, measure
from benchmarks.report import draw, facts, figure, say, write_json
from benchmarks.subjects import BASELINE, SUBJECTS
from benchmarks.timing import copy_bandwidth
from benchmarks.workloads import Floor, Workload

MODES = ("compiled", "eager", "graph")
_DEFAULT = tuple(name for name in SUBJECTS if name != "torchao/rowwise_with_gw_hp")


class Size(NamedTuple):
    """Of the blocks and their input."""

    dim: int
    hidden: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "dim,hidden,tokens"."""
        return cls(*map(int, text.split(",")))


SIZES = (Size(512, 2048, 512), Size(2048, 8192, 4096))
_TINY = Size(64, 128, 32)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints tables, records, and gives the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(given)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 256  # as in benchmarks.linear
    torch._dynamo.config.accumulated_recompile_limit = 1024
    sizes, blocks = ((_TINY,), 1) if arguments.tiny else (arguments.sizes, arguments.blocks)
    rounds, steps = (1, 1) if arguments.tiny else (arguments.rounds, arguments.steps)
    modes = list(arguments.modes)
    if "graph" in modes and device.type != "cuda":
        modes.remove("graph")
        say("mode graph: left out, CUDA graphs need a GPU")
    report = facts("benchmarks.host", given, device)
    report |= {"blocks": blocks, "rounds": rounds, "steps": steps, "compiled_against_eager": [], "measured": []}
    say(f"{report['device']}, torch {report['versions']['torch']}, torchao {report['versions']['torchao']}")
    floor = Floor(device, copy_bandwidth(device))
    for size in sizes:
        if "compiled" in modes:
            report["compiled_against_eager"] += _equality(arguments.subjects, size, device)
        workload = workloads.feed_forwards(size.tokens, size.dim, size.hidden, blocks)
        for mode in modes:
            entries = measure(
                workload,
                [(name, "eager" if mode == "eager" else "compiled") for name in arguments.subjects],
                device,
                rounds=rounds,
                steps=steps,
                floor=floor,
                is_graph=mode == "graph",
            )
            add_host(entries, len(workload.layers))
            report["measured"].append({**size._asdict(), "mode": mode, "subjects": entries})
            _draw(workload, mode, entries)
            if arguments.json:
                write_json(arguments.json, report)
        forget()  # not after each mode: the graphs replay what was compiled before
    return _status(report)


def add_host(entries: Sequence[dict[str, Any]], layers: int) -> None:
    """Adds the milliseconds of host time that one layer costs more than bfloat16's."""
    plain = next((e["enqueue_ms"] for e in entries if e["subject"] == BASELINE and "enqueue_ms" in e), None)
    if plain is None:
        return
    for entry in entries:
        if "enqueue_ms" in entry:
            entry["host_ms_added_a_layer"] = (entry["enqueue_ms"] - plain) / layers


def _equality(subjects: Sequence[str], size: Size, device: torch.device) -> list[dict[str, Any]]:
    """Compiled against eager layers of every subject of f8emu; how many numbers differ."""
    found: list[dict[str, Any]] = []
    for subject in (name for name in subjects if name.startswith("f8emu/")):
        entry: dict[str, Any] = {"subject": subject, **size._asdict()}
        found.append(entry)
        try:
            entry["numbers_differing"] = equal_compiled(subject, size.tokens, size.dim, size.hidden, device)
            verdict = f"numbers differing {entry['numbers_differing']}"
        except Exception as error:  # as in `measure`
            entry["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            verdict = f"FAILED, {entry['failed']}"
        say(f"{subject}, layers {size.dim} -> {size.hidden} -> {size.dim}, compiled against eager: {verdict}")
        forget()
    return found


def _draw(workload: Workload, mode: str, entries: Sequence[dict[str, Any]]) -> None:
    columns = (
        "subject",
        "host ms",
        "added a layer",
        "step ms",
        "times bf16",
        "floor ms",
        "peak MiB",
    )
    rows = []
    for e in entries:
        if "ms" not in e:
            rows.append([e["subject"], "absent" if "absent" in e else "FAILED"])
            continue
        rows.append(
            [
                e["subject"],
                f"{e['enqueue_ms']:.3f}",
                figure(e, "host_ms_added_a_layer", ".3f"),
                f"{e['ms']:.3f}",
                figure(e, "speed", ".3f"),
                f"{e['floor_ms']:.3f}",
                f"{e['peak_bytes'] / 2**20:.0f}" if e.get("peak_bytes") else "-",
            ]
        )
    draw(f"{workload.title}, {workload.tokens} tokens, {mode}, forward + backward", columns, rows)
    for e in entries:
        if "absent" in e or "failed" in e:
            say(f"{e['subject']} {mode}: {e.get('absent') or e.get('failed')}")
        elif not e["is_finite"]:
            say(f"{e['subject']} {mode}: an output or gradient is not finite")
        if e.get("compiled_while_timed"):
            say(f"{e['subject']} {mode}: something was compiled while it was timed: do not use its figures")


def _status(report: dict[str, Any]) -> int:
    own = [e for m in report["measured"] for e in m["subjects"] if not e["subject"].startswith("torchao/")]
    is_broken = any("failed" in e or not e["is_finite"] for e in own)
    compared = report["compiled_against_eager"]
    return int(is_broken or any("failed" in e or any(e["numbers_differing"].values()) for e in compared))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description="Host time of float8 layers.")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=_DEFAULT)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--sizes", nargs="+", type=Size.parse, default=SIZES, metavar="DIM,HIDDEN,TOKENS")
    parser.add_argument("--blocks", type=int, default=4, help="of three layers each (default 4)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every subject (default 7)")
    parser.add_argument("--steps", type=int, default=20, help="steps a turn (default 20)")
    parser.add_argument("--tiny", action="store_true", help="one block of tiny layers, one step: for tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
