"""The float8 weights of a checkpoint: which scale each has, and what its blocks hold, read in bands."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from f8emu.audit.checkpoint import DTYPES, Checkpoint, Stored
from f8emu.audit.formats import SCALES, Format
from f8emu.dialects.rules import GROUP, MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.dialects.stacks import FUSED

CODES = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""The dtype of codes -> the code of its largest number. What is above, signs left out, is infinite or NaN."""
_BAND = 1 << 20
"""Bytes of codes that are read at a time, so that they stay in the cache of a core."""
_SAMPLE = 1 << 22
"""Codes of which a histogram is taken."""
VALUES = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The magnitude of each E4M3 code."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A float8 weight and the scale that belongs to it."""

    codes: Stored
    scale: Stored | None = None
    block: Block | None = None
    """What shares a scale; None: the shapes do not say."""
    shard: str = ""
    """The weight of the source, of one of the shards of a fused weight."""

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
        return self.shard or self.name.replace("._weight_qdata", ".weight")

    @property
    def largest_code(self) -> int:
        return CODES[self.codes.dtype]

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many matrices it is, their rows, their columns; one below the other where blocks do not notice."""
        *lead, rows, k = self.codes.shape
        count = math.prod(lead)
        height = self.block[0] if self.block is not None else None
        return (1, count * rows, k) if height and rows % height == 0 else (count, rows, k)

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of a block in numbers."""
        _, rows, k = self.matrices
        height, width = self.block or TENSOR
        return min(height or rows, rows), min(width or k, k)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks: matrices, down, across."""
        count, rows, k = self.matrices
        height, width = self.extent
        return count, -(-rows // height), -(-k // width)

    def place(self, index: int) -> tuple[int, ...]:
        """A block, as an index of the stored grid, whose experts come first."""
        *lead, rows, _ = self.codes.shape
        matrix, down, across = (int(one) for one in np.unravel_index(index, self.grid))
        of_expert = -(-rows // self.extent[0])
        return (matrix + down // of_expert, down % of_expert, across) if lead else (down, across)


class Blocks(NamedTuple):
    """What the blocks of a weight hold; arrays are flat, in the order of the grid."""

    largest: Bytes
    """The largest magnitude of a code."""
    scale: NDArray[np.float32]
    raw: np.ndarray
    """The scales as they are stored; bytes are exponents."""

    @property
    def used(self) -> NDArray[np.bool]:
        """Blocks with codes other than 0, NaN left out."""
        return (self.largest > 0) & (self.largest <= 0x7E) & (self.scale > 0)

    @property
    def are_bytes(self) -> bool:
        return self.raw.dtype.name == "float8_e8m0fnu"

    @property
    def smallest(self) -> float:
        """Scales below are subnormal, and have too few bits to judge codes by."""
        return 2.0**-17 if self.raw.dtype == np.float16 else 2.0**-118


def names_of(weight: str, templates: tuple[str, ...] = SCALES) -> list[str]:
    """The names of a scale of a weight."""
    return [one.format(w=weight, m=weight.rpartition(".")[0]) for one in templates]


def weights_of(checkpoint: Checkpoint, form: Format) -> Iterator[Weight]:
    """The float8 weights in the order of their names, each with the first scale that is there."""
    tensors = checkpoint.tensors
    for name, codes in sorted(tensors.items()):
        if codes.dtype in CODES and codes.is_matrix and "scale" not in name.rpartition(".")[2]:
            names = (*names_of(name, form.scales), *names_of(name))
            scale = next((tensors[one] for one in names if one in tensors), None)
            block = None if scale is None else _block_of(codes, scale, form)
            yield Weight(codes=codes, scale=scale, block=block)


def shards_of(weight: Weight, sources: Mapping[str, Stored]) -> list[Weight]:
    """The shards of a fused weight whose sources are apart, each with its rows of codes and scales; else the weight."""
    stem, _, last = weight.module.rpartition(".")
    names = [f"{stem}.{one}.weight".lstrip(".") for one in FUSED.get(last, ())]
    parts = [sources[one].shape for one in names if one in sources]
    (rows, k), scale, block = weight.codes.shape[-2:], weight.scale, weight.block
    is_fused = len(names) == len(parts) > 0 and all(len(one) == 2 and one[1] == k for one in parts)
    if scale is None or not is_fused or weight.codes.shape != (sum(one[0] for one in parts), k):
        return [weight]
    # Rows of the scales: one for each shard, or those of its blocks.
    height = None if block is None else block[0]
    counts = [1] * len(parts) if scale.shape == (len(parts),) else [one[0] // (height or rows + 1) for one in parts]
    if sum(counts) * (height or 1) != (rows if height else len(parts)):
        return [weight]
    found: list[Weight] = []
    starts = (accumulate(of, initial=0) for of in ([one[0] for one in parts], counts))
    for name, (row, first), shape, count in zip(names, zip(*starts, strict=True), parts, counts, strict=False):
        label, size = f"{weight.name} ({name.split('.')[-2]})", scale.size // sum(counts)
        codes = replace(weight.codes, name=label, begin=weight.codes.begin + row * k, shape=shape)
        begin = scale.begin + first * size * DTYPES[scale.dtype].itemsize
        own = replace(scale, begin=begin, shape=(count, *scale.shape[1:]))
        found.append(Weight(codes=codes, scale=own, block=block if height else TENSOR, shard=name))
    return found


def _block_of(codes: Stored, scale: Stored, form: Format) -> Block | None:
    # One that the format declares or, where it says none, any whose scales have this shape; by their name, of blocks.
    usual = (TENSOR, ROW, SQUARE, GROUP, MX_GROUP)
    declared = form.blocks or ((SQUARE, *usual) if scale.name.endswith("_scale_inv") else usual)
    return next((one for one in declared if scale.shape in shapes_of(codes.shape, one, has_ones=form.has_ones)), None)


def shapes_of(codes: tuple[int, ...], block: Block, *, has_ones: bool = False) -> list[tuple[int, ...]]:
    """The shapes that scales of a weight may have; the first is the usual one."""
    *lead, rows, k = codes
    if block == TENSOR:
        return [(*lead, *rest) for rest in ((1,), (), (1, 1))]
    if block == ROW:
        return [(*lead, rows, 1), (*lead, rows)]
    down, across = -(-rows // (block[0] or rows)), -(-k // (block[1] or k))
    return [(*lead, down, 1, across, 1) if has_ones else (*lead, down, across)]


def measured(weight: Weight, buffer: Bytes) -> Blocks:
    """The largest code of every block, beside its scale; `buffer` is room for a band.

    Raises:
        CheckpointError: a file has changed.
    """
    assert weight.scale is not None
    _, rows, k = weight.matrices
    height, width = weight.extent
    largest = np.zeros(weight.grid, np.uint8)
    for matrix, row, taken in bands(weight, len(buffer)):
        # 1. Magnitudes, in place; their order is that of the codes.
        begin = (matrix * rows + row) * k
        band = weight.codes.read(begin, begin + taken * k, buffer).view(np.uint8).reshape(taken, k)
        np.bitwise_and(band, 0x7F, out=band)
        # 2. Down: whole blocks together, then what is left of one, which the next band continues. Across.
        whole = taken // height * height
        for first, part in ((0, band[:whole].reshape(-1, height, k)), (whole, band[None, whole:])):
            if part.size:
                columns = part.max(axis=1) if part.shape[1] > 1 else part[:, 0]
                starts = np.arange(0, k, width)
                found = columns.max(axis=1)[:, None] if width == k else np.maximum.reduceat(columns, starts, axis=1)
                at = (row + first) // height
                target = largest[matrix, at : at + len(found)]
                np.maximum(target, found, out=target)
    raw = weight.scale.read()
    raw = raw.view(ml_dtypes.float8_e8m0fnu) if raw.dtype == np.uint8 else raw
    with np.errstate(all="ignore"):
        return Blocks(largest.reshape(-1), raw.astype(np.float32), raw)


def bands(weight: Weight, elements: int = _BAND) -> Iterator[tuple[int, int, int]]:
    """Matrix, first row and number of rows of parts of so many elements: whole blocks, or a part of one."""
    count, rows, k = weight.matrices
    height, _ = weight.extent
    most = max(1, elements // k)
    for matrix in range(count):
        row = 0
        while row < rows:
            left = height - row % height
            taken = min(most // height * height if left == height <= most else min(left, most), rows - row)
            yield matrix, row, taken
            row += taken


def buffer_for(weight: Weight) -> int:
    """The bytes that `measured` needs room for."""
    return max(_BAND, weight.codes.shape[-1])


def histogram(weight: Weight, most: int = _SAMPLE) -> tuple[NDArray[np.int64], int]:
    """How often each magnitude of a code occurs in the first `most` codes, and the number of blocks that these are."""
    counts, size = np.zeros(128, np.int64), min(weight.codes.size, most)
    for begin in range(0, size, _BAND):
        codes = weight.codes.read(begin, min(begin + _BAND, size)).view(np.uint8)
        counts += np.bincount(codes & 0x7F, minlength=128)
    return counts, max(1, size // math.prod(weight.extent))


def magnitudes(weight: Weight, index: int) -> Bytes:
    """The codes of a block that are not 0, signs left out."""
    _, rows, k = weight.matrices
    height, width = weight.extent
    matrix, down, across = (int(one) for one in np.unravel_index(index, weight.grid))
    begin, end = ((matrix * rows + min(row, rows)) * k for row in (down * height, (down + 1) * height))
    found = weight.codes.read(begin, end).view(np.uint8).reshape(-1, k)[:, across * width : (across + 1) * width]
    found = np.bitwise_and(found, np.uint8(0x7F))
    return found[found > 0]
