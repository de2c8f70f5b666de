"""Sound checkpoints as eleven tools write them: random sizes, odd last blocks, dead rows, every layout of a tool.

The codes are those of `f8emu.dialects`, which tests/dialects compares with the packages that run on a CPU, byte for
byte; tests/audit/written.py has those packages write whole checkpoints. Layouts are those of the packages' sources
(compressed-tensors 0.20, Model-Optimizer 0.47, transformers 5.23, torchao 0.18, AutoFP8 084feb8, amd-quark 0.13) or of
published checkpoints (DeepSeek, TransformerEngine, Mistral). How Mistral quantizes is not public; here it divides in
float32. f8emu's own are written by f8emu.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from f8emu.audit import Severity, audit
from f8emu.dialects import DialectName, quantize
from f8emu.dialects.arithmetic import E8M0
from f8emu.dialects.rules import MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.dialects.stacks import FUSED
from tests.audit.checkpoints import BF16, checkpoint, compressed, fp8, write

HEAD = "lm_head.weight"
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """What one tool wrote of a source."""

    variant: str
    source: Tensors
    tensors: Tensors
    dialect: str
    """The one that gives every byte; empty where none does: an observer chose the scales."""
    quantization: Mapping[str, Any] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)
    """More JSON files, by name."""
    shards: int = 1
    consolidated: Tensors = field(default_factory=dict[str, np.ndarray])
    """Mistral's own names, in consolidated.safetensors."""
    exported: Mapping[str, Any] = field(default_factory=dict)
    """The arguments with which f8emu exports the source."""

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The directories of the checkpoint and of the source."""
        path, source = folder / "model", checkpoint(folder / "source", self.source)
        (source / "config.json").write_text('{"model_type": "llama"}')
        if self.exported:
            from f8emu.torch.serving.export import export_checkpoint

            export_checkpoint(source, path, **self.exported)
            return path, source
        names, files = (
            [*self.tensors],
            [f"model-{i + 1:05}-of-{self.shards:05}.safetensors" for i in range(self.shards)],
        )
        parts = {file: names[i :: self.shards] for i, file in enumerate(files)} if self.shards > 1 else None
        path.mkdir()
        if self.tensors:
            checkpoint(path, self.tensors, self.quantization, parts if self.shards > 1 else None)
        if self.consolidated:
            write(path / "consolidated.safetensors", self.consolidated)
        for name, data in self.files.items():
            (path / name).write_text(json.dumps(data))
        return path, source


class Draw:
    """Random numbers of one seed: sizes, weights, choices."""

    def __init__(self, seed: int, *, multiple: int = 16, has_dead_rows: bool = True) -> None:
        self._draw = np.random.default_rng(seed)
        self._seed, self._has_dead_rows = seed, has_dead_rows
        self.hidden, self.wide = (multiple * int(self._draw.integers(8, 24) * 16 // multiple) for _ in range(2))
        self.narrow = max(multiple, self.hidden // 2 // multiple * multiple)
        self.layers = int(self._draw.integers(1, 3))

    def one_of(self, *choices: Any) -> Any:
        """Each in its turn, so that ten seeds meet every layout."""
        return choices[self._seed % len(choices)]

    def chance(self, share: float = 0.5) -> bool:
        return bool(self._draw.random() < share)

    def weight(self, *shape: int) -> np.ndarray:
        """As trained weights are, each of a size of its own; some with heavy tails, a dead row or an outlier."""
        x = self._draw.standard_normal(shape) if self.chance(0.7) else self._draw.standard_t(5, shape)
        x *= 0.02 * 2.0 ** self._draw.uniform(-2, 2)
        if self.chance(0.1) and self._has_dead_rows:
            x[..., int(self._draw.integers(shape[-2])), :] = 0
        if self.chance(0.1):
            x[(*(0 for _ in shape[:-1]), 1)] *= 40
        return x.astype(np.float32).astype(BF16)

    def vector(self, size: int) -> np.ndarray:
        return (1 + 0.1 * self._draw.standard_normal(size)).astype(np.float32).astype(BF16)

    def scale(self, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        """Of activations or of the cache."""
        return np.full(shape, 0.01 + 0.1 * self._draw.random(), np.float32).astype(dtype)

    # Models: names and weights before they were quantized

    def frame(self) -> Tensors:
        return {
            "model.embed_tokens.weight": self.weight(320, self.hidden),
            "model.norm.weight": self.vector(self.hidden),
            **({HEAD: self.weight(320, self.hidden)} if self.chance(0.8) else {}),
        }

    def _attention(self, at: str) -> Iterator[tuple[str, np.ndarray]]:
        for name, rows in (("q", self.hidden), ("k", self.narrow), ("v", self.narrow), ("o", self.hidden)):
            yield f"{at}self_attn.{name}_proj.weight", self.weight(rows, self.hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", self.vector(self.hidden)

    def _mlp(self, at: str, wide: int) -> Iterator[tuple[str, np.ndarray]]:
        for name, shape in (("gate", (wide, self.hidden)), ("up", (wide, self.hidden)), ("down", (self.hidden, wide))):
            yield f"{at}{name}_proj.weight", self.weight(*shape)

    def llama(self) -> Tensors:
        weights, has_bias = self.frame(), self.chance(0.3)
        for at in (f"model.layers.{i}." for i in range(self.layers)):
            weights |= dict((*self._attention(at), *self._mlp(f"{at}mlp.", self.wide)))
            if has_bias:
                weights |= {f"{at}self_attn.{n}_proj.bias": self.vector(self.narrow) for n in "kv"}
        return weights

    def fused(self) -> Tensors:
        """Phi-3: q, k, v and gate, up are one weight on the disk."""
        weights = self.frame()
        for at in (f"model.layers.{i}." for i in range(self.layers)):
            weights[f"{at}self_attn.qkv_proj.weight"] = self.weight(self.hidden + 2 * self.narrow, self.hidden)
            weights[f"{at}self_attn.o_proj.weight"] = self.weight(self.hidden, self.hidden)
            weights[f"{at}mlp.gate_up_proj.weight"] = self.weight(2 * self.wide, self.hidden)
            weights[f"{at}mlp.down_proj.weight"] = self.weight(self.hidden, self.wide)
        return weights

    def experts(self, count: int = 4) -> Tensors:
        """Qwen3-MoE: each expert by itself, a router in bfloat16."""
        weights = self.frame()
        for at in (f"model.layers.{i}." for i in range(self.layers)):
            weights |= {**dict(self._attention(at)), f"{at}mlp.gate.weight": self.weight(count, self.hidden)}
            for e in range(count):
                weights |= dict(self._mlp(f"{at}mlp.experts.{e}.", self.narrow))
        return weights

    def deepseek(self) -> Tensors:
        """DeepSeek-V3: latent attention, a dense layer, routed and shared experts, and multi-token prediction."""
        weights, h = {HEAD: self.weight(320, self.hidden)} | self.frame(), self.hidden
        shapes = {"q_a_proj": (192, h), "q_b_proj": (h, 192), "kv_a_proj_with_mqa": (144, h), "kv_b_proj": (h, 128)}
        for i in range(self.layers + 1):
            at = f"model.layers.{i}."
            weights |= {f"{at}self_attn.{n}.weight": self.weight(*s) for n, s in (*shapes.items(), ("o_proj", (h, h)))}
            weights |= {f"{at}self_attn.{n}_layernorm.weight": self.vector(m) for n, m in (("q_a", 192), ("kv_a", 128))}
            weights |= {f"{at}{n}_layernorm.weight": self.vector(h) for n in ("input", "post_attention")}
            if i == 0:
                weights |= dict(self._mlp(f"{at}mlp.", self.wide))
                continue
            weights |= {
                f"{at}mlp.gate.weight": self.weight(4, h),
                f"{at}mlp.gate.e_score_correction_bias": self.scale(4),
            }
            for part in ("experts.0", "experts.1", "experts.2", "experts.3", "shared_experts"):
                weights |= dict(self._mlp(f"{at}mlp.{part}.", self.narrow))
            if i == self.layers:
                weights |= {f"{at}{n}.weight": self.vector(h) for n in ("enorm", "hnorm", "shared_head.norm")}
                weights |= {f"{at}eh_proj.weight": self.weight(h, 2 * h), f"{at}shared_head.head.weight": weights[HEAD]}
                weights[f"{at}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        return weights

    def stacked(self, count: int = 4) -> Tensors:
        """transformers 5: the experts of a layer are one tensor."""
        weights = self.frame()
        for at in (f"model.layers.{i}." for i in range(self.layers)):
            weights |= {**dict(self._attention(at)), f"{at}mlp.gate.weight": self.weight(count, self.hidden)}
            weights[f"{at}mlp.experts.gate_up_proj"] = self.weight(count, 2 * self.narrow, self.hidden)
            weights[f"{at}mlp.experts.down_proj"] = self.weight(count, self.hidden, self.narrow)
        return weights

    def llama4(self, count: int = 4) -> Tensors:
        """Llama-4: experts lie [E, K, N]."""
        weights = {name.replace("model.", "language_model.model.", 1): x for name, x in self.frame().items()}
        for at in (f"language_model.model.layers.{i}." for i in range(self.layers)):
            weights |= {**dict(self._attention(at)), f"{at}feed_forward.router.weight": self.weight(count, self.hidden)}
            weights |= dict(self._mlp(f"{at}feed_forward.shared_expert.", self.wide))
            weights[f"{at}feed_forward.experts.gate_up_proj"] = self.weight(count, self.hidden, 2 * self.wide)
            weights[f"{at}feed_forward.experts.down_proj"] = self.weight(count, self.wide, self.hidden)
        return weights


def is_linear(name: str) -> bool:
    """Not embeddings, heads, norms, routers."""
    return name.endswith(("proj.weight", "mqa.weight")) and not name.endswith("eh_proj.weight")


def coded(
    source: Tensors, dialect: DialectName, block: Block, scale_name: str, change: Any = np.asarray, **arguments: Any
) -> Tensors:
    """The linear layers in float8: `scale_name` is a template of {w} and {m}, `change` lays the scale out."""
    tensors: Tensors = {}
    for name, x in source.items():
        if not is_linear(name):
            tensors[name] = x
            continue
        made = quantize(x, dialect, block=block, **{key: arrays[name] for key, arrays in arguments.items()})
        tensors[name] = made.codes
        tensors[scale_name.format(w=name, m=name.removesuffix(".weight"))] = np.ascontiguousarray(change(made.scale))
    return tensors


def modules(source: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name in source if is_linear(name)]


def flat(scale: np.ndarray) -> np.ndarray:
    return scale.reshape(-1)


def scalar(scale: np.ndarray) -> np.ndarray:
    return scale.reshape(())


# The tools


def llm_compressor(draw: Draw) -> Sound:
    """Scales in the model's dtype. The observer `mse` clips the largest magnitudes of a row."""
    variant = draw.one_of("static", "channel", "block", "mse", "experts", "fused", "cache", "mxfp8", "fused static")
    source = (draw.fused if "fused" in variant else draw.experts if variant == "experts" else draw.llama)()
    strategy, block, more = {
        "block": ("block", SQUARE, {"block_structure": [128, 128]}),
        "mxfp8": ("group", MX_GROUP, {"group_size": 32, "scale_dtype": "torch.uint8"}),
        **dict.fromkeys(("static", "cache", "fused static"), ("tensor", TENSOR, {})),
    }.get(variant, ("channel", ROW, {}))
    name, is_static = f"compressed_tensors_{'mxfp8' if variant == 'mxfp8' else strategy}", strategy == "tensor"
    # 1. The configuration.
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **more}
    observer = "mse" if variant == "mse" else "memoryless_minmax"
    config: dict[str, Any] = compressed(strategy, observer=observer, **weights)
    config |= {"format": "mxfp8-quantized" if variant == "mxfp8" else "float-quantized"}
    config |= {"quantization_status": "compressed", "ignore": ["lm_head", "re:.*mlp.gate$"]}
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = not is_static
    # 2. The tensors.
    given: dict[str, Any] = {}
    if variant == "mse":
        amax = {
            key: np.abs(source[f"{key}.weight"].astype(np.float32)).max(1, keepdims=True) for key in modules(source)
        }
        scale = {f"{key}.weight": (one / 448 * 0.9).astype(BF16) for key, one in amax.items()}
        given["scale"] = {key: np.where(one == 0, BF16(2**-7), one) for key, one in scale.items()}
    layout = (lambda s: s.view(np.uint8)) if variant == "mxfp8" else flat if is_static else np.asarray
    tensors = coded(source, cast(DialectName, name), block, "{w}_scale", layout, **given)
    if is_static:
        tensors |= {f"{module}.input_scale": draw.scale(1, dtype=BF16) for module in modules(source)}
    if variant == "cache":
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        layers = {module.rpartition(".")[0] for module in modules(source) if "self_attn" in module}
        tensors |= {f"{layer}.{n}_scale": draw.scale(1, dtype=BF16) for layer in sorted(layers) for n in "kv"}
    dialect = "" if variant == "mse" else name
    return Sound(variant=variant, source=source, tensors=tensors, dialect=dialect, quantization=config)


