"""Checks of layer names: layers whose precision a server does not expect, and experts that are missing."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from f8emu.audit.blocks import LAYER, Weight, like_of
from f8emu.audit.checkpoint import FLOATS, Checkpoint, Tensor
from f8emu.audit.findings import Finding, Severity, finding
from f8emu.audit.formats import Format, has

_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embed_in")
_ROUTERS = ("gate", "router")  # of few rows, others are gates of activations
_LINEARS = frozenset(
    "q_proj k_proj v_proj o_proj qkv_proj gate_proj up_proj down_proj gate_up_proj q_a_proj q_b_proj kv_b_proj "
    "kv_a_proj_with_mqa w1 w2 w3 wq wk wv wo dense dense_h_to_4h dense_4h_to_h query_key_value fc1 fc2".split()
)
"""Layers that servers build as the configuration says, if it does not except them."""
_EXPERT = re.compile(r"(.*experts)\.(\d{1,4})\.(.+)")


def layered(
    checkpoint: Checkpoint, form: Format, weights: Sequence[Weight], consumers: Sequence[str]
) -> Iterator[Finding]:
    """Layers in another precision than servers give them, and lost experts."""
    for weight in weights:
        if form.is_complete and (_is_router(weight.codes) or weight.module.rpartition(".")[2] in _EMBEDDINGS):
            yield weight.finding("no-linear", "BF16, F16 or F32", weight.codes.dtype)
    stacks = {match[1] for weight in weights if (match := LAYER.match(weight.name))}
    known = {like_of(weight.module) for weight in weights}  # by the like in other layers
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    for name, stored in sorted(checkpoint.tensors.items()) if form.is_complete else ():
        module, match = name.removesuffix(".weight"), LAYER.match(name)
        is_near = match is not None and (match[1] in stacks or "mtp" in name)
        is_plain = stored.dtype in FLOATS and stored.is_matrix and "norm" not in name and "scale" not in name
        if is_near and is_plain and not form.ignores(module) and form.quantizes(module):
            kinds[like_of(module)].append(stored)
    for module, stored in kinds.items():
        last = module.rpartition(".")[2]
        is_listed = form.method == "modelopt" and "conv" not in last  # what it does not list is quantized
        is_router = _is_router(stored[0]) and (form.method == "compressed-tensors" or bool(consumers))
        if module not in known and (last in _LINEARS or is_listed or is_router):
            # Of DeepSeek's it is known, whatever the configuration says.
            is_known = is_router and (form.method == "fp8" or not has(consumers, "vllm", "sglang"))
            severity = Severity.NOTE if is_known and not is_listed else Severity.WARNING
            more = {"severity": severity, "blocks": len(stored)}
            yield finding("unquantized", stored[0].name, "F8_E4M3, or an exception", stored[0].dtype, **more)
    yield from _experts(checkpoint)
    yield from _halves(weights)


def _is_router(stored: Tensor) -> bool:
    return stored.name.split(".")[-2:-1] in [[one] for one in _ROUTERS] and 4 * stored.shape[-2] <= stored.shape[-1]


def _halves(weights: Sequence[Weight]) -> Iterator[Finding]:
    # The sizes that gate, up and down of a feed-forward layer share.
    sizes: dict[str, dict[int, str]] = defaultdict(dict)
    for weight in weights:
        stem, _, last = weight.module.rpartition(".")
        if len(weight.codes.shape) == 2 and last in ("gate_proj", "up_proj", "down_proj"):
            sizes[stem][weight.codes.shape[last == "down_proj"]] = weight.name
    for members in sizes.values():
        if len(members) > 1:
            texts = (f"{size} in {name.split('.')[-2]}" for size, name in members.items())
            yield finding("weight-cut", members[min(members)], "one size of gate, up and down", ", ".join(texts))


def _experts(checkpoint: Checkpoint) -> Iterator[Finding]:
    # Of each layer: which parts each expert has. All have the same, and their numbers have no gap.
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in checkpoint.tensors:
        if (match := _EXPERT.fullmatch(name)) and "scale" not in match[3]:
            layers[match[1]][int(match[2])].add(match[3])
    ends = {stem: max(experts) for stem, experts in layers.items()}
    usual = Counter((like_of(stem), end) for stem, end in ends.items())
    for stem, experts in layers.items():
        kind, end = like_of(stem), ends[stem]
        # The last ones are missing where most layers have more.
        end = max([end, *(more for (one, more), count in usual.items() if one == kind and count > usual[kind, end])])
        parts = Counter(chain.from_iterable(experts.values()))
        needed = sorted(part for part, count in parts.items() if 2 * count > len(experts))
        lost = [f"{stem}.{i}.{part}" for i in range(end + 1) for part in needed if part not in experts.get(i, ())]
        if lost:
            yield finding(
                "expert-lost", lost[0], f"{end + 1} experts with {', '.join(needed)}", "none", blocks=len(lost)
            )
