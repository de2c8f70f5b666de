"""S as cuBLAS's own heuristic gives it, beside a shipped plan [PLAN-1..7].

    python -m benchmarks.proofs.split_k --json OUT        on a GPU, a minute; no GEMM runs
    python -m benchmarks.proofs.split_k --describe        anywhere: the questions as they would be asked

Asked are all recorded rows, and random shapes of each table; counted is how often the record and the rule alone say the
same.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.runner import Bench, option, say
from f8emu.spec.chips import CHIPS, HOPPER
from f8emu.spec.formats import E4M3FN, E5M2
from f8emu.split_k.ask import WORKSPACE_BYTES, CublasLt, loaded_path, query_of
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, LAYOUTS, PlannedGemm, planned_gemm
from f8emu.split_k.plan import shipped_plan
from f8emu.split_k.trees import MAX_K, MAX_M, MAX_N, SplitPlan

SEED = 20261123
OUTPUTS = ("float32", "bfloat16", "float16")
PAIRS = ((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2))
_KINDS: list[dict[str, Any]] = [
    {"gemm": "tensorwise", "accumulation": "fast", "out_dtype": out, "a_dtype": a.name, "b_dtype": b.name}
    for a, b in PAIRS
    for out in OUTPUTS
]
_KINDS += [{"gemm": gemm, "out_dtype": out} for gemm in BLOCKWISE_GEMMS for out in ("float32", "bfloat16")]
_KINDS += [{"gemm": "bfloat16", "layout": layout, "out_dtype": "bfloat16"} for layout in LAYOUTS]
# Table -> what its GEMMs share.
KINDS = {planned_gemm(m=8, n=16, k=16, **kind).table: kind for kind in _KINDS}
# Tables that are asked for the same shapes.
GROUPS = {
    "bfloat16 tn, nn": ["bfloat16 tn", "bfloat16 nn"],
    "bfloat16 nt, tt": ["bfloat16 nt", "bfloat16 tt"],
    "float8": [table for table, kind in KINDS.items() if kind["gemm"] != "bfloat16"],
}
TABLES = {table: group for group, tables in GROUPS.items() for table in tables}

# 1 Random shapes where [PLAN-2] and [PLAN-4] leave a choice

CHUNK = 20_000  # shapes that are drawn at a time
# So many of a chunk, the first ones; the others are sizes as layers have them.
LOG_UNIFORM = CHUNK * 3 // 5
CANDIDATES = 5 * CHUNK  # that are drawn to select from at a time


def drawn(group: str, chunk: int, count: int = CHUNK) -> np.ndarray:
    """Random shapes [count, 3], the same ones for the same arguments: log-uniform, then as layers have them."""
    rng = np.random.default_rng([SEED, list(GROUPS).index(group), chunk])
    few = count * 3 // 5
    return np.concatenate([_some(_log_uniform, rng, group, few), _some(_of_layers, rng, group, count - few)])


def candidates(table: str, chunk: int) -> np.ndarray:
    """Random shapes to select from."""
    return as_asked(drawn(TABLES[table], 1_000_000 + chunk, CANDIDATES), table)


def as_asked(shapes: np.ndarray, table: str) -> np.ndarray:
    """As `PlannedGemm.rows`: 1x128 scales of a need M a multiple of 4, to which rows are padded."""
    return shapes + -shapes % (4, 1, 1) if table.startswith("blockwise_1x128") else shapes


def _log_uniform(rng: np.random.Generator, count: int, least: int, step: int) -> list[np.ndarray]:
    m = np.maximum(step, np.rint(MAX_M ** rng.random(count) / step).astype(np.int64) * step)
    n = 16 * np.rint((MAX_N / 16) ** rng.random(count)).astype(np.int64)
    k = 16 * np.rint(least / 16 * (MAX_K / least) ** rng.random(count)).astype(np.int64)
    return [m, n, k]


def _of_layers(rng: np.random.Generator, count: int, least: int, step: int) -> list[np.ndarray]:
    """M a multiple of 1 to 64, N of 64 to 256, K of 64 to 512."""
    grids = ((1, 2, 4, 8, 16, 32, 64), (64, 128, 256), (64, 128, 256, 512))
    of_m, of_n, of_k = (rng.choice(grid, count) for grid in grids)
    of_m = np.maximum(of_m, step)
    m = np.maximum(of_m, np.rint(MAX_M ** rng.random(count) / of_m).astype(np.int64) * of_m)
    n = of_n * np.maximum(1, np.rint(16 * (MAX_N / 16) ** rng.random(count) / of_n).astype(np.int64))
    k = of_k * np.maximum(1, np.rint(least * (MAX_K / least) ** rng.random(count) / of_k).astype(np.int64))
    return [m, np.minimum(n, MAX_N), np.minimum(k, MAX_K)]


def _some(sizes: Callable[..., list[np.ndarray]], rng: np.random.Generator, group: str, count: int) -> np.ndarray:
    """`count` of the shapes that may be split."""
    gemm, step = KINDS[GROUPS[group][0]]["gemm"], 8 if group == "bfloat16 nt, tt" else 1
    least, found = 2576 if gemm == "bfloat16" else 5136, list[np.ndarray]()  # the first K [PLAN-2]
    while sum(map(len, found)) < count:
        shapes = np.stack(sizes(rng, count * 2, least, step), 1)
        m, n, k = shapes.T
        found.append(shapes[(8 * m * n < WORKSPACE_BYTES[gemm]) & (k >= least)])
    return np.concatenate(found)[:count]


# 2 The library beside a plan


def random_gemms(table: str, count: int) -> list[PlannedGemm]:
    """Log-uniform sizes, other ones than a plan was fitted on."""
    shapes = _some(_log_uniform, np.random.default_rng(SEED), TABLES[table], count).tolist()
    return [planned_gemm(m=m, n=n, k=k, **KINDS[table]) for m, n, k in shapes]


def compare(plan: SplitPlan, split_k: Callable[[PlannedGemm], int], count: int) -> dict[str, dict[str, int]]:
    """How often the plan's rule says what the library says, all shapes and those that are split."""
    rows: dict[str, dict[str, int]] = {}
    for table, kind in KINDS.items():
        recorded = [planned_gemm(m=m, n=n, k=k, **kind) for of, m, n, k in plan.recorded if of == table]
        looked_up = sum(split_k(gemm) == plan.split_k(gemm).split_k for gemm in recorded)
        rows[table] = {"recorded as the library says": looked_up}
        for name, gemms in (("recorded", recorded), ("random", random_gemms(table, count))):
            pairs = [(split_k(gemm), plan.predicted(gemm).split_k) for gemm in gemms]
            split = [pair for pair in pairs if pair[0] > 1]
            rows[table] |= {name: len(pairs), f"{name} right": sum(a == b for a, b in pairs)}
            rows[table] |= {f"{name} split": len(split), f"{name} split right": sum(a == b for a, b in split)}
    return rows


BENCH = Bench(
    "benchmarks.proofs.split_k",
    __doc__,
    option("count", 4000, "random shapes of each table"),
    option("describe", False, "print one question of each table"),
    option("chip", HOPPER.name, "the profile whose plan is compared", choices=("Hopper", "H100")),
)


def library() -> CublasLt:
    """The cublasLt that torch has loaded."""
    path = loaded_path()
    assert path, "torch has loaded no cublasLt"
    return CublasLt(path)


def main() -> None:
    run = BENCH.parse(None, device="cuda" if torch.cuda.is_available() else "cpu")
    if run.arguments.describe:
        for table in KINDS:
            say(f"{table} {query_of(random_gemms(table, 1)[0])}")
        return
    cublas, plan = library(), shipped_plan(CHIPS[run.arguments.chip].plan)
    rows = compare(plan, lambda gemm: cublas.split_k(query_of(gemm)), run.arguments.count)
    say(json.dumps(rows, indent=1))
    run.record(cublasLt=cublas.version, seed=SEED, tables=rows)


if __name__ == "__main__":
    main()
