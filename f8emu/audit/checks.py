"""The checks, each a function that yields findings: of the names of a checkpoint, of the values of one weight, and of
all weights together.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import VALUES, Blocks, Weight, histogram, names_of, shapes_of
from f8emu.audit.checkpoint import Checkpoint
from f8emu.audit.faults import Severity
from f8emu.audit.findings import Finding, finding
from f8emu.audit.formats import CONSUMERS, FUSED, INPUT_SCALES, READS, SCALES, Format, Kind
from f8emu.dialects import DIALECTS, zero_block_scale
from f8emu.dialects.rules import MX_GROUP, ROW, TENSOR

_TOP, _HALF, _QUARTER = 0x7E, 0x76, 0x6E
"""The codes of 448, 224 and 112."""
_IN_WINDOW = math.log2(448 / 432)
"""How probable it is that the largest code of a block is 448 although its scale is the power of two above amax / 448:
amax / 448s is between 1/2 and 1, log-uniform by Benford's law, and rounds to 448 from 432 on. 5.2%."""
_NEVER = 1e-4
"""A probability below which something is no accident."""
_MOST_AMPLITUDE = 2048.0
"""An amax of a weight that nobody has. Reciprocals of scales are beyond it for every amax below 448^2 / 2048 = 98."""
_MOST_TYPICAL = 32.0
"""The same for the median magnitude: a single outlier may be as large as it likes."""
_KV = re.compile(r"(^|[._])(k|v|kv|q|prob)_scale$|(^|\.)(k|v)_proj\.output_scale$|kv_cache\.scaling_factor$")
_INTERPRETABLE = {"F16": 2.0**-20}
"""Scales below are subnormal, and have too few bits to judge codes by."""
_HIGH = ("F32", "BF16", "F16")


# 1 Names, shapes, dtypes


def names(
    checkpoint: Checkpoint, form: Format, weights: Sequence[Weight], consumers: Sequence[str]
) -> Iterator[Finding]:
    """What the names, shapes and dtypes alone show."""
    if weights and checkpoint.has_config and not checkpoint.quantization:
        yield finding("config-missing", weights[0].name, "a quantization_config", "none", blocks=len(weights))
    stacks = {key.partition(":")[0] for key in consumers}
    for stack in stacks if weights else ():
        if form.method not in READS[stack]:
            expected = ", ".join(filter(None, READS[stack])) or "no configuration"
            yield finding("consumer-format", weights[0].name, f"{expected}, which {stack} reads", form.name)
    for weight in weights:
        yield from _scale_names(checkpoint, form, weight)
        yield from _input_scales(checkpoint, form, weight)
        if form.ignores(weight.module):
            yield finding("ignored", weight.name, "BF16, F16 or F32", weight.codes.dtype)
    yield from _orphans(checkpoint, weights)
    for name in sorted(checkpoint.unlisted):
        yield finding("unlisted", name, "an entry of the index", "none")


def _scale_names(checkpoint: Checkpoint, form: Format, weight: Weight) -> Iterator[Finding]:
    if weight.scale is None:
        if form.method or form.scales != SCALES or any("scale" in name for name in checkpoint.tensors):
            yield finding("scale-missing", weight.name, names_of(weight.name, form.scales)[0], "no scale")
        return
    # 1. The name. A file without a configuration may have any, but of one known to few loaders that is said.
    name, scale = weight.scale.name, weight.scale
    expected = names_of(weight.name, form.scales)
    if name not in expected:
        yield finding("scale-name", weight.name, expected[0], name, remedy=f"rename the tensor to {expected[0]}")
    elif not form.method and name.endswith(".scale_weight"):
        effect = "ComfyUI applies it; loaders that look for weight_scale drop it, and weights are far too large"
        yield finding(
            "scale-name", weight.name, names_of(weight.name)[1], name, severity=Severity.WARNING, effect=effect
        )
    # 2. The dtype.
    if scale.dtype in ("I32", "U32", "I64") and weight.block is not TENSOR:
        yield finding("scale-packed", weight.name, form.dtypes[0], f"{scale.dtype} {list(scale.shape)}")
    elif scale.dtype not in form.dtypes:
        yield finding("scale-dtype", weight.name, " or ".join(form.dtypes), scale.dtype)
    # 3. The shape.
    last = weight.module.rpartition(".")[2]
    shards = FUSED.get(last, 1)
    if weight.block is TENSOR and shards > 1 and math.prod(scale.shape) == 1:
        yield finding("scale-per-shard", weight.name, f"{shards} scales, one of each shard", "1")
    if weight.block is None and not (shards > 1 and scale.shape == (shards,)):
        blocks = form.blocks or (TENSOR, ROW, (128, 128))
        shapes = [shapes_of(weight.codes.shape, one, has_ones=form.has_ones)[0] for one in blocks]
        turned = [shape for shape in shapes if len(shape) > 1 and scale.shape == (*shape[:-2], shape[-1], shape[-2])]
        found = f"{list(scale.shape)}" + (", transposed" if turned else "")
        yield finding("scale-shape", weight.name, " or ".join(str(list(shape)) for shape in shapes), found)


