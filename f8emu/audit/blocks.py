"""The float8 weights of a checkpoint: which scale each has, and what its blocks hold, read in bands."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.checkpoint import BAND, DTYPES, Checkpoint, Stored
from f8emu.audit.findings import Finding, finding
from f8emu.audit.formats import SCALES, Format, Kind
from f8emu.dialects.rules import GROUP, MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.dialects.stacks import FUSED

CODES = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""The dtype of codes -> the code of its largest number. What is above, signs left out, is infinite or NaN."""
_SAMPLE = 1 << 22
"""Codes of which a histogram is taken."""
VALUES = np.arange(128, dtype=np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float32)
"""The magnitude of each E4M3 code."""
Mask = NDArray[np.bool]


@dataclass(slots=True, kw_only=True, eq=False)
class Weight:
    """A float8 weight, the scale that belongs to it, and what an audit found of them."""

    codes: Stored
    source: str
    """The name of the weight before it was quantized; that of a shard, if shards were fused."""
    scale: Stored | None = None
    block: Block | None = None
    """What shares a scale; None: the shapes do not say."""
    findings: list[Finding] = field(default_factory=list)
    blocks: int = 0
    """Those that were read."""
    zeros: Counter[float] = field(default_factory=Counter)
    """Scale -> blocks that have it, and codes of 0 alone."""
    used: int = 0
    """The other blocks; what follows is of them."""
    kind: Kind | None = None
    scales: frozenset[float] = frozenset()
    """All of them or, of floats with mantissa bits, the smallest and the largest."""
    largest: int = 0
    """The largest magnitude of a code."""
    is_full: bool = False
    """448 is in every block, and scales are powers of two."""
    chance: float = 1.0
    """How probable that is, if weights have no end."""
    dialects: tuple[str, ...] | None = None
    """Those that give every byte, as `dialects.matching` compares them; None: no source was compared."""
    stored: int = 0
    """A hash of the scales as they are stored."""
    expected: frozenset[int] = frozenset()
    """Where no dialect gives every byte, hashes of the scales that the nearest ones give."""

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def module(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def largest_code(self) -> int:
        return CODES[self.codes.dtype]

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of a block in numbers."""
        rows, k = self.codes.shape[-2:]
        height, width = self.block or TENSOR
        return min(height or rows, rows), min(width or k, k)

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks: experts, down, across."""
        *lead, rows, k = self.codes.shape
        height, width = self.extent
        return *lead, -(-rows // height), -(-k // width)

    def finding(self, check: str, expected: str, found: str, wrong: Mask | None = None, **changed: Any) -> Finding:
        """A finding of it, in the blocks that are `wrong`."""
        if wrong is not None:
            first = tuple(map(int, np.unravel_index(int(wrong.argmax()), self.grid)))
            changed |= {"block": first, "blocks": int(wrong.sum())}
        return finding(check, self.name, expected, found, **changed)

    def add(self, check: str, expected: str, found: str, wrong: Mask | None = None, **changed: Any) -> None:
        """Keep a finding."""
        self.findings.append(self.finding(check, expected, found, wrong, **changed))


class Blocks(NamedTuple):
    """What the blocks of a weight hold; arrays are flat, in the order of the grid."""

    largest: NDArray[np.uint8]
    """The largest magnitude of a code."""
    scale: NDArray[np.float32]
    raw: np.ndarray
    """The scales as they are stored; bytes are exponents."""

    @property
    def used(self) -> Mask:
        """Blocks with codes other than 0, NaN left out."""
        return (self.largest > 0) & (self.largest <= 0x7E) & (self.scale > 0)


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
            yield Weight(codes=codes, scale=scale, block=block, source=name.replace("._weight_qdata", ".weight"))


def shards_of(weight: Weight, sources: Mapping[str, Stored]) -> list[Weight]:
    """The shards of a fused weight whose sources are apart, each with its rows of codes and scales; else the weight."""
    stem, _, last = weight.module.rpartition(".")
    names = [f"{stem}.{one}.weight".lstrip(".") for one in FUSED.get(last, ())]
    parts = [sources[one].shape for one in names if one in sources]
    k, scale, height = weight.codes.shape[-1], weight.scale, (weight.block or TENSOR)[0]
    rows = [one[0] for one in parts if len(one) == 2 and one[1] == k]
    is_fused = len(rows) == len(names) > 0 and weight.codes.shape == (sum(rows), k)
    if not is_fused or scale is None or scale.dtype not in DTYPES:
        return [weight]
    # Rows of the scales: those of the blocks of a shard, or one for each shard.
    if height is not None and not any(row % height for row in rows):
        counts = [row // height for row in rows]
    elif scale.shape == (len(rows),):
        counts = [1] * len(rows)
    else:
        return [weight]
    size, row, first = scale.size // sum(counts) * DTYPES[scale.dtype].itemsize, 0, 0
    found: list[Weight] = []
    for name, taken, count in zip(names, rows, counts, strict=True):
        label = f"{weight.name} ({name.split('.')[-2]})"
        codes = replace(weight.codes, name=label, begin=weight.codes.begin + row * k, shape=(taken, k))
        own = replace(scale, begin=scale.begin + first * size, shape=(count, *scale.shape[1:]))
        found.append(Weight(codes=codes, scale=own, block=weight.block or TENSOR, source=name))
        row, first = row + taken, first + count
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


def measured(weight: Weight, elements: int = BAND) -> Blocks:
    """The largest code of every block, beside its scale; `elements` are read at a time, or a row."""
    assert weight.scale is not None
    k, (height, width) = weight.codes.shape[-1], weight.extent
    largest = np.zeros((math.prod(weight.grid[:-1]), weight.grid[-1]), np.uint8)
    for at, band in bands(weight, weight.codes, elements):
        # 1. Magnitudes, in place; their order is that of the codes.
        codes = band.view(np.uint8)
        np.bitwise_and(codes, 0x7F, out=codes)
        # 2. Down: whole blocks together, then what is left of one, which the next band continues. Across.
        whole = len(codes) // height * height
        for first, part in ((at, codes[:whole].reshape(-1, height, k)), (at + whole // height, codes[None, whole:])):
            if part.size:
                columns = part.max(axis=1) if part.shape[1] > 1 else part[:, 0]
                starts = np.arange(0, k, width)
                found = columns.max(axis=1)[:, None] if width == k else np.maximum.reduceat(columns, starts, axis=1)
                target = largest[first : first + len(found)]
                np.maximum(target, found, out=target)
    raw = weight.scale.read()
    raw = raw.view(DTYPES["F8_E8M0"]) if raw.dtype == np.uint8 else raw
    with np.errstate(all="ignore"):
        return Blocks(largest.reshape(-1), raw.astype(np.float32), raw)


def bands(weight: Weight, stored: Stored, elements: int = BAND) -> Iterator[tuple[int, np.ndarray]]:
    """Parts of a weight, or of one of its shape, of so many elements: whole blocks, or a part of one.

    Each has the index of its first row of blocks, and its rows.
    """
    rows, k = weight.codes.shape[-2:]
    height, total, row = weight.extent[0], weight.codes.size // k, 0
    # Matrices are one below the other where blocks do not notice.
    most, end = max(1, elements // k), total if rows % height == 0 else rows
    while row < total:
        left = height - row % rows % height
        taken = min(most // height * height if left == height <= most else min(left, most), end - row % end)
        at = row // rows * weight.grid[-2] + row % rows // height
        yield at, stored.read(row * k, (row + taken) * k).reshape(taken, k)
        row += taken


def histogram(weight: Weight, most: int = _SAMPLE) -> tuple[NDArray[np.int64], int]:
    """How often each magnitude of a code occurs in the first `most` codes, and the number of blocks that these are."""
    counts = np.zeros(128, np.int64)
    for codes in weight.codes.parts(most):
        counts += np.bincount(codes.view(np.uint8) & 0x7F, minlength=128)
    return counts, max(1, min(weight.codes.size, most) // math.prod(weight.extent))


def magnitudes(weight: Weight, index: int) -> NDArray[np.uint8]:
    """The codes of a block that are not 0, signs left out."""
    (rows, k), (height, width) = weight.codes.shape[-2:], weight.extent
    down, across = divmod(index, weight.grid[-1])
    matrix, down = divmod(down, weight.grid[-2])
    begin, end = ((matrix * rows + min(row, rows)) * k for row in (down * height, (down + 1) * height))
    band = weight.codes.read(begin, end).view(np.uint8).reshape(-1, k)
    found = band[:, across * width : (across + 1) * width] & np.uint8(0x7F)
    return found[found > 0]
