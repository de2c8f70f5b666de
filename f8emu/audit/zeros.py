"""Blocks of zeros: which dialects give them their scales, and whether they had other codes once."""

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import Blocks, Weight
from f8emu.audit.findings import Severity
from f8emu.dialects import DIALECTS, zero_block_scale
from f8emu.dialects.rules import TENSOR

_TOLD = "a scale of zeros, which is the same in every block"


@functools.cache
def of_zeros(*dtypes: str) -> Mapping[float, Sequence[str]]:
    """The scale of a block of zeros -> the dialects that give it; of weights in float32 and bfloat16, or `dtypes`."""
    dialects: dict[float, list[str]] = defaultdict(list)
    for name, dialect in DIALECTS.items():
        used = dtypes or ("float32", "bfloat16") if dialect.scale is not None else ()
        for scale in {zero_block_scale(dialect, dtype) for dtype in used}:
            dialects[scale].append(name)
    return dialects


def fingerprints(weights: Sequence[Weight]) -> dict[str, int]:
    """The scales of zero blocks, and the dialects that give them -> the number of blocks."""
    total: Counter[float] = sum((weight.zeros for weight in weights), Counter())
    named: dict[str, int] = {}
    for scale, count in total.most_common(4):
        names = of_zeros().get(scale, ())
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        named[f"scale {scale:.4g}: {', '.join(names[:6]) or 'no known dialect'}{more}"] = count
    return named


def lost(weight: Weight, blocks: Blocks, used: NDArray[np.bool]) -> None:
    """Codes of 0 alone under scales of their own.

    A quantizer gives all zeros the same scale. If the scales of the other blocks are those of their largest weights,
    blocks of zeros with several scales had other codes when these were computed. One block is enough if its scale lies
    among the others', where no floor is.
    """
    scale, largest = blocks.scale, blocks.largest
    with np.errstate(over="ignore"):
        every = {*of_zeros(), *(of_zeros("float16") if blocks.raw.dtype == np.float16 else ())}
        known = np.array([*every], np.float32).astype(blocks.raw.dtype).astype(np.float32)
    if weight.block == TENSOR and len(scale) == 1 and 0 < blocks.filled < 0.55:
        seen = f"zeros in the last {100 * (1 - blocks.filled):.0f}% of rows"
        weight.add("lost-codes", "weights in all rows", seen, severity=Severity.WARNING)
    wrong = (largest == 0) & (scale > 0) & ~np.isin(scale, known)
    if not wrong.any():
        return
    values, others = np.unique(scale[wrong]), largest[used]
    is_power = not np.any(values.view(np.uint32) & 0x7FFFFF)
    is_certain = len(values) > 1
    if len(others):
        low, high = scale[used].min(), scale[used].max()
        is_among = low / 2 <= values[0] <= 2 * high and (is_power or int(wrong.sum()) == 1)
        # The scale of a tensor that was copied to its blocks has blocks with small codes.
        is_own = np.median(others) >= int(others.max()) - (8 if is_power else 1)
        is_certain = bool(is_own) and len(others) >= (2 if low < high else 4) and (is_certain or is_among)
    if is_certain:
        seen = f"{int(wrong.sum())} blocks of zeros under {len(values)} scales, {values[-1]:.4g} and others"
        weight.add("lost-codes", _TOLD, seen, wrong)


def lost_whole(weights: Sequence[Weight]) -> None:
    """Weights of zeros alone under one scale, which is as large as the scales of other weights."""
    whole = [weight for weight in weights if not weight.used and len(weight.zeros) == 1 and not weight.findings]
    scales = Counter(scale for weight in whole for scale in weight.zeros)
    for weight in whole:
        (scale,) = weight.zeros
        others = [value for other in weights if other.used and other.block == weight.block for value in other.scales]
        is_known = scale in of_zeros() or (scale in others and weight.block == TENSOR) or scales[scale] > 1
        if others and not is_known and min(others) / 2 < scale < 2 * max(others):
            weight.add("lost-codes", _TOLD, f"zeros alone under {scale:.4g}, a scale as those of other weights")
