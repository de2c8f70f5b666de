"""Forward and backward of one linear layer over a grid of sizes: from where on float8 is faster than bfloat16.

    python -m benchmarks.sizes --json OUT

Eager, timed in two ways: steps back to back as training runs them, where small layers wait for the host, and as CUDA
graphs, where they do not. Of both follow the thresholds of `f8emu.torch.filter_small_layers`: among the pairs of a
least number of features, in and out, and of parameters from which on no size was slower than bfloat16, the one that
leaves out fewest sizes.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks import workloads
from benchmarks.measure import forget, measure
from benchmarks.runner import BASELINE, DEVICE, Bench, draw, figure, option, say, turns_of
from benchmarks.subjects import SUBJECTS

TIMINGS = ("back to back", "CUDA graph")
Size = tuple[int, int]  # in_features K, out_features N


def smallest(speeds: Mapping[Size, float]) -> Size | None:
    """(features, parameters): the threshold that leaves out fewest sizes; None where there is none."""
    # 1. Each pair of least features and least parameters, with the sizes that it lets through.
    covered = {
        (features, parameters): [size for size in speeds if min(size) >= features and size[0] * size[1] >= parameters]
        for features in sorted({min(size) for size in speeds})
        for parameters in sorted({k * n for k, n in speeds})
    }
    # 2. Those that let no size through that was slower.
    counts = {pair: len(of) for pair, of in covered.items() if of and all(speeds[size] >= 1 for size in of)}
    return max(counts, key=lambda pair: (counts[pair], pair), default=None)  # of equals, the one that claims least


BENCH = Bench(
    "benchmarks.sizes",
    __doc__,
    option("sizes", (512, 1024, 2048, 4096, 8192, 14336), "of K and N"),
    option("subjects", tuple(name for name in SUBJECTS if not name.startswith("torchao/")), choices=SUBJECTS),
    option("tokens", 8192),
    *turns_of(5, 10),
    option("seconds", float, "begin no size after these"),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, points = run.arguments, list[dict[str, Any]]()
    timings = TIMINGS if run.device.type == "cuda" else TIMINGS[:1]
    wanted = [(name, "eager") for name in arguments.subjects]
    turns = {"rounds": arguments.rounds, "steps": arguments.steps}
    run.report |= {"tokens": arguments.tokens, **turns, "points": points}
    start = time.perf_counter()
    for k, n in product(arguments.sizes, repeat=2):
        if arguments.seconds and time.perf_counter() - start > arguments.seconds:
            say(f"stopped before K={k}, N={n}: --seconds {arguments.seconds}")
            run.report["stopped_before"] = [k, n]
            break
        points.append({"k": k, "n": n})
        workload = workloads.linear(arguments.tokens, k, n)
        for timing in timings:
            entries = measure(workload, wanted, run.device, **turns, is_graph=timing == "CUDA graph")
            points[-1][timing] = entries
            speeds = ", ".join(f"{e['subject']} {figure(e, 'speed:.2f')}" for e in entries)
            say(f"K={k} N={n}, {timing}: {speeds}")
        forget()
        run.record(
            smallest={
                timing: {name: smallest(_speeds(points, timing, name)) for name in arguments.subjects}
                for timing in timings
            }
        )
    for timing in timings:
        _draw(run.report, timing, [name for name in arguments.subjects if name != BASELINE])
    return int(any("failed" in e for point in points for timing in timings for e in point[timing]))


def _draw(report: dict[str, Any], timing: str, others: Sequence[str]) -> None:
    rows = []
    for point in report["points"]:
        by_name = {e["subject"]: e for e in point[timing]}
        bf16 = figure(by_name.get(BASELINE, {}), "ms:.3f")
        rows.append([f"{point['k']} x {point['n']}", bf16, *(figure(by_name[name], "speed:.2f") for name in others)])
    title = f"speed of one linear layer against bf16, {report['tokens']} tokens, {timing}"
    draw(title, ("K x N", "bf16 ms", *others), rows)
    for name in others:
        threshold = report.get("smallest", {}).get(timing, {}).get(name)
        say(
            f"{timing}, {name}: "
            + (f"from {threshold[0]} features, {threshold[1]} parameters on" if threshold else "never")
        )


def _speeds(points: Sequence[dict[str, Any]], timing: str, subject: str) -> dict[Size, float]:
    """Speed of a subject at every size; 0 where it has none."""
    return {
        (point["k"], point["n"]): next((e.get("speed", 0.0) for e in point[timing] if e["subject"] == subject), 0.0)
        for point in points
    }


if __name__ == "__main__":
    sys.exit(main())
