"""Asks cuBLAS's heuristic for S of millions of shapes [PLAN-1..7]: the labels that `split_k_fit` fits trees on.

    python -m benchmarks.proofs.split_k_labels LABELS --seconds 480        on a GPU with 16 cores: 20 million labels

An answer takes a core 0.2 ms. Each table's first labels are random shapes; the later ones those of random shapes on
which four trees, each fitted on a part of the labels, do not agree: there the library changes from one tile to another,
and a label says more than one of a random shape. The trees are fitted again when there are 0.4 times as many labels
more.

`LABELS` is a folder. `random.npz` has S by table, [chunk, shape], of the shapes that `drawn` gives; `selected_*.npz` by
table which of `candidates` were asked, a bit each, and their S. Needs scikit-learn, which f8emu does not.
"""

import argparse
import contextlib
import functools
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.split_k import KINDS, SEED, SHORTEST_K
from benchmarks.proofs.split_k_trees import fit, held_out, predicted
from f8emu.spec.errors import UnsupportedError
from f8emu.split_k.ask import WORKSPACE_BYTES, CublasLt, loaded_path, question
from f8emu.split_k.gemm import PlannedGemm
from f8emu.split_k.trees import MAX_K, MAX_M, MAX_N

CHUNK = 20_000
"""Shapes that are drawn at a time."""
LOG_UNIFORM = CHUNK * 3 // 5
"""So many of a chunk, the first ones; the others are sizes as layers have them."""
CANDIDATES = 5 * CHUNK
"""That are drawn to select from at a time."""
GROUPS = {
    "bfloat16 tn, nn": ["bfloat16 tn", "bfloat16 nn"],
    "bfloat16 nt, tt": ["bfloat16 nt", "bfloat16 tt"],
    "float8": [table for table, kind in KINDS.items() if kind["gemm"] != "bfloat16"],
}
"""Tables that are asked for the same shapes."""
TABLES = {table: group for group, tables in GROUPS.items() for table in tables}
SHARES = {**dict.fromkeys(TABLES, 1.0), "bfloat16 tn": 15, "bfloat16 nn": 15, "bfloat16 nt": 5, "bfloat16 tt": 7}
"""How many labels a table gets, beside the others."""
RANDOM = {group: chunks * CHUNK for group, chunks in zip(GROUPS, (40, 20, 8), strict=True)}
"""The labels of random shapes that the first trees of a table are fitted on."""
COMMITTEE = 4
"""So many trees are fitted, each on a random part of the labels."""
PART = 0.6


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


