"""Which group each row of a grouped GEMM belongs to, as a kernel reads it [EPI-6].

Shape suffixes: M rows of `a`, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """What each row of `a` is multiplied by, all [M]."""

    b: np.ndarray  # the group whose b; -1: none, and the output is zero
    scale_b: np.ndarray  # the group whose scale_b
    scale_a: np.ndarray  # the row whose scale_a


def _right(ends: np.ndarray, m: int) -> Rows:
    rows = np.arange(m)
    group = np.searchsorted(ends, rows, side="right")
    group = np.where(group < len(ends), group, -1)
    return Rows(b=group, scale_b=group, scale_a=rows)


def _scale_b_of(taken: Callable[[np.ndarray, int], np.ndarray]) -> "_Read":
    """Another group's scale_b; `taken` is called with the groups and the last of them."""

    def read(ends: np.ndarray, m: int, size: int) -> Rows:
        right, last = _right(ends, m), len(ends) - 1
        return replace(right, scale_b=taken(right.b, last).clip(0, last))

    return read


def _starts(moved: Callable[[np.ndarray, int], np.ndarray]) -> "_Read":
    """The groups of starts, and so ends, that are elsewhere; the whole of `a` stays in groups."""
    return lambda ends, m, size: _right(np.where(ends < ends[-1], moved(ends, size).clip(0, m), ends), m)


def _scale_a_of_group(ends: np.ndarray, m: int, size: int) -> Rows:
    right = _right(ends, m)
    return replace(right, scale_a=right.b)


def _scale_a_within(ends: np.ndarray, m: int, size: int) -> Rows:
    right = _right(ends, m)
    return replace(right, scale_a=right.scale_a - np.concatenate([[0], ends])[right.b])


def _only_full_tiles(ends: np.ndarray, m: int, size: int) -> Rows:
    right = _right(ends, m)
    starts = np.concatenate([[0], ends])[right.b]
    whole = starts + (ends[right.b] - starts) // size * size
    return replace(right, b=np.where(right.scale_a < whole, right.b, -1))


def _first_b(ends: np.ndarray, m: int, size: int) -> Rows:
    right = _right(ends, m)
    return replace(right, b=right.b.clip(max=0))


def _without_empty(ends: np.ndarray, m: int, size: int) -> Rows:
    right = _right(ends, m)
    rank = np.cumsum(np.diff(ends, prepend=0) > 0) - 1
    return replace(right, b=rank[right.b], scale_b=rank[right.b])


def _until_empty(ends: np.ndarray, m: int, size: int) -> Rows:
    right, is_empty = _right(ends, m), np.diff(ends, prepend=0) == 0
    return replace(right, b=np.where(is_empty.cumsum()[right.b] > 0, -1, right.b))


_Read = Callable[[np.ndarray, int, int], Rows]


class GroupRead(Enum):
    """How rows find their group: words that follow "it", the name of the alteration, and the rows of some ends."""

    _value_: tuple[str, str, _Read]
    OWN = "reads each group's own rows", "", lambda ends, m, size: _right(ends, m)
    FIRST_SCALE = (
        "uses scale_b of the first group for all groups",
        "scale_b of the first group",
        _scale_b_of(lambda g, last: 0 * g),
    )
    LAST_SCALE = (
        "uses scale_b of the last group for all groups",
        "scale_b of the last group",
        _scale_b_of(lambda g, last: 0 * g + last),
    )
    NEXT_SCALE = "uses scale_b of the next group", "scale_b of group g + 1", _scale_b_of(lambda g, last: g + 1)
    PREVIOUS_SCALE = "uses scale_b of the group before", "scale_b of group g - 1", _scale_b_of(lambda g, last: g - 1)
    SWAPPED_SCALE = (
        "exchanges scale_b of neighbouring groups",
        "scale_b of group g xor 1",
        _scale_b_of(lambda g, last: np.where(g ^ 1 <= last, g ^ 1, g)),
    )
    FIRST_B = "multiplies all groups by b of the first", "b of the first group", _first_b
    SCALE_A_OF_GROUP = "indexes scale_a by the group instead of the row", "scale_a of the group", _scale_a_of_group
    SCALE_A_WITHIN = (
        "indexes scale_a by the row within the group instead of the row of a",
        "scale_a of the row within its group",
        _scale_a_within,
    )
    LATE = "ends every group {} row late", "groups end {} row late", _starts(lambda ends, size: ends + size)
    EARLY = "ends every group {} row early", "groups end {} row early", _starts(lambda ends, size: ends - size)
    ROUNDED_UP = (
        "rounds the start of a group up to a tile of {} rows",
        "group starts rounded up to {}",
        _starts(lambda ends, size: -(-ends // size) * size),
    )
    ROUNDED_DOWN = (
        "rounds the start of a group down to a tile of {} rows",
        "group starts rounded down to {}",
        _starts(lambda ends, size: ends // size * size),
    )
    FULL_TILES = "leaves out a group's last tile below {} rows", "full tiles of {} in a group", _only_full_tiles
    WITHOUT_EMPTY = (
        "does not count empty groups when it looks up b and scale_b",
        "empty groups not counted",
        _without_empty,
    )
    UNTIL_EMPTY = "stops at the first empty group", "stops at an empty group", _until_empty


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """One way to read the groups."""

    read: GroupRead = GroupRead.OWN
    size: int = 0  # of a tile, or of a shift

    def __str__(self) -> str:
        return self.read.value[1].format(self.size)

    @property
    def sentence(self) -> str:
        """In words that follow "it"."""
        return self.read.value[0].format(self.size)

    def rows(self, ends: np.ndarray, m: int) -> Rows:
        """What each of m rows is multiplied by, for groups that end at `ends`."""
        return self.read.value[2](ends, m, self.size)


OWN_GROUPS = GroupRule()
_TILES = (8, 16, 32, 64, 128)
GROUP_RULES: tuple[GroupRule, ...] = (
    *(GroupRule(read=read) for read in GroupRead if "{}" not in read.value[1] and read is not GroupRead.OWN),
    *(GroupRule(read=read, size=1) for read in (GroupRead.LATE, GroupRead.EARLY)),
    *(
        GroupRule(read=read, size=size)
        for read in (GroupRead.ROUNDED_UP, GroupRead.ROUNDED_DOWN, GroupRead.FULL_TILES)
        for size in _TILES
    ),
)
"""The wrong ones."""
