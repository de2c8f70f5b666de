"""The layout in which cuBLASLt takes block scales: tiles of 128 rows by 4 blocks, which torch calls SWIZZLE_32_4_4.

Scales [rows, blocks] are padded to whole tiles, which follow one another along the blocks. Inside a tile of 512 bytes:

    offset = (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4

Groups of a grouped GEMM begin a new tile each: along the rows, or along K, in blocks. Padding is never multiplied.

Source: cuBLAS 13 documentation, "1D Block Scaling Factors Layout"; torchao's `to_blocked` has the same bytes.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple, SupportsIndex

from f8emu.spec.errors import OperandError

TILE_ROWS = 128
"""Rows of a tile."""
TILE_BLOCKS = 4
"""Blocks along K of a tile."""


class SwizzledGroup(NamedTuple):
    """Where the scales of a group are, in the plain layout and in the swizzled one."""

    rows: slice
    blocks: slice
    start: int
    """Of its first tile, in bytes."""

    @property
    def sizes(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.blocks.stop - self.blocks.start

    def offsets(self, row: Any, block: Any) -> Any:
        """Of scale [row, block] of the group: of integers, or of arrays that broadcast."""
        tiles = row // TILE_ROWS * -(-self.sizes[1] // TILE_BLOCKS) + block // TILE_BLOCKS
        within = row % 32 * 16 + row // 32 % 4 * 4 + block % 4
        return self.start + tiles * (TILE_ROWS * TILE_BLOCKS) + within

    def places(self, arange: Callable[[int], Any]) -> Any:
        """The offsets of all scales [rows, blocks] of the group, of the arrays that `arange` makes."""
        rows, blocks = map(arange, self.sizes)
        return self.offsets(rows[:, None], blocks)


def swizzled_size(rows: int, blocks: int) -> int:
    """The bytes of scales [rows, blocks], padding included."""
    return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * TILE_ROWS * TILE_BLOCKS


def swizzled_groups(
    call: str, shape: tuple[int, ...], ends: Iterable[SupportsIndex] | None, axis: int
) -> tuple[list[SwizzledGroup], int]:
    """The groups of scales [rows, blocks], one without `ends`, and the bytes of all.

    Group g ends before row `ends[g]` where `axis` is 0, before that block where it is 1.

    Raises:
        OperandError: no matrix, no such axis, or ends that are no integers, descend or leave the scales.
    """
    rows, blocks = shape[-2:] if len(shape) > 1 else (-1, -1)
    if min(rows, blocks) < 0 or axis not in (0, 1) or (ends is not None and len(shape) > 2):
        raise OperandError(
            f"{call}: scales must be [rows, blocks], or without ends [..., rows, blocks], and axis 0 or 1; got shape "
            f"{list(shape)} and axis {axis}; reshape them"
        )
    try:
        stops = [shape[axis - 2]] if ends is None else list(map(index, ends))
    except TypeError:
        raise OperandError(f"{call}: ends must be integers, one for each group; got {ends!r}; list them") from None
    runs = [slice(*run) for run in pairwise([0, *stops])]
    if any(run.start > run.stop or run.stop > shape[axis - 2] for run in runs):
        raise OperandError(f"{call}: ends must ascend up to {shape[axis - 2]}; got {stops}; give ends, not sizes")
    groups, start = list[SwizzledGroup](), 0
    for run in runs:
        group = SwizzledGroup(slice(0, rows), run, start) if axis else SwizzledGroup(run, slice(0, blocks), start)
        groups.append(group)
        start += swizzled_size(*group.sizes)
    return groups, start


def check_padding(call: str, padding: object) -> None:
    """Refuse what is no byte.

    Raises:
        OperandError: it is none.
    """
    if not isinstance(padding, SupportsIndex) or not 0 <= index(padding) < 256:
        raise OperandError(
            f"{call}: padding must be a byte, an integer from 0 to 255; got {padding!r}; 255 is a NaN of E8M0"
        )


def check_swizzled(call: str, shape: tuple[int, ...], size: int) -> None:
    """Refuse swizzled scales with fewer bytes in their last dimension than the layout has.

    Raises:
        OperandError: there are fewer.
    """
    if not shape or shape[-1] < size:
        raise OperandError(
            f"{call}: swizzled must have {size} bytes or more in its last dimension, padding to tiles of 128 rows by 4 "
            f"blocks included; got shape {list(shape)}; flatten it, or mend rows and blocks"
        )
