"""The checks of names, shapes and dtypes, and of the scales that belong to no float8 weight."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from f8emu.audit.blocks import CODES, Weight, names_of, shapes_of
from f8emu.audit.checkpoint import FLOATS, Checkpoint
from f8emu.audit.faults import Severity
from f8emu.audit.findings import Finding, finding
from f8emu.audit.formats import INPUT_SCALES, SCALES, Format
from f8emu.dialects.rules import ROW, SQUARE, TENSOR
from f8emu.dialects.stacks import FUSED

_SHARDS = {"query_key_value": 3, **{name: len(shards) for name, shards in FUSED.items()}}
"""A fused Linear -> the shards that a loader expects scales of."""
_NUMBERS = re.compile(r"\d+")
_LAYER = re.compile(r".*?\.\d+\.")
_KV = re.compile(r"(^|[._])(k|v|kv|q|prob)_scale$|(^|\.)(k|v)_proj\.output_scale$|kv_cache\.scaling_factor$")


def named(checkpoint: Checkpoint, form: Format, weights: Sequence[Weight]) -> Iterator[Finding]:
    """What names, shapes and dtypes alone show."""
    if weights and checkpoint.has_config and not checkpoint.quantization:
        yield finding("config-missing", weights[0].name, "a quantization_config", "none", blocks=len(weights))
    has_scales = any(weight.scale is not None for weight in weights)
    for weight in weights:
        if form.ignores(weight.module):
            yield finding("ignored", weight.name, "BF16, F16 or F32", weight.codes.dtype)
        if form.method and weight.codes.dtype != "F8_E4M3":
            yield finding("code-dtype", weight.name, "F8_E4M3", weight.codes.dtype)
        yield from _input_scale(checkpoint, form, weight)
        if weight.scale is not None:
            yield from _scale(form, weight)
        elif form.is_certain or has_scales:
            yield finding("scale-missing", weight.name, names_of(weight.name, form.scales)[0], "no scale")
    if form.method:
        yield from _unlike(checkpoint, form, weights)
    yield from _orphans(checkpoint, weights)
    for name in sorted(checkpoint.unlisted):
        yield finding("unlisted", name, "an entry of the index", "none")


def _unlike(checkpoint: Checkpoint, form: Format, weights: Sequence[Weight]) -> Iterator[Finding]:
    # Tensors that are not what their like in other layers are.
    like = {_NUMBERS.sub("#", weight.name): weight.codes.shape for weight in weights}
    for name, stored in checkpoint.tensors.items():
        module, _, last = name.rpartition(".")
        shape = like.get(_NUMBERS.sub("#", name))
        if stored.dtype in FLOATS and shape and not form.ignores(module):
            yield finding("unquantized", name, "F8_E4M3, as in other layers", stored.dtype)
        elif stored.dtype in ("U8", "I8") and shape == stored.shape:
            yield finding("code-dtype", name, "F8_E4M3, as in other layers", stored.dtype)
        elif stored.dtype in CODES and len(stored.shape) < 2 and "scale" not in last:
            yield finding("code-dtype", name, "a vector in BF16, F16 or F32", stored.dtype)
    usual = Counter((w.block, w.scale.dtype) for w in weights if w.scale is not None and w.scale.dtype in FLOATS)
    for weight in weights:
        if weight.scale is not None and (count := usual[weight.block, weight.scale.dtype]):
            most, dtype = max((n, dtype) for (block, dtype), n in usual.items() if block == weight.block)
            if count < most:
                more = {"severity": Severity.WARNING, "effect": "the scale was rounded after the codes were made"}
                yield finding("scale-dtype", weight.name, f"{dtype}, as in other layers", weight.scale.dtype, **more)


def left_out(checkpoint: Checkpoint, origin: Checkpoint, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Weights of the source that are not there, although their like in other layers and more of their layer are."""
    layers = {found[0] for name in checkpoint.tensors if (found := _LAYER.match(name))}
    there = {weight.source_name: weight.codes.shape for weight in weights}
    like = {(_NUMBERS.sub("#", name), shape) for name, shape in there.items()}
    for name, stored in origin.tensors.items():
        is_like = (_NUMBERS.sub("#", name), stored.shape) in like
        is_lost = is_like and name not in there and name not in checkpoint.tensors
        # A layer that is missing as a whole was left out on purpose, as the last ones of DeepSeek-V3 are.
        if checkpoint.has_config and is_lost and (found := _LAYER.match(name)) and found[0] in layers:
            yield finding("left-out", name, "the weight, as in other layers", "none")


