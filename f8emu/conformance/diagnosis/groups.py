"""Which group each row of a grouped GEMM belongs to, as a kernel reads it [EPI-6].

Shape suffixes: M rows of `a`, G groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """The groups and scales that each row of `a` is multiplied by, all [M]."""

    b: np.ndarray  # the group whose b; -1: none, and the output is zero
    scale_b: np.ndarray  # the group whose scale_b
    scale_a: np.ndarray  # the row whose scale_a


class GroupRule(NamedTuple):
    """One way to read the groups."""

    name: str
    sentence: str  # in words that follow "it"
    change: Callable[[Rows, np.ndarray], Rows]  # the right rows, and where groups end -> those that are read

    def __str__(self) -> str:
        return self.name

    def rows(self, ends: np.ndarray, m: int) -> Rows:
        """The rows as this rule reads them, for m rows in groups that end at `ends`."""
        return self.change(_right(ends, m), ends)


def _right(ends: np.ndarray, m: int) -> Rows:
    rows = np.arange(m)
    group = np.searchsorted(ends, rows, side="right")
    group = np.where(group < len(ends), group, -1)
    return Rows(b=group, scale_b=group, scale_a=rows)


def _moved(right: Rows, ends: np.ndarray, to: np.ndarray) -> Rows:
    """Groups that end elsewhere, but for the last: the whole of `a` stays in groups."""
    m = len(right.b)
    return _right(np.where(ends < ends[-1], to.clip(0, m), ends), m)


def _within(right: Rows, ends: np.ndarray) -> np.ndarray:
    """The row within its group."""
    return right.scale_a - np.concatenate([[0], ends])[right.b]


def _full_tiles(right: Rows, ends: np.ndarray, tile: int) -> Rows:
    whole = np.diff(ends, prepend=0) // tile * tile
    return right._replace(b=np.where(_within(right, ends) < whole[right.b], right.b, -1))


def _until_empty(right: Rows, ends: np.ndarray) -> Rows:
    is_behind = (np.diff(ends, prepend=0) == 0).cumsum() > 0
    return right._replace(b=np.where(is_behind[right.b], -1, right.b))


def _one_tiling(right: Rows, ends: np.ndarray) -> Rows:
    """Row r of a swizzled scale_a whose groups restart the tiling, read as row r of one tiling; -1 is padding."""
    sizes = np.diff(ends, prepend=0)
    of_tiles = [np.pad(np.arange(size), (0, -size % 128), constant_values=-1) for size in sizes]
    starts = (np.where(rows < 0, -1, rows + start) for rows, start in zip(of_tiles, ends - sizes, strict=True))
    lying = np.concatenate([*starts, np.full(len(right.b), -1)])
    return right._replace(scale_a=lying[: len(right.b)])


OWN_GROUPS = GroupRule("", "reads each group's own rows", lambda right, ends: right)
_WHOLE: tuple[GroupRule, ...] = (
    GroupRule(
        "scale_b of the first group",
        "uses scale_b of the first group for all groups",
        lambda right, ends: right._replace(scale_b=0 * right.b),
    ),
    GroupRule(
        "scale_b of group g + 1",
        "uses scale_b of the next group",
        lambda right, ends: right._replace(scale_b=(right.b + 1).clip(0, len(ends) - 1)),
    ),
    GroupRule(
        "scale_b of group g - 1",
        "uses scale_b of the group before",
        lambda right, ends: right._replace(scale_b=(right.b - 1).clip(0)),
    ),
    GroupRule(
        "b of the first group",
        "multiplies all groups by b of the first",
        lambda right, ends: right._replace(b=right.b.clip(max=0)),
    ),
    GroupRule(
        "scale_a of the group",
        "indexes scale_a by the group instead of the row",
        lambda right, ends: right._replace(scale_a=right.b),
    ),
    GroupRule(
        "scale_a of the row within its group",
        "indexes scale_a by the row within the group instead of the row of a",
        lambda right, ends: right._replace(scale_a=_within(right, ends)),
    ),
    GroupRule(
        "one tiling for all groups",
        "reads scale_a as one tiling of 128 x 4, and each group restarts it [MX-2]",
        _one_tiling,
    ),
    GroupRule("stops at an empty group", "stops at the first empty group", _until_empty),
    GroupRule(
        "groups end 1 row late", "ends every group 1 row late", lambda right, ends: _moved(right, ends, ends + 1)
    ),
    GroupRule(
        "groups end 1 row early", "ends every group 1 row early", lambda right, ends: _moved(right, ends, ends - 1)
    ),
)
_OF_TILES: tuple[tuple[str, str, Callable[[Rows, np.ndarray, int], Rows]], ...] = (
    (
        "group starts rounded up to {}",
        "rounds the start of a group up to a tile of {} rows",
        lambda right, ends, tile: _moved(right, ends, -(-ends // tile) * tile),
    ),
    (
        "group starts rounded down to {}",
        "rounds the start of a group down to a tile of {} rows",
        lambda right, ends, tile: _moved(right, ends, ends // tile * tile),
    ),
    ("full tiles of {} in a group", "leaves out a group's last tile below {} rows", _full_tiles),
)
GROUP_RULES: tuple[GroupRule, ...] = (
    *_WHOLE,
    *(
        GroupRule(name.format(tile), sentence.format(tile), lambda right, ends, t=tile, of=change: of(right, ends, t))
        for name, sentence, change in _OF_TILES
        for tile in (8, 16, 32, 64, 128)
    ),
)
"""The wrong ones."""
