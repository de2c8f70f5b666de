"""Host time and step time of small feed-forward blocks: what a float8 layer adds to bfloat16's launch.

    python -m benchmarks.host --json OUT

Blocks of RMSNorm, w1, w3, SiLU, product, w2 and residual, forward and backward, compiled, eager, and compiled and
captured in a CUDA graph. Host time is a clock around steps that nothing waits for: at dim 512 the GPU is ahead, and it
is what the host needs; at dim 2048 the launch queue may fill, and the host then waits for the GPU. Step time is between
two events. Subjects take turns, a few steps each; the figure is the median over rounds.

Delayed scaling's update is part of the step, in a CUDA graph too.
Exit status 1 if f8emu fails or gives a number that is not finite.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple, Self

from benchmarks import runner, workloads
from benchmarks.measure import forget, measure
from benchmarks.runner import BASELINE, Entry
from benchmarks.subjects import SUBJECTS
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


BENCH = runner.Bench(
    "benchmarks.host",
    __doc__,
    runner.option("subjects", tuple(s for s in SUBJECTS if s != "torchao/rowwise_with_gw_hp"), choices=SUBJECTS),
    runner.option("modes", MODES, choices=MODES),
    runner.option(
        "sizes", (Size(512, 2048, 512), Size(2048, 8192, 4096)), type=Size.parse, metavar="DIM,HIDDEN,TOKENS"
    ),
    runner.option("blocks", 4, "of three layers each"),
    *runner.turns_of(7, 20),
    runner.option("tiny", False, "one block of tiny layers, one step: for tests"),
    runner.DEVICE,
)
_COLUMNS = "enqueue_ms:.3f host_ms_added_a_layer:.3f ms:.3f speed:.3f floor_ms:.3f peak_bytes:GiB"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, device = run.arguments, run.device
    runner.compile_without_limits()
    sizes, blocks, rounds, steps = arguments.sizes, arguments.blocks, arguments.rounds, arguments.steps
    if arguments.tiny:
        sizes, blocks, rounds, steps = (Size(64, 128, 32),), 1, 1, 1
    modes = [mode for mode in arguments.modes if mode != "graph" or device.type == "cuda"]  # a CPU has no CUDA graphs
    measured = list[Entry]()
    run.report |= {"blocks": blocks, "rounds": rounds, "steps": steps, "measured": measured}
    run.announce()
    floor = Floor(device, copy_bandwidth(device))
    for size in sizes:
        workload = workloads.feed_forwards(size.tokens, size.dim, size.hidden, blocks)
        for mode in modes:
            wanted = [(name, "eager" if mode == "eager" else "compiled") for name in arguments.subjects]
            options = {"rounds": rounds, "steps": steps, "floor": floor, "is_graph": mode == "graph"}
            entries = measure(workload, wanted, device, **options)
            add_host(entries, len(workload.layers))
            measured.append({**size._asdict(), "mode": mode, "subjects": entries})
            title = f"{workload.title}, {workload.tokens} tokens, {mode}, forward + backward"
            runner.draw_entries(title, entries, _COLUMNS)
            run.record()
        forget()  # not after each mode: the graphs replay what was compiled before
    return int(any(runner.is_wrong(e) for m in measured for e in m["subjects"]))


def add_host(entries: Sequence[Entry], layers: int) -> None:
    """Adds the milliseconds of host time that one layer costs more than bfloat16's."""
    timed = {e["subject"]: e for e in entries if "enqueue_ms" in e}
    for entry in timed.values() if BASELINE in timed else ():
        entry["host_ms_added_a_layer"] = (entry["enqueue_ms"] - timed[BASELINE]["enqueue_ms"]) / layers


if __name__ == "__main__":
    sys.exit(main())
