"""Which modules of a checkpoint an engine fuses into one, and which part of it each rank holds."""

import math
import re
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

from f8emu.audit.checkpoint import Checkpoint
from f8emu.dialects.stacks import FUSED
from f8emu.rollout.checksums import VLLM
from f8emu.spec.errors import UnsupportedError

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe")
"""Those whose loading code was read in both engines, without `ForCausalLM`."""
_PADDING = 64
"""To which engines pad a vocabulary."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,4})\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
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
    is_linear: bool = True
    """Whether the engine quantizes it, where it quantizes at all."""

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

    def share(self, cut: Cut, part: str, shape: tuple[int, ...], rank: int) -> tuple[slice, slice]:
        """The rows and columns that a rank has of a part; a vector is one column. Behind a vocabulary, zeros follow."""
        rows, columns = shape[0], math.prod(shape[1:])
        match cut:
            case Cut.ROWS:
                # Ranks have one head of keys and values at least.
                is_kv = part.rpartition(".")[2] in ("k_proj", "v_proj")
                count = min(self.tp, self.kv_heads) if is_kv else self.tp
                return _share(rows, count, rank // (self.tp // count)), slice(0, columns)
            case Cut.COLUMNS if len(shape) > 1:
                return slice(0, rows), _share(columns, self.tp, rank)
            case Cut.VOCABULARY:
                return _share(-(-rows // _PADDING) * _PADDING, self.tp, rank), slice(0, columns)
            case _:
                return slice(0, rows), slice(0, columns)


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
    places: dict[tuple[str, Cut], dict[tuple[int, int], str]] = {}
    unknown: list[tuple[str, str]] = []
    for name in checkpoint.tensors:
        if name.endswith(_COMPUTED) or (name == "lm_head.weight" and config.get("tie_word_embeddings") is True):
            continue
        if place := _place(name, engine):
            module, cut, index = place
            places.setdefault((module, cut), {})[index] = name.rpartition(".")[0]
        else:
            unknown.append((name, "no rule knows this module"))
    # 2. Their order: experts, then the parts of each. vLLM quantizes the router of Qwen3-MoE, SGLang none.
    linear = ("gate",) if engine == VLLM and architecture == "Qwen3Moe" else ()
    modules: list[Module] = []
    for (name, cut), parts in sorted(places.items(), key=lambda item: item[0][0]):
        last = name.rpartition(".")[2]
        experts = groupby(sorted(parts), key=lambda index: index[0])
        of_experts = tuple(tuple(parts[index] for index in indices) for _, indices in experts)
        is_linear, is_expert = cut in (Cut.ROWS, Cut.COLUMNS) or last in linear, last in ("w13", "w2")
        modules.append(Module(name=name, cut=cut, parts=of_experts, is_expert=is_expert, is_linear=is_linear))
    return Layout(tp=tp, kv_heads=kv_heads, modules=tuple(modules), unknown=tuple(unknown))


def _place(name: str, engine: str) -> tuple[str, Cut, tuple[int, int]] | None:
    # The engine's module, its cut, and where in it (expert, part) that of the checkpoint is.
    module = name.rpartition(".")[0]
    stem, _, last = module.rpartition(".")
    if match := _EXPERT.fullmatch(module):
        stem, expert, last = match[1] + (".routed_experts" if engine == VLLM else ""), int(match[2]), match[3]
        if last in _W2:
            return f"{stem}.w2", Cut.COLUMNS, (expert, 0)
        return f"{stem}.w13", Cut.ROWS, (expert, _W13.index(last) // 2)
    for fused, parts in FUSED.items():
        if last in parts:
            return f"{stem}.{fused}", Cut.ROWS, (0, parts.index(last))
    if last in ("embed_tokens", "lm_head"):
        return module, Cut.VOCABULARY, (0, 0)
    if last in ("o_proj", "down_proj"):
        return module, Cut.COLUMNS, (0, 0)
    return (module, Cut.WHOLE, (0, 0)) if last.endswith("norm") or last == "gate" else None
