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
from functools import partial
from typing import NamedTuple, Self

from benchmarks import runner, workloads
from benchmarks.equality import compared, equal_compiled, is_altered
from benchmarks.measure import forget, is_wrong, measure
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
SMALL_SUBJECTS = tuple(name for name in SUBJECTS if name != "torchao/rowwise_with_gw_hp")

BENCH = runner.Bench(
    "benchmarks.host",
    "Host time of float8 layers.",
    runner.option("subjects", SMALL_SUBJECTS, choices=SUBJECTS),
    runner.option("modes", MODES, choices=MODES),
    runner.option("sizes", SIZES, "of blocks and input", type=Size.parse, metavar="DIM,HIDDEN,TOKENS"),
    runner.option("blocks", 4, "of three layers each"),
    *runner.turns_of(7, 20),
    runner.option("tiny", False, "one block of tiny layers, one step: for tests"),
    runner.DEVICE,
)
_COLUMNS: runner.Columns = {
    "host ms": "enqueue_ms:.3f",
    "added a layer": "host_ms_added_a_layer:.3f",
    "step ms": "ms:.3f",
    "times bf16": "speed:.3f",
    "floor ms": "floor_ms:.3f",
    "peak MiB": runner.scaled("peak_bytes", 2**20, ".0f"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints tables, records, and gives the exit status."""
    run = BENCH.parse(argv)
    arguments, device, report = run.arguments, run.device, run.report
    runner.compile_without_limits()
    sizes, blocks = ((_TINY,), 1) if arguments.tiny else (arguments.sizes, arguments.blocks)
    rounds, steps = (1, 1) if arguments.tiny else (arguments.rounds, arguments.steps)
    modes = list(arguments.modes)
    if "graph" in modes and device.type != "cuda":
        modes.remove("graph")
        runner.say("mode graph: left out, CUDA graphs need a GPU")
    report |= {"blocks": blocks, "rounds": rounds, "steps": steps, "compiled_against_eager": [], "measured": []}
    run.announce()
    floor = Floor(device, copy_bandwidth(device))
    for size in sizes:
        if "compiled" in modes:
            of = size._asdict()
            what = f"layers {size.dim} -> {size.hidden} -> {size.dim}, compiled against eager"
            count = partial(equal_compiled, **of, device=device)
            report["compiled_against_eager"] += compared(arguments.subjects, what, count, **of)
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
            runner.draw_entries(title, entries, _COLUMNS)
            run.record()
        forget()  # not after each mode: the graphs replay what was compiled before
    is_broken = any(is_wrong(e) for m in report["measured"] for e in m["subjects"])
    return int(is_broken or is_altered(report["compiled_against_eager"]))


def add_host(entries: Sequence[runner.Entry], layers: int) -> None:
    """Adds the milliseconds of host time that one layer costs more than bfloat16's."""
    plain = next((e["enqueue_ms"] for e in entries if e["subject"] == BASELINE and "enqueue_ms" in e), None)
    if plain is None:
        return
    for entry in entries:
        if "enqueue_ms" in entry:
            entry["host_ms_added_a_layer"] = (entry["enqueue_ms"] - plain) / layers


if __name__ == "__main__":
    sys.exit(main())