def autofp8(draw: Draw) -> Sound:
    variant = draw.one_of("dynamic", "static", "static with a cache")
    source = draw.llama()
    tensors = coded(source, "autofp8_tensor", TENSOR, "{w}_scale", scalar)
    scheme = "dynamic" if variant == "dynamic" else "static"
    config = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    if scheme == "static":
        tensors |= {f"{module}.input_scale": draw.scale() for module in modules(source)}
    if "cache" in variant:
        config["kv_cache_scheme"] = "static"
        caches = [module for module in modules(source) if module.endswith(("k_proj", "v_proj"))]
        tensors |= {f"{module}.output_scale": draw.scale() for module in caches}
    return Sound(variant=variant, source=source, tensors=tensors, dialect="autofp8_tensor", quantization=config)


def model_optimizer(draw: Draw) -> Sound:
    """With a scale a tensor, layers that a server fuses share the largest amax."""
    algorithm = draw.one_of("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "FP8", "MXFP8")
    source = (draw.experts if draw.chance(0.4) else draw.llama)()
    name, block, layout = {
        "FP8": ("modelopt_tensor", TENSOR, scalar),
        "FP8_PB_WO": ("modelopt_block", SQUARE, lambda s: s[:, None, :, None]),
        "MXFP8": ("modelopt_mxfp8", MX_GROUP, lambda s: s.view(np.uint8)),
    }.get(algorithm, ("modelopt_channel", ROW, flat))
    given: dict[str, Any] = {}
    if algorithm == "FP8":
        amax = {key: np.abs(source[f"{key}.weight"].astype(np.float32)).max() for key in modules(source)}
        shards = {last: group for group in FUSED.values() for last in group}
        of = {key: shards.get(key.rpartition(".")[2], (key.rpartition(".")[2],)) for key in amax}
        largest = {key: max(amax[f"{key.rpartition('.')[0]}.{last}"] for last in of[key]) for key in amax}
        given["scale"] = {f"{key}.weight": np.full((1, 1), one) / np.float32(448) for key, one in largest.items()}
    tensors = coded(source, cast(DialectName, name), block, "{w}_scale", layout, **given)
    if algorithm == "FP8":
        tensors |= {f"{module}.input_scale": draw.scale() for module in modules(source)}
        tensors |= {f"{m}.{m[-6]}_scale": draw.scale() for m in modules(source) if m.endswith(("k_proj", "v_proj"))}
    exclude = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(draw.layers))]
    algorithms = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8" if algorithm == "FP8" else None}
    producer = {"producer": {"name": "modelopt", "version": "0.47.0"}}
    files: dict[str, Any] = {
        "hf_quant_config.json": {**producer, "quantization": {**algorithms, "exclude_modules": exclude}}
    }
    config = {**algorithms, **producer, "quant_method": "modelopt", "ignore": exclude} if draw.chance() else None
    files |= {} if config else {"config.json": {"model_type": "llama"}}
    return Sound(variant=algorithm, source=source, tensors=tensors, dialect=name, quantization=config, files=files)


