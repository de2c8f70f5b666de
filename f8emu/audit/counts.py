"""How often each code occurs, against what every right cast gives, whatever the weights.

A cast gives a code to an interval of magnitudes, and the density of weights has few holes: where a code never occurs,
its neighbours do not either. Let d be the density that the sparser neighbour has. Then a code whose interval is w wide
is expected d * w times, and is missing with probability exp(-d * w) at most, if the density between two neighbours is
not below both. Here it may be a quarter of that. Scales mix such densities, which keeps the bound.

Weights that were themselves quantized have holes: those of 4 or 8 bits under other scales. They lie in most binades,
and not in one, and not in exactly the odd codes; elsewhere nothing is told.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.checkpoint import DTYPES

VALUES = np.arange(128, dtype=np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float32)
"""The magnitude of each E4M3 code."""
TOP = 0x7E
"""The code of 448."""
_ENDS = {0x76: "224, the end of FNUZ on AMD", 0x77: "240, the end of FNUZ and of IEEE's E4M3"}
"""Codes at which a cast to another format saturates."""
_BINADE = 8
_NEIGHBOURS = 4
"""Codes from which a density is taken."""
_SURE = 20.0
"""Expected occurrences of what never occurs: a probability of 2e-9 at most, below 1e-3 over all codes and weights."""
_MIDDLE = (VALUES[1 : TOP + 1] + VALUES[:TOP]) / 2
_WIDTHS = np.diff(np.concatenate([[0.0], _MIDDLE, [464.0]]))
"""The interval of magnitudes of each code to 448, rounded to nearest."""


class Counts(NamedTuple):
    """How often each magnitude of a code occurs in a part of a weight."""

    codes: NDArray[np.int64]
    blocks: float
    """How many blocks that part is."""


def wrong_cast(counts: Counts, largest: NDArray[np.uint8], *, is_float: bool) -> tuple[str, str] | None:
    """The expected codes and the observed ones, as text; None if the counts do not show a wrong cast.

    `largest` are the largest codes of the blocks that are not zero; `is_float`: scales are not powers of two.
    """
    n = counts.codes[: TOP + 1].astype(np.float64)
    n[TOP] = max(n[TOP] - counts.blocks, 0)
    return _holes(n) or _end(n, counts, largest, is_float=is_float) or _steps(n)


def _holes(n: NDArray[np.float64]) -> tuple[str, str] | None:
    present = np.flatnonzero(n)
    if len(present) < 24:
        return None
    density = n / _WIDTHS
    density[TOP] /= 16  # it stands for all that is clipped, up to 16 times the largest
    expected = np.zeros(TOP + 1)
    for code in np.flatnonzero(n == 0):
        below, above = present[present < code][-_NEIGHBOURS:], present[present > code][:_NEIGHBOURS]
        if code and len(below) and len(above):
            # Zeros may be of any number: pruned weights.
            sides = [density[side].mean() for side in (below, above) if side[0] > 0]
            expected[code] = min(sides) * _WIDTHS[code] / 4
    missing = np.flatnonzero(expected >= 1)
    if expected[missing].sum() < _SURE:
        return None
    if len(missing) >= _BINADE and np.all(missing % 2) and not n[_BINADE + 1 :: 2].any():
        return "odd codes too", "even codes alone: numbers of two fraction bits, as in E5M2"
    binade = np.arange(TOP + 1) // _BINADE
    is_populated = np.bincount(binade, n) > 100
    if len(set(binade[missing])) == 1 and is_populated.sum() > 4:
        first, last = VALUES[missing[0]], VALUES[missing[-1]]
        return "codes of every size", f"none of {first:g} to {last:g}, expected {4 * expected.sum():.0f} times"
    return None


def _end(
    n: NDArray[np.float64], counts: Counts, largest: NDArray[np.uint8], *, is_float: bool
) -> tuple[str, str] | None:
    # Clipped: in nearly every block, and more than the codes below it are. Under powers of two, weights that were
    # clipped themselves have an end anywhere: only those of other formats are told.
    end = int(largest.max(initial=0))
    if len(largest) < 4 or not (end in _ENDS or (is_float and 0 < end < TOP - 1)):
        return None
    often, below = n[end], n[end - 1] * _WIDTHS[end] / _WIDTHS[end - 1]
    is_clipped = often - below > 4 * math.sqrt(often + below) and often > 3 * counts.blocks
    share = f"{100 * float(np.mean(largest == end)):.0f}% of blocks"
    return (
        ("codes to 448", f"clipped at {_ENDS.get(end, f'{VALUES[end]:g}')}, in {share}")
        if is_clipped and n[end - 1]
        else None
    )


def _steps(n: NDArray[np.float64]) -> tuple[str, str] | None:
    # Where the density is flat, far below the largest: the number of codes doubles from binade to binade.
    total = np.cumsum(n[1:])
    binades = [binade for binade in range(1, 15) if total[_BINADE * (binade + 1) - 1] < total[-1] / 8]
    if not binades:
        return None
    grid = n[_BINADE * binades[0] : _BINADE * (binades[-1] + 1)].reshape(-1, _BINADE)
    halves = n[_BINADE * binades[0] : _BINADE * (binades[-1] + 1) + 4].reshape(-1, 4).sum(1)
    sums, inner = [halves[1::2].sum(), halves[:-1:2].sum(), halves[2::2].sum()], grid.sum(0)
    if min(sums) < 1000 or any(np.ptp(part) > 0.25 * part.mean() for part in (inner[1:4], inner[5:])):
        return None
    # Rounded to nearest this is 16 / 28; where binades have four codes, as in E5M2, it is 1.
    ratio = math.log(sums[0] ** 2 / (sums[1] * sums[2]))
    noise = math.sqrt(4 / sums[0] + 1 / sums[1] + 1 / sums[2])
    if ratio - 5 * noise > math.log(0.8):
        return "twice as many codes in a binade as in the one below", "that every four codes: bytes of E5M2"
    # The interval of a power of two is 3/4 of that of the next code, with ties to even 4/5: its lower half is narrow.
    # Many zeros are of pruned weights, or of weights on a grid of their own, as those of 8-bit integers.
    first, between = grid[1:, 0].sum(), np.sqrt(2 * grid[:-1, 5:].mean(1) * grid[1:, 1:4].mean(1)).sum()
    is_even = n[0] <= 2 * n[1:_BINADE].mean() + 30
    if is_even and first > 1000 and first / between * (1 - 5 / math.sqrt(first)) > 0.88:
        return "powers of two 3/4 as often as the next code", f"{first / between:.2f}: rounded to zero, or a lost carry"
    return None
