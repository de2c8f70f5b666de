"""A float8 weight beside the weight that it was quantized from: which dialects give every byte, and where none does."""

from collections.abc import Sequence

import numpy as np

from f8emu.audit.blocks import Blocks, Weight, bands
from f8emu.audit.checkpoint import DTYPES, Stored
from f8emu.audit.findings import Severity
from f8emu.dialects.arithmetic import block_amax, codes_of_other
from f8emu.dialects.matching import Candidate, candidates, count_codes
from f8emu.dialects.rules import PowerOfTwo


def compare(weight: Weight, blocks: Blocks, source: Stored, *, is_power_of_two: bool = False) -> None:
    """The dialects of a weight, if any has its blocks. `is_power_of_two`: the configuration says so."""
    rows, k = weight.codes.shape[-2:]
    raw = blocks.raw.reshape(-1, weight.grid[-1])
    # 1. The scales, for which the largest magnitudes are enough.
    amax = np.zeros(raw.shape, np.float32)
    for at, x in bands(weight, source):
        found = block_amax(x, weight.extent)
        np.maximum(amax[at : at + len(found)], found, out=amax[at : at + len(found)])
    # Of a matrix of one block, several granularities are the same.
    every = candidates(lambda _: amax, raw, (rows, k), weight.extent, DTYPES[source.dtype])
    if not every:
        return
    # 2. The codes: of dialects with these scales to the end; of all others a part, to find the nearest.
    right = [one for one in every if not one.scales_differ.any()]
    size = _count_codes(weight, source, right or every, is_sample=not right)
    fits = [one for one in right if one.fits]
    weight.dialects, weight.stored = tuple(one.dialect.name for one in fits), hash(blocks.raw.tobytes())
    if fits:
        powers = [one for one in fits if one.form.is_power_of_two]
        if is_power_of_two or len(powers) == len(fits):
            _by_logarithm(weight, raw, every, powers)
        return
    # 3. Of the source in another dtype. Few codes that differ are faults, for which some master could be imagined.
    other = {"F32": "its bfloat16 copy", "BF16": "a float32 master"}.get(source.dtype)
    for one in every if other else ():
        if (count := _of_other(weight, source, amax, raw, one)) > size // 1000:
            found = f"{other}, cast so; {count} codes differ"
            weight.add("cast-from", f"the source, cast by {one.dialect.name}", found)
            return
    # 4. The nearest: by its codes, as long as some are right; then the one whose scales moved; then by its scales.
    wrong = [min(int(one.codes_differ.sum()), size // 2) for one in right or every]
    tied = [one for one, count in zip(right or every, wrong, strict=True) if count == min(wrong)]
    with np.errstate(all="ignore"):
        far = [float(np.median(np.abs(np.log2(one.factors.scale / raw.astype(np.float32))))) for one in tied]
    best = next((one for one in tied if _moved(one.scale, raw)), tied[far.index(min(far))])
    if not right:
        best.codes_differ[:] = 0
        _count_codes(weight, source, [best], is_sample=False)
    weight.expected = frozenset(hash(one.scale.tobytes()) for one in tied)
    _differ(weight, raw, best)


def _of_other(weight: Weight, source: Stored, amax: np.ndarray, raw: np.ndarray, one: Candidate) -> int:
    # `codes_of_other` of the whole weight.
    total = 0
    for (at, x), (_, codes) in zip(bands(weight, source), bands(weight, weight.codes), strict=True):
        down = slice(at, at + -(-len(x) // min(weight.extent[0], len(x))))
        count = codes_of_other(x, amax[down], codes, raw[down], one.dialect, weight.extent)
        if not count:
            return 0
        total += count
    return total


def _count_codes(weight: Weight, source: Stored, of: Sequence[Candidate], *, is_sample: bool) -> int:
    # Of the whole weight or, as a sample, of its first band: the number of codes that were compared.
    size = 0
    for (at, x), (_, codes) in zip(bands(weight, source), bands(weight, weight.codes), strict=True):
        count_codes(of, x, codes, weight.extent, at)
        size += x.size
        if is_sample:
            break
    return size


def _by_logarithm(weight: Weight, raw: np.ndarray, every: Sequence[Candidate], powers: Sequence[Candidate]) -> None:
    # Where all that fits rounds by a float logarithm, and the bits give twice the scale.
    bits = [one for one in every if one.form.power_of_two in (PowerOfTwo.UP, PowerOfTwo.DOWN)]
    logarithms = (PowerOfTwo.UP_LOG2, PowerOfTwo.DOWN_LOG2)
    if bits and powers and all(one.form.power_of_two in logarithms for one in powers):
        best = min(bits, key=lambda one: int(one.scales_differ.sum())).scale.astype(np.float32)
        there = raw.astype(np.float32)
        if (wrong := best == 2 * there).any():
            weight.add("logarithm", f"{best[wrong][0]:.9g}", f"{there[wrong][0]:.9g}", wrong)


def _differ(weight: Weight, raw: np.ndarray, best: Candidate) -> None:
    wrong = best.scales_differ | (best.codes_differ > 0)
    codes, scales, name = int(best.codes_differ.sum()), int(best.scales_differ.sum()), best.dialect.name
    # 1. Scales that moved: the codes say which they should be.
    if codes == 0 and (moved := _moved(best.scale, raw)):
        weight.add("grid-moved", f"the order of blocks, by {name}", moved, wrong)
        return
    # 2. What the nearest dialect gives, and what is there.
    first = tuple(np.argwhere(wrong)[0])
    expected = f"by {name}, the nearest: scale {float(best.scale[first]):.9g}"
    if best.codes_differ[first]:
        expected += f", code {best.first[int(first[0])]}"
    found = f"scale {float(raw[first]):.9g}; {scales} scales and {codes} codes differ in all"
    is_other = scales or codes > weight.codes.size // 20  # dialects with the same scales differ in 3% of codes at most
    severity = Severity.ERROR if is_other else Severity.WARNING
    weight.add("no-dialect", expected, found, wrong, severity=severity)


def _moved(a: np.ndarray, b: np.ndarray) -> str:
    # How the stored grid b came from a; empty, if it did not.
    a, b = a.astype(np.float32), b.astype(np.float32)
    if np.array_equal(a, b):
        return ""
    if np.array_equal(b.reshape(-1), a.T.reshape(-1)):
        return "the transposed grid"
    early, late = slice(None, -1), slice(1, None)
    for name, x, y in (("down", a, b), ("across", a.T, b.T)):
        for by, old, new in ((1, early, late), (-1, late, early)):
            if np.array_equal(x[old], y[new]) and not np.array_equal(x[new], y[new]):
                return f"the grid shifted by {by} block {name}"
    return "the same scales in another order" if np.array_equal(np.sort(a, None), np.sort(b, None)) else ""
