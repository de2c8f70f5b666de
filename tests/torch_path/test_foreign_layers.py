"""Layers of other stacks: what a capture reads of them, and what `f8emu diff` says of a trainer and a server.

transformers' FP8Linear runs its own code up to its kernel, `fp8_linear`, which is Triton's and runs on no CPU: the test
puts an emulation in its place. torchao's Float8Linear is run as it is, with its `emulate=True`. vLLM cannot be
imported here: its layer is a stand-in with the same attributes, whose operators have the names and the arguments of
vLLM's. None of this ran with vLLM itself.
"""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from f8emu.capture import CaptureError, ForeignRecord
from f8emu.capture.explain import Side, explained, first_block
from f8emu.capture.read import read_capture
from f8emu.dialects import Dialect, DialectName, Quantized, dialect_by_name, quantize
from f8emu.rollout import certify
from f8emu.spec import RecipeName, SpecError
from f8emu.torch import capture, convert_to_float8_training, scaled_mm
from f8emu.verdict import Exit
from tests.conformance.command import invoke

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
K = 512
SIZES = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


def weights() -> dict[str, Tensor]:
    """The weights of three layers with one input. Blocks differ in magnitude, so that none is taken for another."""
    generator, found = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for i, (name, rows) in enumerate(SIZES.items()):
        w = torch.randn(rows // 128, 128, K // 128, 128, generator=generator)
        w *= torch.exp2(torch.randint(-6, 3, (rows // 128, 1, K // 128, 1), generator=generator) - i)
        found[name] = w.view(rows, K).to(BF16)
    found["q_proj"][:128, :128] = found["q_proj"][:128, :128].clamp(-7, 7)
    found["q_proj"][0, 0] = 7  # 448 / 64: a scale that is a power of two by itself
    found["k_proj"][:, 128:256] *= 2.0**-20  # below every floor
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


def captured(model: nn.Module, path: Path, *, mode: Any = torch.no_grad) -> Path:
    with capture(model, path), mode():
        model(draw())
    return path


class ServedLinear(nn.Module):
    """vLLM's linear layer after `process_weights_after_loading`: attributes, operators, a pair of outputs."""

    def __init__(
        self, weight: Quantized, block: list[int] | None = None, activation: DialectName = "vllm_token"
    ) -> None:
        super().__init__()
        self.quant_method = object()
        self.activation: DialectName = activation
        self.weight_block_size = block
        self.logical_widths = list(SIZES.values())
        codes, scale = (nn.Parameter(x, requires_grad=False) for x in weight)
        self.weight = codes if block else nn.Parameter(codes.data.t(), requires_grad=False)
        self.register_parameter("weight_scale_inv" if block else "weight_scale", scale)
        self.register_parameter("input_scale", None)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        rows = x.reshape(-1, K)
        codes, scale = quantize(rows, self.activation)
        scale = 1 / scale if self.activation == "torchao_tensorwise" else scale  # whose stored factor encodes
        out = x.new_empty(len(rows), sum(self.logical_widths))
        if self.weight_block_size is None:
            torch.ops._C.cutlass_scaled_mm(out, codes, self.weight, scale, self.weight_scale, None)
        else:
            torch.ops.vllm.fp8_gemm_nt_op(codes, scale, self.weight, self.weight_scale_inv, out, True)
        return out.view(*x.shape[:-1], -1), None


@pytest.fixture(scope="module", autouse=True)
def operators() -> Any:
    """The operators of vLLM with its schemas, as emulations."""
    ops, vllm = torch.library.Library("_C", "FRAGMENT"), torch.library.Library("vllm", "FRAGMENT")
    of_cutlass = "Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias"
    of_deep_gemm = "Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, Tensor! output, bool e8m0"
    ops.define(f"cutlass_scaled_mm({of_cutlass}) -> ()")
    vllm.define(f"fp8_gemm_nt_op({of_deep_gemm}) -> ()")

    def cutlass(out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> None:
        scales = scale_a.expand(len(a), 1), scale_b.reshape(1, -1).expand(1, b.shape[1])
        out.copy_(scaled_mm(a, b, *(scale.contiguous() for scale in scales), out_dtype=BF16))

    def deep_gemm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, e8m0: bool) -> None:
        out.copy_(scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=BF16))

    ops.impl("cutlass_scaled_mm", cutlass, "CPU")
    vllm.impl("fp8_gemm_nt_op", deep_gemm, "CPU")
    yield
    ops._destroy()
    vllm._destroy()


def test_what_a_layer_of_vllm_shows(tmp_path: Path) -> None:
    own = quantize(torch.cat(list(weights().values())), "vllm_weight_channel")
    (step,) = read_capture(captured(Attention({"qkv_proj": ServedLinear(own)}), tmp_path))
    assert [one.record.what for one in step.records] == ["input", "output"]
    record, arrays = step.records[1].record, step.records[1].load()
    assert isinstance(record, ForeignRecord) and not record.not_shown and not record.has_bias
    for side, expected in (("a", quantize(draw(), "vllm_token")), ("b", own)):
        assert arrays[f"{side}.codes"].tobytes() == expected.codes.view(torch.uint8).numpy().tobytes()
        assert arrays[f"{side}.scale"].tobytes() == expected.scale.numpy().tobytes()
    assert arrays["product"].shape == (16, sum(SIZES.values()))


def test_what_is_not_as_its_record_says_is_refused(tmp_path: Path) -> None:
    """And a call that fails leaves nothing behind; a replay says that it computed nothing."""
    layer = ServedLinear(quantize(torch.cat(list(weights().values())), "vllm_weight_channel"))
    with capture(layer, tmp_path), torch.inference_mode():
        layer.activation = "no such dialect"  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(SpecError):
            layer(draw())
        assert _get_current_dispatch_mode() is None
        layer.activation = "vllm_token"
        layer(draw())
        layer.bias = nn.Parameter(torch.zeros(1))
        layer(draw())
        setattr(layer, "skip_bias_add", True)  # noqa: B010
        layer(draw())
    (step,) = read_capture(tmp_path)
    assert [one.record.what for one in step.records] == ["input", "output"] * 3
    assert [getattr(one.record, "has_bias", None) for one in step.records[1::2]] == [False, True, False]
    status, text, _ = invoke("replay", tmp_path, COLUMNS="2000")
    assert status == 2 and "output is of another stack's layer" in text and "NOT VERIFIED" in text
    index = step.path / "index.json"
    for old, new, message in (
        ('"b_block_rows": 1', '"b_block_rows": 2', r"b.scale float32\[256, 1\]; found float32\[512, 1\]"),
        ('"b_scale": "float32"', '"b_scale": ""', "expected the tensors a.codes, a.scale, b.codes, product"),
        ('"b_block_rows": 1', '"b_block_rows": 0', "the blocks of b must have"),
    ):
        text = index.read_text()
        index.write_text(text.replace(old, new))
        assert index.read_text() != text
        with pytest.raises(CaptureError, match=message):
            read_capture(tmp_path)[0].records[1].load()
        index.write_text(text)


def up(scale: Tensor) -> Tensor:
    """Exactly: what a server that wants E8M0 makes of float32 scales."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def test_what_gives_a_side() -> None:
    """Blocks cut by the edges: of a dialect, of the value or its bfloat16; of a scale rounded later; of nothing."""

    def side(name: DialectName, x: Any) -> Side:
        codes, scale = quantize(x, name, block=(128, 128))
        return Side(codes=codes, scale=scale, block=(128, 128), stack="vllm")

    w = torch.randn(100, 200, generator=torch.Generator().manual_seed(3)).numpy()
    a, b = side("torchao_blockwise", w), side("vllm_weight_block_cuda", w)
    assert "B: vllm_weight_block_cuda, deep_gemm_block_cuda" in explained(w, a, b)
    rounded = side("vllm_weight_block_cuda", w.astype(ml_dtypes.bfloat16))
    assert explained(w, a, rounded).endswith(" of the value rounded to bfloat16")
    late = replace(b, scale=up(torch.from_numpy(b.scale)).numpy())
    in_time = side("vllm_weight_block_ue8m0", w)
    assert (late.scale == in_time.scale).all()
    expected = "B: codes of vllm_weight_block, but the scale was rounded up to a power of two after the cast"
    assert explained(w, in_time, late).startswith("A: vllm_weight_block_ue8m0, ")
    assert explained(w, in_time, late).endswith(expected)
    codes = a.codes.copy()
    codes[5, 150] = -codes[5, 150]
    assert explained(w, a, replace(a, codes=codes)).endswith("; B: no dialect")
    wrong = np.zeros((100, 200), bool)
    wrong[99, 199] = True
    expected = "first in block [0, 1] (rows 0 to 99, columns 128 to 199), 1 of 2 blocks"
    assert first_block(wrong, a.block, wrong.shape) == expected
    assert (
        first_block(wrong, (1, 200), wrong.shape)
        == "first in block [99, 0] (row 99, columns 0 to 199), 1 of 100 blocks"
    )
    assert not first_block(wrong, wrong.shape, wrong.shape)


def served(
    path: Path, weight: Quantized | dict[str, Quantized], block: list[int] | None = None, **options: DialectName
) -> Path:
    """A capture of a server with a fused layer."""
    if isinstance(weight, dict):
        codes, scales = zip(*weight.values(), strict=True)
        weight = Quantized(torch.cat(codes), torch.cat(scales))
    model = Attention({"qkv_proj": ServedLinear(weight, block, **options)})
    return captured(model, path, mode=torch.inference_mode)  # as servers run


def trained(path: Path, recipe: RecipeName) -> Path:
    model = linears()
    convert_to_float8_training(model, config=recipe)
    return captured(model, path)


def said(a: Path, b: Path, *options: str) -> tuple[int, str]:
    status, text, error = invoke("diff", a, b, *options, COLUMNS="2000")
    assert not error.strip()
    return status, text


BLOCKWISE = dialect_by_name("torchao_blockwise")
assert BLOCKWISE.scale is not None
FLOORED = replace(BLOCKWISE, name="floored", scale=replace(BLOCKWISE.scale, amax_floor=1e-3))


@pytest.mark.parametrize(
    ("dialect", "change", "first", "expected"),
    [
        # another division
        ("vllm_weight_block_cuda", None, "q_proj", "B: vllm_weight_block_cuda, deep_gemm_block_cuda"),
        ("transformers_block", None, "q_proj", "B: fbgemm_torch, transformers_block"),
        # a floor that no dialect has
        (FLOORED, None, "k_proj", "B: no dialect; t = 448 / max(amax, 0.001); code = x * t"),
        ("torchao_blockwise", up, "q_proj", "B: the scale was rounded up to a power of two after the cast"),
        ("torchao_blockwise", torch.reciprocal, "q_proj", "B: the scales are the inverses of A's"),
        ("torchao_blockwise", lambda s: 2 * s, "q_proj", "B: the codes of A, with scales that are 2 times A's"),
    ],
)
def test_a_planted_difference_is_named(
    dialect: Dialect | DialectName, change: Any, first: str, expected: str, tmp_path: Path
) -> None:
    """Layer, matrix and block at which a server's blocks part from a trainer's, and what gives either."""
    weight = {}
    for name, w in weights().items():
        codes, scale = quantize(w, dialect, block=(128, 128))
        weight[name] = Quantized(codes, scale if change is None else change(scale))
    a = trained(tmp_path / "a", "blockwise")
    b = served(tmp_path / "b", weight, [128, 128], activation="torchao_blockwise")
    status, text = said(a, b)
    assert status == 1
    line = next(line for line in text.splitlines() if line.startswith("first divergence"))
    assert f"self_attn.{first} output b.scale (weight)" in line and expected in line
    assert "A: torchao_blockwise" in line
    ours = quantize(weights()[first], "torchao_blockwise", block=(128, 128)).scale
    i, j = (int(index) for index in (ours != weight[first].scale).nonzero()[0])
    assert (
        f"first in block [{i}, {j}] (rows {128 * i} to {128 * i + 127}, columns {128 * j} to {128 * j + 127})" in line
    )


def test_a_server_that_does_as_its_trainer_does(tmp_path: Path) -> None:
    """Equal in every part of every shard; incomplete, since the trainer's weights are not those of a server."""
    weight = {name: quantize(w, "torchao_blockwise", block=(128, 128)) for name, w in weights().items()}
    a = trained(tmp_path / "a", "blockwise")
    b = served(tmp_path / "b", weight, [128, 128], activation="torchao_blockwise")
    status, text = said(a, b)
    assert status == 3 and "A: step 1: 3 records not compared" in text
    assert re.search("INCOMPLETE: no bit differs, but 1 thing is missing; equal: 18 of 18 stages, .*", text)


def test_fused_shards_with_one_scale_are_named(tmp_path: Path) -> None:
    """vLLM loads a per-tensor checkpoint so: the largest scale, and the codes of the other shards through float16."""
    shards = {name: quantize(w, "torchao_tensorwise") for name, w in weights().items()}
    scales = {name: 1 / shard.scale for name, shard in shards.items()}
    largest = torch.stack(list(scales.values())).max().reshape(1, 1)
    codes = []
    for name, shard in shards.items():
        value = shard.codes.half() * scales[name].half()  # on a GPU torch rounds the scale to the common dtype
        codes.append((value.float() * (1 / largest)).clamp(-448, 448).to(E4M3))
    a = trained(tmp_path / "a", "tensorwise")
    b = served(tmp_path / "b", Quantized(torch.cat(codes), largest), activation="torchao_tensorwise")
    status, text = said(a, b)
    assert status == 1
    line = next(line for line in text.splitlines() if "self_attn.k_proj output b.scale" in line)
    names = ", ".join(f"self_attn.{name}" for name in SIZES)
    assert f"B: shards fused: one scale, the largest of {names}; its codes are cast again by vllm_fused_shards" in line


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module, its kernel replaced by an emulation: the activation by blocks of 128, then the GEMM."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")

    def kernel(x: Tensor, weight: Tensor, scale: Tensor, *rest: Any, **options: Any) -> Tensor:
        a = quantize(x.reshape(-1, K), "transformers_activation")
        out = scaled_mm(a.codes, weight.t(), a.scale, scale.float().t(), out_dtype=BF16)
        return out.view(*x.shape[:-1], -1)

    monkeypatch.setattr(module, "fp8_linear", kernel)
    return module


@pytest.mark.parametrize(
    ("scale_fmt", "expected"),
    [("float", "B: transformers_block, "), ("ue8m0", "B: transformers_block_ue8m0, ")],
)
def test_transformers_against_a_trainer(fp8: Any, scale_fmt: str, expected: str, tmp_path: Path) -> None:
    """Its own layers and its own quantizer of a checkpoint; its kernel does not show the activation's codes."""
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=scale_fmt)
    quantizer = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))
    layers: dict[str, nn.Module] = {}
    for name, w in weights().items():
        layers[name] = fp8.FP8Linear(K, len(w), (128, 128), scale_fmt=scale_fmt)
        layers[name].load_state_dict(quantizer._quantize_one("weight", w))
    a = trained(tmp_path / "a", "blockwise")
    b = captured(Attention(layers), tmp_path / "b")
    status, text = said(a, b, "--map", r"^self_attn[.]=self_attn.")
    assert status == 1 and "self_attn.q_proj output b.scale (weight)" in text and expected in text
    with pytest.raises(AssertionError, match=r"diff: map must be REGEX=REPLACEMENT, .* got \(=: missing \)"):
        said(a, b, "--map", "(=")
    lacks = "B: step 1: self_attn.v_proj output: a.codes, a.scale not shown by transformers"
    assert lacks in text and "output a.codes (input)" not in text
    assert "of equal operands" not in text and "float8_e8m0fnu[" not in text
    # What it multiplies is what it stores, and is compared as the numbers that E8M0 bytes are.
    record = read_capture(b)[0].records[1]
    stored = layers["q_proj"].get_parameter("weight_scale_inv")
    assert isinstance(record.record, ForeignRecord) and record.record.b_scale == str(stored.dtype).removeprefix(
        "torch."
    )
    assert record.load()["b.scale"].tobytes() == stored.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_torchao_trains_with_our_codes_and_scales(torchao: Any, tmp_path: Path) -> None:
    for recipe in ("tensorwise", "rowwise"):
        compare_with_torchao(torchao, recipe, tmp_path / recipe)