def _scale(form: Format, weight: Weight) -> Iterator[Finding]:
    assert weight.scale is not None
    scale, expected = weight.scale, names_of(weight.name, form.scales)
    # A file without a configuration may call its scales what it likes; but few loaders know ComfyUI's name.
    if scale.name not in expected or (not form.is_certain and scale.name.endswith(".scale_weight")):
        name = expected[0] if form.is_certain else names_of(weight.name)[1]
        more = {} if form.is_certain else {"severity": Severity.WARNING}
        yield finding("scale-name", weight.name, name, scale.name, remedy=f"rename the tensor to {name}", **more)
    if scale.dtype not in form.dtypes:
        check = "scale-packed" if scale.dtype in ("I32", "U32", "I64") else "scale-dtype"
        yield finding(check, weight.name, " or ".join(form.dtypes), f"{scale.dtype} {list(scale.shape)}")
    shards = _SHARDS.get(weight.module.rpartition(".")[2], 1)
    if weight.block is TENSOR and shards > 1 and scale.size == 1:
        yield finding("scale-per-shard", weight.name, f"{shards} scales, one of each shard", "1")
    if weight.block is None and shards > 1 and scale.shape == (shards,):
        if scale.dtype in FLOATS:
            yield from _shards(weight, scale.read().astype(np.float32))
    elif weight.block is None:
        blocks = form.blocks or (TENSOR, ROW, SQUARE)
        shapes = [shapes_of(weight.codes.shape, one, has_ones=form.has_ones)[0] for one in blocks]
        is_turned = any(len(shape) > 1 and scale.shape == (*shape[:-2], *shape[:-3:-1]) for shape in shapes)
        found = f"{list(scale.shape)}" + ", transposed" * is_turned
        yield finding("scale-shape", weight.name, " or ".join(str(list(shape)) for shape in shapes), found)


def _shards(weight: Weight, scale: NDArray[np.float32]) -> Iterator[Finding]:
    # Scales of shards, whose rows are not known: what no shard has, as slots that were never written.
    is_positive = (scale >= np.finfo(np.float32).tiny) & np.isfinite(scale)
    for check, expected, wrong in (
        ("scale-invalid", "> 0, normal and finite, in each shard", ~is_positive),
        ("amplitude", "a scale of at most 1 in each shard", is_positive & (scale > 1)),
    ):
        if wrong.any():
            place = {"block": (int(wrong.argmax()),), "blocks": int(wrong.sum())}
            yield finding(check, weight.name, expected, f"{scale[wrong][0]:.4g}", **place)


def _input_scale(checkpoint: Checkpoint, form: Format, weight: Weight) -> Iterator[Finding]:
    if form.input_scale and weight.name.endswith(".weight"):
        (expected,) = names_of(weight.name, (form.input_scale,))
        found = [name for name in names_of(weight.name, INPUT_SCALES) if name in checkpoint.tensors]
        if expected not in found:
            yield finding("input-scale", weight.name, expected, found[0] if found else "no scale")


def _orphans(checkpoint: Checkpoint, weights: Sequence[Weight]) -> Iterator[Finding]:
    used = {weight.scale.name for weight in weights if weight.scale is not None}
    codes = {weight.name for weight in weights}
    for name in checkpoint.tensors.keys() - used:
        for template in SCALES:
            suffix = template[3:]  # behind {w} or {m}
            if not name.endswith(suffix) or template == "{m}.scale":
                continue
            of = name.removesuffix(suffix) + ".weight" * template.startswith("{m}")
            weight = checkpoint.tensors.get(of)
            if of in codes:
                yield finding("scale-orphan", name, "one scale of a weight", "another beside it")
            elif weight is not None and weight.dtype in FLOATS and weight.is_matrix:
                yield finding("scale-orphan", name, f"{of} in float8", f"{weight.dtype} {list(weight.shape)}")
            elif weight is None and of.endswith(".weight") and f"{of}_packed" not in checkpoint.tensors:
                yield finding("scale-orphan", name, f"a weight {of}", "none")
            break


def lone_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of activations and of the key-value cache, and block scales stored as E4M3.

    Raises:
        CheckpointError: a file has changed.
    """
    cache = checkpoint.quantization.get("kv_cache_scheme")
    is_by_head = isinstance(cache, dict) and cache.get("strategy") == "attn_head"
    for name, stored in sorted(checkpoint.tensors.items()):
        is_cache = _KV.search(name) is not None
        if stored.dtype == "F8_E4M3" and "scale" in name.rpartition(".")[2]:
            nans = sum(int(np.count_nonzero(codes.view(np.uint8) & 0x7F == 0x7F)) for codes in stored.parts(1 << 22))
            if nans:
                yield finding("e4m3-scale", name, "at most 0x7E", f"0x7F, {nans} times")
        elif (is_cache or name.endswith(tuple(one[3:] for one in INPUT_SCALES))) and stored.dtype in FLOATS:
            check = "kv-scale" if is_cache else "input-scale"
            values = stored.read().astype(np.float64).reshape(-1) if stored.size < 1 << 20 else np.ones(2)
            wrong = values[~((values > 0) & np.isfinite(values))]
            is_vector = (stored.size != 1 and not is_by_head) if is_cache else stored.size > 8 and "expert" not in name
            if wrong.size or is_vector:
                found = f"{wrong[0]:g}" if wrong.size else f"{list(stored.shape)}"
                yield finding(check, name, "one number, > 0 and finite" if is_vector else "> 0 and finite", found)
