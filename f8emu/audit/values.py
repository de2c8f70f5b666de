"""The checks of codes and scales: of one weight after the other, then of all together.

What the rule of a quantizer excludes is certain. Everything else is a matter of probability: see `_chance`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import Blocks, Weight, magnitudes
from f8emu.audit.checkpoint import DTYPES
from f8emu.audit.counts import TOP, VALUES, Counts, wrong_cast
from f8emu.audit.findings import Finding, Severity
from f8emu.audit.formats import CONSUMERS, Format, ScaleKind
from f8emu.audit.zeros import lost, of_zeros
from f8emu.dialects.rules import MX_GROUP, ROW, TENSOR

_HALF, _QUARTER, _CEIL = 0x76, 0x6E, 0x70
"""The codes of 224, 112, and of 128, below which no rule of Microscaling leaves the largest code."""
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
_BY_CHANCE = ("saturated", "scale-constant", "too-coarse", "rounded-after", "wrong-cast")
"""Checks of codes against the rule of their scales, which know no source."""


def unscaled(weight: Weight, blocks: Blocks, *, is_told: bool) -> None:
    """A weight whose scale is not known: a plain cast, or one that lost its scale, unless that is told already."""
    last = int(blocks.largest.max())
    if weight.largest_code == TOP and (wrong := wrong_cast(blocks.counts, blocks.largest[blocks.used], is_float=False)):
        weight.add("wrong-cast", *wrong)
    if last > weight.largest_code:
        weight.add("nan-code", f"at most {weight.largest_code:#04x}", "NaN or infinity")
    elif not is_told and weight.largest_code == TOP and VALUES[last] >= _PLAIN_CAST:
        weight.add("scale-missing", "weights below 100, of a cast without a scale", f"{VALUES[last]:g}")


def examine(weight: Weight, blocks: Blocks, form: Format, consumers: Sequence[str]) -> None:
    """Add the findings from codes and scales of one weight, and from its largest codes against its scales."""
    _forbidden(weight, blocks)
    largest, scale = blocks.largest, blocks.scale
    weight.blocks, weight.zeros = len(scale), Counter(scale[(largest == 0) & (scale >= 0)].tolist())
    # Subnormal scales have too few bits to judge codes by.
    used = blocks.used & (scale >= (2.0**-17 if blocks.raw.dtype == np.float16 else 2.0**-118))
    count = weight.used = int(used.sum()) if weight.largest_code == TOP else 0
    lost(weight, blocks, used)
    if count == 0:
        return
    # 1. The kind of scales.
    has_mantissa = used & ((scale.view(np.uint32) & 0x7FFFFF) != 0)
    is_float, bits = bool(has_mantissa.any()), scale[used].view(np.uint32)
    is_e8m0 = blocks.raw.dtype == DTYPES["F8_E8M0"]
    kind = ScaleKind.E8M0 if is_e8m0 else ScaleKind.FLOAT if is_float else ScaleKind.POWER
    weight.kind = kind
    every = np.array([bits.min(), bits.max()]) if is_float else np.flatnonzero(np.bincount(bits >> 23)) << 23
    weight.scales = frozenset(every.astype(np.uint32).view(np.float32).tolist())
    weight.largest = int(largest[used].max())
    if weight.block not in (TENSOR, ROW):
        if form.is_power_of_two and kind is ScaleKind.FLOAT:
            weight.add("scale-format", ScaleKind.POWER, kind, has_mantissa)
        for key in consumers:
            if kind in CONSUMERS[key]:
                severity, effect = CONSUMERS[key][kind]
                wrong = has_mantissa if is_float else used
                weight.add("scale-kind", f"what {key} takes", kind, wrong, severity=severity, effect=effect)
    # 2. Codes that no right cast gives.
    weight.counts = blocks.counts
    if wrong := wrong_cast(weight.counts, largest[used], is_float=kind is ScaleKind.FLOAT):
        weight.add("wrong-cast", *wrong, blocks=count)
    # 3. Floors: the codes of a block are small because its scale could not be smaller.
    floors = np.array([floor for floor in of_zeros() if 0 < floor < 2.0**-7], np.float32)
    is_floored = used & np.isin(scale, floors)
    is_faint = is_floored & (largest < _QUARTER)
    if is_faint.any():
        first = int(is_faint.argmax())
        weight.add("floored", "0x6e or more", f"{largest[first]:#04x} under {scale[first]:.4g}, a floor", is_faint)
    # 4. Scales larger than the codes need: by 8% where they have mantissa bits, else by more than the factor of 2 that
    # a power of two may be. The rule CEIL of Microscaling leaves codes of 128 to 256. Few scales with mantissa bits
    # among powers of two were changed, and judge no other block.
    odd, of_others = has_mantissa & ~is_floored, largest[used & ~has_mantissa]
    is_mostly_float = 4 * int(has_mantissa.sum()) > count
    if not is_mostly_float and odd.any() and (of_others < TOP).any() and not form.is_power_of_two:
        title, effect = "few scales that are no powers of two, among powers of two", "these blocks are off by a factor"
        seen = f"{scale[int(odd.argmax())]:.9g}"
        weight.add("scale-format", "a power of two, as in the other blocks", seen, odd, title=title, effect=effect)
    limit, share = (TOP - 1, 0.95) if is_mostly_float and count >= 4 else (_HALF, 0.5)
    is_small = used & ~is_floored & (largest < limit)
    is_ceil = weight.block == MX_GROUP and np.mean(largest[used] < _CEIL) <= 0.05
    if np.mean(is_small[used]) > share and not is_ceil:
        middle = f"{int(np.median(largest[used])):#04x} in the middle block"
        weight.add("too-coarse", f"{limit:#04x} or more", middle, is_small)
    # 5. 448 in every block, under powers of two or one scale for all.
    is_top = used & (largest == TOP)
    is_full = bool(np.all((is_floored | is_top)[used]) and not is_floored[used].all())
    weight.is_full = is_full and kind is not ScaleKind.FLOAT
    if weight.is_full or (is_full and len(weight.scales) == 1):
        weight.chance, is_rare, clipped = _chance(weight, count)
        if len(weight.scales) == 1 and count >= 4 and is_rare and (kind is ScaleKind.FLOAT or 1.0 in weight.scales):
            weight.add("scale-constant", "a scale of each block", f"{min(weight.scales):.4g} in all", is_top)
        elif clipped and kind is not ScaleKind.FLOAT:
            weight.add("saturated", "448 in few blocks", clipped, is_top)


def _forbidden(weight: Weight, blocks: Blocks) -> None:
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
            seen = f"code {blocks.largest[first]:#04x} under scale {blocks.scale[first]:.4g}"
            weight.add(check, expected, seen, wrong)
    if blocks.raw.dtype == DTYPES["F8_E8M0"]:
        stored = blocks.raw.view(np.uint8)[blocks.largest > 0]
        # 2^k by value, and then a byte: powers of two are left, and 0 of all below 1.
        if stored.size and stored.min() < 64 and not np.any(stored & (np.maximum(stored, 1) - 1)):
            seen = f"bytes {', '.join(map(str, stored[:8]))}"
            weight.add("e8m0-by-value", "exponents about 120", seen, blocks=stored.size)
    if blocks.used.any() and weight.largest_code == TOP:
        _amplitude(weight, blocks)


def _amplitude(weight: Weight, blocks: Blocks) -> None:
    used, scale, values = blocks.used, blocks.scale, VALUES[np.minimum(blocks.largest, TOP)]
    with np.errstate(all="ignore"):
        amax, inverse = np.where(used, values * scale, 0), values / scale
    # 1. All of them.
    low = _low(amax[used])
    if low > _LARGEST_AMAX:
        counts = blocks.counts.codes[1:]
        middle = float(VALUES[1 + np.searchsorted(np.cumsum(counts), counts.sum() / 2)])
        if middle * _low(scale[used]) > _LARGEST_MEDIAN:
            seen = f"{low:.3g}; by the reciprocal {_low(inverse[used]):.3g}, by scale / 448 {low / 448:.3g}"
            weight.add("amplitude", "largest weights below 10", seen, blocks=int(used.sum()))
            return
    # 2. One block of many whose weights are large, and not an outlier in it alone. Rows may be large.
    largest = np.argsort(amax)[-4:][::-1] if min(weight.extent) >= 32 and len(amax) > 1 else []
    for index in (int(i) for i in largest if amax[i] > _LARGEST_AMAX):
        middle = float(np.median(VALUES[magnitudes(weight, index)]) * scale[index])
        if middle > _LARGEST_MEDIAN:
            seen = f"{amax[index]:.3g}, and {middle:.3g} in the middle"
            weight.add("amplitude", "largest weights below 10", seen, np.arange(len(amax)) == index)
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
    assert weight.counts is not None
    counts, blocks = weight.counts
    top, below, middle = (int(counts[code]) for code in (TOP, TOP - 1, TOP - 6))
    mean = max(top / blocks, 1.0)
    is_spread = below > 0 and int(np.count_nonzero(counts[1:])) > 16
    is_rare = is_spread and mean < 4
    has_end = not (is_rare and 4 * below < middle) and (below == 0 or mean >= 0.8 * math.log(used + 1))
    chance = 1.0 if has_end else (-math.expm1(-mean) * math.exp(-mean)) ** used
    is_excess = top - below / 2 > 4 * math.sqrt(top + below / 4)
    is_clipped = is_excess and is_spread and used >= 4 and (mean >= 8 or (mean >= 3 and used >= 8))
    return chance, is_rare, f"448 in every block, {mean:.1f} times on average" if is_clipped else ""


def together(form: Format, weights: Sequence[Weight]) -> None:
    """Add the findings that need the whole checkpoint, and drop those that other weights or the source explain."""
    # 1. Scales rounded after the cast. One quantizer made them all: if every weight is full, their chances multiply,
    # but weights with an end count once for each scale, since layers may share the end.
    powers = [weight for weight in weights if weight.kind in (ScaleKind.POWER, ScaleKind.E8M0)]
    pooled = 1.0
    if all(weight.is_full for weight in powers):
        ends = frozenset[float]().union(*(weight.scales for weight in powers))
        pooled = min(_IN_WINDOW ** len(ends), math.prod(weight.chance for weight in powers))
    for weight in powers:
        alone = min(weight.chance, _IN_WINDOW ** len(weight.scales)) * len(powers)
        is_told = any(finding.check in ("saturated", "scale-constant") for finding in weight.findings)
        if weight.is_full and not is_told and min(pooled, alone) < _NEVER:
            seen = f"448 in all {weight.used} blocks"
            weight.add("rounded-after", "448 in about 5% of blocks", seen, blocks=weight.used)
    # 2. scale_fmt of the configuration, where it says none.
    of_blocks = [weight for weight in weights if weight.kind is not None and weight.block not in (TENSOR, ROW)]
    scales = frozenset[float]().union(*(weight.scales for weight in of_blocks))
    is_unsaid = form.method == "fp8" and not form.is_power_of_two and scales - {1.0}
    if is_unsaid and all(weight.kind is ScaleKind.POWER for weight in of_blocks):
        # amax / 448 may be one by accident, in blocks of one amax: then 448 is in all of them.
        is_chance = all(weight.is_full for weight in of_blocks) and len(scales) < 2
        severity = Severity.NOTE if is_chance else Severity.WARNING
        found = f"powers of two in all {sum(weight.used for weight in of_blocks)} blocks"
        of_blocks[0].add("scale-format-unsaid", "scale_fmt ue8m0", found, severity=severity)
    # 3. Codes that only many weights show to be wrong.
    counted = [weight for weight in weights if weight.counts is not None]
    if len(counted) > 1 and not any(finding.check == "wrong-cast" for weight in weights for finding in weight.findings):
        tallies = [weight.counts for weight in counted if weight.counts is not None]
        codes, blocks = (sum(part) for part in zip(*tallies, strict=True))
        largest = np.array([weight.largest for weight in counted], np.uint8)
        is_float = all(weight.kind is ScaleKind.FLOAT for weight in counted)
        if wrong := wrong_cast(Counts(np.asarray(codes), float(blocks)), largest, is_float=is_float):
            counted[0].add("wrong-cast", *wrong, blocks=sum(weight.used for weight in counted))
    # 4. Weights whose dialects are not that of the others with the same blocks.
    known = [(weight, weight.dialects) for weight in weights if weight.dialects]
    for block in dict.fromkeys(weight.block for weight, _ in known):
        alike = [(weight, names) for weight, names in known if weight.block == block]
        ((usual, count),) = Counter(name for _, names in alike for name in names).most_common(1)
        other = [(weight, names) for weight, names in alike if usual not in names]
        if other and count > len(other):
            weight, names = other[0]
            weight.add("dialects-mixed", usual, f"{names[0]}, in {len(other)} of {len(alike)} weights")
    # 5. What others explain. The shards of a fused layer share the scale of the largest; scales may be another's.
    whole = [weight for weight in weights if weight.block == TENSOR and weight.largest >= _HALF]
    reached = {scale for weight in whole for scale in weight.scales}
    owners = {scales: weight.name for weight in weights for scales in weight.expected}
    for weight in weights:
        owner = owners.get(weight.stored) if weight.stored not in weight.expected else None
        is_shared = weight.block == TENSOR and weight.scales & reached
        kept = [finding for finding in weight.findings if not (finding.check == "too-coarse" and is_shared)]
        weight.findings = [_explained(finding, weight, owner) for finding in kept]


def _explained(finding: Finding, weight: Weight, owner: str | None) -> Finding:
    if finding.check == "no-dialect" and owner is not None:
        return weight.finding("grid-moved", f"scales of {weight.name}", f"those of {owner}", block=finding.block)
    # A dialect that gives every byte refutes what was judged by chance: the weights were clipped before. A float32
    # scale of 0 is then its way with zeros; smaller dtypes underflow.
    is_zero = finding.check == "scale-zero" and weight.scale is not None and weight.scale.dtype == "F32"
    is_refuted = weight.dialects and (is_zero or finding.check in _BY_CHANCE)
    return replace(finding, severity=Severity.NOTE) if is_refuted else finding
