"""The checks of codes and scales: of one weight after the other, then of all together.

What the rule of a quantizer excludes is certain. Everything else is a matter of probability: see `_chance`.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import VALUES, Blocks, Weight, histogram, magnitudes
from f8emu.audit.faults import Severity
from f8emu.audit.findings import Finding, finding
from f8emu.audit.formats import CONSUMERS, Format, Kind
from f8emu.dialects import DIALECTS, zero_block_scale
from f8emu.dialects.rules import MX_GROUP, ROW, TENSOR

_TOP, _HALF, _QUARTER, _CEIL = 0x7E, 0x76, 0x6E, 0x70
"""The codes of 448, 224, 112, and of 128, below which no rule of Microscaling leaves the largest code."""
_IN_WINDOW = math.log2(448 / 432)
"""How probable it is that the largest code of a block is 448 although its scale is the power of two above amax / 448:
amax / 448s is between 1/2 and 1, log-uniform by Benford's law, and rounds to 448 from 432 on. 5.2%."""
_NEVER = 1e-3
"""A probability below which something is no accident."""
_LARGEST_AMAX, _LARGEST_MEDIAN = 24.0, 3.5
"""Magnitudes that no weights have; a single outlier does not raise the median. A scale that is an amax is beyond them
for every amax above 24 / 448 = 0.05, and the reciprocal of a scale for every amax below 448^2 / 24 = 8000."""
_PLAIN_CAST = 112.0
"""What a cast without a scale does not reach; the largest code under any scale is 128 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the checks of all weights need of one; of its blocks, those with codes other than 0."""

    weight: Weight
    kind: Kind | None
    """None: there are no such blocks."""
    used: int = 0
    scales: frozenset[float] = frozenset()
    """All of them or, of floats with mantissa bits, the smallest and the largest."""
    first: tuple[int, ...] = ()
    """The first block whose scale has mantissa bits."""
    largest: int = 0
    zeros: Counter[float]
    """Scale -> zero blocks that have it."""
    is_full: bool = False
    """448 is in every block, and scales are powers of two."""
    chance: float = 1.0
    """How probable that is, if weights have no end."""
    coarse: Finding | None = None
    """Of a weight with one scale, which a weight that shares it may excuse."""


