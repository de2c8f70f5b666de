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
from typing import Any

from benchmarks import workloads
from benchmarks.measure import forget, measure
from benchmarks.runner import DEVICE, Bench, draw, figure, option, say, turns_of
from benchmarks.subjects import BASELINE, SUBJECTS

SIZES = (512, 1024, 2048, 4096, 8192, 14336)
TIMINGS = ("back to back", "CUDA graph")
Size = tuple[int, int]
"""in_features K, out_features N."""


def smallest(speeds: Mapping[Size, float]) -> Size | None:
    """(features, parameters): the threshold that leaves out fewest sizes; None where there is none."""
    covered = {
        (features, parameters): [size for size in speeds if min(size) >= features and size[0] * size[1] >= parameters]
        for features in sorted({min(size) for size in speeds})
        for parameters in sorted({k * n for k, n in speeds})
    }
    found = {pair: len(of) for pair, of in covered.items() if of and all(speeds[size] >= 1 for size in of)}
    return max(found, key=lambda pair: (found[pair], pair), default=None)  # of equals, the one that claims least


BENCH = Bench(
    "benchmarks.sizes",
    "One linear layer, many sizes.",
    option("sizes", SIZES, "of K and N"),
    option("subjects", tuple(name for name in SUBJECTS if not name.startswith("torchao/")), choices=SUBJECTS),
    option("tokens", 8192),
    *turns_of(5, 10),
    option("seconds", float, "begin no size after these"),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints tables, records after every size; exit status 1 if a subject failed."""
    run = BENCH.parse(argv)
    arguments, device, report = run.arguments, run.device, run.report
    timings = TIMINGS if device.type == "cuda" else TIMINGS[:1]
    wanted = [(name, "eager") for name in arguments.subjects]
    report |= {"tokens": arguments.tokens, "rounds": arguments.rounds, "steps": arguments.steps, "points": []}
    start = time.perf_counter()
    for k, n in ((k, n) for k in arguments.sizes for n in arguments.sizes):
        if arguments.seconds and time.perf_counter() - start > arguments.seconds:
            say(f"stopped before K={k}, N={n}: --seconds {arguments.seconds}")
            report["stopped_before"] = [k, n]
            break
        point: dict[str, Any] = {"k": k, "n": n}
        report["points"].append(point)
        for timing in timings:
            point[timing] = measure(
                workloads.linear(arguments.tokens, k, n),
                wanted,
                device,
                rounds=arguments.rounds,
                steps=arguments.steps,
                is_graph=timing == "CUDA graph",
            )
            speeds = ", ".join(f"{e['subject']} {figure(e, 'speed', '.2f')}" for e in point[timing])
            say(f"K={k} N={n}, {timing}: {speeds}")
        forget()
        found = {
            timing: {name: smallest(_speeds(report["points"], timing, name)) for name in arguments.subjects}
            for timing in timings
        }
        run.record(smallest=found)
    for timing in timings:
        _draw(report, timing, [name for name in arguments.subjects if name != BASELINE])
    return int(any("failed" in e for point in report["points"] for timing in timings for e in point[timing]))


def _draw(report: dict[str, Any], timing: str, others: Sequence[str]) -> None:
    rows = []
    for point in report["points"]:
        by_name = {e["subject"]: e for e in point[timing]}
        figures = [figure(by_name[name], "speed", ".2f") for name in others]
        bf16 = figure(by_name.get(BASELINE, {}), "ms", ".3f")
        rows.append([f"{point['k']} x {point['n']}", bf16, *figures])
    title = f"speed of one linear layer against bf16, {report['tokens']} tokens, {timing}"
    draw(title, ("K x N", "bf16 ms", *others), rows)
    for name in others:
        found = report.get("smallest", {}).get(timing, {}).get(name)
        say(f"{timing}, {name}: " + (f"from {found[0]} features, {found[1]} parameters on" if found else "never"))


def _speeds(points: Sequence[dict[str, Any]], timing: str, subject: str) -> dict[Size, float]:
    """Speed of a subject at every size; 0 where it has none."""
    return {
        (point["k"], point["n"]): next((e.get("speed", 0.0) for e in point[timing] if e["subject"] == subject), 0.0)
        for point in points
    }


if __name__ == "__main__":
    sys.exit(main())