def deepseek(draw: Draw) -> Sound:
    variant = draw.one_of("V3", "V3.1", "V4")
    source, is_power = draw.deepseek(), variant != "V3"
    name = "deep_gemm_block_ue8m0" if is_power else "deep_gemm_block"
    template = "{m}.scale" if variant == "V4" else "{w}_scale_inv"
    layout = (lambda s: s.astype(E8M0)) if variant == "V4" else np.asarray
    tensors = coded(source, name, SQUARE, template, layout)
    config = fp8(fmt="e4m3", **({"scale_fmt": "ue8m0"} if is_power else {}))
    return Sound(variant=variant, source=source, tensors=tensors, dialect=name, quantization=config, shards=3)


def transformers(draw: Draw) -> Sound:
    """FineGrainedFP8Config: blocks divide the weights; what does not divide stays as it is."""
    variant = draw.one_of("block", "ue8m0", "stacked experts", "text_config", "experts")
    source = {"stacked experts": draw.stacked, "experts": draw.experts}.get(variant, draw.llama)()
    name = "transformers_block_ue8m0" if variant == "ue8m0" else "transformers_block"
    tensors = coded(source, name, SQUARE, "{w}_scale_inv")
    for key, x in source.items():
        if ".experts." in key and x.ndim == 3:
            made = [quantize(expert, name, block=SQUARE) for expert in x]
            tensors[key], tensors[f"{key}_scale_inv"] = (np.stack(part) for part in zip(*made, strict=True))
    gates = [key.removesuffix(".weight") for key in source if key.endswith("mlp.gate.weight")]
    config = fp8(modules_to_not_convert=["lm_head", *gates], **({"scale_fmt": "ue8m0"} if variant == "ue8m0" else {}))
    nested = {"config.json": {"model_type": "kimi_k25", "text_config": {"quantization_config": config}}}
    where: dict[str, Any] = {"files": nested} if variant == "text_config" else {"quantization": config}
    return Sound(variant=variant, source=source, tensors=tensors, dialect=name, shards=2, **where)


