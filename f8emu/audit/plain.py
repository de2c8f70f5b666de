"""Weights in high precision beside those of the source, and weights of the source that the checkpoint lacks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from f8emu.audit.blocks import LAYER, Weight, like_of
from f8emu.audit.checkpoint import FLOATS, Checkpoint, Joined, Tensor
from f8emu.audit.findings import Finding, Severity, finding
from f8emu.conformance.compare import counted

_BUFFERS = ("inv_freq", "masked_bias")
"""What old checkpoints store of modules, and nobody loads."""


def comparable(checkpoint: Checkpoint, origin: Checkpoint) -> list[tuple[Tensor, Tensor]]:
    """The weights in high precision of a checkpoint, each with that of the same name in the source."""
    return [
        (stored, origin.tensors[name])
        for name, stored in sorted(checkpoint.tensors.items())
        if stored.dtype in FLOATS and name in origin.tensors and origin.tensors[name].dtype in FLOATS
    ]


def altered(pair: tuple[Tensor, Tensor]) -> list[Finding]:
    """Whether a weight in high precision is another than the source's, converted to its dtype; a band at a time."""
    stored, source = pair
    of = partial(finding, "weight-altered", stored.name)
    if stored.shape != source.shape:
        return [of(f"{list(source.shape)}, as in the source", f"{list(stored.shape)}")]
    begin, count, first = 0, 0, ""
    for x, y in zip(source.parts(), stored.parts(), strict=True):
        with np.errstate(all="ignore"):
            x = x.astype(y.dtype)
        if (wrong := (x != y) & ~(np.isnan(x) & np.isnan(y))).any():
            index = int(wrong.argmax())
            first = first or f"{float(x[index]):.9g} at {begin + index}", f"{float(y[index]):.9g}"
            count += int(np.count_nonzero(wrong))
        begin += y.size
    return [of(f"{first[0]}, of the source", f"{first[1]}; {count:,} of {stored.size:,} differ")] if first else []


def left_out(checkpoint: Checkpoint, origin: Checkpoint, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Weights of the source that the checkpoint lacks, unless it has another layout there, or a part less.

    A layer that is missing as a whole was left out on purpose, as the last ones of DeepSeek-V3 are, and so was a part
    of the model of which nothing is there. A weight that others are tied to is stored once.
    """
    of_weights = {weight.source: weight.codes.shape for weight in weights}
    there = {*of_weights, *checkpoint.tensors, *(name for weight in weights for name in _origins(weight))}
    if not checkpoint.has_config or there.isdisjoint(origin.tensors):
        return
    # 1. What the checkpoint has and the source has not, by modules: the layout is another one around them.
    names = [name for name in there if "scale" not in name]
    other_layout = {_around(name) for name in names if name not in origin.tensors}
    layers = {layer[0] for name in names if (layer := LAYER.match(name))}
    parents = {""}.union(*map(_ancestors, names))
    like = {(like_of(name), shape) for name, shape in of_weights.items()}
    for name, stored in sorted(origin.tensors.items()):
        layer, module = LAYER.match(name), name.removesuffix(".weight").removesuffix(".bias")
        is_buffer = (
            name.endswith(_BUFFERS) or stored.dtype not in FLOATS or (name.endswith(".bias") and stored.is_matrix)
        )
        if name in there or is_buffer or (layer is not None and layer[0] not in layers):
            continue
        # 2. One whose like is float8 in other layers; any other where its neighbours are.
        is_like = layer is not None and (like_of(name), stored.shape) in like
        is_beside = (layer is not None or _around(name) in parents) and other_layout.isdisjoint((_around(name), module))
        if (is_like or is_beside) and not _is_tied(stored, origin, there):
            yield finding(
                "left-out", name, "the weight, as in " + ("other layers" if is_like else "the source"), "none"
            )


def gaps(checkpoint: Checkpoint, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Float8 weights that a layer lacks, and that other layers with the same modules beside it have."""
    codes = {weight.module: weight.codes for weight in weights}
    beside: dict[str, set[str]] = defaultdict(set)
    for name in checkpoint.tensors:
        parent, _, last = name.rpartition(".")[0].rpartition(".")
        beside[parent].add(last)
    like: dict[str, list[str]] = defaultdict(list)
    for parent in beside:
        if (layer := LAYER.match(parent)) and not any(part.isdecimal() for part in parent[layer.end() :].split(".")):
            like[like_of(parent)].append(parent)
    for parents in like.values():
        whole = {tuple(sorted(beside[parent])) for parent in parents}
        for last in sorted(set[str]().union(*(beside[parent] for parent in parents))):
            having = [f"{parent}.{last}" for parent in parents if f"{parent}.{last}" in codes]
            lacking = [name for name in parents if last not in beside[name] and _with(beside[name], last) in whole]
            if len(having) < len(lacking) or not lacking:
                continue
            # Few models have layers of two kinds that differ in one module, and both kinds are many then.
            is_rare = len(having) > 8 * len(lacking) or 1 == len(lacking) < len(having)
            severity = Severity.WARNING if is_rare else Severity.NOTE
            texts = f"{last}, which {counted(len(having), 'other layer')} have", f"no {last}"
            yield finding("layer-gap", f"{lacking[0]}.{last}", *texts, severity=severity, blocks=len(lacking))


def _with(modules: Iterable[str], last: str) -> tuple[str, ...]:
    return tuple(sorted((*modules, last)))


def _origins(weight: Weight) -> list[str]:
    origin = weight.origin
    return [part.name for part in origin.parts] if isinstance(origin, Joined) else [origin.name] if origin else []


def _around(name: str) -> str:
    # The module around that of a weight; all experts are in one.
    parent = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]
    return parent.rstrip("0123456789").removesuffix(".") if ".experts." in name else parent


def _ancestors(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def _is_tied(stored: Tensor, origin: Checkpoint, there: set[str]) -> bool:
    # Whether another matrix of the source, which is there, is the same.
    alike = [
        other
        for name, other in origin.tensors.items()
        if name in there and stored.is_matrix and (other.shape, other.dtype) == (stored.shape, stored.dtype)
    ]
    return any(
        all(np.array_equal(x, y, equal_nan=False) for x, y in zip(stored.parts(), other.parts(), strict=True))
        for other in alike
    )
