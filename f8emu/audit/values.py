"""The checks of codes and scales: of one weight after the other, then of all together.

What the rule of a quantizer excludes is certain. Everything else is a matter of probability: see `_chance`.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import VALUES, Blocks, Mask, Weight, histogram, magnitudes
from f8emu.audit.findings import Finding, Severity
from f8emu.audit.formats import CONSUMERS, Format, Kind
from f8emu.audit.source import Comparison
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
_BY_CHANCE = ("saturated", "scale-constant", "too-coarse", "rounded-after")
"""Checks of codes against the rule of their scales, which know no source."""


@dataclass(slots=True, kw_only=True)
class Examined:
    """What is kept of a weight; of its blocks, those with codes other than 0."""

    weight: Weight
    findings: list[Finding] = field(default_factory=list)
    blocks: int = 0
    zeros: Counter[float] = field(default_factory=Counter)
    """Scale -> zero blocks that have it."""
    kind: Kind | None = None
    """None: there are no blocks with codes other than 0, or none with a scale."""
    used: int = 0
    scales: frozenset[float] = frozenset()
    """All of them or, of floats with mantissa bits, the smallest and the largest."""
    largest: int = 0
    is_full: bool = False
    """448 is in every block, and scales are powers of two."""
    chance: float = 1.0
    """How probable that is, if weights have no end."""
    comparison: Comparison | None = None

    @property
    def checks(self) -> set[str]:
        return {one.check for one in self.findings}


def unscaled(weight: Weight, *, is_told: bool) -> Examined:
    """A weight whose scale is not known: a plain cast, or one that lost its scale, unless that is told already."""
    found, counts = Examined(weight=weight), histogram(weight, weight.codes.size)[0]
    if counts[weight.largest_code + 1 :].any():
        found.findings.append(weight.finding("nan-code", f"at most {weight.largest_code:#04x}", "NaN or infinity"))
    largest = VALUES[np.flatnonzero(counts)[-1]] if weight.largest_code == _TOP else 0
    if not is_told and largest >= _PLAIN_CAST:
        expected = "weights below 100, of a cast without a scale"
        found.findings.append(weight.finding("scale-missing", expected, f"{largest:g}"))
    return found


def examined(weight: Weight, blocks: Blocks, form: Format, consumers: Sequence[str]) -> Examined:
    """What codes and scales of one weight show, and what its largest codes say of the rule that made the scales."""
    one = Examined(weight=weight, findings=[*_forbidden(weight, blocks)], blocks=len(blocks.scale))
    one.zeros.update(blocks.scale[(blocks.largest == 0) & (blocks.scale >= 0)].tolist())
    # Subnormal scales have too few bits to judge codes by.
    used = blocks.used & (blocks.scale >= (2.0**-17 if blocks.raw.dtype == np.float16 else 2.0**-118))
    largest, scale = blocks.largest[used], blocks.scale[used]
    if weight.largest_code != _TOP or not used.any():
        return one

    def add(check: str, expected: str, text: str, wrong: Mask, **changed: Any) -> None:
        of_all = np.zeros_like(used)
        of_all[used] = wrong
        one.findings.append(weight.finding(check, expected, text, of_all, **changed))

    # 1. The kind of scales.
    has_mantissa = (scale.view(np.uint32) & 0x7FFFFF) != 0
    is_float = bool(has_mantissa.any())
    kind = Kind.E8M0 if blocks.are_bytes else Kind.FLOAT if is_float else Kind.POWER
    exponents = np.flatnonzero(np.bincount(scale.view(np.uint32) >> 23)) - 127
    scales = np.unique([scale.min(), scale.max()]) if is_float else np.exp2(exponents.astype(np.float32))
    one.kind, one.scales, one.used, one.largest = kind, frozenset(scales.tolist()), len(scale), int(largest.max())
    if weight.block not in (TENSOR, ROW):
        if form.is_power_of_two and kind is Kind.FLOAT:
            add("scale-format", Kind.POWER, kind, has_mantissa)
        for key in consumers:
            if kind in CONSUMERS[key]:
                severity, effect = CONSUMERS[key][kind]
                wrong = has_mantissa if is_float else scale > 0
                add("scale-kind", f"what {key} takes", kind, wrong, severity=severity, effect=effect)
    # 2. Floors: the codes of a block are small because its scale could not be smaller.
    is_floored = np.isin(scale, np.array([floor for floor in _of_zeros() if 0 < floor < 2.0**-7], np.float32))
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
    one.is_full = is_full and kind is not Kind.FLOAT
    if one.is_full or (is_full and len(scales) == 1):
        one.chance, is_rare, clipped = _chance(weight, len(largest))
        if len(scales) == 1 and len(largest) >= 4 and is_rare and (kind is Kind.FLOAT or scale[0] == 1):
            add("scale-constant", "a scale of each block", f"{scale[0]:.4g} in all", largest == _TOP)
        elif clipped and kind is not Kind.FLOAT:
            add("saturated", "448 in few blocks", clipped, largest == _TOP)
    return one


def _forbidden(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    # Codes and scales that must not occur, and scales that were converted into what they are not.
    has_nan, is_zero = blocks.largest > weight.largest_code, blocks.scale == 0
    for check, expected, wrong in (
        ("zero-over-zero", "0x00 under a scale > 0", has_nan & is_zero),
        ("nan-code", f"at most {weight.largest_code:#04x}", has_nan & ~is_zero),
        ("scale-zero", "> 0", ~has_nan & is_zero),
        ("scale-invalid", "> 0 and finite", ~(blocks.scale >= 0) | np.isinf(blocks.scale)),
    ):
        if wrong.any():
            first = int(wrong.argmax())
            found = f"code {blocks.largest[first]:#04x} under scale {blocks.scale[first]:.4g}"
            yield weight.finding(check, expected, found, wrong)
    stored = blocks.raw.view(np.uint8)[blocks.largest > 0] if blocks.are_bytes else np.empty(0, np.uint8)
    # 2^k by value, and then a byte: powers of two are left, and 0 of all below 1.
    if stored.size and stored.min() < 64 and not np.any(stored & (np.maximum(stored, 1) - 1)):
        found = f"bytes {', '.join(map(str, stored[:8]))}"
        yield weight.finding("e8m0-by-value", "exponents about 120", found, blocks=stored.size)
    if blocks.used.any() and weight.largest_code == _TOP:
        yield from _amplitude(weight, blocks)


def _amplitude(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    used, scale, values = blocks.used, blocks.scale, VALUES[np.minimum(blocks.largest, _TOP)]
    with np.errstate(all="ignore"):
        amax, inverse = np.where(used, values * scale, 0), values / scale
    # 1. All of them.
    low = _low(amax[used])
    if low > _LARGEST_AMAX:
        counts = histogram(weight)[0][1:]
        middle = float(VALUES[1 + np.searchsorted(np.cumsum(counts), counts.sum() / 2)])
        if middle * _low(scale[used]) > _LARGEST_MEDIAN:
            found = f"{low:.3g}; by the reciprocal {_low(inverse[used]):.3g}, by scale / 448 {low / 448:.3g}"
            yield weight.finding("amplitude", "largest weights below 10", found, blocks=int(used.sum()))
            return
    # 2. One block of many whose weights are large, and not an outlier in it alone. Rows may be large.
    largest = np.argsort(amax)[-4:][::-1] if min(weight.extent) >= 32 and len(amax) > 1 else []
    for index in (int(one) for one in largest if amax[one] > _LARGEST_AMAX):
        middle = float(np.median(VALUES[magnitudes(weight, index)]) * scale[index])
        if middle > _LARGEST_MEDIAN:
            found = f"{amax[index]:.3g}, and {middle:.3g} in the middle"
            yield weight.finding("amplitude", "largest weights below 10", found, np.arange(len(amax)) == index)
            return


def _low(values: NDArray[np.float32]) -> float:
    # What nine of ten exceed: without outliers.
    return float(np.partition(values, len(values) // 10)[len(values) // 10])


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
def _of_zeros() -> Mapping[float, Sequence[str]]:
    """The scale of a block of zeros -> the dialects that give it."""
    found: dict[float, dict[str, None]] = defaultdict(dict)
    for name, dialect in DIALECTS.items():
        for dtype in ("float32", "bfloat16") if dialect.scale is not None else ():
            found[zero_block_scale(dialect, dtype)][name] = None
    return {scale: list(names) for scale, names in found.items()}


def fingerprints(every: Sequence[Examined]) -> dict[str, int]:
    """The scales of zero blocks, and the dialects that give them -> the number of blocks."""
    total: Counter[float] = sum((one.zeros for one in every), Counter())
    named: dict[str, int] = {}
    for scale, count in total.most_common(4):
        names = _of_zeros().get(scale, ())
        more = f" and {len(names) - 6} more" * (len(names) > 6)
        named[f"scale {scale:.4g}: {', '.join(names[:6]) or 'no known dialect'}{more}"] = count
    return named


def together(form: Format, every: Sequence[Examined]) -> Iterator[Finding]:
    """Findings of all weights: what the others and the source explain is left out or changed, and what only the whole
    checkpoint shows is added.
    """
    # 1. Scales rounded after the cast. One quantizer made them all: if every weight is full, their chances multiply,
    # but weights with an end count once for each scale, since layers may share the end.
    powers = [one for one in every if one.kind in (Kind.POWER, Kind.E8M0)]
    pooled = 1.0
    if all(one.is_full for one in powers):
        ends = frozenset[float]().union(*(one.scales for one in powers))
        pooled = min(_IN_WINDOW ** len(ends), math.prod(one.chance for one in powers))
    for one in powers:
        alone = min(one.chance, _IN_WINDOW ** len(one.scales)) * len(powers)
        if one.is_full and min(pooled, alone) < _NEVER and not one.checks & {"saturated", "scale-constant"}:
            found = f"448 in all {one.used} blocks"
            one.findings.append(
                one.weight.finding("rounded-after", "448 in about 5% of blocks", found, blocks=one.used)
            )
    # 2. scale_fmt of the configuration, where it says none.
    of_blocks = [one for one in every if one.kind is not None and one.weight.block not in (TENSOR, ROW)]
    scales = frozenset[float]().union(*(one.scales for one in of_blocks))
    is_unsaid = form.method == "fp8" and not form.is_power_of_two and scales - {1.0}
    if is_unsaid and all(one.kind is Kind.POWER for one in of_blocks):
        # amax / 448 may be one by accident, in blocks of one amax: then 448 is in all of them.
        is_chance = all(one.is_full for one in of_blocks) and len(scales) < 2
        found = f"powers of two in all {sum(one.used for one in of_blocks)} blocks"
        severity = Severity.NOTE if is_chance else Severity.WARNING
        yield of_blocks[0].weight.finding("scale-format-unsaid", "scale_fmt ue8m0", found, severity=severity)
    # 3. What the other weights explain, and the source.
    whole = [one for one in every if one.weight.block == TENSOR]
    reached = {scale for one in whole if one.largest >= _HALF for scale in one.scales}
    owners = {scales: one.weight.name for one in every if one.comparison for scales in one.comparison.expected}
    for one in every:
        for found in one.findings:
            yield from _explained(found, one, reached, owners)


def _explained(found: Finding, of: Examined, reached: set[float], owners: Mapping[int, str]) -> Iterator[Finding]:
    by, scale = of.comparison, of.weight.scale
    if found.check == "too-coarse" and of.weight.block == TENSOR and of.scales & reached:
        return  # the shards of a fused layer share the scale of the largest
    if found.check == "no-dialect" and by and by.stored not in by.expected and by.stored in owners:
        texts = f"scales of {of.weight.name}", f"those of {owners[by.stored]}"
        yield of.weight.finding("grid-moved", *texts, block=found.block)
        return
    # A dialect that gives every byte refutes what was judged by chance: the weights were clipped before. A float32
    # scale of 0 is then its way with zeros; smaller dtypes underflow.
    is_zero = found.check == "scale-zero" and scale is not None and scale.dtype == "F32"
    is_refuted = by is not None and by.dialects and (is_zero or found.check in _BY_CHANCE)
    yield replace(found, severity=Severity.NOTE) if is_refuted else found
