"""Which modules of a checkpoint an engine fuses into one, and which part of it each rank holds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from f8emu.audit.checkpoint import Checkpoint
from f8emu.dialects.stacks import FUSED
from f8emu.rollout.checksums import VLLM
from f8emu.spec.errors import UnsupportedError

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe")
"""Those whose loading code was read in both engines, without `ForCausalLM`."""
_VOCABULARY_PADDING = 64
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,4})\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(\w+)")
_W13, _W2 = ("gate_proj", "w1", "up_proj", "w3"), ("down_proj", "w2")
_COMPUTED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""What engines compute, or do not check."""


class Cut(Enum):
    """What a rank holds of a module."""

    ROWS = "some rows of each part"
    COLUMNS = "some columns"
    VOCABULARY = "some rows, padded"
    WHOLE = "all of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of an engine, and the modules of the checkpoint that it holds."""

    name: str
    """As the engine names it; of experts without `_weight`."""
    cut: Cut
    parts: tuple[tuple[str, ...], ...]
    """Modules of the checkpoint, one below the other; of experts, those of each expert."""
    is_expert: bool = False
    is_router: bool = False

    def tensor(self, suffix: str) -> str:
        """The name of a parameter of it."""
        return f"{self.name}{'_' if self.is_expert else '.'}{suffix}"

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint has every part of every expert."""
        last = self.name.rpartition(".")[2]
        return {len(parts) for parts in self.parts} == {2 if last == "w13" else len(FUSED.get(last, (last,)))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modules of a model in an engine, and how ranks share them."""

    tp: int
    kv_heads: int
    modules: tuple[Module, ...]
    unknown: tuple[tuple[str, str], ...]
    """(name, reason) of tensors that no rule knows."""
    quantizes_router: bool
    """Whether a router is quantized as the model is loaded: in vLLM that of Qwen3-MoE is, in SGLang none."""

    def rows(self, part: str, size: int, rank: int) -> slice:
        """The rows of a part of a fused module on a rank; of keys and values, ranks have one head at least."""
        is_kv = part.rpartition(".")[2] in ("k_proj", "v_proj")
        count = min(self.tp, self.kv_heads) if is_kv else self.tp
        return _share(size, count, rank // (self.tp // count))

    def columns(self, size: int, rank: int) -> slice:
        return _share(size, self.tp, rank)

    def vocabulary(self, size: int, rank: int) -> tuple[slice, int]:
        """The rows of a rank that the checkpoint has, and how many there are with the padding."""
        padded = -(-size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        share = _share(padded, self.tp, rank)
        return slice(min(share.start, size), min(share.stop, size)), share.stop - share.start


def _share(size: int, count: int, index: int) -> slice:
    if size % count:
        raise UnsupportedError(f"checksums: {size} must be a multiple of the {count} ranks that share it; choose --tp")
    return slice(size // count * index, size // count * (index + 1))


def layout_of(checkpoint: Checkpoint, engine: str, tp: int) -> Layout:
    """The modules that an engine makes of a checkpoint of transformers.

    Raises:
        UnsupportedError: an architecture that was not read, or heads that the ranks cannot share.
    """
    config = checkpoint.config
    heads: Any = config.get("num_attention_heads")
    kv_heads: Any = config.get("num_key_value_heads", heads)
    named: Any = config.get("architectures")
    architecture = str(named[0]).removesuffix("ForCausalLM") if isinstance(named, list) and named else ""
    if architecture not in ARCHITECTURES:
        known = ", ".join(f"{part}ForCausalLM" for part in ARCHITECTURES)
        raise UnsupportedError(f"checksums: config.json must have an architecture among {known}; got {named!r:.60}")
    is_right = isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0
    if not (is_right and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)):
        raise UnsupportedError(f"checksums: {tp} ranks must share {heads} heads and {kv_heads} of keys; choose --tp")
    # 1. Which module of the engine each module of the checkpoint goes to.
    stems: dict[str, dict[tuple[int, int], str]] = {}
    unknown: list[tuple[str, str]] = []
    cuts: dict[str, Cut] = {}
    for name in checkpoint.tensors:
        if name.endswith(_COMPUTED) or (name == "lm_head.weight" and config.get("tie_word_embeddings") is True):
            continue
        place = _place(name, engine)
        if place is None:
            unknown.append((name, "no rule knows this module"))
        else:
            module, index, part, cuts[module] = place
            stems.setdefault(module, {})[index] = part
    # 2. Their order: experts, then the parts of each.
    modules = tuple(_module(name, parts, cuts[name]) for name, parts in sorted(stems.items()))
    routed = engine == VLLM and architecture == "Qwen3Moe"
    return Layout(tp=tp, kv_heads=kv_heads, modules=modules, unknown=tuple(unknown), quantizes_router=routed)


def _place(name: str, engine: str) -> tuple[str, tuple[int, int], str, Cut] | None:
    # The engine's module, where in it (expert, part), the checkpoint's module, and the cut.
    module = name.rpartition(".")[0]
    if match := _EXPERT.fullmatch(name):
        stem, expert, last = match[1], int(match[2]), match[3]
        stem = f"{stem}.routed_experts" if engine == VLLM else stem
        if last in _W2:
            return f"{stem}.w2", (expert, 0), module, Cut.COLUMNS
        return f"{stem}.w13", (expert, _W13.index(last) // 2), module, Cut.ROWS
    stem, _, last = module.rpartition(".")
    for fused, parts in FUSED.items():
        if last in parts:
            return f"{stem}.{fused}", (0, parts.index(last)), module, Cut.ROWS
    if last in ("embed_tokens", "lm_head"):
        return module, (0, 0), module, Cut.VOCABULARY
    if last in ("o_proj", "down_proj"):
        return module, (0, 0), module, Cut.COLUMNS
    return (module, (0, 0), module, Cut.WHOLE) if last.endswith("norm") or last == "gate" else None


def _module(name: str, places: Mapping[tuple[int, int], str], cut: Cut) -> Module:
    last = name.rpartition(".")[2]
    experts: dict[int, list[str]] = {}
    for (expert, _), part in sorted(places.items()):
        experts.setdefault(expert, []).append(part)
    parts = tuple(map(tuple, experts.values()))
    return Module(name=name, cut=cut, parts=parts, is_expert=last in ("w13", "w2"), is_router=last == "gate")