def fbgemm(draw: Draw) -> Sound:
    """Llama-4's experts: the scales of gate_up_proj [E, K, N] are [E, 1, N], those of down_proj [E, N, 1]."""
    variant = draw.one_of("rows", "Llama-4")
    source = (draw.llama4 if variant == "Llama-4" else draw.llama)()
    tensors = coded(source, "fbgemm_cuda", ROW, "{w}_scale")
    for key, x in source.items():
        if ".experts." in key:
            made = [quantize(np.ascontiguousarray(expert.T), "fbgemm_cuda", block=ROW) for expert in x]
            tensors[key] = np.stack([codes.T for codes, _ in made])
            scale = np.stack([scale for _, scale in made])
            tensors[f"{key}_scale"] = scale.transpose(0, 2, 1) if key.endswith("gate_up_proj") else scale
    routers = [key.removesuffix(".weight") for key in source if key.endswith("router.weight")]
    config = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head", *routers],
    }
    return Sound(variant=variant, source=source, tensors=tensors, dialect="fbgemm_cuda", quantization=config)


def torchao(draw: Draw) -> Sound:
    variant, block, layout = draw.one_of(("PerRow", ROW, np.asarray), ("PerTensor", TENSOR, np.asarray))
    source = draw.llama()
    tensors = coded(source, "torchao_inference", block, "{m}._weight_scale", layout)
    for module in modules(source):
        tensors[f"{module}._weight_qdata"] = tensors.pop(f"{module}.weight")
    kind = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": {}}
    config = {"quant_method": "torchao", "quant_type": {"default": kind}, "modules_to_not_convert": ["lm_head"]}
    return Sound(variant=variant, source=source, tensors=tensors, dialect="torchao_inference", quantization=config)


