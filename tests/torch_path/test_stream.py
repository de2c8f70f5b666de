"""Weights for a server's update: equal to an export, to a dialect's bytes, of sharded models and of experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import f8emu.torch as f8
from f8emu.dialects import dialect_by_name, quantize
from f8emu.dialects.rules import Stored
from f8emu.spec import E5M2, ROWWISE, F8Error
from f8emu.torch.serving.coding import WeightCoder
from tests.torch_path.streams import assert_same
from tests.torch_path.test_serving import llama

SIZES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 64, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("recipe", "format", "options"),
    [
        ("blockwise", "block", {}),
        ("blockwise_ue8m0", "compressed-tensors", {"cast_weight_from": "bfloat16"}),
        ("rowwise", "per-channel", {"float8_primary_weights": True}),
        ("tensorwise", "compressed-tensors", {}),
    ],
)
def test_a_stream_is_what_an_export_writes(recipe: Any, format: Any, options: Any, tmp_path: Path) -> None:
    model = llama(recipe, **options)
    path = f8.export_float8(model, tmp_path / "out", format=format)
    streamed = dict(f8.stream_float8(model, format))
    assert sum(x.dtype is torch.float8_e4m3fn for x in streamed.values()) == 7
    assert_same(streamed, load_file(path / "model.safetensors"))


@pytest.mark.parametrize(
    "dialect", ["vllm_weight_block", "deep_gemm_block_ue8m0", "vllm_weight_channel", "sglang_weight_tensor"]
)
@pytest.mark.parametrize("copies", [False, True])
def test_a_dialect_gives_its_own_bytes(dialect: Any, copies: bool) -> None:
    """By its arithmetic, or by ours where a ScaleRule gives its bytes; a block of zeros, and one below its floor."""
    model = llama("blockwise", cast_weight_from="bfloat16" if copies else None)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[:128, :128], weight[128:256, :128] = 0, weight[128:256, :128] * 1e-6
    streamed = dict(f8.stream_float8(model, dialect, dtype=torch.float32))
    suffix = "scale_inv" if "block" in dialect else "scale"
    codes, scale = (streamed[f"model.layers.0.mlp.up_proj.weight{end}"] for end in ("", f"_{suffix}"))
    theirs = quantize(weight.detach().bfloat16() if copies else weight.detach(), dialect)
    assert_same({"codes": codes, "scale": scale.reshape(theirs.scale.shape)}, theirs._asdict())
    assert scale.ndim == (1 if "tensor" in dialect else 2) and streamed["lm_head.weight"].dtype is torch.float32


def test_a_dialect_keeps_its_format_beside_layers_of_another() -> None:
    """Weights are E5M2 in the layers; a dialect that a ScaleRule gives is E4M3."""
    output, grad_input = ROWWISE.output, ROWWISE.grad_input
    recipe = replace(
        ROWWISE,
        name="weights_in_e5m2",
        output=replace(output, b=replace(output.b, format=E5M2)),
        grad_input=replace(grad_input, b=replace(grad_input.b, format=E5M2)),
    )
    dialect = replace(dialect_by_name("torchao_rowwise_float"), stored=Stored(names=("weight_scale",)))
    value = torch.randn(128, 256)
    codes, scale = WeightCoder("stream_float8", dialect, recipe, {"weight": value.shape}, "").cast(value)
    assert_same({"codes": codes, "scale": scale}, quantize(value, dialect)._asdict())


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_experts_come_one_by_one_as_checkpoints_name_them(recipe: Any) -> None:
    """Of Qwen3 and of Mixtral: what the layers of the experts cast, and everything else under its saved name."""
    of_qwen: dict[str, Any] = {"num_experts": 3, "moe_intermediate_size": 128, "head_dim": 128}
    models: Any = (
        (Qwen3MoeForCausalLM, Qwen3MoeConfig, "mlp", ("gate_proj", "up_proj", "down_proj"), of_qwen),
        (MixtralForCausalLM, MixtralConfig, "block_sparse_moe", ("w1", "w3", "w2"), {"num_local_experts": 3}),
    )
    for kind, config, block, names, options in models:
        torch.manual_seed(0)
        model: Any = kind(config(**SIZES, **options))
        f8.convert_to_float8_training(model, config=recipe)
        streamed = dict(f8.stream_float8(model, "compressed-tensors"))
        assert not any(x.ndim > 2 for x in streamed.values()) and f"model.layers.0.{block}.gate.weight" in streamed
        layers = model.model.layers[0].mlp.experts.expert_layers()
        for expert in range(3):
            gate_up, down = (layers[f"{name}.{expert}"].weight for name in ("gate_up_proj", "down_proj"))
            both, (codes, scale) = [], quantize_as(recipe, gate_up)
            for name in names[:2]:
                stem = f"model.layers.0.{block}.experts.{expert}.{name}.weight"
                both.append((streamed[stem], streamed[f"{stem}_scale"]))
            assert_same(
                {"gate_up": torch.cat([x.view(torch.uint8) for x, _ in both])}, {"gate_up": codes.view(torch.uint8)}
            )
            for part, of_part in zip(scale.chunk(2) if recipe == "rowwise" else (scale, scale), both, strict=True):
                assert_same({"scale": of_part[1]}, {"scale": part})
            stem = f"model.layers.0.{block}.experts.{expert}.{names[2]}.weight"
            codes, scale = quantize_as(recipe, down)
            assert_same({"": streamed[stem], "_scale": streamed[f"{stem}_scale"]}, {"": codes, "_scale": scale})
        with pytest.raises(F8Error, match="stream_float8 has them"):
            f8.export_float8(model, "out", format="compressed-tensors")
        with pytest.raises(F8Error, match="no format here"):
            f8.stream_float8(model, "per-channel")


def quantize_as(recipe: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales of a layer's weight."""
    layer: Any = f8.convert_to_float8_training(
        nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False)), config=cast(Any, recipe)
    )
    with torch.no_grad():
        layer[0].weight.copy_(weight)
    return tuple(dict(f8.stream_float8(layer, "compressed-tensors")).values())  # type: ignore[return-value]


def test_what_is_refused() -> None:
    """By the call, before a tensor is asked for."""
    model = llama("blockwise")
    refused: Any = (
        ("other", {}, "to must be a format or a dialect .*block, .*vllm_weight_block.*got 'other'"),
        ("vllm_group", {}, "casts no weights .* vllm_weight_block"),
        ("vllm_static", {}, "casts no weights"),
        ("per-channel", {}, "choose format block or compressed-tensors"),
        ("block", {"dtype": torch.int32}, "dtype must be"),
        ("block", {"ranks": "tp"}, "got 'tp', and the model's are none with a name; None gives whole"),
    )
    for to, options, why in refused:
        with pytest.raises(F8Error, match=why):
            f8.stream_float8(model, to, **options)
