"""The float8 weights of a checkpoint: which scale each has, and what its blocks hold, read in bands."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.checkpoint import BAND, DTYPES, Checkpoint, Joined, Tensor
from f8emu.audit.counts import Counts
from f8emu.audit.findings import Finding, finding
from f8emu.audit.formats import SCALES, TURNED_ROW, Format, ScaleKind
from f8emu.dialects.rules import GROUP, MX_GROUP, ROW, SQUARE, TENSOR, Block

CODES = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""The dtype of codes -> the code of its largest number. What is above, signs left out, is infinite or NaN."""
_SAMPLE = 1 << 20
"""About so many codes of a weight are counted."""
Mask = NDArray[np.bool]
LAYER = re.compile(r"(.*?)\.\d+\.")
"""The begin of a name, to the number of the layer; the stack of layers in front of it is a group."""
_NUMBERS = re.compile(r"\d+")


def like_of(name: str) -> str:
    """The name with # for every number: that of its like in other layers too."""
    return _NUMBERS.sub("#", name)


@dataclass(slots=True, kw_only=True, eq=False)
class Weight:
    """A float8 weight, the scale that belongs to it, and what an audit found of them."""

    codes: Tensor
    source: str
    """The name of the weight before it was quantized; that of a shard, if shards were fused."""
    scale: Tensor | None = None
    block: Block | None = None
    """What shares a scale; None: the shapes do not say."""
    findings: list[Finding] = field(default_factory=list)
    blocks: int = 0
    """Those that were read."""
    zeros: Counter[float] = field(default_factory=Counter)
    """Scale -> blocks that have it, and codes of 0 alone."""
    used: int = 0
    """The other blocks; what follows is of them."""
    kind: ScaleKind | None = None
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
    counts: Counts | None = None
    """Of the codes of E4M3, where they can be judged."""
    origin: Tensor | Joined | None = None
    """What it was quantized from, where a source is given that has it."""
    uncompared: str = ""
    """Why it was not compared with the source that was given."""
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
    def is_scaled(self) -> bool:
        """Whether its scale can be read."""
        return self.scale is not None and self.block is not None and self.scale.dtype in DTYPES

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
    """The blocks of a weight, as flat arrays in the order of the grid."""

    largest: NDArray[np.uint8]
    """The largest magnitude of a code."""
    scale: NDArray[np.float32]
    raw: np.ndarray
    """The scales as they are stored; bytes are exponents."""
    counts: Counts
    filled: float
    """The share of rows up to the last one that is not zero."""

    @property
    def used(self) -> Mask:
        """Blocks with codes other than 0, NaN left out."""
        return (self.largest > 0) & (self.largest <= 0x7E) & (self.scale > 0)


def names_of(weight: str, templates: tuple[str, ...] = SCALES) -> list[str]:
    """The names of a scale of a weight."""
    return [template.format(w=weight, m=weight.rpartition(".")[0]) for template in templates]


def weights_of(checkpoint: Checkpoint, form: Format) -> Iterator[Weight]:
    """The float8 weights in the order of their names, each with the first scale that is there."""
    tensors = checkpoint.tensors
    for name, codes in sorted(tensors.items()):
        if codes.dtype in CODES and codes.is_matrix and "scale" not in name.rpartition(".")[2]:
            names = (*names_of(name, form.scales), *names_of(name))
            scale = next((tensors[name] for name in names if name in tensors), None)
            block = None if scale is None else _block_of(codes, scale, form)
            yield Weight(codes=codes, scale=scale, block=block, source=name.replace("._weight_qdata", ".weight"))


def _block_of(codes: Tensor, scale: Tensor, form: Format) -> Block | None:
    # One that the format declares or, where it says none, any whose scales have this shape; by their name, of blocks.
    usual = (TENSOR, ROW, SQUARE, GROUP, MX_GROUP)
    declared = form.blocks or ((SQUARE, *usual) if scale.name.endswith("_scale_inv") else usual)
    return next(
        (block for block in declared if scale.shape in shapes_of(codes.shape, block, has_ones=form.has_ones)), None
    )


def shapes_of(codes: tuple[int, ...], block: Block, *, has_ones: bool = False) -> list[tuple[int, ...]]:
    """The shapes that scales of a weight may have; the first is the usual one."""
    *lead, rows, k = codes
    if block == TENSOR:
        return [(*lead, *rest) for rest in ((1,), (), (1, 1))]
    if block == ROW:
        return [(*lead, rows, 1), (*lead, rows)]
    if block == TURNED_ROW:
        return [(*lead, 1, k), (*lead, k, 1)] if lead else []
    down, across = -(-rows // (block[0] or rows)), -(-k // (block[1] or k))
    return [(*lead, down, 1, across, 1) if has_ones else (*lead, down, across)]


def measured(weight: Weight, elements: int = BAND) -> Blocks:
    """The largest code of every block, beside its scale, or 1; `elements` are read at a time, or a row."""
    k, (height, width) = weight.codes.shape[-1], weight.extent
    largest = np.zeros((math.prod(weight.grid[:-1]), weight.grid[-1]), np.uint8)
    counts, step = np.zeros(128, np.int64), max(1, weight.codes.size // _SAMPLE)
    row = filled = 0
    for at, band in bands(weight, weight.codes, elements):
        # 1. Magnitudes, in place; their order is that of the codes.
        codes = band.view(np.uint8)
        np.bitwise_and(codes, 0x7F, out=codes)
        counts += np.bincount(codes.reshape(-1)[: -(-codes.size // step)], minlength=128)
        if codes[-1].any():
            filled = row + len(codes)
        elif codes.any():
            filled = row + 1 + int(np.flatnonzero(codes.any(axis=1))[-1])
        row += len(codes)
        # 2. Down: whole blocks together, then what is left of one, which the next band continues. Across.
        whole = len(codes) // height * height
        for first, part in ((at, codes[:whole].reshape(-1, height, k)), (at + whole // height, codes[None, whole:])):
            if part.size:
                columns = part.max(axis=1) if part.shape[1] > 1 else part[:, 0]
                starts = np.arange(0, k, width)
                across = columns.max(axis=1)[:, None] if width == k else np.maximum.reduceat(columns, starts, axis=1)
                target = largest[first : first + len(across)]
                np.maximum(target, across, out=target)
    raw = weight.scale.read() if weight.scale and weight.is_scaled else np.ones(math.prod(weight.grid), np.float32)
    raw = raw.view(DTYPES["F8_E8M0"]) if raw.dtype == np.uint8 else raw
    with np.errstate(all="ignore"):
        part = Counts(counts, float(counts.sum()) / math.prod(weight.extent))
        return Blocks(largest.reshape(-1), raw.astype(np.float32), raw, part, filled / row)


def bands(weight: Weight, stored: Tensor | Joined, elements: int = BAND) -> Iterator[tuple[int, np.ndarray]]:
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


def magnitudes(weight: Weight, index: int) -> NDArray[np.uint8]:
    """The codes of a block that are not 0, signs left out."""
    (rows, k), (height, width) = weight.codes.shape[-2:], weight.extent
    down, across = divmod(index, weight.grid[-1])
    matrix, down = divmod(down, weight.grid[-2])
    begin, end = ((matrix * rows + min(row, rows)) * k for row in (down * height, (down + 1) * height))
    band = weight.codes.read(begin, end).view(np.uint8).reshape(-1, k)
    codes = band[:, across * width : (across + 1) * width] & np.uint8(0x7F)
    return codes[codes > 0]
