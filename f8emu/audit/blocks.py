"""The float8 weights of a checkpoint: which scale each has, and what its blocks hold, read in bands."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from f8emu.audit.checkpoint import Checkpoint, Stored
from f8emu.audit.formats import SCALES, Format
from f8emu.dialects.rules import GROUP, MX_GROUP, ROW, SQUARE, TENSOR, Block

_CODES = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""The dtype of codes -> the code of its largest number. What is above, signs left out, is infinite or NaN."""
_BAND = 1 << 20
"""Bytes of codes that are read at a time; with the copy of their magnitudes they stay in the cache of a core."""
_SAMPLE = 1 << 22
"""Codes of which a histogram is taken."""
VALUES = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The magnitude of each E4M3 code."""
Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A float8 weight and the scale that belongs to it."""

    codes: Stored
    scale: Stored | None = None
    block: Block | None = None
    """What shares a scale; None: that could not be told from the shapes."""

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def module(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def source_name(self) -> str:
        """The weight before it was quantized."""
        return self.name.replace("._weight_qdata", ".weight")

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many matrices it is, their rows, their columns; one below the other where blocks do not notice."""
        *lead, rows, k = self.codes.shape
        count = math.prod(lead)
        height = self.block[0] if self.block is not None else None
        return (1, count * rows, k) if height and rows % height == 0 else (count, rows, k)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks: matrices, down, across."""
        count, rows, k = self.matrices
        height, width = self.extent
        return count, -(-rows // height), -(-k // width)

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of a block in numbers."""
        _, rows, k = self.matrices
        height, width = self.block or TENSOR
        return min(height or rows, rows), min(width or k, k)

    def place(self, index: int) -> tuple[int, ...]:
        """A block, as an index of the stored grid, whose experts come first."""
        *lead, rows, _ = self.codes.shape
        matrix, down, across = (int(one) for one in np.unravel_index(index, self.grid))
        if not lead:
            return down, across
        of_matrix = -(-rows // self.extent[0])
        return matrix + down // of_matrix, down % of_matrix, across

    @property
    def largest_code(self) -> int:
        return _CODES[self.codes.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What the blocks of a weight hold; arrays are flat, in the order of the grid."""

    largest: Bytes
    """The largest magnitude of a code."""
    scale: Float32
    raw: np.ndarray
    """The scales as they are stored."""
    used: NDArray[np.bool] = field(init=False)
    """Blocks with codes other than 0, NaN left out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "used", (self.largest > 0) & (self.largest <= 0x7E) & (self.scale > 0))


def is_weight(stored: Stored) -> bool:
    """Whether a tensor holds the codes of a Linear: float8, two dimensions or more, and no scale by its name."""
    return stored.dtype in _CODES and stored.is_matrix and "scale" not in stored.name.rpartition(".")[2]


def names_of(weight: str, templates: tuple[str, ...] = SCALES) -> list[str]:
    """The names of a scale of a weight."""
    return [one.format(w=weight, m=weight.rpartition(".")[0]) for one in templates]


def weights_of(checkpoint: Checkpoint, form: Format) -> Iterator[Weight]:
    """The float8 weights in the order of their names, each with the first scale that is there."""
    tensors = checkpoint.tensors
    for codes in sorted(filter(is_weight, tensors.values()), key=lambda one: one.name):
        names = [*names_of(codes.name, form.scales), *names_of(codes.name)]
        scale = next((tensors[name] for name in names if name in tensors), None)
        block = None if scale is None else block_of(codes.shape, scale.shape, form)
        yield Weight(codes=codes, scale=scale, block=block)


def block_of(codes: tuple[int, ...], scale: tuple[int, ...], form: Format) -> Block | None:
    """The granularity that a shape of scales means: one that the format declares or, where it says none, any."""
    for block in form.blocks or (TENSOR, ROW, SQUARE, GROUP, MX_GROUP):
        if scale in shapes_of(codes, block, has_ones=form.has_ones):
            return block
    return None


def shapes_of(codes: tuple[int, ...], block: Block, *, has_ones: bool = False) -> list[tuple[int, ...]]:
    """The shapes that scales of a weight may have; the first is the usual one."""
    *lead, rows, k = codes
    if block == TENSOR:
        return [(*lead, *rest) for rest in ((1,), (), (1, 1))]
    if block == ROW:
        return [(*lead, rows, 1), (*lead, rows)]
    down, across = -(-rows // (block[0] or rows)), -(-k // (block[1] or k))
    return [(*lead, down, 1, across, 1)] if has_ones else [(*lead, down, across)]


def measured(weight: Weight, buffer: Bytes) -> Blocks:
    """The largest code of every block, beside its scale.

    Raises:
        CheckpointError: a file has changed.
    """
    count, _, k = weight.matrices
    height, width = weight.extent
    largest = np.zeros(weight.grid, np.uint8)
    starts = np.arange(0, k, width)
    for matrix in range(count):
        row = 0
        for band in _bands(weight, matrix, buffer):
            # 1. Magnitudes, in place; their order is that of the codes.
            np.bitwise_and(band, 0x7F, out=band)
            whole = len(band) // height * height
            # 2. Down: whole blocks together, then what is left of one, which the next band continues.
            for first, part in ((0, band[:whole].reshape(-1, height, k)), (whole, band[None, whole:])):
                if part.size:
                    columns = part[:, 0] if part.shape[1] == 1 else part.max(axis=1)
                    # 3. Across.
                    found = columns.max(axis=1)[:, None] if width == k else np.maximum.reduceat(columns, starts, axis=1)
                    at = (row + first) // height
                    target = largest[matrix, at : at + len(found)]
                    np.maximum(target, found, out=target)
            row += len(band)
    scale, raw = scales_of(weight)
    return Blocks(largest=largest.reshape(-1), scale=scale, raw=raw)


def _bands(weight: Weight, matrix: int, buffer: Bytes) -> Iterator[Bytes]:
    # Rows of a matrix: some whole blocks, or parts of one that end where it ends.
    _, rows, k = weight.matrices
    height, _ = weight.extent
    most = max(1, min(_BAND, len(buffer)) // k)
    row = 0
    while row < rows:
        left = height - row % height
        count = most // height * height if left == height and most >= height else min(left, most)
        count = min(count, rows - row)
        begin = (matrix * rows + row) * k
        (codes,) = weight.codes.parts(count * k, buffer, begin=begin, end=begin + count * k)
        yield codes.view(np.uint8).reshape(count, k)
        row += count


def buffer_for(weight: Weight) -> int:
    """The bytes of the buffer that `measured` needs."""
    return max(_BAND, weight.codes.shape[-1])


def scales_of(weight: Weight) -> tuple[Float32, np.ndarray]:
    """The scales as float32, and as they are stored, flat. Bytes are exponents."""
    assert weight.scale is not None
    raw = weight.scale.read().reshape(-1)
    raw = raw.view(ml_dtypes.float8_e8m0fnu) if raw.dtype == np.uint8 else raw
    with np.errstate(all="ignore"):
        return raw.astype(np.float32), raw


def histogram(weight: Weight) -> tuple[NDArray[np.int64], int]:
    """How often each magnitude of a code occurs in the first codes, and the number of blocks that these are."""
    size = min(weight.codes.size, _SAMPLE)
    (codes,) = weight.codes.parts(size, None, end=size)
    counts = np.bincount(codes.view(np.uint8).reshape(-1) & 0x7F, minlength=128)
    height, width = weight.extent
    return counts, max(1, size // (height * width))
