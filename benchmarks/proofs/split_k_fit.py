"""Fits the trees of the plan of split K [PLAN-1..4] on what the library said, and scores them on shapes set aside.

    python -m benchmarks.proofs.split_k_fit LABELS --select ROUND     what to ask next: LABELS/shapes_{ROUND}.npz
    python -m benchmarks.proofs.split_k_fit LABELS --json OUT         the trees, into the shipped plan file

Needs scikit-learn, which f8emu does not, and torch; ten minutes. `LABELS` is the folder of `split_k_labels`: random
shapes, and rounds of selected ones, on which two trees that were fitted on half of the labels each do not agree. There
the library changes from one tile to another, and a label says more than one of a random shape.

Set aside from every round: `held_out`, one shape in 16; every recorded row; the shapes of
`tests/spec/split_k_set_aside.json`. The rules go into the shipped plan file, whose recorded rows stay as they are.
"""

import argparse
import base64
import json
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier  # pyright: ignore[reportMissingImports]

from benchmarks.proofs.split_k_labels import CHUNK, GROUPS, LOG_UNIFORM, as_asked, drawn
from f8emu.spec.plan import LEAF, PLAIN_FEATURES
from f8emu.torch.gemm.cublaslt import WORKSPACE_BYTES

PLAN = Path(__file__).parents[2] / "f8emu/spec/data/h200_cublas_13_1_0_3_split_k.json"
SET_ASIDE = Path(__file__).parents[2] / "tests/spec/split_k_set_aside.json"
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
MOST_CHUNKS = 1000
"""That are drawn for one selection."""
FEATURES: list[Any] = [*PLAIN_FEATURES, *(list(tile) for tile in TILES)]
FEATURES += [[*tile, "at least", 88] for tile in FILLED] + [[*tile, "at most", 132] for tile in FILLED]
"""As `f8emu.spec.plan.FittedTree` reads them."""


