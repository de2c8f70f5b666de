"""How a server changes a sound checkpoint: ranks cut blocks, layers are fused, scales change their dtype."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from f8emu.audit.blocks import Weight
from f8emu.audit.checkpoint import BAND, DTYPES, Checkpoint
from f8emu.audit.counts import VALUES
from f8emu.audit.findings import Finding, Severity
from f8emu.audit.formats import has
from f8emu.audit.pairs import group_of
from f8emu.dialects.rules import TENSOR

_ROWS = frozenset("q_proj k_proj v_proj gate_proj up_proj q_b_proj kv_b_proj w1 w3 wq wk wv".split())
"""Layers of which a rank has some rows; of a fused one, some of each part."""
_COLUMNS = frozenset("o_proj down_proj w2 w2_weight wo dense_4h_to_h".split())
"""Layers of which a rank has a part of K."""
_SIZES = (1, 2, 4, 8, 16)


def served(checkpoint: Checkpoint, weights: Sequence[Weight], consumers: Sequence[str]) -> Iterator[Finding]:
    """Findings that need the scales of all weights."""
    if has(consumers, "vllm", "sglang"):
        yield from _fused(weights)
    yield from _dtypes(checkpoint, weights, consumers)


def cuts(
    checkpoint: Checkpoint, weights: Sequence[Weight], consumers: Sequence[str], tp: int | None
) -> Iterator[Finding]:
    """The tensor-parallel sizes, `tp` alone if it is given, at which vLLM and SGLang have a part of a block on a rank.

    On one rank too, where layers are fused, but for the last of them.
    """
    if not tp and not has(consumers, "vllm", "sglang"):
        return
    heads = checkpoint.config.get("num_key_value_heads")
    heads = heads if isinstance(heads, int) and heads > 0 else max(_SIZES)
    wrong: dict[tuple[int, ...], list[tuple[Weight, str]]] = defaultdict(list)
    for weight in weights:
        last, (height, width) = weight.module.rpartition(".")[2], weight.block or TENSOR
        if height is None or width is None:
            continue
        last = last if weight.name.endswith(".weight") else weight.name.rpartition(".")[2]
        rows, k = weight.codes.shape[-2:]
        group, is_both = group_of(last), last in ("gate_up_proj", "w13_weight")
        is_rows = is_both or last in _ROWS
        size, block = (rows // (1 + is_both), height) if is_rows else (k, width)
        if not is_rows and last not in _COLUMNS:
            continue
        sizes = []
        for count in (tp,) if tp else _SIZES:
            # Each rank has one head of keys and values at least.
            taken = min(count, heads) if last in ("k_proj", "v_proj") else count
            is_alone = taken == 1 and not (is_both or (group and last != group[-1]))
            if not is_alone and (size % taken or size // taken % block):
                sizes.append(count)
        if sizes:
            part = f"{size / sizes[0]:g} of {size} {'rows' if is_rows else 'columns'} in blocks of {block}"
            wrong[tuple(sizes)].append((weight, part))
    for sizes, cut in wrong.items():
        weight, part = cut[0]
        severity = Severity.ERROR if tp else Severity.WARNING if 1 in sizes else Severity.NOTE
        text = f"{part} on a rank, with tensor-parallel sizes of {', '.join(map(str, sizes))}"
        text += f"; the first of {len(cut)} such weights" if len(cut) > 1 else ""
        yield weight.finding("cut-block", "whole blocks on each rank", text, severity=severity, blocks=len(cut))


def _fused(weights: Sequence[Weight]) -> Iterator[Finding]:
    # Layers with a scale each that a server gives the largest: what a second rounding adds.
    groups: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
    for weight in weights:
        stem, _, last = weight.module.rpartition(".")
        if weight.block == TENSOR and len(weight.scales) == 1 and (group := group_of(last)):
            groups[stem, *group].append(weight)
    ratios = [
        (max(member.scales) / max(scale for other in group for scale in other.scales), member)
        for group in groups.values()
        for member in group
    ]
    # A power of two moves the exponents alone.
    ratios = [pair for pair in ratios if math.frexp(pair[0])[0] != 0.5]
    if ratios:
        ratio, smallest = min(ratios, key=lambda pair: pair[0])
        values = VALUES[smallest.codes.read(0, min(smallest.codes.size, BAND)).view(np.uint8) & 0x7F]
        again = (values * np.float32(ratio)).astype(DTYPES["F8_E4M3"]).astype(np.float32) / np.float32(ratio)
        added = 100 * float(np.linalg.norm(again - values) / np.linalg.norm(values))
        seen = f"{1 / ratio:.3g} times smaller than the largest: {added:.1f}% are added"
        yield smallest.finding("requantized", "one scale for layers that are fused", seen, blocks=len(groups))


def _dtypes(checkpoint: Checkpoint, weights: Sequence[Weight], consumers: Sequence[str]) -> Iterator[Finding]:
    # Scales below the normal numbers of float16, as they are stored, or as transformers keeps them.
    model = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    is_kept = model == "float16" and has(consumers, "transformers")
    of = [weight for weight in weights if weight.scales and weight.scale and (is_kept or weight.scale.dtype == "F16")]
    small = [(min(weight.scales), weight) for weight in of if min(weight.scales) < 2.0**-14]
    if small:
        least, smallest = min(small, key=lambda pair: pair[0])
        error = f"{least:.3g}, off by up to {100 * 2.0**-25 / least:.1f}%"
        yield smallest.finding("scale-half", f"at least {2.0**-14:.2g} in float16", error, blocks=len(small))
