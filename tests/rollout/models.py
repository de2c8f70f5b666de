"""Small checkpoints for these tests: a Llama and a mixture, in high precision or in float8."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from f8emu.dialects import quantize
from f8emu.dialects.arithmetic import DTYPES

HIDDEN, HEADS, KV_HEADS, SIZE, VOCABULARY, EXPERTS, LAYER = 512, 4, 2, 512, 100, 2, "model.layers.0"
Arrays = dict[str, np.ndarray[Any, Any]]


def weights(*, experts: bool = False, dtype: str = "bfloat16") -> Arrays:
    """The tensors of a model of one layer."""
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        f"{LAYER}.input_layernorm": (HIDDEN,),
        f"{LAYER}.self_attn.q_proj": (HEADS * head, HIDDEN),
        f"{LAYER}.self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        f"{LAYER}.self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        f"{LAYER}.self_attn.o_proj": (HIDDEN, HEADS * head),
    }
    stems = [f"experts.{i}." for i in range(EXPERTS)] if experts else [""]
    for stem in stems:
        shapes |= {f"{LAYER}.mlp.{stem}{name}": (SIZE, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"{LAYER}.mlp.{stem}down_proj"] = (HIDDEN, SIZE)
    if experts:
        shapes[f"{LAYER}.mlp.gate"] = (EXPERTS, HIDDEN)
    # Each has another largest magnitude, so that scales tell them apart.
    drawn = {name: rng.standard_normal(shape) * 2.0 ** (i % 5 - 6) for i, (name, shape) in enumerate(shapes.items())}
    return {f"{name}.weight": x.astype(DTYPES[dtype]) for name, x in drawn.items()}


def linear(name: str) -> bool:
    """Whether servers quantize a weight."""
    return "_proj" in name


def in_float8(tensors: Mapping[str, np.ndarray[Any, Any]], dialect: Any, suffix: str) -> Arrays:
    """Each linear layer as codes and scales, as a trainer casts it."""
    made: Arrays = {}
    for name, x in tensors.items():
        made[name] = x
        if linear(name):
            made[name], scale = quantize(x, dialect)
            made[f"{name}{suffix}"] = scale.astype(np.float32)
    return made


def write(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]], quantization: Any = None) -> Path:
    """A checkpoint of them."""
    experts = any(".experts." in name for name in tensors)
    config: dict[str, Any] = {"architectures": [f"{'Qwen3Moe' if experts else 'Llama'}ForCausalLM"]}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config |= {"quantization_config": quantization} if quantization else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


LEFT = {"modules_to_not_convert": ["lm_head", f"{LAYER}.mlp.gate"]}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], **LEFT}
TENSORS = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"strategy": "channel"}, "targets": ["Linear"]}},
}
