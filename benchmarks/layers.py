"""Converted layers against the oracle: every code, scale, output and gradient, bit for bit, eager and compiled.

    python -m benchmarks.layers --json OUT

A case is a layer with a bias under one recipe, with weights of one dtype, of one shape, in one mode. Exit status 1 if
a number differs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.layer_checks import PARTS, SHAPES, STEPS, WEIGHT_DTYPES, LayerCase
from benchmarks.report import draw, facts, say, write_json
from benchmarks.subjects import MODES
from f8emu.spec import RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table, records, and gives the exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description="Converted layers, the oracle.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first of the shapes")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to record")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    report = facts("benchmarks.layers", given, device) | {"steps": STEPS, "cases": []}
    begin = time.perf_counter()
    for name in arguments.recipes:
        for shape in SHAPES[: arguments.shapes]:
            for dtype in WEIGHT_DTYPES:
                case = LayerCase(RECIPES[name], shape, dtype, device)
                for mode in arguments.modes:
                    torch._dynamo.reset()
                    counts = case.check(mode, arguments.engine)
                    weight = str(dtype).removeprefix("torch.")
                    entry = {"recipe": name, "shape": list(shape), "weight": weight, "mode": mode}
                    entry |= {"compared": counts.compared, "differing": counts.differing}
                    report["cases"].append(entry)
                    if any(counts.differing.values()):
                        say(f"DIFFERS: {entry}")
        say(f"{name}: {time.perf_counter() - begin:.0f} s")
    cases = report["cases"]
    equal = [not any(case["differing"].values()) for case in cases]
    totals = {
        key: {part: sum(case[key][part] for case in cases) for part in PARTS} for key in ("compared", "differing")
    }
    report |= {"cases_total": len(cases), "cases_equal": sum(equal), **totals}
    rows = []
    for name in arguments.recipes:
        of = [(case, same) for case, same in zip(cases, equal, strict=True) if case["recipe"] == name]
        figures = [f"{sum(c['compared'][p] for c, _ in of) - sum(c['differing'][p] for c, _ in of):,}" for p in PARTS]
        rows.append([name, f"{sum(same for _, same in of)} of {len(of)}", *figures])
    draw("converted layers, numbers equal to the oracle's", ("recipe", "cases equal", *PARTS), rows)
    say(f"{sum(equal)} of {len(cases)} cases equal; numbers that differ: {sum(totals['differing'].values())}")
    if arguments.json:
        write_json(arguments.json, report)
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())
