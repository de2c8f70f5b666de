"""A float8 weight beside the weight that it was quantized from: which dialects give every byte, and where none does."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from f8emu.audit.blocks import Blocks, Weight, bands
from f8emu.audit.checkpoint import DTYPES, Joined, Tensor
from f8emu.audit.findings import Severity
from f8emu.audit.formats import Format
from f8emu.conformance.compare import counted
from f8emu.dialects.arithmetic import block_amax, codes_of_other, factors_from_stored
from f8emu.dialects.matching import Candidate, candidates, count_codes, numbers_differ, relation
from f8emu.dialects.rules import TENSOR, PowerOfTwo
from f8emu.spec.swizzle import swizzled_groups


def compare(weight: Weight, blocks: Blocks, source: Tensor | Joined, siblings: Sequence[Tensor], form: Format) -> None:
    """The dialects of a weight, if any has its blocks. `siblings` are the sources of the layers fused with it."""
    raw = blocks.raw.reshape(-1, weight.grid[-1])
    # 1. The scales, for which the largest magnitudes are enough; then the codes: of dialects with these scales to the
    # end, of all others a part, to find the nearest.
    amax = np.zeros(raw.shape, np.float32)
    for at, x in bands(weight, source):
        part = block_amax(x, weight.extent)
        np.maximum(amax[at : at + len(part)], part, out=amax[at : at + len(part)])
    every, right, size = _candidates(weight, source, amax, raw)
    if not every:
        weight.uncompared = f"no dialect has blocks of {' x '.join(map(str, weight.extent))}"
        return
    fits = [candidate for candidate in right if candidate.fits]
    if not fits and weight.block == TENSOR and len(siblings) > 1:
        largest = [block_amax(x[None], TENSOR).max() for sibling in siblings for x in sibling.parts()]
        shared = np.full_like(amax, max(largest))
        fits = [candidate for candidate in _candidates(weight, source, shared, raw)[1] if candidate.fits]
    weight.dialects, weight.stored = tuple(candidate.dialect.name for candidate in fits), hash(blocks.raw.tobytes())
    if fits:
        if all(candidate.zeros_scaled for candidate in fits):
            zeros = amax == 0
            weight.add("zero-scale", f"{float(fits[0].scale[zeros][0]):.4g}", f"{float(raw[zeros][0]):.4g}", zeros)
        powers = [candidate for candidate in fits if candidate.form.is_power_of_two]
        if form.is_power_of_two or len(powers) == len(fits):
            _by_logarithm(weight, raw, every, powers)
        return
    # 2. Scales of another rule, or rounded afterwards, with the codes that belong to them.
    if _of_scales(weight, source, amax, raw, every, form):
        return
    # 3. Of the source in another dtype. Few codes that differ are faults, for which some master could be imagined.
    other = {"F32": "its bfloat16 copy", "BF16": "a float32 master"}.get(source.dtype)
    for candidate in every if other else ():
        if (count := _of_other(weight, source, amax, raw, candidate)) > size // 1000:
            seen = f"{other}, cast so; {count} codes differ"
            weight.add("cast-from", f"the source, cast by {candidate.dialect.name}", seen)
            return
    # 4. The nearest: by its codes, as long as some are right; then the one whose scales moved; then by its scales.
    wrong = [min(int(candidate.codes_differ.sum()), size // 2) for candidate in right or every]
    tied = [candidate for candidate, count in zip(right or every, wrong, strict=True) if count == min(wrong)]
    with np.errstate(all="ignore"):
        ratios = [np.log2(candidate.factors.scale / raw.astype(np.float32)) for candidate in tied]
        far = [float(np.median(np.abs(ratio))) for ratio in ratios]
    of_rule = (candidate for candidate in tied if _moved(candidate.scale, raw) or relation(candidate.scale, raw))
    best = next(of_rule, tied[far.index(min(far))])
    if not right:
        best.codes_differ[:] = 0
        _count_codes(weight, source, [best], is_sample=False)
    weight.expected = frozenset(hash(candidate.scale.tobytes()) for candidate in tied)
    _differ(weight, raw, best)


def _candidates(
    weight: Weight, source: Tensor | Joined, amax: np.ndarray, raw: np.ndarray
) -> tuple[list[Candidate], list[Candidate], int]:
    # All, those whose scales are right, and the number of codes that were compared. Zeros need no right scale.
    # Of a matrix of one block, several granularities are the same.
    rows, k = weight.codes.shape[-2:]
    every = candidates(lambda _: amax, raw, (rows, k), weight.extent, DTYPES[source.dtype])
    for candidate in every:
        if not (candidate.scales_differ & (amax != 0)).any() and candidate.scales_differ.any():
            candidate.zeros_scaled, candidate.scales_differ = True, np.zeros_like(candidate.scales_differ)
    right = [candidate for candidate in every if not candidate.scales_differ.any()]
    return every, right, _count_codes(weight, source, right or every, is_sample=not right) if every else 0


def _of_scales(
    weight: Weight, source: Tensor | Joined, amax: np.ndarray, raw: np.ndarray, every: Sequence[Candidate], form: Format
) -> bool:
    # Whether the codes are those of the source under the scales, as they are or as they were before they were rounded.
    rounded = [candidate for candidate in every if not (numbers_differ(candidate.scale, raw) & (amax != 0)).any()]
    decoding = [candidate for candidate in every if not candidate.dialect.stored.is_multiplier]
    of_rule = {candidate.dialect.code: candidate for candidate in decoding}.values()
    # Scales that are mostly a dialect's were changed.
    is_changed = not form.observer and any(2 * candidate.scales_differ.sum() < raw.size for candidate in every)
    scaled = [
        replace(
            candidate,
            factors=factors_from_stored(raw, candidate.dialect),
            codes_differ=np.zeros_like(candidate.codes_differ),
        )
        for candidate in of_rule
    ]
    for of in (rounded, [] if is_changed else scaled):
        for candidate in of:
            candidate.codes_differ[:] = 0
        _count_codes(weight, source, of, is_sample=True)
        left = [candidate for candidate in of if not candidate.codes_differ.any()]
        _count_codes(weight, source, left, is_sample=False)
        best = next((candidate for candidate in left if not candidate.codes_differ.any()), None)
        if best is None:
            continue
        name, stored = best.dialect.name, weight.scale.dtype if weight.scale else ""
        if of is rounded:
            effect = "scales were rounded after the codes were made with them: each block is off by a factor of its own"
            expected = f"{best.factors.stored.dtype}, as {name} stores them"
            weight.add("scale-dtype", expected, stored, severity=Severity.WARNING, effect=effect)
        else:
            clipped = amax / (448 * raw.astype(np.float32))
            severity = Severity.NOTE if form.observer or float(np.nanmax(clipped)) <= 2 else Severity.WARNING
            rule = f"codes by {name}, scales by {form.observer or 'another rule'}"
            weight.add("scale-given", "scales of a known rule", rule, severity=severity)
        return True
    return False


def _of_other(weight: Weight, source: Tensor | Joined, amax: np.ndarray, raw: np.ndarray, candidate: Candidate) -> int:
    # `codes_of_other` of the whole weight.
    total = 0
    for (at, x), (_, codes) in zip(bands(weight, source), bands(weight, weight.codes), strict=True):
        down = slice(at, at + -(-len(x) // min(weight.extent[0], len(x))))
        count = codes_of_other(x, amax[down], codes, raw[down], candidate.dialect, weight.extent)
        if not count:
            return 0
        total += count
    return total


def _count_codes(weight: Weight, source: Tensor | Joined, of: Sequence[Candidate], *, is_sample: bool) -> int:
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
    bits = [candidate for candidate in every if candidate.form.power_of_two in (PowerOfTwo.UP, PowerOfTwo.DOWN)]
    logarithms = (PowerOfTwo.UP_LOG2, PowerOfTwo.DOWN_LOG2)
    if bits and powers and all(candidate.form.power_of_two in logarithms for candidate in powers):
        best = min(bits, key=lambda candidate: int(candidate.scales_differ.sum())).scale.astype(np.float32)
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
    if codes == 0 and (of := relation(best.scale, raw)):
        weight.add("no-dialect", f"codes and scales of {name}", f"its codes, with scales that are {of} its own", wrong)
        return
    # 2. What the nearest dialect gives, and what is there.
    first = tuple(np.argwhere(wrong)[0])
    expected = f"by {name}, the nearest: scale {float(best.scale[first]):.9g}"
    if best.codes_differ[first]:
        expected += f", code {best.first[int(first[0])]}"
    seen = f"scale {float(raw[first]):.9g}; {counted(scales, 'scale')} and {counted(codes, 'code')} differ in all"
    is_other = scales or codes > weight.codes.size // 20  # dialects with the same scales differ in 3% of codes at most
    severity = Severity.ERROR if is_other else Severity.WARNING
    weight.add("no-dialect", expected, seen, wrong, severity=severity)


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
    (group,), size = swizzled_groups("audit", a.shape, None, 0)
    if size == b.size and np.array_equal(b.reshape(-1)[group.offsets(*np.ogrid[: a.shape[0], : a.shape[1]])], a):
        return "the grid in cuBLASLt's swizzled layout"
    return "the same scales in another order" if np.array_equal(np.sort(a, None), np.sort(b, None)) else ""
