"""Which weights of the source a float8 weight was quantized from: itself, those that it fuses, or a part of one."""

import re
from collections.abc import Mapping
from dataclasses import replace

from f8emu.audit.blocks import Weight
from f8emu.audit.checkpoint import DTYPES, FLOATS, Joined, Tensor
from f8emu.dialects.rules import TENSOR
from f8emu.dialects.stacks import FUSED

_GATE_UP, _DOWN = (("gate_proj", "up_proj"), ("w1", "w3")), (("down_proj",), ("w2",))
_STACKED = {"gate_up_proj": _GATE_UP, "w13_weight": _GATE_UP, "down_proj": _DOWN, "w2_weight": _DOWN}
"""All experts as one tensor [E, rows, K] -> the weights of one expert, each a tensor, by transformers and Mistral."""
_EXPERT = re.compile(r"(.*experts)\.(\d{1,4})\.(\w+)\.weight")
_GROUPS = (*FUSED.values(), ("wq", "wk", "wv"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Layers that servers fuse: exporters that know it give them one amax."""


def paired(weight: Weight, sources: Mapping[str, Tensor]) -> list[Weight]:
    """The weight with its origin, or why it has none; shards of it, where several sources have scales of their own."""
    origin = sources.get(weight.source)
    if origin is None:
        parts = _parts(weight, sources)
        if shards := _shards(weight, parts):
            return shards
        rows, k = sum(part.size for part in parts) // weight.codes.shape[-1], weight.codes.shape[-1]
        is_whole = rows * k == weight.codes.size and all(part.shape[-1] == k for part in parts)
        if is_whole and {part.dtype for part in parts} in [{one} for one in FLOATS]:
            weight.origin = Joined(parts=tuple(parts), shape=weight.codes.shape)
            return [weight]
        origin = _slice(weight, sources)
    weight.origin = origin
    if origin is None and weight.codes.file.name.startswith("consolidated"):
        weight.add("second-layout", weight.source, "none in the source")
    elif origin is None:
        weight.uncompared = f"the source has no {weight.source}"
    elif origin.dtype not in FLOATS:
        weight.uncompared = f"the source has {origin.dtype} here"
    return [weight]


def group_of(layer: str) -> tuple[str, ...]:
    """The layers that servers fuse with one of this name; empty: none."""
    return next((group for group in _GROUPS if layer in group), ())


def siblings_of(weight: Weight, sources: Mapping[str, Tensor]) -> list[Tensor]:
    """The sources of the layers that a server fuses with this one, its own among them; empty: none."""
    stem, _, last = weight.module.rpartition(".")
    return [sources[name] for member in group_of(last) if (name := f"{stem}.{member}.weight".lstrip(".")) in sources]


def _parts(weight: Weight, sources: Mapping[str, Tensor]) -> list[Tensor]:
    # Those whose rows, one below the other, are those of the weight; empty, if one is missing.
    stem, _, last = weight.name.removesuffix(".weight").rpartition(".")
    kinds = [[f"{stem}.{one}.weight".lstrip(".") for one in FUSED.get(last, ())]]
    if len(weight.codes.shape) == 3:
        experts = range(weight.codes.shape[0])
        for parts in _STACKED.get(last, ()):
            kinds.append([f"{stem}.{expert}.{part}.weight" for expert in experts for part in parts])
    return next(
        ([sources[name] for name in names] for names in kinds if names and all(n in sources for n in names)), []
    )


def _slice(weight: Weight, sources: Mapping[str, Tensor]) -> Tensor | None:
    # One expert of a source that has all of them in one tensor.
    if (match := _EXPERT.fullmatch(weight.source)) is None:
        return None
    stem, expert, last = match[1], int(match[2]), match[3]
    rows, k = weight.codes.shape[-2:]
    for name, kinds in _STACKED.items():
        stacked, count = sources.get(f"{stem}.{name}"), len(kinds[0])
        part = next((parts.index(last) for parts in kinds if last in parts), None)
        is_there = stacked is not None and expert < stacked.shape[0] and stacked.shape[1:] == (count * rows, k)
        if stacked and part is not None and is_there:
            begin = (expert * count + part) * rows * k * DTYPES[stacked.dtype].itemsize
            return replace(stacked, begin=stacked.begin + begin, shape=(rows, k))
    return None


def _shards(weight: Weight, parts: list[Tensor]) -> list[Weight]:
    # Each with its rows of codes and scales; empty, if a block has rows of two of them.
    k, scale, height = weight.codes.shape[-1], weight.scale, (weight.block or TENSOR)[0]
    rows = [part.shape[0] for part in parts if len(part.shape) == 2 and part.shape[1] == k]
    is_fused = len(rows) == len(parts) > 0 and weight.codes.shape == (sum(rows), k)
    if not is_fused or scale is None or scale.dtype not in DTYPES:
        return []
    # Rows of the scales: those of the blocks of a shard, or one for each shard.
    if height is not None and not any(row % height for row in rows):
        counts = [row // height for row in rows]
    elif scale.shape == (len(rows),):
        counts = [1] * len(rows)
    else:
        return []
    size, row, first = scale.size // sum(counts) * DTYPES[scale.dtype].itemsize, 0, 0
    shards: list[Weight] = []
    for part, taken, count in zip(parts, rows, counts, strict=True):
        label = f"{weight.name} ({part.name.split('.')[-2]})"
        codes = replace(weight.codes, name=label, begin=weight.codes.begin + row * k, shape=(taken, k))
        scale_of_shard = replace(scale, begin=scale.begin + first * size, shape=(count, *scale.shape[1:]))
        block = weight.block or TENSOR
        shards.append(Weight(codes=codes, scale=scale_of_shard, block=block, source=part.name, origin=part))
        row, first = row + taken, first + count
    return shards
