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
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.split_k import CHUNK, GROUPS, KINDS, TABLES, as_asked, candidates, drawn, library
from benchmarks.proofs.split_k_fit import fit, held_out, predicted
from f8emu.spec.errors import UnsupportedError
from f8emu.split_k.ask import query_of
from f8emu.split_k.gemm import planned_gemm

# How many labels a table gets, beside the others.
SHARES = {**dict.fromkeys(TABLES, 1.0), "bfloat16 tn": 15, "bfloat16 nn": 15, "bfloat16 nt": 5, "bfloat16 tt": 7}
# The labels of random shapes that the first trees of a table are fitted on.
RANDOM = {group: chunks * CHUNK for group, chunks in zip(GROUPS, (40, 20, 8), strict=True)}
COMMITTEE, PART = 4, 0.6  # so many trees are fitted, each on that part of the labels
LAST_FIT = 50  # seconds before the end after which no tree would be of use
# Tables by the file of their selected shapes.
FILES = (["bfloat16 tn"], ["bfloat16 nn"], GROUPS["bfloat16 nt, tt"], GROUPS["float8"])


class Table:
    """The labels of one table."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.random: dict[int, np.ndarray] = {}
        # The shapes that were selected from a chunk of candidates, S of each, and a bit for each candidate.
        self.selected: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.asked = self.count = self.coming = self.fitted_on = 0
        self.trees: list[Path] = []  # the committee, once it is fitted
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

    def __init__(self, pool: ProcessPoolExecutor, tables: list[str], trees: Path, until: float) -> None:
        self.pool, self.trees, self.until = pool, trees, until
        self.tables = [Table(name) for name in tables]
        self.running: dict[Future[Any], Callable[[Any], None]] = {}

    def run(self, processes: int) -> None:
        while True:
            while len(self.running) < 2 * processes and time.monotonic() < self.until:
                self._ask(min(self.tables, key=lambda table: (table.count + table.coming) / SHARES[table.name]))
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
            is_due = table.count >= max(RANDOM[TABLES[table.name]], 1.4 * table.fitted_on)
            if is_due and not table.is_fitting and time.monotonic() <= self.until - LAST_FIT:
                self._fit(table)

        ask = partial(_random, table.name, chunk) if is_random else partial(_selected, table.name, chunk, table.trees)
        self.running[self.pool.submit(ask)] = take

    def _fit(self, table: Table) -> None:
        # 1. Each tree sees a part of the labels of its own, so that they differ where labels are few.
        shapes, split = table.labels()
        table.is_fitting, table.fitted_on = True, table.count
        rng = np.random.default_rng(table.count)
        paths = [self.trees / f"{table.name} {table.count} {at}" for at in range(COMMITTEE)]
        left = [*paths]

        # 2. The committee changes at once, when the last of its trees is there.
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
        selected: list[dict[str, Any]] = [{} for _ in FILES]
        for table in self.tables:
            # 1. Random chunks, up to the first whose answers did not come.
            count = next(chunk for chunk in range(len(table.random) + 1) if chunk not in table.random)
            random[table.name] = np.stack([table.random[chunk] for chunk in range(count)])
            # 2. Selected ones, each with the number of its chunk.
            found = next(found for found, tables in zip(selected, FILES, strict=True) if table.name in tables)
            _, split, asked = zip(*table.selected.values(), strict=True) if table.selected else ((), (), ())
            if table.selected:
                found[f"{table.name}: chunks"] = np.array([*table.selected])
                found[f"{table.name}: asked"], found[f"{table.name}: S"] = np.stack(asked), np.concatenate(split)
            print(f"{table.name}: {count * CHUNK} random, {sum(map(len, split))} selected", flush=True)
        np.savez_compressed(folder / "random.npz", **random)
        for at, found in enumerate(selected):
            np.savez_compressed(folder / f"selected_{at}.npz", **found)


# What a process does

_library = cache(library)


def _answers(table: str, shapes: np.ndarray) -> np.ndarray:
    """S of each shape; 0 where the library has no answer."""
    found = np.zeros(len(shapes), np.uint8)
    for at, (m, n, k) in enumerate(shapes.tolist()):
        with contextlib.suppress(UnsupportedError):
            found[at] = _library().split_k(query_of(planned_gemm(m=m, n=n, k=k, **KINDS[table])))
    return found


def _random(table: str, chunk: int) -> np.ndarray:
    return _answers(table, drawn(TABLES[table], chunk))


def _selected(table: str, chunk: int, trees: list[Path]) -> tuple[np.ndarray, ...]:
    shapes = candidates(table, chunk)
    said = predicted([_read(tree) for tree in trees], shapes, table)
    asked = (said != said[0]).any(0) & ~held_out(*shapes.T)
    return shapes[asked], _answers(table, shapes[asked]), np.packbits(asked)


def _fitted(path: Path, table: str, shapes: np.ndarray, split: np.ndarray) -> Path:
    path.write_bytes(pickle.dumps(fit(shapes, split, table, max_features=25)))
    return path


@lru_cache(8 * COMMITTEE)
def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), help="to ask for (default: all)")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    arguments.labels.mkdir(parents=True, exist_ok=True)
    library()
    with (
        tempfile.TemporaryDirectory() as trees,
        ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        asking = Asking(pool, arguments.tables, Path(trees), until)
        try:
            asking.run(arguments.processes)
        finally:
            asking.write(arguments.labels)


if __name__ == "__main__":
    main()
