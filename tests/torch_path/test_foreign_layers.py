"""Layers of other stacks: what a capture reads of them, and what `f8emu diff` says of a trainer and a server.

transformers' FP8Linear runs its own code up to its kernel, `fp8_linear`, which is Triton's and runs on no CPU: the test
puts an emulation in its place. torchao's Float8Linear is run as it is, with its `emulate=True`. vLLM cannot be
imported here: its layer is a stand-in with the same attributes, whose operator has the name and the arguments of
vLLM's. None of this ran with vLLM itself.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from f8emu.capture import ForeignRecord
from f8emu.capture.read import read_capture
from f8emu.torch import amax, capture, scaled_mm

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
K = 256
SIZES = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Of three layers with one input, a magnitude to each block: shards and blocks cannot be mixed up."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for i, (name, rows) in enumerate(SIZES.items()):
        w = torch.randn(rows, K, generator=generator).view(rows // 128, 128, K // 128, 128)
        w *= torch.exp2(torch.randint(-9, 3, (rows // 128, 1, K // 128, 1), generator=generator) - i)
        found[name] = w.view(rows, K).to(BF16)
    return found


def draw() -> Tensor:
    return torch.randn(16, K, generator=torch.Generator().manual_seed(9)).to(BF16)


class Attention(nn.Module):
    """Layers under the names of a Llama; all see one input."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> list[Any]:
        return [layer(x[None]) for layer in self.self_attn.values()]


def linears() -> Attention:
    layers: dict[str, nn.Module] = {}
    for name, w in weights().items():
        layers[name] = nn.Linear(K, len(w), bias=False, dtype=BF16)
        layers[name].weight = nn.Parameter(w)
    return Attention(layers)


def captured(model: nn.Module, path: Path) -> Path:
    with capture(model, path), torch.no_grad():
        model(draw())
    return path


class ServedLinear(nn.Module):
    """vLLM's linear layers after `process_weights_after_loading`: its attributes, its operator, its pair of outputs."""

    def __init__(self, codes: Tensor, scale: Tensor, block: list[int] | None, widths: list[int]) -> None:
        super().__init__()
        self.quant_method = object()
        self.weight_block_size = block
        self.logical_widths = widths
        self.weight = nn.Parameter(codes if block else codes.t(), requires_grad=False)
        self.register_parameter("weight_scale_inv" if block else "weight_scale", nn.Parameter(scale, False))
        self.register_parameter("input_scale", None)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        rows = x.reshape(-1, K)
        out = x.new_empty(len(rows), sum(self.logical_widths))
        if self.weight_block_size is None:
            scale = amax(rows, "rowwise") / 448
            codes = (rows.float() / scale).to(E4M3)
            torch.ops._C.cutlass_scaled_mm(out, codes, self.weight, scale, self.weight_scale, None)
        return out.view(*x.shape[:-1], -1), None


@pytest.fixture(scope="module")
def operators() -> Any:
    """The operator of vLLM with its schema, as an emulation."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
    )

    def run(out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> None:
        scales = scale_a.expand(len(a), 1), scale_b.reshape(1, -1).expand(1, b.shape[1])
        out.copy_(scaled_mm(a, b, *(scale.contiguous() for scale in scales), out_dtype=BF16))

    library.impl("cutlass_scaled_mm", run, "CPU")
    return library


def test_what_a_layer_of_vllm_shows(operators: Any, tmp_path: Path) -> None:
    w = torch.cat(list(weights().values()))
    scale = amax(w, "rowwise") / 448
    layer = ServedLinear((w.float() / scale).to(E4M3), scale, None, list(SIZES.values()))
    (step,) = read_capture(captured(Attention({"qkv_proj": layer}), tmp_path))
    assert [one.record.what for one in step.records] == ["input", "output"]
    record, arrays = step.records[1].record, step.records[1].load()
    assert isinstance(record, ForeignRecord) and not record.not_shown and not record.has_bias
    assert arrays["b.codes"].tobytes() == layer.weight.t().contiguous().view(torch.uint8).numpy().tobytes()
    assert arrays["b.scale"].tobytes() == scale.numpy().tobytes()
    assert arrays["a.scale"].tobytes() == (amax(draw(), "rowwise") / 448).numpy().tobytes()
    assert arrays["product"].shape == (16, len(w)) and arrays["a.codes"].shape == (16, K)