def _input_scales(checkpoint: Checkpoint, form: Format, weight: Weight) -> Iterator[Finding]:
    found = [name for name in names_of(weight.name, INPUT_SCALES) if name in checkpoint.tensors]
    if form.input_scale and weight.name.endswith(".weight"):
        (expected,) = names_of(weight.name, (form.input_scale,))
        if not found:
            yield finding("input-scale-missing", weight.name, expected, "no scale")
        elif expected not in found:
            yield finding("scale-name", weight.name, expected, found[0], remedy=f"rename the tensor to {expected}")


def _orphans(checkpoint: Checkpoint, weights: Sequence[Weight]) -> Iterator[Finding]:
    used = {weight.scale.name for weight in weights if weight.scale is not None}
    codes = {weight.name for weight in weights}
    for name, stored in checkpoint.tensors.items():
        for template in SCALES:
            suffix = template[3:]  # behind {w} or {m}
            if name in used or not name.endswith(suffix) or (template == "{m}.scale" and stored.dtype not in _HIGH):
                continue
            stem = name.removesuffix(suffix)
            of = stem if template.startswith("{w}") else f"{stem}.weight"
            weight = checkpoint.tensors.get(of)
            if of in codes:
                yield finding("scale-orphan", name, "one scale of a weight", "another beside it")
            elif weight is not None and weight.dtype in _HIGH and weight.is_matrix:
                yield finding("scale-orphan", name, f"{of} in float8", f"{weight.dtype} {list(weight.shape)}")
            elif weight is None and template != "{m}.scale" and of.endswith(".weight") and not _KV.search(name):
                yield finding("scale-orphan", name, f"a weight {of}", "none")
            break


def lone_scales(checkpoint: Checkpoint, form: Format) -> Iterator[Finding]:
    """Scales of activations and of the key-value cache, and block scales stored as E4M3.

    Raises:
        CheckpointError: a file has changed.
    """
    cache = checkpoint.quantization.get("kv_cache_scheme")
    is_by_head = isinstance(cache, dict) and cache.get("strategy") == "attn_head"
    last_parts = {name[4:] for name in INPUT_SCALES}
    for name, stored in sorted(checkpoint.tensors.items()):
        is_cache = _KV.search(name) is not None
        if stored.dtype == "F8_E4M3" and name.rpartition(".")[2].endswith(("scale", "scale_inv")):
            for codes in stored.parts(1 << 22, None):
                is_nan = (codes.view(np.uint8).reshape(-1) & 0x7F) == 0x7F
                if is_nan.any():
                    place = f"0x7F at element {int(is_nan.argmax())}, {np.count_nonzero(is_nan)} in all"
                    yield finding("e4m3-scale", name, "at most 0x7E", place)
                    break
        elif (is_cache or name.rpartition(".")[2] in last_parts) and stored.dtype in (*_HIGH, "F64"):
            if is_cache and stored.size != 1 and not is_by_head:
                yield finding("kv-scale", name, "1 element", f"{stored.size}, {list(stored.shape)}")
            elif 0 < stored.size <= 1 << 20:
                values = stored.read().astype(np.float64).reshape(-1)
                wrong = values[~((values > 0) & np.isfinite(values))]
                if wrong.size:
                    yield finding("kv-scale" if is_cache else "input-scale", name, "> 0 and finite", f"{wrong[0]:g}")


