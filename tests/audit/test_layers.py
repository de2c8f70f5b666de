"""Faults that names and shapes show, what servers make of a model, and experts in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.audit import Severity, audit
from f8emu.dialects import quantize
from f8emu.verdict import Exit
from tests.audit.checkpoints import BF16, checkpoint, compressed, f32, fp8, normal

Tensors = dict[str, np.ndarray]
TENSOR = compressed("tensor")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
UNIT = ("q_proj", "k_proj", "v_proj", "o_proj")


def blocks(shapes: dict[str, tuple[int, ...]], suffix: str = "_scale_inv") -> Tensors:
    """Weights by their names, in blocks of 128 x 128; experts are one tensor."""
    weights: Tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        made = [quantize(normal(*shape[-2:], seed=7 * seed + i), "deep_gemm_block") for i in range((1, *shape)[-3])]
        codes, scale = (np.stack(part) if len(shape) == 3 else part[0] for part in zip(*made, strict=True))
        weights |= {name: codes, f"{name}{suffix}": scale}
    return weights


def tensors(scales: dict[str, float], shape: tuple[int, int] = (128, 256)) -> Tensors:
    """Weights with a scale each, and the size that it gives them."""
    weights: Tensors = {}
    for seed, (name, size) in enumerate(scales.items()):
        made = quantize((normal(*shape, seed=seed).astype(np.float32) * size).astype(np.float32), "vllm_tensor")
        weights |= {name: made.codes, f"{name}_scale": made.scale.reshape(1)}
    return weights


L, E = "model.layers.0.", "model.layers.0.mlp.experts."
PARTS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {f"{E}{i}.{part}.weight": (128, 128) for i in range(4) for part in PARTS}
DENSE = {f"{L}mlp.{part}.weight": (256, 256) for part in PARTS}
ATTENTION = {f"model.layers.{i}.self_attn.{name}.weight": (128, 128) for i in range(2) for name in UNIT}
PLAIN = {f"model.layers.{i}.self_attn.o_proj.weight": normal(128, 128) for i in range(2)}


def without(weights: Tensors, *names: str) -> Tensors:
    return {name: x for name, x in weights.items() if not name.startswith(names)}


LLAMA = blocks(ATTENTION | DENSE)
ROWS = quantize(normal(128, 128), "vllm_token")
ACTS = {f"l.{i}.input_scale": f32(81.0 + i) for i in range(4)}
CASES: dict[str, tuple[Tensors, object, str, dict[str, Any]]] = {
    "an expert lost a part": (without(blocks(EXPERTS), f"{E}2.up_proj"), fp8(), f"expert-lost {E}2.up_proj.weight", {}),
    "an expert is lost": (without(blocks(EXPERTS), f"{E}1."), fp8(), f"expert-lost {E}1.down_proj.weight", {}),
    "the last expert of a layer": (
        without(blocks(EXPERTS), f"{E}3.")
        | blocks({k.replace("s.0", f"s.{i}", 1): v for k, v in EXPERTS.items() for i in (1, 2)}),
        fp8(),
        f"expert-lost {E}3.down_proj.weight",
        {},
    ),
    "an embedding": (
        LLAMA | blocks({"model.embed_tokens.weight": (256, 128)}),
        fp8(),
        "no-linear model.embed_tokens.weight",
        {},
    ),
    "a router": (blocks(EXPERTS | {f"{L}mlp.gate.weight": (4, 128)}), fp8(), f"no-linear {L}mlp.gate.weight", {}),
    "o_proj in bfloat16": (without(LLAMA, *PLAIN) | PLAIN, fp8(), f"unquantized {L}self_attn.o_proj.weight", {}),
    "a router that is not listed": (
        blocks(EXPERTS, "_scale") | {f"{L}mlp.gate.weight": normal(4, 128)},
        compressed("block", block_structure=[128, 128]) | {"ignore": ["lm_head"]},
        f"unquantized {L}mlp.gate.weight",
        {"consumer": "vllm:h100"},
    ),
    "half of a weight": (
        LLAMA | blocks({f"{L}mlp.up_proj.weight": (128, 256)}),
        fp8(),
        f"weight-cut {L}mlp.up_proj.weight",
        {},
    ),
    "NaN in a norm": (
        LLAMA | {"model.norm.weight": np.full(8, np.nan, BF16)},
        fp8(),
        "not-finite model.norm.weight",
        {},
    ),
    "reciprocals of activations": (
        tensors({f"l.{i}.weight": 1 for i in range(4)}) | ACTS,
        STATIC,
        "input-scale l.0.input_scale",
        {},
    ),
    "activations that were not calibrated": (
        tensors({f"l.{i}.weight": 1 for i in range(4)}) | {name: f32(1.0) for name in ACTS},
        STATIC,
        "input-scale l.0.input_scale",
        {},
    ),
    "scales of rows without their dimension": (
        {"l.weight": ROWS.codes, "l.weight_scale": ROWS.scale.reshape(-1)},
        compressed("channel"),
        "scale-shape l.weight",
        {},
    ),
    "a frozen status": (
        tensors({"l.weight": 1}),
        TENSOR | {"quantization_status": "frozen"},
        "status-frozen l.weight",
        {"consumer": "transformers:h100"},
    ),
    "merged layers that share a block": (
        blocks({f"{L}mlp.{part}.weight": (320, 128) for part in PARTS[:2]}),
        fp8(),
        f"cut-block {L}mlp.gate_proj.weight",
        {"consumer": "vllm:h100"},
    ),
    "ranks that share a block": (
        LLAMA,
        fp8(),
        f"cut-block {L}mlp.down_proj.weight",
        {"consumer": "sglang:h100", "tp": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    weights, config, expected, options = CASES[name]
    result = audit(checkpoint(tmp_path / "model", weights, config), **options)
    faults = [f"{finding.check} {finding.tensor}" for finding in result.findings if finding.is_fault]
    assert expected in faults and len({finding.split()[0] for finding in faults}) == 1, result.findings


def test_the_sound_ones_are_not_accused(tmp_path: Path) -> None:
    """What the cases above change; projections that are excepted or no target; notes of what servers do."""
    gate = {f"{L}mlp.gate.weight": normal(4, 128)}
    targets = {"targets": ["re:.*(mlp|[qkv]_proj)"], "weights": {"strategy": "block", "block_structure": [128, 128]}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": targets}}
    other = without(blocks(ATTENTION | DENSE, "_scale"), *PLAIN) | PLAIN
    cases: list[tuple[Tensors, object, dict[str, Any]]] = [
        (LLAMA, fp8(), {"consumer": "vllm:h100"}),
        (LLAMA, fp8(), {"consumer": "vllm:h100", "tp": 1}),
        (blocks(EXPERTS) | gate, fp8(), {}),
        (without(LLAMA, *PLAIN) | PLAIN, fp8(modules_to_not_convert=["o_proj"]), {}),
        (other, config, {}),
    ]
    for number, (weights, config, options) in enumerate(cases):
        result = audit(checkpoint(tmp_path / f"model {number}", weights, config), **options)
        assert result.verdict.status == 0, (number, result.findings)
    notes = (
        (TENSOR, {f"{L}self_attn.q_proj.weight": 1, f"{L}self_attn.k_proj.weight": 0.3}, "vllm:h100", "requantized"),
        (TENSOR | {"torch_dtype": "x"}, {"l.weight": 0.1}, None, "scale-half"),
    )
    for config, sizes, consumer, check in notes:
        weights = tensors(dict(sizes))
        if check == "scale-half":
            weights = {k: x.astype(np.float16) if "scale" in k else x for k, x in weights.items()}
        (finding,) = audit(checkpoint(tmp_path / check, weights, config), consumer=consumer).findings
        assert (finding.check, finding.severity) == (check, Severity.NOTE)


def experts_of(layout: str) -> Tensors:
    """Four experts in bfloat16."""
    x = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(EXPERTS.items())}
    if layout == "each":
        return x
    gate_up = np.stack([np.concatenate([x[f"{E}{i}.{part}.weight"] for part in PARTS[:2]]) for i in range(4)])
    down = np.stack([x[f"{E}{i}.down_proj.weight"] for i in range(4)])
    names = ("w13_weight", "w2_weight") if layout == "w13" else ("gate_up_proj", "down_proj")
    return {f"{E}{names[0]}": gate_up, f"{E}{names[1]}": down}


@pytest.mark.parametrize("source", ["each", "gate_up"])
@pytest.mark.parametrize("layout", ["each", "gate_up", "w13"])
def test_experts_are_compared_across_layouts(layout: str, source: str, tmp_path: Path) -> None:
    """As one tensor or one for each; two that were exchanged are found, with their scales or without."""
    if (layout, source) == ("w13", "gate_up"):
        source = "w13"
    origin = checkpoint(tmp_path / "source", experts_of(source))
    made: Tensors = {}
    for name, x in experts_of(layout).items():
        parts = [quantize(one, "deep_gemm_block") for one in (x if x.ndim == 3 else x[None])]
        made[name], made[f"{name}_scale_inv"] = (
            np.stack(part) if x.ndim == 3 else part[0] for part in zip(*parts, strict=True)
        )
    result = audit(checkpoint(tmp_path / "sound", made, fp8()), source=origin)
    assert result.verdict.status == 0 and result.compared == result.tensors and "deep_gemm_block" in result.dialect, (
        result
    )
    for exchanged in ("scales", "experts")[layout == "each" :]:
        bad = {name: x.copy() for name, x in made.items()}
        for name in made:
            if exchanged == "scales" and not name.endswith("_scale_inv"):
                continue
            if layout == "each" and f"{E}1." in name:
                other = name.replace(f"{E}1.", f"{E}2.")
                bad[name], bad[other] = made[other], made[name]
            elif layout != "each":
                bad[name] = made[name][[0, 2, 1, 3]]
        result = audit(checkpoint(tmp_path / exchanged, bad, fp8()), source=origin)
        assert {one.check for one in result.findings if one.is_fault} <= {
            "grid-moved",
            "no-dialect",
        } and not result.is_equal


def test_what_is_not_compared_is_named_and_is_a_status_of_its_own(tmp_path: Path) -> None:
    made = blocks({"a.weight": (128, 128), "b.weight": (128, 128)})
    source = checkpoint(tmp_path / "source", {"a.weight": normal(128, 128)})
    result = audit(checkpoint(tmp_path / "model", made, fp8()), source=source)
    assert not result.findings and result.verdict.status is Exit.INCOMPLETE
    assert result.uncompared == {"b.weight": "the source has no b.weight"}


def test_a_fused_layer_whose_parts_share_a_block_is_compared_as_a_whole(tmp_path: Path) -> None:
    """gate and up of 320 rows in blocks of 128; scales of the first and the last blocks are exchanged."""
    parts = {f"l.{name}.weight": normal(320, 256, seed=i) * BF16(3.0**i) for i, name in enumerate(PARTS[:2])}
    codes, scale = quantize(np.concatenate([*parts.values()]), "deep_gemm_block")
    source = checkpoint(tmp_path / "source", parts)
    for order, expected in (([0, 1, 2, 3, 4], []), ([4, 1, 2, 3, 0], ["grid-moved"])):
        made = {"l.gate_up_proj.weight": codes, "l.gate_up_proj.weight_scale_inv": scale[order]}
        result = audit(checkpoint(tmp_path / "model", made, fp8()), source=source)
        assert [finding.check for finding in result.findings] == expected and result.compared == 1


def test_scales_of_another_rule_are_told_and_are_no_fault(tmp_path: Path) -> None:
    """An amax that q, k and v share has its dialect; an observer and another scale of zeros are notes."""
    source = {f"{name}.weight": normal(128, 128, seed=i) * BF16(2.0**i) for i, name in enumerate(UNIT[:3])}
    largest = max(float(np.abs(x.astype(np.float32)).max()) for x in source.values())
    scale = f32(largest) / np.float32(448)
    shared: Tensors = {}
    for name, x in source.items():
        shared |= {name: quantize(x, "modelopt_channel", block=(None, None), scale=scale.reshape(1, 1)).codes}
        shared |= {f"{name}_scale": scale}
    origin = checkpoint(tmp_path / "source", source)
    result = audit(checkpoint(tmp_path / "shared", shared, TENSOR), source=origin)
    assert not result.findings and "modelopt_channel" in result.dialect
    x = normal(128, 256)
    x[7] = 0
    origin = checkpoint(tmp_path / "rows", {"l.weight": x})
    amax = np.abs(x.astype(np.float32)).max(1, keepdims=True)
    for check, scale, observer in (
        ("zero-scale", np.maximum(amax / np.float32(448), np.float32(1e-9)).astype(np.float32), "minmax"),
        ("scale-given", np.maximum(amax * np.float32(0.85 / 448), np.float32(1e-9)).astype(np.float32), "mse"),
    ):
        codes = np.clip(x.astype(np.float32) / scale, -448, 448).astype(shared["q_proj.weight"].dtype)
        made = {"l.weight": codes, "l.weight_scale": scale}
        config = compressed("channel", observer=observer)
        (finding,) = audit(checkpoint(tmp_path / check, made, config), source=origin).findings
        assert (finding.check, finding.severity) == (check, Severity.NOTE)