def transformer_engine(draw: Draw) -> Sound:
    """As Megatron exports what it trained: names and configuration of DeepSeek, or a scale a tensor."""
    variant, name, block = draw.one_of(
        ("blocks", "transformer_engine_block_float", SQUARE),
        ("powers of two", "transformer_engine_block", SQUARE),
        ("current scaling", "transformer_engine_current", TENSOR),
    )
    source = draw.experts() if draw.chance() else draw.llama()
    if block == TENSOR:
        tensors = coded(source, name, TENSOR, "{w}_scale", flat)
        config: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    else:
        tensors = coded(source, name, SQUARE, "{w}_scale_inv")
        config = fp8(**({"scale_fmt": "ue8m0"} if variant == "powers of two" else {}))
    gates = [key.removesuffix(".weight") for key in source if key.endswith("mlp.gate.weight")]
    config |= {"modules_to_not_convert": ["lm_head", *gates]}
    return Sound(variant=variant, source=source, tensors=tensors, dialect=name, quantization=config)


_MISTRAL = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attention.w{name}" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"feed_forward.w{i}" for i, name in ((1, "gate"), (2, "down"), (3, "up"))},
}
"""transformers' names -> Mistral's."""


def own_names(tensors: Tensors) -> Tensors:
    """As Mistral calls them."""
    renamed: Tensors = {}
    for name, x in tensors.items():
        for old, new in _MISTRAL.items():
            name = name.replace(old, new)
        renamed[name] = x
    return renamed