# 2 The values of one weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the checks of all weights together need of one."""

    weight: Weight
    kind: Kind | None
    """None: no block is used."""
    blocks: int
    used: int
    steps: int
    """How many scales of used blocks differ."""
    zeros: dict[float, int]
    """Scale -> zero blocks that have it."""
    chance: float = 1.0
    """How probable codes of 448 in every block are, if scales are rounded up before the cast."""
    coarse: Finding | None = None
    """Whether the largest code of a tensor is small; another that shares its scale may excuse it."""
    scale: float = 0.0
    largest: int = 0
    is_power_first: tuple[int, ...] = ()


def forbidden(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    """Codes and scales that must not occur."""

    def at(is_wrong: NDArray[np.bool], check: str, expected: str, found: str) -> Iterator[Finding]:
        if is_wrong.any():
            first, count = int(is_wrong.argmax()), int(np.count_nonzero(is_wrong))
            text = found.format(code=f"{blocks.largest[first]:#04x}", scale=f"{blocks.scale[first]:.4g}")
            yield finding(check, weight.name, expected, text, block=weight.place(first), blocks=count)

    has_nan = blocks.largest > weight.largest_code
    is_zero = blocks.scale == 0
    at_most = f"at most {weight.largest_code:#04x}"
    yield from at(has_nan & is_zero, "zero-over-zero", "0x00 under a positive scale", "{code} under {scale}")
    yield from at(has_nan & ~is_zero, "nan-code", at_most, "{code} or {code} with a sign")
    yield from at(~has_nan & is_zero, "scale-zero", "> 0", "{scale}")
    yield from at(~np.isfinite(blocks.scale) | (blocks.scale < 0), "scale-invalid", "> 0 and finite", "{scale}")
    if blocks.raw.dtype.name == "float8_e8m0fnu":
        # 2^k by value, and then as a byte: only powers of two are left, and most are 0.
        used = blocks.raw.view(np.uint8)[blocks.used | (blocks.largest > 0)]
        if used.size and used.min() < 64 and not np.any(used & (used - (used > 0)) & 0xFF):
            shown = ", ".join(map(str, used[:8]))
            yield finding("e8m0-by-value", weight.name, "exponents about 120", f"bytes {shown}", blocks=used.size)


def amplitude(weight: Weight, blocks: Blocks) -> Iterator[Finding]:
    """Scales that are the reciprocals of what decodes."""
    if weight.largest_code != _TOP or not blocks.used.any():
        return
    values, scale = VALUES[blocks.largest[blocks.used]], blocks.scale[blocks.used]
    with np.errstate(over="ignore"):
        amax, reciprocal = float(np.median(values * scale)), float(np.median(values / scale))
    if amax > _MOST_AMPLITUDE:
        counts, _ = histogram(weight)
        middle = VALUES[np.searchsorted(np.cumsum(counts[1:]), counts[1:].sum() / 2) + 1]
        typical = float(middle) * float(np.median(scale))
        if typical > _MOST_TYPICAL:
            inverse = f"; by its reciprocal {reciprocal:.3g}" if reciprocal > 1e-8 else ""
            found = f"{amax:.3g}{inverse}"
            yield finding("inverted", weight.name, "largest weights below 100", found, blocks=int(blocks.used.sum()))


def unscaled(weight: Weight, is_told: bool) -> Iterator[Finding]:
    """A float8 weight without a scale, in a file that has none: a plain cast, or one that lost its scale."""
    counts, _ = histogram(weight)
    if counts[weight.largest_code + 1 :].any():
        yield finding("nan-code", weight.name, f"at most {weight.largest_code:#04x}", "NaN or infinity")
    largest = VALUES[np.flatnonzero(counts)[-1]] if weight.largest_code == _TOP else 0
    if not is_told and 112 <= largest:
        yield finding("scale-missing", weight.name, "weights below 100, of a cast without a scale", f"{largest:g}")


def summarized(weight: Weight, blocks: Blocks) -> tuple[Summary, list[Finding]]:
    """What one weight shows of the rule that made it, and of its floors."""
    used = blocks.used & (blocks.scale >= _INTERPRETABLE.get(weight.scale.dtype if weight.scale else "", 2.0**-118))
    largest, scale = blocks.largest[used], blocks.scale[used]
    zeros, counts = np.unique(blocks.scale[(blocks.largest == 0) & (blocks.scale >= 0)], return_counts=True)
    of = {float(s): int(n) for s, n in zip(zeros[:8], counts[:8], strict=True)}
    total = {"weight": weight, "blocks": len(blocks.largest), "zeros": of}
    if not used.any() or weight.largest_code != _TOP:
        return Summary(**total, kind=None, used=0, steps=0), []
    # 1. The kind of scales.
    has_mantissa = (scale.view(np.uint32) & 0x7FFFFF) != 0
    is_byte = blocks.raw.dtype.name == "float8_e8m0fnu"
    kind = Kind.E8M0 if is_byte else Kind.FLOAT if has_mantissa.any() else Kind.POWER
    first = np.flatnonzero(used)[int(has_mantissa.argmax())]
    steps = len(np.unique(scale))
    found: list[Finding] = []
    # 2. Floors: the codes of a block are small because its scale could not be smaller.
    is_small = largest < _HALF
    is_floored = np.isin(scale, _floors())
    is_faint = is_floored & (largest < _QUARTER)
    if is_faint.any():
        index = int(np.flatnonzero(used)[int(is_faint.argmax())])
        text = f"{blocks.largest[index]:#04x} under {blocks.scale[index]:.4g}, a floor"
        place = {"block": weight.place(index), "blocks": int(is_faint.sum())}
        found.append(finding("floored", weight.name, "a largest code of 0x6e or more", text, **place))
    # 3. Scales that are more than twice what the codes need. The rule CEIL of Microscaling is allowed 128 to 256.
    is_small &= ~is_floored
    coarse = None
    enough = is_small if weight.block != MX_GROUP else is_small & (np.mean(largest < 0x70) > 0.05)
    if 2 * np.count_nonzero(enough) > len(largest):
        text = f"0x{int(np.median(largest)):02x} in the middle block"
        coarse = finding("too-coarse", weight.name, "largest codes of 0x76 to 0x7e", text, blocks=int(enough.sum()))
        if weight.block != TENSOR:
            found.append(coarse)
    # 4. Powers of two and 448 in every block.
    chance = 1.0
    if kind is not Kind.FLOAT and np.mean(largest == _TOP) >= 0.95:
        chance, saturated = _chance(weight, len(largest), steps)
        if saturated:
            found.append(finding("saturated", weight.name, "448 in few blocks", saturated, blocks=len(largest)))
    more = {"scale": float(scale[0]), "largest": int(largest.max()), "is_power_first": weight.place(int(first))}
    return Summary(**total, kind=kind, used=len(largest), steps=steps, chance=chance, coarse=coarse, **more), found


def _chance(weight: Weight, used: int, steps: int) -> tuple[float, str]:
    """How probable 448 in every block is by accident, and what shows that codes are clipped, or empty.

    With scales rounded up before the cast, the largest code of a block is 448 if its amax lies in a window of 3.6%. If
    m codes of a block are 448 on average, the window holds some of a block with probability 1 - e^-m, so all blocks are
    in it with (1 - e^-m)^blocks, unless the distribution ends there (a constant, a clipped weight): then all blocks of
    one scale are one accident of 5.2%. Clipped codes are more than their neighbours, which an end cannot explain:
    below an end of a flat distribution, 448 has half the width of 416.
    """
    counts, blocks = histogram(weight)
    top, next_to, after = (int(counts[code]) for code in (0x7E, 0x7D, 0x7C))
    mean = max(top / blocks, 1.0)
    has_end = next_to == 0 or mean >= math.log(used + 1)
    chance = _IN_WINDOW**steps
    if not has_end:
        chance = min(chance, -(math.expm1(-mean) ** used))
    share = 2.5 if weight.block == MX_GROUP and steps == 1 else 0.5  # FLOOR clips 448 to 512
    excess = top - share * next_to > 4 * math.sqrt(top + share * share * next_to)
    is_spread = np.count_nonzero(counts[1:]) > 16 and next_to + after > 0
    is_clipped = excess and is_spread and (mean >= 8 or (steps >= 3 and mean > 1.5)) and max(used, 4 * steps - 4) >= 4
    return chance, f"448 in every block, {mean:.1f} times on average" if is_clipped else ""


@functools.cache
def _floors() -> np.ndarray:
    found = {float(zero_block_scale(one, "float32")) for one in DIALECTS.values() if one.scale is not None}
    return np.array(sorted(scale for scale in found if 0 < scale < 2.0**-7), np.float32)


# 3 All weights together


def together(form: Format, summaries: Sequence[Summary], told: set[str], consumers: Sequence[str]) -> Iterator[Finding]:
    """What only the whole checkpoint shows; `told` are weights of which `saturated` was found."""
    yield from _rounded_after(summaries, told)
    yield from _kinds(form, summaries, consumers)
    # The shards of a fused layer share the scale of the largest: it excuses the others.
    reached = {one.scale: 0 for one in summaries}
    for one in summaries:
        reached[one.scale] = max(reached[one.scale], one.largest)
    for one in summaries:
        if one.coarse is not None and one.weight.block == TENSOR and reached[one.scale] < _HALF:
            yield one.coarse


def _rounded_after(summaries: Sequence[Summary], told: set[str]) -> Iterator[Finding]:
    powers = [one for one in summaries if one.kind in (Kind.POWER, Kind.E8M0)]
    # One quantizer made them all: if 448 is in every block of every weight, their chances multiply.
    together = math.prod(one.chance for one in powers) if all(one.chance < 1 for one in powers) else 1.0
    for one in powers:
        if one.weight.name not in told and one.chance < 1 and min(together, one.chance * len(powers)) < _NEVER:
            found = f"448 in every block of {one.used}"
            yield finding("rounded-after", one.weight.name, "448 in about 5% of blocks", found, blocks=one.used)


def _kinds(form: Format, summaries: Sequence[Summary], consumers: Sequence[str]) -> Iterator[Finding]:
    of_blocks = [one for one in summaries if one.kind is not None and one.weight.block not in (TENSOR, ROW, None)]
    # 1. What the configuration says.
    if form.is_power_of_two:
        for one in of_blocks:
            if one.kind is Kind.FLOAT:
                text = f"{one.kind}"
                yield finding("scale-format", one.weight.name, Kind.POWER, text, block=one.is_power_first, blocks=1)
    elif form.method == "fp8" and of_blocks and all(one.kind is Kind.POWER for one in of_blocks):
        # Of 128 mantissas of bfloat16 one gives a power of two.
        steps = max(one.steps for one in of_blocks)
        is_chance = steps < 2 and sum(one.used for one in of_blocks) < 4
        severity = Severity.NOTE if is_chance else None
        found = f"powers of two in all {sum(one.used for one in of_blocks)} blocks"
        yield finding("scale-format-unsaid", of_blocks[0].weight.name, "scale_fmt ue8m0", found, severity=severity)
    # 2. What the consumer takes.
    for key in consumers:
        for one in of_blocks:
            taken = CONSUMERS[key].get(one.kind) if one.kind else None
            if taken is not None:
                severity, effect = taken
                place = {"block": one.is_power_first, "blocks": one.used, "severity": severity}
                yield finding(
                    "scale-kind", one.weight.name, f"what {key} takes", one.kind or "", effect=effect, **place
                )


def fingerprints(summaries: Sequence[Summary]) -> dict[str, int]:
    """The scales of zero blocks, and the dialects that give them -> the number of blocks."""
    total: dict[float, int] = {}
    for one in summaries:
        for scale, count in one.zeros.items():
            total[scale] = total.get(scale, 0) + count
    named: dict[str, int] = {}
    for scale, count in sorted(total.items(), key=lambda one: -one[1])[:4]:
        makers = [
            one.name
            for one in DIALECTS.values()
            if one.scale is not None and any(float(zero_block_scale(one, d)) == scale for d in ("float32", "bfloat16"))
        ]
        shown = ", ".join(makers[:6]) + f" and {len(makers) - 6} more" * (len(makers) > 6)
        named[f"scale {scale:.4g}: {shown or 'no known dialect'}"] = count
    return named