def forbidden(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    """Codes and scales that must not occur, and scales that were converted into what they are not."""
    has_nan, is_zero = blocks.largest > weight.largest_code, blocks.scale == 0
    most = f"at most {weight.largest_code:#04x}"
    for check, expected, wrong in (
        ("zero-over-zero", "0x00 under a scale > 0", has_nan & is_zero),
        ("nan-code", most, has_nan & ~is_zero),
        ("scale-zero", "> 0", ~has_nan & is_zero),
        ("scale-invalid", "> 0 and finite", ~(blocks.scale >= 0) | np.isinf(blocks.scale)),
    ):
        if wrong.any():
            first = int(wrong.argmax())
            found = f"code {blocks.largest[first]:#04x} under scale {blocks.scale[first]:.4g}"
            yield finding(check, weight.name, expected, found, block=weight.place(first), blocks=int(wrong.sum()))
    used = blocks.raw.view(np.uint8)[blocks.largest > 0] if blocks.are_bytes else np.empty(0, np.uint8)
    # 2^k by value, and then a byte: powers of two are left, and 0 of all below 1.
    if used.size and used.min() < 64 and not np.any(used & (np.maximum(used, 1) - 1)):
        found = f"bytes {', '.join(map(str, used[:8]))}"
        yield finding("e8m0-by-value", weight.name, "exponents about 120", found, blocks=used.size)
    if blocks.used.any() and weight.largest_code == _TOP:
        yield from _amplitude(weight, blocks)


def _amplitude(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    values, scale = VALUES[blocks.largest[blocks.used]], blocks.scale[blocks.used]
    with np.errstate(over="ignore"):
        amax, inverse = (_low(one) for one in (values * scale, values / scale))
    if amax > _LARGEST_AMAX:
        counts = histogram(weight)[0][1:]
        middle = float(VALUES[1 + np.searchsorted(np.cumsum(counts), counts.sum() / 2)])
        if middle * _low(scale) > _LARGEST_MEDIAN:
            found = f"{amax:.3g}; by the reciprocal {inverse:.3g}, by scale / 448 {amax / 448:.3g}"
            yield finding("amplitude", weight.name, "largest weights below 10", found, blocks=len(scale))
            return
    yield from _large_block(weight, blocks)


def _large_block(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    # One block of many whose weights are large, and not an outlier in it alone. Rows may be large.
    rows, columns = weight.extent
    if min(rows, columns) < 32 or len(blocks.scale) == 1:
        return
    with np.errstate(all="ignore"):
        amax = np.where(blocks.used, VALUES[np.minimum(blocks.largest, _TOP)] * blocks.scale, 0)
    for index in np.argsort(amax)[-4:][::-1]:
        if not amax[index] > _LARGEST_AMAX:
            return
        middle = float(np.median(VALUES[magnitudes(weight, int(index))]) * blocks.scale[index])
        if middle > _LARGEST_MEDIAN:
            place = {"block": weight.place(int(index)), "blocks": 1}
            found = f"{amax[index]:.3g}, and {middle:.3g} in the middle"
            yield finding("amplitude", weight.name, "largest weights below 10", found, **place)
            return


def _low(values: NDArray[np.float32]) -> float:
    # What nine of ten exceed: without outliers.
    return float(np.partition(values, len(values) // 10)[len(values) // 10])


def unscaled(weight: Weight, *, is_told: bool) -> Iterator[Finding]:
    """A weight whose scale is not known: a plain cast, or one that lost its scale, unless that is told already."""
    counts = histogram(weight, weight.codes.size)[0]
    if counts[weight.largest_code + 1 :].any():
        yield finding("nan-code", weight.name, f"at most {weight.largest_code:#04x}", "NaN or infinity")
    largest = VALUES[np.flatnonzero(counts)[-1]] if weight.largest_code == _TOP else 0
    if not is_told and largest >= _PLAIN_CAST:
        yield finding("scale-missing", weight.name, "weights below 100, of a cast without a scale", f"{largest:g}")


def examined(weight: Weight, blocks: Blocks) -> tuple[Summary, list[Finding]]:
    """What the largest codes of one weight say of the rule that made its scales."""
    used = blocks.used & (blocks.scale >= blocks.smallest)
    largest, scale = blocks.largest[used], blocks.scale[used]
    of_zeros = np.unique(blocks.scale[(blocks.largest == 0) & (blocks.scale >= 0)], return_counts=True)
    zeros = Counter(dict(zip(*(one.tolist() for one in of_zeros), strict=True)))
    if not used.any() or weight.largest_code != _TOP:
        return Summary(weight=weight, kind=None, zeros=zeros), []
    found: list[Finding] = []

    def add(check: str, expected: str, text: str, wrong: NDArray[np.bool]) -> None:
        place = weight.place(int(np.flatnonzero(used)[int(wrong.argmax())]))
        found.append(finding(check, weight.name, expected, text, block=place, blocks=int(wrong.sum())))

    # 1. The kind of scales.
    has_mantissa = (scale.view(np.uint32) & 0x7FFFFF) != 0
    kind = Kind.E8M0 if blocks.are_bytes else Kind.FLOAT if has_mantissa.any() else Kind.POWER
    # All of them or, of floats with mantissa bits, whether they differ.
    exponents = np.flatnonzero(np.bincount(scale.view(np.uint32) >> 23)) - 127
    scales = np.unique([scale.min(), scale.max()]) if has_mantissa.any() else np.exp2(exponents.astype(np.float32))
    # 2. Floors: the codes of a block are small because its scale could not be smaller.
    is_floored = np.isin(scale, _floors())
    is_faint = is_floored & (largest < _QUARTER)
    if is_faint.any():
        first = int(is_faint.argmax())
        add("floored", "0x6e or more", f"{largest[first]:#04x} under {scale[first]:.4g}, a floor", is_faint)
    # 3. Scales larger than the codes need: by 8% where they have mantissa bits, else by more than the factor of 2 that
    # a power of two may be. The rule CEIL of Microscaling leaves codes of 128 to 256.
    limit, share = (_TOP - 1, 0.95) if kind is Kind.FLOAT and len(largest) >= 4 else (_HALF, 0.5)
    is_small = ~is_floored & (largest < limit)
    is_ceil = weight.block == MX_GROUP and np.mean(largest < _CEIL) <= 0.05
    if np.mean(is_small) > share and not is_ceil:
        add("too-coarse", f"{limit:#04x} or more", f"{int(np.median(largest)):#04x} in the middle block", is_small)
    # 4. 448 in every block, under powers of two or one scale for all.
    is_full = bool(np.all(is_floored | (largest == _TOP)) and not is_floored.all())
    chance = 1.0
    if is_full and (kind is not Kind.FLOAT or len(scales) == 1):
        chance, is_rare, clipped = _chance(weight, len(largest))
        if len(scales) == 1 and len(largest) >= 4 and is_rare and (kind is Kind.FLOAT or scale[0] == 1):
            add("scale-constant", "a scale of each block", f"{scale[0]:.4g} in all", largest == _TOP)
        elif clipped and kind is not Kind.FLOAT:
            add("saturated", "448 in few blocks", clipped, largest == _TOP)
    coarse = found.pop() if found and found[-1].check == "too-coarse" and weight.block == TENSOR else None
    summary = Summary(
        weight=weight,
        kind=kind,
        used=len(largest),
        scales=frozenset(scales.tolist()),
        first=weight.place(int(np.flatnonzero(used)[int(has_mantissa.argmax())])),
        largest=int(largest.max()),
        zeros=zeros,
        is_full=is_full and kind is not Kind.FLOAT,
        chance=chance,
        coarse=coarse,
    )
    return summary, found


def _chance(weight: Weight, used: int) -> tuple[float, bool, str]:
    """How probable 448 in every block is by accident, if weights have no end; whether 448 is as rare as an outlier of a
    continuous distribution; and the sign of clipped codes, or empty.

    If scales are rounded up before the cast, the largest code of a block is 448 if its amax lies in a window of 3.6%.
    Let m be how often a block has 448. Then the window holds a weight with probability 1 - e^-m, and none is above it
    with e^-m or less, because the tails of weights decay that slowly. Weights with an end (uniform, clipped, constant)
    have none above: there m is about ln(blocks) or more if every block has one, and nothing follows from that, unless
    the codes below show a tail. Clipped codes are more than their neighbours: below an end, 448 is at most half as
    frequent as 416, which stands for twice the width.
    """
    counts, blocks = histogram(weight)
    top, below, middle = (int(counts[code]) for code in (_TOP, _TOP - 1, _TOP - 6))
    mean = max(top / blocks, 1.0)
    is_spread = below > 0 and int(np.count_nonzero(counts[1:])) > 16
    is_rare = is_spread and mean < 4
    has_end = not (is_rare and 4 * below < middle) and (below == 0 or mean >= 0.8 * math.log(used + 1))
    chance = 1.0 if has_end else (-math.expm1(-mean) * math.exp(-mean)) ** used
    is_excess = top - below / 2 > 4 * math.sqrt(top + below / 4)
    is_clipped = is_excess and is_spread and used >= 4 and (mean >= 8 or (mean >= 3 and used >= 8))
    return chance, is_rare, f"448 in every block, {mean:.1f} times on average" if is_clipped else ""


@functools.cache
def _floors() -> NDArray[np.float32]:
    found = {zero_block_scale(one, "float32") for one in DIALECTS.values() if one.scale is not None}
    return np.array([scale for scale in found if 0 < scale < 2.0**-7], np.float32)


def together(form: Format, every: Sequence[Summary], told: set[str], consumers: Sequence[str]) -> Iterator[Finding]:
    """What only the whole checkpoint shows; `told` are weights whose codes are explained already."""
    # 1. Scales rounded after the cast. One quantizer made them all: if every weight is full, their chances multiply,
    # but weights with an end count once for each scale, since layers may share the end.
    powers = [one for one in every if one.kind in (Kind.POWER, Kind.E8M0)]
    pooled = 1.0
    if all(one.is_full for one in powers):
        ends = frozenset[float]().union(*(one.scales for one in powers))
        pooled = min(_IN_WINDOW ** len(ends), math.prod(one.chance for one in powers))
    for one in powers:
        alone = min(one.chance, _IN_WINDOW ** len(one.scales)) * len(powers)
        if one.is_full and one.weight.name not in told and min(pooled, alone) < _NEVER:
            found = f"448 in all {one.used} blocks"
            yield finding("rounded-after", one.weight.name, "448 in about 5% of blocks", found, blocks=one.used)
    # 2. The shards of a fused layer share the scale of the largest, which excuses the others.
    whole = [one for one in every if one.weight.block == TENSOR]
    reached = {scale for one in whole if one.largest >= _HALF for scale in one.scales}
    yield from (one.coarse for one in whole if one.coarse and not one.scales & reached)
    # 3. The kinds of block scales.
    of_blocks = [one for one in every if one.kind is not None and one.weight.block not in (TENSOR, ROW)]
    yield from _said(form, of_blocks)
    for key in consumers:
        for one in of_blocks:
            if one.kind is not None and one.kind in CONSUMERS[key]:
                severity, effect = CONSUMERS[key][one.kind]
                more = {"severity": severity, "effect": effect, "block": one.first, "blocks": one.used}
                yield finding("scale-kind", one.weight.name, f"what {key} takes", one.kind, **more)


def _said(form: Format, of_blocks: Sequence[Summary]) -> Iterator[Finding]:
    # scale_fmt of the configuration against the scales.
    if form.is_power_of_two:
        for one in of_blocks:
            if one.kind is Kind.FLOAT:
                yield finding("scale-format", one.weight.name, Kind.POWER, Kind.FLOAT, block=one.first, blocks=1)
        return
    scales = frozenset[float]().union(*(one.scales for one in of_blocks))
    if form.method == "fp8" and scales - {1.0} and all(one.kind is Kind.POWER for one in of_blocks):
        # amax / 448 may be one by accident, in blocks of one amax: then 448 is in all of them.
        is_chance = all(one.is_full for one in of_blocks) and len(scales) < 2
        found = f"powers of two in all {sum(one.used for one in of_blocks)} blocks"
        severity = {"severity": Severity.NOTE} if is_chance else {}
        yield finding("scale-format-unsaid", of_blocks[0].weight.name, "scale_fmt ue8m0", found, **severity)


def fingerprints(every: Sequence[Summary]) -> dict[str, int]:
    """The scales of zero blocks, and the dialects that give them -> the number of blocks."""
    total: Counter[float] = sum((one.zeros for one in every), Counter())
    named: dict[str, int] = {}
    for scale, count in total.most_common(4):
        giving = [one for one in DIALECTS.values() if one.scale is not None]
        names = [one.name for one in giving if scale in (zero_block_scale(one, d) for d in ("float32", "bfloat16"))]
        more = f" and {len(names) - 6} more" * (len(names) > 6)
        named[f"scale {scale:.4g}: {', '.join(names[:6]) or 'no known dialect'}{more}"] = count
    return named
