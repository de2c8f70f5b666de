"""Asks cuBLAS's heuristic for S of millions of shapes [PLAN-1..6]: the labels that `split_k_fit` fits trees on.

    python -m benchmarks.proofs.split_k_labels LABELS [--chunks 228 162 39]   on a GPU: random shapes of every table
    python -m benchmarks.proofs.split_k_labels LABELS --selected ROUND        on a GPU: shapes that split_k_fit selected

A library's answer takes a core 0.2 ms, so the first takes five minutes of 16 cores. `LABELS` is a folder: `random.npz`
has S by table, [chunk, shape], of the shapes that `drawn` gives; `selected_{ROUND}.npz` S of those of
`shapes_{ROUND}.npz`, a row (M, N / 16, K / 16) each.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.split_k import KINDS, SEED, SHORTEST_K
from f8emu.spec.plan import BLOCKWISE_GEMMS, MAX_K, MAX_M, MAX_N, PlannedGemm
from f8emu.torch.gemm.cublaslt import WORKSPACE_BYTES, asked_split_k

CHUNK = 20_000
"""Shapes that are drawn at a time."""
LOG_UNIFORM = CHUNK * 3 // 5
"""So many of a chunk, the first ones; the others are sizes as layers have them."""
GROUPS = {
    "bfloat16 tn, nn": ["bfloat16 tn", "bfloat16 nn"],
    "bfloat16 nt, tt": ["bfloat16 nt", "bfloat16 tt"],
    "float8": [t for t, kind in KINDS.items() if kind["gemm"] != "bfloat16" and t not in BLOCKWISE_GEMMS],
}
"""Tables that are asked for the same shapes. Block scales with float32 outputs have no trees of their own."""


def drawn(group: str, chunk: int, count: int = CHUNK) -> np.ndarray:
    """Random shapes [count, 3] where [PLAN-2] and [PLAN-4] leave a choice, the same ones for the same arguments."""
    rng = np.random.default_rng([SEED, list(GROUPS).index(group), chunk])
    gemm = KINDS[GROUPS[group][0]]["gemm"]
    step = 8 if group == "bfloat16 nt, tt" else 1
    few = count * 3 // 5
    return np.concatenate([_some(_log_uniform, rng, gemm, step, few), _some(_of_layers, rng, gemm, step, count - few)])


def _log_uniform(rng: np.random.Generator, count: int, least: int, step: int) -> list[np.ndarray]:
    m = np.maximum(step, np.rint(MAX_M ** rng.random(count) / step).astype(np.int64) * step)
    n = 16 * np.rint((MAX_N / 16) ** rng.random(count)).astype(np.int64)
    k = 16 * np.rint(least / 16 * (MAX_K / least) ** rng.random(count)).astype(np.int64)
    return [m, n, k]


def _of_layers(rng: np.random.Generator, count: int, least: int, step: int) -> list[np.ndarray]:
    """M a multiple of 1 to 64, N of 64 to 256, K of 64 to 512."""
    of_m, of_n, of_k = (rng.choice(grid, count) for grid in ((1, 2, 4, 8, 16, 32, 64), (64, 128, 256), _GRID_OF_K))
    of_m = np.maximum(of_m, step)
    m = np.maximum(of_m, np.rint(MAX_M ** rng.random(count) / of_m).astype(np.int64) * of_m)
    n = of_n * np.maximum(1, np.rint(16 * (MAX_N / 16) ** rng.random(count) / of_n).astype(np.int64))
    k = of_k * np.maximum(1, np.rint(least * (MAX_K / least) ** rng.random(count) / of_k).astype(np.int64))
    return [m, np.minimum(n, MAX_N), np.minimum(k, MAX_K)]


_GRID_OF_K = (64, 128, 256, 512)


def _some(sizes: Any, rng: np.random.Generator, gemm: str, step: int, count: int) -> np.ndarray:
    """`count` of the shapes that may be split."""
    least, found = SHORTEST_K[gemm], list[np.ndarray]()
    while sum(map(len, found)) < count:
        shapes = np.stack(sizes(rng, count * 2, least, step), 1)
        m, n, k = shapes.T
        found.append(shapes[(8 * m * n < WORKSPACE_BYTES[gemm]) & (k >= least)])
    return np.concatenate(found)[:count]


def as_asked(shapes: np.ndarray, table: str) -> np.ndarray:
    """As `PlannedGemm.rows`: 1x128 scales of a need M a multiple of 4, to which rows are padded."""
    return shapes + -shapes % (4, 1, 1) if table.startswith("blockwise_1x128") else shapes


def _answers(job: tuple[str, np.ndarray]) -> np.ndarray:
    """S of each shape, in a process of its own."""
    table, shapes = job
    asked = (PlannedGemm(m=m, n=n, k=k, **KINDS[table]) for m, n, k in shapes.tolist())
    return np.array([asked_split_k(gemm) for gemm in asked], np.uint8)


def _random(pool: Any, chunks: list[int]) -> Iterator[tuple[str, np.ndarray]]:
    for (group, tables), count in zip(GROUPS.items(), chunks, strict=True):
        for table in tables:
            yield table, np.stack(list(pool.imap(_answers, ((table, drawn(group, at)) for at in range(count)))))
            print(f"{table}: {count} chunks of {CHUNK}", file=sys.stderr)


def _selected(pool: Any, shapes: Any) -> Iterator[tuple[str, np.ndarray]]:
    for table in shapes.files:
        rows = shapes[table].astype(np.int64) * (1, 16, 16)
        parts = np.array_split(rows, max(1, len(rows) // 1000))
        yield table, np.concatenate(list(pool.imap(_answers, ((table, part) for part in parts))))
        print(f"{table}: {len(rows)} shapes", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--chunks", type=int, nargs=len(GROUPS), default=[228, 162, 39], help="of each group of tables")
    parser.add_argument("--selected", type=int, metavar="ROUND")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    arguments.labels.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        if arguments.selected is None:
            name, labels = "random.npz", _random(pool, arguments.chunks)
        else:
            name, shapes = f"selected_{arguments.selected}.npz", f"shapes_{arguments.selected}.npz"
            labels = _selected(pool, np.load(arguments.labels / shapes))
        found: dict[str, Any] = dict(labels)
    np.savez_compressed(arguments.labels / name, **found)


if __name__ == "__main__":
    main()
