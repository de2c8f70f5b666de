"""What the trees of the plan of split K ask of a shape [PLAN-1..4], and how they are fitted. Needs scikit-learn."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier  # pyright: ignore[reportMissingImports]

from f8emu.split_k.ask import WORKSPACE_BYTES
from f8emu.split_k.trees import LEAF, PLAIN_FEATURES

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