def compare_with_torchao(torchao: Any, recipe: RecipeName, tmp_path: Path) -> None:
    """Codes and scales of both operands are ours; the products of torchao's emulation are those of float32."""
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    # not by its own convert_to_float8_training, which changes Inductor for the whole process
    kind = torchao.float8_linear.Float8Linear
    theirs = Attention({name: kind.from_float(layer, config) for name, layer in linears().self_attn.items()})
    a, b = captured(theirs, tmp_path / "a"), trained(tmp_path / "b", recipe)
    for step in (read_capture(a)[0], read_capture(b)[0]):
        assert [one.record.what for one in step.records] == ["input", "weight", "output"] * len(SIZES)
    status, text = said(a, b)
    lines = [line.strip() for line in text.splitlines() if ": self_attn." in line]
    products = [f"self_attn.{name} output product" for name in SIZES]
    assert status == 1 and "equal: 18 of 21 stages" in text
    assert all(any(product in line for product in products) for line in lines[:3])


def test_a_certificate_of_a_trainer_and_a_stand_in_of_vllm(tmp_path: Path) -> None:
    """Fused layers, a prefill, and the same tokens in shorter passes; the trainer captured gradients too."""
    trained = convert_to_float8_training(linears(), config="blockwise_ue8m0")
    with capture(trained, tmp_path / "trainer"):
        torch.cat(trained(draw()), dim=-1).float().sum().backward()
    fused = quantize(torch.cat(list(weights().values())), "deep_gemm_block_ue8m0")
    served = Attention({"qkv_proj": ServedLinear(fused, [128, 128], "vllm_group_ue8m0")})
    with capture(served, tmp_path / "server"), torch.no_grad():
        for part in (draw(), draw()[:12], draw()[12:]):
            served(part)
    result = certify(tmp_path / "trainer", tmp_path / "server")
    assert result.verdict.status is Exit.EQUAL, result
    assert result.decode["rows"] == result.decode["rows_equal"] == 16
    (layer,) = result.invariance
    assert (layer["layer"], layer["evidence"]) == ("self_attn.qkv_proj", "measured")