class Table:
    """The labels of one table."""

    def __init__(self, name: str) -> None:
        self.name, self.share = name, SHARES[name]
        self.random: dict[int, np.ndarray] = {}
        self.selected: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """The shapes that were selected from a chunk of candidates, S of each, and a bit for each candidate."""
        self.asked = self.count = self.coming = self.fitted_on = 0
        self.trees: list[Path] = []
        """The committee, once it is fitted."""
        self.is_fitting = False

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Shapes and S of all that may be fitted on."""
        drawn_shapes = np.concatenate([drawn(TABLES[self.name], chunk) for chunk in self.random])
        shapes = np.concatenate([as_asked(drawn_shapes, self.name), *(found[0] for found in self.selected.values())])
        split = np.concatenate([*self.random.values(), *(found[1] for found in self.selected.values())])
        kept = ~held_out(*shapes.T) & (split > 0)
        return shapes[kept], split[kept]


class Asking:
    """All tables, and the processes that ask for them until the time is over."""

    def __init__(self, pool: ProcessPoolExecutor, path: str, tables: list[str], trees: Path, until: float) -> None:
        self.pool, self.path, self.trees, self.until = pool, path, trees, until
        self.tables = [Table(name) for name in tables]
        self.running: dict[Future[Any], Callable[[Any], None]] = {}

    def run(self, processes: int) -> None:
        while True:
            while len(self.running) < 2 * processes and time.monotonic() < self.until:
                self._ask(min(self.tables, key=lambda table: (table.count + table.coming) / table.share))
            if not self.running:
                return
            for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                self.running.pop(future)(future.result())

    def _ask(self, table: Table) -> None:
        """More labels of a table, and the trees that select them."""
        chunk, is_random = table.asked, not table.trees
        expected = CHUNK if is_random else CHUNK // 8
        table.asked, table.coming = chunk + 1, table.coming + expected

        def take(found: Any) -> None:
            table.coming -= expected
            table.count += len(found) if is_random else len(found[0])
            (table.random if is_random else table.selected)[chunk] = found
            if table.count >= max(RANDOM[TABLES[table.name]], 1.4 * table.fitted_on) and not table.is_fitting:
                self._fit(table)

        if is_random:
            self.running[self.pool.submit(_random, self.path, table.name, chunk)] = take
        else:
            self.running[self.pool.submit(_selected, self.path, table.name, chunk, table.trees)] = take

    def _fit(self, table: Table) -> None:
        if time.monotonic() > self.until - LAST_FIT:
            return
        shapes, split = table.labels()
        table.is_fitting, table.fitted_on = True, table.count
        rng = np.random.default_rng(table.count)
        paths = [self.trees / f"{table.name} {table.count} {at}" for at in range(COMMITTEE)]
        left = [*paths]

        def take(fitted: Path) -> None:
            left.remove(fitted)
            if not left:
                table.trees, table.is_fitting = paths, False
                print(f"{table.name}: {table.count} labels, trees of {table.fitted_on}", flush=True)

        for path in paths:
            part = rng.random(len(split)) < PART
            self.running[self.pool.submit(_fitted, path, table.name, shapes[part], split[part])] = take

    def write(self, folder: Path) -> None:
        random: dict[str, Any] = {}
        for table in self.tables:
            count = next(chunk for chunk in range(len(table.random) + 1) if chunk not in table.random)
            random[table.name] = np.stack([table.random[chunk] for chunk in range(count)])
            selected = sum(len(split) for _, split, _ in table.selected.values())
            print(f"{table.name}: {count * CHUNK} random, {selected} selected", flush=True)
        np.savez_compressed(folder / "random.npz", **random)
        for at, group in enumerate((["bfloat16 tn"], ["bfloat16 nn"], GROUPS["bfloat16 nt, tt"], GROUPS["float8"])):
            found: dict[str, Any] = {}
            for table in self.tables:
                if table.name in group and table.selected:
                    _, split, asked = zip(*table.selected.values(), strict=True)
                    found[f"{table.name}: chunks"] = np.array([*table.selected])
                    found[f"{table.name}: asked"], found[f"{table.name}: S"] = np.stack(asked), np.concatenate(split)
            np.savez_compressed(folder / f"selected_{at}.npz", **found)


LAST_FIT = 50
"""Seconds before the end after which no tree would be of use."""


@functools.cache
def _library(path: str) -> CublasLt:
    return CublasLt(path)


def _answers(path: str, table: str, shapes: np.ndarray) -> np.ndarray:
    """S of each shape; 0 where the library has no answer."""
    library, found = _library(path), np.zeros(len(shapes), np.uint8)
    for at, (m, n, k) in enumerate(shapes.tolist()):
        with contextlib.suppress(UnsupportedError):
            found[at] = library.split_k(question(PlannedGemm(m=m, n=n, k=k, **KINDS[table])))
    return found


def _random(path: str, table: str, chunk: int) -> np.ndarray:
    return _answers(path, table, drawn(TABLES[table], chunk))


def _fitted(path: Path, table: str, shapes: np.ndarray, split: np.ndarray) -> Path:
    path.write_bytes(pickle.dumps(fit(shapes, split, table, max_features=25)))
    return path


@functools.lru_cache(8 * COMMITTEE)
def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def candidates(table: str, chunk: int) -> np.ndarray:
    """Random shapes to select from."""
    return as_asked(drawn(TABLES[table], 1_000_000 + chunk, CANDIDATES), table)


def _selected(path: str, table: str, chunk: int, trees: list[Path]) -> tuple[np.ndarray, ...]:
    shapes = candidates(table, chunk)
    said = predicted([_read(tree) for tree in trees], shapes, table)
    asked = (said != said[0]).any(0) & ~held_out(*shapes.T)
    return shapes[asked], _answers(path, table, shapes[asked]), np.packbits(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), help="to ask for (default: all)")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    arguments.labels.mkdir(parents=True, exist_ok=True)
    import torch  # noqa: F401 - it loads cublasLt

    path = loaded_path()
    assert path, "torch has loaded no cublasLt"
    with (
        tempfile.TemporaryDirectory() as trees,
        ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        asking = Asking(pool, path, arguments.tables, Path(trees), until)
        try:
            asking.run(arguments.processes)
        finally:
            asking.write(arguments.labels)


if __name__ == "__main__":
    main()
