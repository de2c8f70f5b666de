"""S as cuBLAS's own heuristic gives it, beside a shipped plan [PLAN-1..7].

    python -m benchmarks.proofs.split_k --json OUT        on a GPU, a minute; no GEMM runs
    python -m benchmarks.proofs.split_k --describe        anywhere: the questions as they would be asked

Asked are all recorded rows, and random shapes of each table; counted is how often the record and the rule alone say the
same.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.runner import Bench, option, say
from f8emu.spec.chips import CHIPS, HOPPER
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.split_k.ask import WORKSPACE_BYTES, CublasLt, loaded_path, question
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, LAYOUTS, PlannedGemm
from f8emu.split_k.plan import shipped_plan
from f8emu.split_k.trees import Plan

SEED = 20261123
OUTPUTS = ("float32", "bfloat16", "float16")
PAIRS = ((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2))
SHORTEST_K = {gemm: 2576 if gemm == "bfloat16" else 5136 for gemm in WORKSPACE_BYTES}
"""The first multiple of 16 that may be split [PLAN-2]."""
_KINDS: list[dict[str, Any]] = [
    {"gemm": "tensorwise", "accumulation": "fast", "out_dtype": out, "a_dtype": a.name, "b_dtype": b.name}
    for a, b in PAIRS
    for out in OUTPUTS
]
_KINDS += [{"gemm": gemm, "out_dtype": out} for gemm in BLOCKWISE_GEMMS for out in ("float32", "bfloat16")]
_KINDS += [{"gemm": "bfloat16", "layout": layout, "out_dtype": "bfloat16"} for layout in LAYOUTS]
KINDS = {PlannedGemm(m=8, n=16, k=16, **kind).table: kind for kind in _KINDS}
"""Table -> what its GEMMs share."""


def random_gemms(kind: dict[str, Any], count: int) -> Iterator[PlannedGemm]:
    """Log-uniform sizes off every grid, where [PLAN-2] and [PLAN-4] leave a choice."""
    rng, gemm = random.Random(SEED), kind["gemm"]
    step = 8 if kind.get("layout") in ("nt", "tt") else 1
    while count:
        m = max(step, round(8192 ** rng.random() / step) * step)
        n, k = (16 * round(least * (2048 / least) ** rng.random()) for least in (1, SHORTEST_K[gemm] / 16))
        if 8 * m * n < WORKSPACE_BYTES[gemm]:
            count -= 1
            yield PlannedGemm(m=m, n=n, k=k, **kind)


def compare(plan: Plan, split_k: Callable[[PlannedGemm], int], count: int) -> dict[str, dict[str, int]]:
    """How often the plan's rule says what the library says, all shapes and those that are split."""
    rows: dict[str, dict[str, int]] = {}
    for table, kind in KINDS.items():
        recorded = [shape for of, *shape in plan.recorded if of == table]
        sets = {
            "recorded": [PlannedGemm(m=m, n=n, k=k, **kind) for m, n, k in recorded],
            "random": list(random_gemms(kind, count)),
        }
        said = {name: [split_k(gemm) for gemm in gemms] for name, gemms in sets.items()}
        looked_up = [plan.split_k(gemm).split_k for gemm in sets["recorded"]]
        agreeing = sum(a == b for a, b in zip(said["recorded"], looked_up, strict=True))
        rows[table] = {"recorded as the library says": agreeing}
        for name, gemms in sets.items():
            pairs = [(s, plan.predicted(gemm).split_k) for s, gemm in zip(said[name], gemms, strict=True)]
            split = [pair for pair in pairs if pair[0] > 1]
            rows[table] |= {name: len(pairs), f"{name} right": sum(a == b for a, b in pairs)}
            rows[table] |= {f"{name} split": len(split), f"{name} split right": sum(a == b for a, b in split)}
    return rows


BENCH = Bench(
    "benchmarks.proofs.split_k",
    "S as cuBLAS's own heuristic gives it, beside a shipped plan.",
    option("count", 4000, "random shapes of each table"),
    option("describe", False, "print one question of each table"),
    option("chip", HOPPER.name, "the profile whose plan is compared", choices=("Hopper", "H100")),
)


def main() -> None:
    run = BENCH.parse(None, device="cuda" if torch.cuda.is_available() else "cpu")
    if run.arguments.describe:
        for table, kind in KINDS.items():
            say(f"{table} {question(next(random_gemms(kind, 1)))}")
        return
    path = loaded_path()
    assert path, "torch has loaded no cublasLt"
    library, plan = CublasLt(path), shipped_plan(CHIPS[run.arguments.chip].plan)
    rows = compare(plan, lambda gemm: library.split_k(question(gemm)), run.arguments.count)
    say(json.dumps(rows, indent=1))
    run.record(cublasLt=library.version, seed=SEED, tables=rows)


if __name__ == "__main__":
    main()
