"""Fits the trees of the plan of split K [PLAN-1..7] on what the library said, and scores them on shapes set aside.

    python -m benchmarks.proofs.split_k_fit LABELS... --chip H100 --json OUT      the trees, into the shipped plan files

Needs scikit-learn, which f8emu does not; twenty minutes. `LABELS` are folders of `split_k_labels`, of one chip. Tables
without labels keep their trees.

Set aside: of the random shapes `held_out`, one in 16; every recorded row, and of an H200 the shapes of
`tests/spec/split_k_set_aside.json`.
"""

import argparse
import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier  # pyright: ignore[reportMissingImports]

from benchmarks.proofs.split_k import CHUNK, LOG_UNIFORM, TABLES, as_asked, candidates, drawn
from f8emu.spec import CHIPS
from f8emu.split_k.ask import WORKSPACE_BYTES
from f8emu.split_k.plan import LIBRARY
from f8emu.split_k.trees import LEAF, PLAIN_FEATURES

DATA = Path(__file__).parents[2] / "f8emu/split_k/data"
SET_ASIDE = Path(__file__).parents[2] / "tests/spec/split_k_set_aside.json"
TAUGHT = 40 * CHUNK  # random shapes of a float8 table for which trees stand in for the library
BARE_MM = ("bfloat16 tn", "bfloat16 nn", "bfloat16 tt")  # the tables of the second file

# 1 Trees: what they ask of a shape, and how they are fitted

ELEMENT_BYTES = {"float8": 1, "bfloat16": 2}
WORKSPACE = {"float8": WORKSPACE_BYTES["tensorwise"], "bfloat16": WORKSPACE_BYTES["bfloat16"]}
TILES = (
    [(64, m) for m in (8, 16, 24, 32, 40, 48, 56, 64, 128, 256)]
    + [(128, m) for m in (8, 16, 24, 32, 48, 64, 128, 256)]
    + [(192, 8), (192, 16), (256, 8), (256, 16), (256, 32), (256, 64), (256, 128), (512, 8)]
    + [(n, 64) for n in (16, 24, 32, 48, 80, 96)]
    + [(16, 128), (32, 128)]
)
FILLED = [(64, m) for m in (8, 16, 24, 32, 48, 64)] + [(128, m) for m in (8, 16, 32, 64)]
FILLED += [(192, 8), (256, 8), (16, 64), (24, 64), (32, 64), (48, 64)]
FEATURES: list[Any] = [*PLAIN_FEATURES, *(list(tile) for tile in TILES)]
FEATURES += [[*tile, "at least", 88] for tile in FILLED] + [[*tile, "at most", 132] for tile in FILLED]
"""As `f8emu.split_k.plan.FittedTree` reads them."""


def family(table: str) -> str:
    return "bfloat16" if table.startswith("bfloat16") else "float8"


def held_out(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """One shape in 16, by a hash that was chosen before any fit."""
    m, n, k = (x.astype(np.uint64) for x in (m, n, k))
    mixed = (m * np.uint64(73856093)) ^ (n * np.uint64(19349663)) ^ (k * np.uint64(83492791))
    mixed = (mixed ^ (mixed >> np.uint64(13))) * np.uint64(0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFF)
    return ((mixed >> np.uint64(29)) % np.uint64(16)) == 0


def features(shapes: np.ndarray, table: str) -> tuple[np.ndarray, np.ndarray]:
    """FEATURES of every shape, and the largest S that [PLAN-2] and [PLAN-4] leave."""
    m, n, k = shapes.T
    by_k = np.maximum(1, (k * ELEMENT_BYTES[family(table)] - 1) // 2560)
    slices = np.minimum(by_k, np.maximum(1, (WORKSPACE[family(table)] - 1) // (4 * m * n)))
    tiles = {(a, b): -(-n // a) * -(-m // b) for a, b in TILES}
    columns = [m, n, k, m * n, *(np.minimum(x & -x, 128) for x in (m, n, k)), by_k, slices, *tiles.values()]
    columns += [np.minimum(slices, -(-88 // tiles[tile])) for tile in FILLED]
    columns += [np.minimum(slices, 132 // tiles[tile]) for tile in FILLED]
    return np.stack(columns, 1, dtype=np.float32), slices


def fit(shapes: np.ndarray, split: np.ndarray, table: str, **how: Any) -> DecisionTreeClassifier:
    """A tree of every shape that may be split."""
    x, slices = features(shapes, table)
    return DecisionTreeClassifier(**{"random_state": 0, **how}).fit(x[slices > 1], split[slices > 1])


def predicted(trees: Sequence[DecisionTreeClassifier], shapes: np.ndarray, table: str) -> np.ndarray:
    """What each tree says of each shape, [trees, shapes]."""
    x, slices = features(shapes, table)
    return np.stack([np.minimum(tree.predict(x), slices) for tree in trees])


def distilled(shapes: np.ndarray, split: np.ndarray, table: str, more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The labels, and of more shapes what most of eight trees say: one tree of all these is right more often."""
    trees = [fit(shapes, split, table, random_state=at, max_features=40 if at else None) for at in range(8)]
    said = predicted(trees, more, table)
    votes = np.zeros((len(more), said.max() + 1), np.uint8)
    for one in said:
        votes[np.arange(len(more)), one] += 1
    return np.concatenate([shapes, more]), np.concatenate([split, votes.argmax(1)])


def packed(tree: DecisionTreeClassifier) -> dict[str, str]:
    """The bytes of `f8emu.split_k.plan.Tree`, as text."""
    inner = tree.tree_
    split = tree.classes_[inner.value[:, 0, :].argmax(1)]
    codes, limits, waiting = bytearray(), list[int](), [0]
    while waiting:
        at = waiting.pop()
        if inner.children_left[at] < 0:
            codes.append(LEAF + int(split[at]))
            continue
        codes.append(int(inner.feature[at]))
        limits.append(int(inner.threshold[at]))
        waiting += [inner.children_right[at], inner.children_left[at]]
    of = np.array([code for code in codes if code < LEAF])
    planes = np.array(limits, "<u4")[of.argsort(kind="stable")].view(np.uint8).reshape(-1, 4).T[:3].tobytes()
    texts = {"codes": bytes(codes), "limits": planes}
    return {name: base64.b64encode(zlib.compress(data, 9)).decode() for name, data in texts.items()}


# 2 Labels, and the plan files


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
