"""Host time and step time of small feed-forward blocks: what a float8 layer adds to bfloat16's launch.

    python -m benchmarks.host --json OUT

Blocks of RMSNorm, w1, w3, SiLU, product, w2 and residual, forward and backward, compiled, eager, and compiled and
captured in a CUDA graph. Host time is a clock around steps that nothing waits for: at dim 512 the GPU is ahead, and it
is what the host needs; at dim 2048 the launch queue may fill, and the host then waits for the GPU. Step time is between
two events. Subjects take turns, a few steps each; the figure is the median over rounds.

Delayed scaling's update is part of the step, in a CUDA graph too.
Exit status 1 if f8emu fails, gives a number that is not finite, or compiled layers differ from eager ones.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from benchmarks import workloads
from benchmarks.equality import equal_compiled
from benchmarks.measure import forget, is_wrong, measure
from benchmarks.runner import (
    DEVICE,
    Bench,
    Columns,
    Entry,
    attempt,
    compile_without_limits,
    draw_entries,
    option,
    say,
    scaled,
    turns_of,
)
from benchmarks.subjects import BASELINE, SUBJECTS
from benchmarks.timing import copy_bandwidth
from benchmarks.workloads import Floor

MODES = ("compiled", "eager", "graph")


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


BENCH = Bench(
    "benchmarks.host",
    "Host time of float8 layers.",
    option("subjects", tuple(name for name in SUBJECTS if name != "torchao/rowwise_with_gw_hp"), choices=SUBJECTS),
    option("modes", MODES, choices=MODES),
    option("sizes", SIZES, "of blocks and input", type=Size.parse, metavar="DIM,HIDDEN,TOKENS"),
    option("blocks", 4, "of three layers each"),
    *turns_of(7, 20),
    option("tiny", False, "one block of tiny layers, one step: for tests"),
    DEVICE,
)
_COLUMNS: Columns = {
    "host ms": "enqueue_ms:.3f",
    "added a layer": "host_ms_added_a_layer:.3f",
    "step ms": "ms:.3f",
    "times bf16": "speed:.3f",
    "floor ms": "floor_ms:.3f",
    "peak MiB": scaled("peak_bytes", 2**20, ".0f"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints tables, records, and gives the exit status."""
    run = BENCH.parse(argv)
    arguments, device, report = run.arguments, run.device, run.report
    torch.manual_seed(0)
    compile_without_limits()
    sizes, blocks = ((_TINY,), 1) if arguments.tiny else (arguments.sizes, arguments.blocks)
    rounds, steps = (1, 1) if arguments.tiny else (arguments.rounds, arguments.steps)
    modes = list(arguments.modes)
    if "graph" in modes and device.type != "cuda":
        modes.remove("graph")
        say("mode graph: left out, CUDA graphs need a GPU")
    report |= {"blocks": blocks, "rounds": rounds, "steps": steps, "compiled_against_eager": [], "measured": []}
    run.announce()
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
            title = f"{workload.title}, {workload.tokens} tokens, {mode}, forward + backward"
            draw_entries(title, entries, _COLUMNS)
            run.record()
        forget()  # not after each mode: the graphs replay what was compiled before
    compared = report["compiled_against_eager"]
    is_broken = any(is_wrong(e) for m in report["measured"] for e in m["subjects"])
    return int(is_broken or any("failed" in e or any(e["numbers_differing"].values()) for e in compared))


def add_host(entries: Sequence[Entry], layers: int) -> None:
    """Adds the milliseconds of host time that one layer costs more than bfloat16's."""
    plain = next((e["enqueue_ms"] for e in entries if e["subject"] == BASELINE and "enqueue_ms" in e), None)
    if plain is None:
        return
    for entry in entries:
        if "enqueue_ms" in entry:
            entry["host_ms_added_a_layer"] = (entry["enqueue_ms"] - plain) / layers


def _equality(subjects: Sequence[str], size: Size, device: torch.device) -> list[Entry]:
    """Compiled against eager layers of every subject of f8emu; how many numbers differ."""
    found: list[Entry] = []
    for subject in (name for name in subjects if name.startswith("f8emu/")):
        entry: Entry = {"subject": subject, **size._asdict()}
        found.append(entry)
        with attempt(entry):
            entry["numbers_differing"] = equal_compiled(subject, size.tokens, size.dim, size.hidden, device)
        verdict = "FAILED" if "failed" in entry else f"numbers differing {entry['numbers_differing']}"
        say(f"{subject}, layers {size.dim} -> {size.hidden} -> {size.dim}, compiled against eager: {verdict}")
        forget()
    return found


if __name__ == "__main__":
    sys.exit(main())
