"""Fits the trees of the plan of split K [PLAN-1..4] on what the library said, and scores them on shapes set aside.

    python -m benchmarks.proofs.split_k_fit LABELS --json OUT     minutes; needs scikit-learn, f8emu does not

`LABELS` is a folder with, for f8 and b16, `{}_0.npz`, `{}_1.npz` (m, n16 = N / 16, k16 = K / 16, sets, labels by table)
and `{}_bisect.npz` (table, m, n16, k16, label: pairs of shapes between which S changes, and what was asked on the way),
and with meta.json: `tables` and `configs["lt"]`, whose entry label - 1 starts with S. A label of 0 was not asked. With
block scales the outputs are bfloat16.

Set aside: `held_out`, one shape in 16 of every set; the sets EDGE and ABOVE as a whole; every recorded row. The rules
go into the shipped plan file, whose recorded rows stay as they are.
"""

import argparse
import base64
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier  # pyright: ignore[reportMissingImports]

from f8emu.spec.plan import PLAIN_FEATURES

PLAN = Path(__file__).parents[2] / "f8emu/spec/data/h200_cublas_13_1_0_3_split_k.json"
EDGE, RANDOM, REAL, ABOVE = 2, 3, 4, 7
"""Sets: groups of neighbours, log-uniform shapes, sizes as layers have them, more outputs than [PLAN-4] splits."""
TREES = {"f8": 3, "b16": 1}
ELEMENT_BYTES = {"f8": 1, "b16": 2}
WORKSPACE_BYTES = {"f8": 1 << 20, "b16": 32 << 20}
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
"""As `f8emu.spec.plan.Trees` reads them."""


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
    slices = np.minimum(by_k, np.maximum(1, (WORKSPACE_BYTES[family] - 1) // (4 * m * n)))
    tiles = {(a, b): -(-n // a) * -(-m // b) for a, b in TILES}
    columns = [m, n, k, m * n, *(np.minimum(x & -x, 128) for x in (m, n, k)), by_k, slices, *tiles.values()]
    columns += [np.minimum(slices, -(-88 // tiles[tile])) for tile in FILLED]
    columns += [np.minimum(slices, 132 // tiles[tile]) for tile in FILLED]
    return np.stack(columns, 1).astype(np.float32), slices


def as_asked(shapes: np.ndarray, table: str) -> np.ndarray:
    """1x128 scales of a need M a multiple of 4, to which rows are padded."""
    return shapes + -shapes % (4, 1, 1) if table.startswith("blockwise_1x128") else shapes


class Labels:
    """What the library said about float8 or bfloat16 GEMMs."""

    def __init__(self, folder: Path, family: str, configs: np.ndarray) -> None:
        parts = [np.load(folder / f"{family}_{part}.npz") for part in (0, 1)]
        bisect = np.load(folder / f"{family}_bisect.npz")
        self.shapes = np.concatenate([_shapes(part) for part in parts])
        self.sets = np.concatenate([part["sets"] for part in parts])
        self.split = configs[np.concatenate([part["labels"] for part in parts], 1)]
        self.aside = held_out(*self.shapes.T)
        self.bisect = [(_shapes(bisect)[of], configs[bisect["label"]][of]) for of in _each(bisect["table"])]

    def fitted_on(self, table: int, never: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shapes and S, without all that is set aside."""
        split = self.split[table]
        wanted = (self.sets != EDGE) & (self.sets != ABOVE) & (split > 0)
        shapes = np.concatenate([self.shapes[wanted], self.bisect[table][0]])
        split = np.concatenate([split[wanted], self.bisect[table][1]])
        edge = key(self.shapes[self.sets == EDGE])
        kept = ~held_out(*shapes.T) & ~np.isin(key(shapes), np.concatenate([edge, never])) & (split > 0)
        return shapes[kept], split[kept]

    def set_aside(self, table: int) -> Mapping[str, np.ndarray]:
        """Indices of the shapes of each set."""
        known = self.split[table] > 0
        return {
            "random": np.flatnonzero((self.sets == RANDOM) & self.aside & known),
            "real": np.flatnonzero((self.sets == REAL) & self.aside & known),
            "edge": np.flatnonzero((self.sets == EDGE) & known),
        }


def _shapes(data: Any) -> np.ndarray:
    return np.stack(
        [data["m"].astype(np.int64), data["n16"].astype(np.int64) * 16, data["k16"].astype(np.int64) * 16], 1
    )


def _each(tables: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(tables == table) for table in range(int(tables.max()) + 1)]


def packed(tree: DecisionTreeClassifier) -> dict[str, str]:
    """The bytes of `f8emu.spec.plan.Tree`, as text."""
    inner = tree.tree_
    split = tree.classes_[inner.value[:, 0, :].argmax(1)]
    codes, limits, waiting = bytearray(), list[int](), [0]
    while waiting:
        at = waiting.pop()
        if inner.children_left[at] < 0:
            codes.append(128 + int(split[at]))
            continue
        codes.append(int(inner.feature[at]))
        limits.append(int(inner.threshold[at]))
        waiting += [inner.children_right[at], inner.children_left[at]]
    planes = np.array(limits, "<u4").view(np.uint8).reshape(-1, 4).T[:3].tobytes()
    texts = {"codes": bytes(codes), "limits": planes}
    return {name: base64.b64encode(zlib.compress(data, 9)).decode() for name, data in texts.items()}


def fit(shapes: np.ndarray, split: np.ndarray, family: str) -> list[DecisionTreeClassifier]:
    """One tree of all features, or several that look at four in ten of them at each node."""
    x, slices = features(shapes, family)
    count = TREES[family]
    made = [DecisionTreeClassifier(random_state=seed, max_features=0.4 if count > 1 else None) for seed in range(count)]
    return [tree.fit(x[slices > 1], split[slices > 1]) for tree in made]


def predicted(trees: list[DecisionTreeClassifier], shapes: np.ndarray, family: str) -> np.ndarray:
    """S of most trees; of the first one if all differ."""
    x, slices = features(shapes, family)
    votes = np.stack([tree.predict(x) for tree in trees])
    counts = (votes[:, None] == votes[None]).sum(1)
    return np.minimum(votes[counts.argmax(0), np.arange(len(shapes))], slices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="the table of accuracies")
    arguments = parser.parse_args()
    meta = json.loads((arguments.labels / "meta.json").read_text())
    configs = np.array([0, *(config[0] for config in meta["configs"]["lt"])])
    plan = json.loads(PLAN.read_text())
    never = key(np.array([row[:3] for block in plan["recorded"] for row in block["rows"]]))
    rules: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    for family, tables in meta["tables"].items():
        labels = Labels(arguments.labels, family, configs)
        for index, table in enumerate(tables):
            rule = f"{table} bfloat16" if table.startswith("blockwise") else table
            shapes, split = labels.fitted_on(index, never)
            trees = fit(as_asked(shapes, table), split, family)
            rules[rule] = {"workspace_bytes": WORKSPACE_BYTES[family], "trees": [packed(tree) for tree in trees]}
            scores[rule] = {"fitted on": len(split)}
            for name, of in labels.set_aside(index).items():
                truth, found = labels.split[index][of], predicted(trees, as_asked(labels.shapes[of], table), family)
                scores[rule][name] = [int(x) for x in (len(of), (found == truth).sum(), (truth > 1).sum())]
                scores[rule][name] += [int(((found == truth) & (truth > 1)).sum())]
            print(rule, scores[rule], flush=True)
    rules |= {name: rule for name, rule in plan["rules"].items() if name not in rules}
    arguments.json.write_text(json.dumps(scores, indent=1))
    PLAN.write_text(_text({**plan, "features": FEATURES, "rules": rules}))


def _text(plan: Mapping[str, Any]) -> str:
    """One recorded shape a line, one tree a line."""
    lines = json.dumps(plan, indent=1)
    return re.sub(r"\[([^\[\]{}]*)\]", lambda found: "[" + " ".join(found[1].split()) + "]", lines) + "\n"


if __name__ == "__main__":
    main()
