"""Which dialect gives every byte of a quantized matrix: the one rule of `f8emu verify`, `f8emu diff` and `f8emu audit`.

Scales are compared as the numbers that decode; a dialect does not fit scales that were rounded afterwards. Codes are
compared bit by bit, except that any NaN is any NaN and that a zero fits with either sign, since stacks write both and
no product depends on it. Zeros of the other sign are counted, so that whoever names the dialect can say so.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from f8emu.dialects.arithmetic import Array, Factors, Float32, block_amax, encode, extent, factors_from_amax
from f8emu.dialects.rules import ROW, Block, Dialect, ScaleForm
from f8emu.dialects.stacks import DIALECTS

_MAGNITUDE = 0x7F


@dataclass(slots=True)
class Candidate:
    """A dialect, and where its bytes differ from those of a matrix; grids are [blocks down, blocks across]."""

    dialect: Dialect
    form: ScaleForm
    factors: Factors
    scale: Array
    """The scales that it gives, in the dtype in which those of the matrix are kept."""
    scales_differ: NDArray[np.bool]
    codes_differ: NDArray[np.int64]
    """How many codes of a block differ."""
    zeros_scaled: bool = False
    """Blocks of zeros have another scale; they are taken out of `scales_differ`."""
    zeros_differ: int = 0
    """How many zeros have the other sign; they count as equal."""
    first: dict[int, str] = field(default_factory=dict[int, str])
    """Row of blocks -> the first code in it that differs."""

    @property
    def fits(self) -> bool:
        """Whether the dialect gives every byte that was compared."""
        return not self.scales_differ.any() and not self.codes_differ.any()


def numbers_differ(a: Array, b: Array) -> NDArray[np.bool]:
    """A mask of the scales that differ as numbers; any NaN equals any NaN."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


def relation(a: Array, b: Array) -> str:
    """What the scales `b` are to the scales `a` of equal codes, if one rule makes all of them of these; else empty."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if any(np.array_equal(np.float32(1) / x, y) for x, y in ((a, b), (b, a))):
            return "the inverses of"
        ratio = np.unique(b / a)
    is_power = ratio.size == 1 and ratio[0] != 1 and abs(np.frexp(ratio[0])[0]) == 0.5
    return f"{ratio[0]:g} times" if is_power else ""


def candidates(
    amax: Callable[[bool], Float32],
    scale: Array,
    shape: tuple[int, int],
    block: Block,
    dtype: np.dtype[Any],
    dialects: Iterable[Dialect] = DIALECTS.values(),
    *,
    change: Callable[[Array], Array] = np.asarray,
) -> list[Candidate]:
    """The dialects that have this block and a rule for their scales, compared with the grid `scale`; no codes yet.

    `amax` gives the largest magnitudes of the blocks of a matrix of `shape` and `dtype`, with or without its NaN.
    `change` is what became of their scales before they were kept.
    """
    matches: list[Candidate] = []
    for dialect in dialects:
        # Rows of a matrix that is stored transposed are its columns.
        blocks = [*dialect.blocks, (None, 1)] if ROW in dialect.blocks else dialect.blocks
        if dialect.scale is None or extent(shape, block) not in [extent(shape, size) for size in blocks]:
            continue
        factors = factors_from_amax(amax(dialect.scale.ignores_nan), dialect, dtype)
        decoding = change((factors.scale if dialect.stored.is_multiplier else factors.stored).astype(np.float32))
        with np.errstate(all="ignore"):
            ours = decoding.astype(scale.dtype)
        matches.append(
            Candidate(
                dialect, dialect.scale, factors, ours, numbers_differ(decoding, scale), np.zeros(scale.shape, np.int64)
            )
        )
    return matches


def count_codes(of: Sequence[Candidate], x: Array, codes: Array, block: tuple[int, int], at: int = 0) -> None:
    """Compare the codes of a band of rows, of whole blocks, the first of which is the row `at` of the grid."""
    height, there = min(block[0], max(len(x), 1)), codes.view(np.uint8)
    down = slice(at, at + -(-len(x) // height))
    made: dict[object, Array] = {}  # dialects with the same rule and factors give the same codes
    for candidate in of:
        part = Factors(*(grid[down] for grid in candidate.factors))
        key = (candidate.dialect.code, part.scale.tobytes(), part.multiplier.tobytes())
        if key not in made:
            made[key] = encode(x, part, candidate.dialect.code, block)
        ours = made[key].view(np.uint8)
        unequal = ours != there
        if not unequal.any():
            continue
        is_zero = ((ours | there) & _MAGNITUDE) == 0
        candidate.zeros_differ += int(np.count_nonzero(unequal & is_zero))
        differs = unequal & ~is_zero
        differs[differs] = ~(np.isnan(made[key][differs]) & np.isnan(codes[differs]))
        if differs.any():
            across = np.add.reduceat(differs, np.arange(0, x.shape[1], block[1]), axis=1, dtype=np.int64)
            candidate.codes_differ[down] += np.add.reduceat(across, np.arange(0, len(x), height), axis=0)
            r, c = np.argwhere(differs)[0]
            text = f"{ours[r, c]:#04x} for {x[r, c]:.6g}, not {there[r, c]:#04x}"
            candidate.first.setdefault(at + int(r) // height, text)


def fitting(
    x: Array,
    codes: Array,
    scale: Array,
    block: Block,
    dialects: Iterable[Dialect] = DIALECTS.values(),
    *,
    change: Callable[[Array], Array] = np.asarray,
) -> list[Candidate]:
    """The dialects that give every byte of a matrix from `x` [rows, K]; arguments as of `candidates`.

    Shapes:
        codes [rows, K] float8, scale [ceil(rows / block rows), ceil(K / block K)] of any dtype.
    """
    amaxes: dict[bool, Float32] = {}

    def amax(ignores_nan: bool) -> Float32:
        if ignores_nan not in amaxes:
            amaxes[ignores_nan] = block_amax(x, sides, ignores_nan=ignores_nan)
        return amaxes[ignores_nan]

    height, width = extent(x.shape, block)
    sides = height, width
    matches = candidates(amax, scale, x.shape, block, x.dtype, dialects, change=change)
    right = [one for one in matches if not one.scales_differ.any() and one.dialect.code.format.name == codes.dtype.name]
    count_codes(right, x, codes, sides)
    return [candidate for candidate in right if candidate.fits]
