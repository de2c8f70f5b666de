"""Fits the trees of the plan of split K [PLAN-1..7] on what the library said, and scores them on shapes set aside.

    python -m benchmarks.proofs.split_k_fit LABELS... --chip H100 --json OUT      the trees, into the shipped plan files

Needs scikit-learn, which f8emu does not; twenty minutes. `LABELS` are folders of `split_k_labels`, of one chip. Tables
without labels keep their trees.

Set aside: of the random shapes `held_out`, one in 16; every recorded row, and of an H200 the shapes of
`tests/spec/split_k_set_aside.json`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.split_k_labels import CHUNK, LOG_UNIFORM, TABLES, as_asked, candidates, drawn
from benchmarks.proofs.split_k_trees import FEATURES, WORKSPACE, distilled, family, fit, held_out, packed, predicted
from f8emu.spec import CHIPS
from f8emu.split_k.plan import LIBRARY

DATA = Path(__file__).parents[2] / "f8emu/split_k/data"
SET_ASIDE = Path(__file__).parents[2] / "tests/spec/split_k_set_aside.json"
TAUGHT = 40 * CHUNK
"""Random shapes of a float8 table for which trees stand in for the library."""
BARE_MM = ("bfloat16 tn", "bfloat16 nn", "bfloat16 tt")
"""The tables of the second file."""


class Labels:
    """What the library said of the shapes of one table."""

    def __init__(self, folders: Sequence[Path], table: str, aside: np.ndarray) -> None:
        given = [np.load(folder / "random.npz") for folder in folders]
        split = max((found[table] for found in given if table in found.files), key=len)
        random = np.concatenate([as_asked(drawn(TABLES[table], chunk), table) for chunk in range(len(split))])
        log_uniform, split = np.tile(np.arange(CHUNK) < LOG_UNIFORM, len(split)), split.ravel()
        tested = held_out(*random.T) & (split > 0)
        self.set_aside = {
            name: (random[tested & of], split[tested & of])
            for name, of in (("log-uniform", log_uniform), ("layers", ~log_uniform))
        }
        selected = [labels for folder in folders for labels in _selected(folder, table)]
        shapes = np.concatenate([random, *(shapes for shapes, _ in selected)])
        split = np.concatenate([split, *(split for _, split in selected)])
        self.shapes, unique = np.unique(shapes, axis=0, return_index=True)
        self.split = split[unique]
        kept = ~held_out(*self.shapes.T) & ~np.isin(_key(self.shapes), _key(as_asked(aside, table))) & (self.split > 0)
        self.shapes, self.split = self.shapes[kept], self.split[kept]


def _selected(folder: Path, table: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for path in folder.glob("selected_*.npz"):
        found = np.load(path)
        if f"{table}: S" in found.files:
            chunks = zip(found[f"{table}: chunks"], found[f"{table}: asked"], strict=True)
            shapes = [candidates(table, chunk)[np.unpackbits(bits).astype(bool)] for chunk, bits in chunks]
            yield np.concatenate(shapes), found[f"{table}: S"]


def _key(shapes: np.ndarray) -> np.ndarray:
    """One integer for each (m, n, k)."""
    m, n, k = shapes.T
    return (m * 4096 + n // 16) * 4096 + k // 16


def _fitted(folders: Sequence[Path], table: str, aside: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rule of a table, and its scores: shapes, right, split, right of those."""
    labels = Labels(folders, table, aside)
    shapes, split = labels.shapes, labels.split
    if family(table) == "float8":
        shapes, split = distilled(shapes, split, table, as_asked(drawn(TABLES[table], 2_000_000, TAUGHT), table))
    tree = fit(shapes, split, table)
    score: dict[str, Any] = {"fitted on": len(labels.split), "nodes": int(tree.tree_.node_count)}
    for name, (shapes, truth) in labels.set_aside.items():
        right = predicted([tree], shapes, table)[0] == truth
        score[name] = [int(x) for x in (len(truth), right.sum(), (truth > 1).sum(), right[truth > 1].sum())]
    print(table, score, flush=True)
    return {"workspace_bytes": WORKSPACE[family(table)], "tree": packed(tree)}, score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, nargs="+")
    parser.add_argument("--chip", required=True, help="a profile with a plan: Hopper (an H200's), H100")
    parser.add_argument("--json", type=Path, help="the table of accuracies")
    arguments = parser.parse_args()
    chip = CHIPS[arguments.chip].plan
    paths = {
        is_bare: DATA / f"{chip.split()[1].lower()}_cublas_13_1_0_3_split_k{'_mm' * is_bare}.json"
        for is_bare in (False, True)
    }
    empty = {"schema": 2, "library": LIBRARY, "chip": chip, "torch": "2.11.0+cu130", "slice_bytes": 2560}
    plans = {at: json.loads(path.read_text()) if path.exists() else empty for at, path in paths.items()}
    blocks = [
        *plans[False].get("recorded", []),
        *(json.loads(SET_ASIDE.read_text())["labels"] if chip == CHIPS["Hopper"].plan else []),
    ]
    aside = np.array([row[:3] for block in blocks for row in block["rows"]], np.int64).reshape(-1, 3)
    labelled = set().union(*(np.load(folder / "random.npz").files for folder in arguments.labels))
    tables = [table for table in TABLES if table in labelled]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        fitted = dict(zip(tables, pool.map(_fitted, repeat(arguments.labels), tables, repeat(aside)), strict=True))
    old = {table: rule for plan in plans.values() for table, rule in plan.get("rules", {}).items() if "tree" in rule}
    rules = {**old, **{table: rule for table, (rule, _) in fitted.items()}}
    for is_bare, plan in plans.items():
        own = {table: rules[table] for table in TABLES if (table in BARE_MM) == is_bare}
        plan = {**plan, "features": FEATURES, "rules": own, "recorded": plan.get("recorded", []) if not is_bare else []}
        paths[is_bare].write_text(_text(plan))
    if arguments.json:
        arguments.json.write_text(json.dumps({table: score for table, (_, score) in fitted.items()}, indent=1))


def _text(plan: Mapping[str, Any]) -> str:
    """One recorded shape a line, one tree a line."""
    lines = json.dumps(plan, indent=1)
    return re.sub(r"\[([^\[\]{}]*)\]", lambda found: "[" + " ".join(found[1].split()) + "]", lines) + "\n"


if __name__ == "__main__":
    main()