def mistral(draw: Draw) -> Sound:
    """Its own names, transformers' names, or a directory with both."""
    variant, name = draw.one_of("its own", "both", "transformers' names"), "vllm_weight_tensor"
    source = draw.llama()
    acts = {module: draw.scale() for module in modules(source)}
    mistral_tensors = coded(source, name, TENSOR, "{m}.qscale_weight", scalar) | {
        f"{m}.qscale_act": s for m, s in acts.items()
    }
    theirs = coded(source, name, TENSOR, "{w}_scale_inv", scalar) | {
        f"{m}.activation_scale": s for m, s in acts.items()
    }
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    params = {"params.json": {"dim": draw.hidden, "quantization": quantization}}
    if variant == "its own":
        here: Any = {
            "source": own_names(source),
            "tensors": {},
            "consolidated": own_names(mistral_tensors),
            "files": params,
        }
        return Sound(variant=variant, dialect=name, **here)
    config = fp8(weight_block_size=None, activation_scheme="static", modules_to_not_convert=["lm_head"])
    both: Any = {"consolidated": own_names(mistral_tensors), "files": params} if variant == "both" else {}
    return Sound(variant=variant, source=source, tensors=theirs, dialect=name, quantization=config, **both)


def quark(draw: Draw) -> Sound:
    """Its scales have the model's dtype; those of dead rows are 2^-23."""
    variant = draw.one_of("static", "static with a cache", "channel")
    source, is_tensor = draw.llama(), variant != "channel"
    if is_tensor:
        name = "compressed_tensors_tensor"
        tensors = coded(source, name, TENSOR, "{w}_scale", scalar)
        tensors |= {f"{module}.input_scale": draw.scale(dtype=BF16) for module in modules(source)}
    else:
        name = "compressed_tensors_channel"
        tensors = coded(source, name, ROW, "{w}_scale", lambda s: s.reshape(-1))
        for weight in (key for key in source if is_linear(key)):
            tensors[f"{weight}_scale"][~source[weight].astype(np.float32).any(1)] = BF16(2**-23)
    if "cache" in variant:
        caches = [module for module in modules(source) if module.endswith(("k_proj", "v_proj"))]
        tensors |= {f"{module}.output_scale": draw.scale(dtype=BF16) for module in caches}
    spec = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor" if is_tensor else "per_channel"}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec, "input_tensors": {**spec, "is_dynamic": not is_tensor}, "bias": None},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "weight_format": "real_quantized"},
    }
    return Sound(variant=variant, source=source, tensors=tensors, dialect=name, quantization=config)


def f8emu(draw: Draw) -> Sound:
    """A checkpoint in bfloat16, exported as its layers cast it."""
    name, form, recipe = draw.one_of(
        ("torchao_blockwise", "block", "blockwise"),
        ("torchao_rowwise", "compressed-tensors", "rowwise"),
        ("torchao_tensorwise", "compressed-tensors", "tensorwise"),
        ("torchao_rowwise", "per-channel", "rowwise"),
    )
    exported = {"format": form, "config": recipe}
    return Sound(variant=f"{form} {recipe}", source=draw.llama(), tensors={}, dialect=name, exported=exported)


TOOLS: dict[str, Callable[[Draw], Sound]] = {
    "llm-compressor": llm_compressor,
    "AutoFP8": autofp8,
    "Model-Optimizer": model_optimizer,
    "DeepSeek": deepseek,
    "transformers": transformers,
    "FBGEMM": fbgemm,
    "torchao": torchao,
    "TransformerEngine": transformer_engine,
    "Mistral": mistral,
    "Quark": quark,
    "f8emu": f8emu,
}
_LIMITS: Mapping[str, Mapping[str, Any]] = {
    "transformers": {"multiple": 128},  # leaves what its blocks do not divide in bfloat16
    "f8emu": {"multiple": 128},
    "torchao": {"has_dead_rows": False},  # writes 0 / 0 for them: a fault, ao#4713
}


def sound(tool: str, seed: int) -> Sound:
    """What a tool writes of the source of a seed."""
    return TOOLS[tool](Draw(seed, **_LIMITS.get(tool, {})))


def accused(path: Path, source: Path, dialect: str) -> list[str]:
    """What the audit of a sound checkpoint says untruly, with and without the source; a dialect must be named too."""
    wrong: list[str] = []
    for origin in (None, source):
        result = audit(path, source=origin)
        faults = [finding for finding in result.findings if finding.severity is not Severity.NOTE]
        wrong += [
            f"{finding.check} {finding.tensor}: expected {finding.expected}; found {finding.found}"
            for finding in faults
        ]
        if not result.tensors or result.uncompared:
            wrong.append(f"{result.compared} of {result.tensors} weights were compared")
        if origin and dialect not in ("", *result.dialect.split(", ")):
            wrong.append(f"{dialect} is not among the dialects {result.dialect!r}")
    return wrong