def held_out(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """One shape in 16, by a hash that was chosen before any fit."""
    m, n, k = (x.astype(np.uint64) for x in (m, n, k))
    mixed = (m * np.uint64(73856093)) ^ (n * np.uint64(19349663)) ^ (k * np.uint64(83492791))
    mixed = (mixed ^ (mixed >> np.uint64(13))) * np.uint64(0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFF)
    return ((mixed >> np.uint64(29)) % np.uint64(16)) == 0


def key(shapes: np.ndarray) -> np.ndarray:
    """One integer for each (m, n, k)."""
    m, n, k = shapes.T
    return (m * 4096 + n // 16) * 4096 + k // 16


def features(shapes: np.ndarray, family: str) -> tuple[np.ndarray, np.ndarray]:
    """FEATURES of every shape, and the largest S that [PLAN-2] and [PLAN-4] leave."""
    m, n, k = shapes.T
    by_k = np.maximum(1, (k * ELEMENT_BYTES[family] - 1) // 2560)
    slices = np.minimum(by_k, np.maximum(1, (WORKSPACE[family] - 1) // (4 * m * n)))
    tiles = {(a, b): -(-n // a) * -(-m // b) for a, b in TILES}
    columns = [m, n, k, m * n, *(np.minimum(x & -x, 128) for x in (m, n, k)), by_k, slices, *tiles.values()]
    columns += [np.minimum(slices, -(-88 // tiles[tile])) for tile in FILLED]
    columns += [np.minimum(slices, 132 // tiles[tile]) for tile in FILLED]
    return np.stack(columns, 1).astype(np.float32), slices


class Labels:
    """What the library said of the shapes of one table."""

    def __init__(self, folder: Path, table: str) -> None:
        group = next(group for group, tables in GROUPS.items() if table in tables)
        split = np.load(folder / "random.npz")[table]
        drawn_shapes = as_asked(np.concatenate([drawn(group, chunk) for chunk in range(len(split))]), table)
        self.table, self.group, self.family = table, group, "bfloat16" if table.startswith("bfloat16") else "float8"
        log_uniform = np.tile(np.arange(CHUNK) < LOG_UNIFORM, len(split))
        split = split.ravel()
        aside = held_out(*drawn_shapes.T) & (split > 0)
        self.set_aside = {
            name: (drawn_shapes[aside & of], split[aside & of])
            for name, of in (("log-uniform", log_uniform), ("layers", ~log_uniform))
        }
        shapes, found = [drawn_shapes], [split]
        for asked in sorted(folder.glob("shapes_*.npz")):
            rows, answers = np.load(asked), np.load(asked.with_name(asked.name.replace("shapes", "selected")))
            if table in rows.files:
                shapes.append(rows[table].astype(np.int64) * (1, 16, 16))
                found.append(answers[table])
        self.shapes, unique = np.unique(np.concatenate(shapes), axis=0, return_index=True)
        self.split = np.concatenate(found)[unique]
        kept = ~held_out(*self.shapes.T) & ~np.isin(key(self.shapes), _never(table)) & (self.split > 0)
        self.shapes, self.split = self.shapes[kept], self.split[kept]


def _never(table: str) -> np.ndarray:
    """Keys of the recorded rows and of those that a test asks, as the library sees them."""
    recorded, tested = (json.loads(path.read_text()) for path in (PLAN, SET_ASIDE))
    rows = [row[:3] for block in (*recorded["recorded"], *tested["labels"]) for row in block["rows"]]
    return key(as_asked(np.array(rows), table))


def fit(shapes: np.ndarray, split: np.ndarray, family: str) -> DecisionTreeClassifier:
    """A tree of every shape that may be split."""
    x, slices = features(shapes, family)
    return DecisionTreeClassifier(random_state=0).fit(x[slices > 1], split[slices > 1])


def predicted(tree: DecisionTreeClassifier, shapes: np.ndarray, family: str) -> np.ndarray:
    x, slices = features(shapes, family)
    return np.minimum(tree.predict(x), slices)


def select(labels: Labels, count: int, round_: int) -> np.ndarray:
    """About `count` new shapes on which the trees of two halves of the labels differ, as rows (M, N / 16, K / 16).

    Of fewer than 4,096 outputs the trees are right all the same, and such shapes are passed over.
    """
    order = np.random.default_rng(round_).permutation(len(labels.split))
    trees = [fit(labels.shapes[half], labels.split[half], labels.family) for half in (order[::2], order[1::2])]
    found = list[np.ndarray]()
    for chunk in range(1_000_000 * round_, 1_000_000 * round_ + MOST_CHUNKS):
        shapes = as_asked(drawn(labels.group, chunk, 10 * CHUNK), labels.table)
        shapes = shapes[(shapes[:, 0] * shapes[:, 1] >= 4096) & ~held_out(*shapes.T)]
        first, second = (predicted(tree, shapes, labels.family) for tree in trees)
        found.append(shapes[first != second])
        if sum(map(len, found)) >= count:
            break
    return (np.unique(np.concatenate(found), axis=0) // (1, 16, 16)).astype(np.uint16)


def packed(tree: DecisionTreeClassifier) -> dict[str, str]:
    """The bytes of `f8emu.spec.plan.Tree`, as text."""
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


def _fitted(folder: Path, table: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rule of a table, and its scores: shapes, right, split, right of those."""
    labels = Labels(folder, table)
    tree = fit(labels.shapes, labels.split, labels.family)
    score: dict[str, Any] = {"fitted on": len(labels.split), "nodes": int(tree.tree_.node_count)}
    for name, (shapes, truth) in labels.set_aside.items():
        right = predicted(tree, shapes, labels.family) == truth
        score[name] = [int(x) for x in (len(truth), right.sum(), (truth > 1).sum(), right[truth > 1].sum())]
    return {"workspace_bytes": WORKSPACE[labels.family], "tree": packed(tree)}, score


def _selected(folder: Path, table: str, round_: int, share: float) -> np.ndarray:
    labels = Labels(folder, table)
    return select(labels, int(share * len(labels.split)), round_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--select", type=int, metavar="ROUND")
    parser.add_argument("--share", type=float, default=0.4, help="shapes to select, for each label there is")
    parser.add_argument("--tables", nargs="+", help="to select for (default: all)")
    parser.add_argument("--json", type=Path, help="the table of accuracies")
    arguments = parser.parse_args()
    folder, tables = arguments.labels, [table for tables in GROUPS.values() for table in tables]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        if arguments.select is not None:
            if (path := folder / f"shapes_{arguments.select}.npz").exists():
                parser.error(f"{path} exists, and its answers may too: select the next round")
            tables = arguments.tables or tables
            found = pool.map(_selected, repeat(folder), tables, repeat(arguments.select), repeat(arguments.share))
            selected: dict[str, Any] = dict(zip(tables, found, strict=True))
            np.savez_compressed(path, **selected)
            return
        fitted = dict(zip(tables, pool.map(_fitted, repeat(folder), tables), strict=True))
    plan = json.loads(PLAN.read_text())
    rules = {**plan["rules"], **{table: rule for table, (rule, _) in fitted.items()}}
    scores = {table: score for table, (_, score) in fitted.items()}
    print(json.dumps(scores, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(scores, indent=1))
    PLAN.write_text(_text({**plan, "features": FEATURES, "rules": rules}))


def _text(plan: Mapping[str, Any]) -> str:
    """One recorded shape a line, one tree a line."""
    lines = json.dumps(plan, indent=1)
    return re.sub(r"\[([^\[\]{}]*)\]", lambda found: "[" + " ".join(found[1].split()) + "]", lines) + "\n"


if __name__ == "__main__":
    main()
