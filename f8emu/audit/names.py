"""The checks of names, shapes and dtypes, and of the scales that belong to no float8 weight."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from f8emu.audit.blocks import CODES, Weight, like_of, names_of, shapes_of
from f8emu.audit.checkpoint import FLOATS, MODELOPT, Checkpoint, Tensor
from f8emu.audit.findings import Finding, Severity, finding
from f8emu.audit.formats import INPUT_SCALES, SCALES, Format, format_of, has
from f8emu.dialects.rules import ROW, SQUARE, TENSOR
from f8emu.dialects.stacks import FUSED

_SHARDS = {"query_key_value": 3, **{name: len(shards) for name, shards in FUSED.items()}}
"""A fused Linear -> the shards that a loader expects scales of."""
_INPUTS = tuple(template[3:] for template in INPUT_SCALES)
_LARGEST_INPUT = 10.0
"""A scale of activations that no model has in every layer: they would reach 4480."""
_KV = re.compile(r"(^|[._])(k|v|kv|q|prob)_scale$|(^|\.)(k|v)_proj\.output_scale$|kv_cache\.scaling_factor$")


def named(
    checkpoint: Checkpoint, form: Format, weights: Sequence[Weight], consumers: Sequence[str]
) -> Iterator[Finding]:
    """Findings from names, shapes and dtypes, and from scales without a float8 weight."""
    # 1. The configurations.
    is_told = all(weight.scale is not None and weight.scale.name.endswith(".qscale_weight") for weight in weights)
    if weights and checkpoint.has_config and not checkpoint.quantization and not is_told:  # Mistral: in params.json
        yield weights[0].finding("config-missing", "a quantization_config", "none", blocks=len(weights))
    second = format_of(replace(checkpoint, quantization=checkpoint.second))
    if checkpoint.second and (form.name, {*form.ignored}) != (second.name, {*second.ignored}):
        texts = (f"{config.name}, without {', '.join(config.ignored) or 'exceptions'}" for config in (form, second))
        yield finding("config-twice", MODELOPT, *texts)
    status = checkpoint.quantization.get("quantization_status", "compressed")
    if form.method == "compressed-tensors" and status != "compressed" and weights and has(consumers, "transformers"):
        yield weights[0].finding("status-frozen", "compressed", f"{status!s:.40}", blocks=len(weights))
    # 2. Weights and their scales.
    has_scales = any(weight.scale is not None for weight in weights)
    for weight in weights:
        if form.ignores(weight.module):
            yield weight.finding("ignored", "BF16, F16 or F32", weight.codes.dtype)
        if form.method and weight.codes.dtype != "F8_E4M3":
            yield weight.finding("code-dtype", "F8_E4M3", weight.codes.dtype)
        if form.input_scales and weight.name.endswith(".weight"):
            there = [name for name in names_of(weight.name, INPUT_SCALES) if name in checkpoint.tensors]
            expected = names_of(weight.name, form.input_scales)
            if not {*expected} & {*there}:
                yield weight.finding("input-scale", expected[0], there[0] if there else "no scale")
        if weight.scale is not None:
            yield from _scale(form, weight, weight.scale, consumers)
        elif form.is_certain or has_scales:
            yield weight.finding("scale-missing", names_of(weight.name, form.scales)[0], "no scale")
    usual = Counter((w.block, w.scale.dtype) for w in weights if w.scale is not None and w.scale.dtype in FLOATS)
    for weight in weights:
        if form.method and weight.scale is not None and (count := usual[weight.block, weight.scale.dtype]):
            most, dtype = max((n, dtype) for (block, dtype), n in usual.items() if block == weight.block)
            if count < most:
                more = {"severity": Severity.WARNING, "effect": "the scale was rounded after the codes were made"}
                yield weight.finding("scale-dtype", f"{dtype}, as in other layers", weight.scale.dtype, **more)
    # 3. The other tensors.
    used = {weight.scale.name for weight in weights if weight.scale is not None}
    like = {like_of(weight.name): weight.codes.shape for weight in weights if form.method}
    for name, stored in sorted(checkpoint.tensors.items()):
        if name in checkpoint.unlisted:
            yield finding("unlisted", name, "an entry of the index", "none")
        if name not in used:
            yield from _orphan(checkpoint, name)
        yield from _unlike(form, stored, like.get(like_of(name)))
        yield from _lone_scale(checkpoint, stored)
    acts = [tensor for name, tensor in checkpoint.tensors.items() if name.endswith(_INPUTS) and tensor.dtype in FLOATS]
    values = [float(one.read(0, 1)[0]) for one in acts if one.size]
    if len(values) > 3 and (min(values) > _LARGEST_INPUT or {*values} == {1.0}):
        more = {"severity": Severity.WARNING, "effect": "activations are clipped, or lose their small numbers"}
        yield finding("input-scale", acts[0].name, "amax / 448", f"{min(values):.4g} or more in all layers", **more)


def infinite(stored: Tensor) -> list[Finding]:
    """Whether a tensor in high precision has a number that is none."""
    first = next((part[~np.isfinite(part)][0] for part in stored.parts() if not np.isfinite(part).all()), None)
    return [] if first is None else [finding("not-finite", stored.name, "finite numbers", f"{first:g}")]


def changed(checkpoint: Checkpoint, name: str) -> list[Finding]:
    """Whether a tensor is not the one that the manifest has."""
    known, there = checkpoint.manifest.get(name), checkpoint.tensors.get(name)
    hashes = known.get("sha256") if isinstance(known, dict) else None, there and there.sha256
    texts = (f"SHA-256 {one!s:.16}..." if one else "no tensor" for one in hashes)
    return [finding("manifest", name, *texts)] if hashes[0] != hashes[1] else []


def _scale(form: Format, weight: Weight, scale: Tensor, consumers: Sequence[str]) -> Iterator[Finding]:
    expected = names_of(weight.name, form.scales)
    # A file without a configuration may call its scales what it likes; but few loaders know ComfyUI's name.
    if scale.name not in expected or (not form.is_certain and scale.name.endswith(".scale_weight")):
        name = expected[0] if form.is_certain else names_of(weight.name)[1]
        severity = Severity.ERROR if form.is_certain else Severity.WARNING
        yield weight.finding("scale-name", name, scale.name, severity=severity, remedy=f"rename the tensor to {name}")
    if scale.dtype not in form.dtypes:
        check = "scale-packed" if scale.dtype in ("I32", "U32", "I64") else "scale-dtype"
        yield weight.finding(check, " or ".join(form.dtypes), f"{scale.dtype} {list(scale.shape)}")
    shards = _SHARDS.get(weight.module.rpartition(".")[2], 1)
    if weight.block == TENSOR and shards > 1 and scale.size == 1:
        severity = Severity.WARNING if has(consumers, "sglang") else Severity.NOTE
        yield weight.finding("scale-per-shard", f"{shards} scales, one of each shard", "1", severity=severity)
    if form.method == "compressed-tensors" and weight.block == ROW and len(scale.shape) == 1:
        yield weight.finding("scale-shape", f"[{scale.size}, 1]", f"[{scale.size}]")
    if weight.block is not None:
        return
    if shards > 1 and scale.shape == (shards,):
        # Of shards, whose rows are not known: what no shard has, as slots that were never written.
        values = scale.read().astype(np.float32) if scale.dtype in FLOATS else np.ones(1, np.float32)
        is_positive = (values >= np.finfo(np.float32).tiny) & np.isfinite(values)
        for check, right, wrong in (
            ("scale-invalid", "> 0, normal and finite, in each shard", ~is_positive),
            ("amplitude", "a scale of at most 1 in each shard", is_positive & (values > 1)),
        ):
            if wrong.any():
                place = {"block": (int(wrong.argmax()),), "blocks": int(wrong.sum())}
                yield weight.finding(check, right, f"{values[wrong][0]:.4g}", **place)
        return
    blocks = form.blocks or (TENSOR, ROW, SQUARE)
    shapes = [s for block in blocks for s in shapes_of(weight.codes.shape, block, has_ones=form.has_ones)[:1]]
    is_turned = any(len(shape) > 1 and scale.shape == (*shape[:-2], *shape[:-3:-1]) for shape in shapes)
    seen = f"{list(scale.shape)}, transposed" if is_turned else f"{list(scale.shape)}"
    yield weight.finding("scale-shape", " or ".join(str(list(shape)) for shape in shapes), seen)


def _orphan(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    # A name of a scale that is not used, beside what may be its weight.
    template = next((template for template in SCALES if name.endswith(template[3:]) and template != "{m}.scale"), None)
    if template is None:
        return
    of = name.removesuffix(template[3:]) + ".weight" * template.startswith("{m}")
    weight = checkpoint.tensors.get(of)
    if weight is None and of.endswith(".weight") and f"{of}_packed" not in checkpoint.tensors:
        yield finding("scale-orphan", name, f"a weight {of}", "none")
    elif weight is not None and weight.is_matrix and weight.dtype in CODES:
        yield finding("scale-orphan", name, "one scale of a weight", "another beside it")
    elif weight is not None and weight.is_matrix and weight.dtype in FLOATS:
        yield finding("scale-orphan", name, f"{of} in float8", f"{weight.dtype} {list(weight.shape)}")


def _unlike(form: Format, stored: Tensor, shape: tuple[int, ...] | None) -> Iterator[Finding]:
    # A tensor that is not what its like in other layers, weights of this shape, are.
    module, _, last = stored.name.rpartition(".")
    if stored.dtype in FLOATS and shape and not form.ignores(module):
        yield finding("unquantized", stored.name, "F8_E4M3, as in other layers", stored.dtype)
    elif stored.dtype in ("U8", "I8") and shape == stored.shape:
        yield finding("code-dtype", stored.name, "F8_E4M3, as in other layers", stored.dtype)
    elif form.method and stored.dtype in CODES and len(stored.shape) < 2 and "scale" not in last:
        yield finding("code-dtype", stored.name, "a vector in BF16, F16 or F32", stored.dtype)


def _lone_scale(checkpoint: Checkpoint, stored: Tensor) -> Iterator[Finding]:
    # Scales of activations and of the key-value cache, and block scales stored as E4M3.
    name, cache = stored.name, checkpoint.quantization.get("kv_cache_scheme")
    is_cache = _KV.search(name) is not None
    if stored.dtype == "F8_E4M3" and "scale" in name.rpartition(".")[2]:
        nans = sum(int(np.count_nonzero(codes.view(np.uint8) & 0x7F == 0x7F)) for codes in stored.parts())
        if nans:
            yield finding("e4m3-scale", name, "at most 0x7E", f"0x7F, {nans} times")
    elif (is_cache or name.endswith(_INPUTS)) and stored.dtype in FLOATS:
        is_by_head = isinstance(cache, dict) and cache.get("strategy") == "attn_head"
        values = stored.read().astype(np.float64) if stored.size < 1 << 20 else np.ones(2)
        wrong = values[~((values > 0) & np.isfinite(values))]
        is_vector = (stored.size != 1 and not is_by_head) if is_cache else stored.size > 8 and "expert" not in name
        if wrong.size or is_vector:
            found, expected = f"{wrong[0]:g}" if wrong.size else f"{list(stored.shape)}", "> 0 and finite"
            check = "kv-scale" if is_cache else "input-scale"
            yield finding(check, name, f"one number, {expected}" if is_vector else expected, found)
