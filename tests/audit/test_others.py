"""Faults beside those that were met in public, each planted in one of three sound weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from f8emu.audit import Severity, audit
from f8emu.dialects import DialectName, dialect_by_name, quantize
from tests.audit.checkpoints import BF16, E4M3, E5M2, MXFP8, checkpoint, codes, compressed, f32, fp8, normal

Tensors = dict[str, np.ndarray]
SOURCE = {f"l.{i}.weight": normal(512, 512, seed=i) for i in range(3)}
BLOCK, CHANNEL, MX = "vllm_weight_block", "compressed_tensors_channel", "modelopt_mxfp8"
NAMES = {BLOCK: "{}_scale_inv", CHANNEL: "{}_scale", MX: "{}_scale"}
CONFIGS = {BLOCK: fp8(), CHANNEL: compressed("channel"), MX: MXFP8}
S, W, C = "l.1.weight_scale_inv", "l.1.weight", "l.1.weight_scale"


def quantized(dialect: DialectName, source: Tensors = SOURCE) -> Tensors:
    tensors: Tensors = {}
    for name, x in source.items():
        made = quantize(x, dialect)
        scale = made.scale.view(np.uint8) if dialect == MX else made.scale
        tensors |= {name: made.codes.copy(), NAMES[dialect].format(name): scale.copy()}
    return tensors


def with_maximum(largest: float) -> Tensors:
    """Scales of another maximum than 448."""
    tensors = quantized(BLOCK)
    x = SOURCE[W].astype(np.float32).reshape(4, 128, 4, 128)
    tensors[S] = (np.abs(x).max((1, 3)) / largest).astype(np.float32)
    tensors[W] = (x / tensors[S][:, None, :, None]).reshape(512, 512).astype(E4M3)
    return tensors


def put(name: str, change: Callable[[np.ndarray], object], dialect: DialectName = BLOCK) -> Callable[[], Tensors]:
    """`change` gives another tensor, or None after it changed this one."""

    def plant() -> Tensors:
        tensors = quantized(dialect)
        made = change(tensors[name])
        return tensors if made is None else tensors | {name: np.asarray(made)}

    return plant


def at(index: tuple[int, int], value: float) -> Callable[[np.ndarray], object]:
    return lambda array: array.__setitem__(index, value)


def swapped(a: str, b: str) -> Tensors:
    tensors = quantized(BLOCK)
    return tensors | {a: tensors[b], b: tensors[a]}


def renamed(old: str, new: str, dialect: DialectName = BLOCK) -> Tensors:
    tensors = quantized(dialect)
    return {new if name == old else name: array for name, array in tensors.items()}


def floor_of_microscaling() -> Tensors:
    made = quantize(SOURCE[W], "torchao_mx_floor")
    return {W: made.codes, C: made.scale.view(np.uint8)}


FAULTS: dict[str, tuple[Callable[[], Tensors], str, object, bool]] = {
    # tensors, check, configuration, whether the source is needed
    "NaN in a grid": (put(S, at((1, 2), np.nan)), "scale-invalid", CONFIGS[BLOCK], False),
    "a sign": (put(S, at((3, 1), -1e-4)), "scale-invalid", CONFIGS[BLOCK], False),
    "a byte of 255": (put(C, at((3, 1), 255), MX), "scale-invalid", MXFP8, False),
    "one code of NaN": (put(W, lambda w: at((200, 300), 0xFF)(w.view(np.uint8))), "nan-code", CONFIGS[BLOCK], False),
    "reciprocals": (put(S, lambda s: 1 / s), "amplitude", CONFIGS[BLOCK], False),
    "amaxes": (put(S, lambda s: s * 448), "amplitude", CONFIGS[BLOCK], False),
    "E5M2": (put(W, lambda w: w.astype(np.float32).astype(E5M2)), "code-dtype", CONFIGS[BLOCK], False),
    "one layer in bfloat16": (
        lambda: {name: x for name, x in quantized(BLOCK).items() if name != S} | {W: SOURCE[W]},
        "unquantized",
        CONFIGS[BLOCK],
        False,
    ),
    "exponents as numbers": (
        put(C, lambda s: s.astype(np.float32), MX),
        "amplitude",
        compressed("group", group_size=32),
        False,
    ),
    "exponents without bias": (put(C, lambda s: s - np.uint8(127), MX), "amplitude", MXFP8, False),
    "ones": (put(S, np.ones_like), "scale-constant", CONFIGS[BLOCK], False),
    "one scale for all": (put(S, lambda s: np.full_like(s, s.max())), "scale-constant", CONFIGS[BLOCK], False),
    "rounded down after": (put(S, lambda s: np.exp2(np.floor(np.log2(s)))), "rounded-after", CONFIGS[BLOCK], False),
    "the maximum of FNUZ": (lambda: with_maximum(240), "too-coarse", CONFIGS[BLOCK], False),
    "another block size": (lambda: quantized(BLOCK), "scale-shape", fp8(weight_block_size=[64, 64]), False),
    "a static scheme": (lambda: quantized(BLOCK), "input-scale", fp8(activation_scheme="static"), False),
    "no configuration": (lambda: quantized(BLOCK), "config-missing", {}, False),
    "an ignored module": (lambda: quantized(BLOCK), "ignored", fp8(modules_to_not_convert=["l.1"]), False),
    "another name": (lambda: renamed(C, "l.1.weight_scale_inv", CHANNEL), "scale-name", CONFIGS[CHANNEL], False),
    "a weight in bfloat16": (lambda: quantized(BLOCK) | {W: SOURCE[W]}, "scale-orphan", CONFIGS[BLOCK], False),
    "two scales": (lambda: quantized(BLOCK) | {C: f32([1.0])}, "scale-orphan", CONFIGS[BLOCK], False),
    "one scale of many": (put(C, lambda s: s[:1], CHANNEL), "scale-shape", CONFIGS[CHANNEL], False),
    "one number for all rows": (put(C, lambda s: s[0], CHANNEL), "scale-shape", CONFIGS[CHANNEL], False),
    "codes as bytes": (put(W, lambda w: w.view(np.uint8)), "code-dtype", CONFIGS[BLOCK], False),
    "a scale in bfloat16": (put(S, lambda s: s.astype(BF16)), "scale-dtype", CONFIGS[BLOCK], False),
    "one block of large weights": (put(S, at((1, 2), 0.2)), "amplitude", CONFIGS[BLOCK], False),
    "another quantizer": (lambda: quantized(MX) | floor_of_microscaling(), "dialects-mixed", MXFP8, True),
    "a weight that was lost": (
        lambda: {name: x for name, x in quantized(BLOCK).items() if name not in (W, S)} | {"l.1.norm": f32(1.0)},
        "left-out",
        CONFIGS[BLOCK],
        True,
    ),
    "transposed": (put(S, lambda s: s.T), "grid-moved", CONFIGS[BLOCK], True),
    "shifted": (put(S, lambda s: np.roll(s, 1, 0)), "grid-moved", CONFIGS[BLOCK], True),
    "two blocks": (put(S, lambda s: s[[1, 0, 2, 3]]), "grid-moved", CONFIGS[BLOCK], True),
    "two tensors": (lambda: swapped(S, "l.2.weight_scale_inv"), "grid-moved", CONFIGS[BLOCK], True),
    "one ulp": (put(S, lambda s: np.nextafter(s, s + (np.arange(4) == 2))), "no-dialect", CONFIGS[BLOCK], True),
    "one code": (put(W, lambda w: at((5, 7), 0x11)(w.view(np.uint8))), "no-dialect", CONFIGS[BLOCK], True),
    "rows": (put(W, lambda w: w[::-1]), "no-dialect", CONFIGS[BLOCK], True),
    "all exponents": (put(C, lambda s: s - np.uint8(1), MX), "no-dialect", MXFP8, True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    plant, check, config, needs_source = FAULTS[name]
    path = checkpoint(tmp_path / "model", plant(), config)
    source = checkpoint(tmp_path / "source", SOURCE) if needs_source else None
    result = audit(path, source=source)
    assert result.verdict.status == 1
    named = {
        finding.tensor.removesuffix("_scale_inv").removesuffix("_scale")
        for finding in result.findings
        if finding.check == check
    }
    assert W in named or check == "config-missing", result.findings
    if not needs_source and check not in ("config-missing", "scale-shape", "input-scale"):
        assert named == {W}, "the sound weights have none"


def test_scales_of_shards_and_vectors_of_codes(tmp_path: Path) -> None:
    """Slots that a loader would leave uninitialized, and a bias that no consumer decodes."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    sound = {"qkv_proj.weight": codes(384, 128), "qkv_proj.weight_scale": f32(1e-3, 2e-3, 1e-3)}
    result = audit(checkpoint(tmp_path / "sound", sound, config))
    assert not result.findings and result.unscaled == ["qkv_proj.weight"] and result.verdict.status == 3
    assert "no fault in 0 of 1 float8 weight, but no scale of qkv_proj.weight can be" in result.verdict.line
    faulty = sound | {"qkv_proj.weight_scale": f32(1e-3, 1e-39, 3e5), "qkv_proj.bias": codes(1, 384)[0]}
    findings = audit(checkpoint(tmp_path / "faulty", faulty, config)).findings
    assert {(finding.check, finding.tensor, finding.block) for finding in findings} == {
        ("scale-invalid", "qkv_proj.weight", (1,)),
        ("amplitude", "qkv_proj.weight", (2,)),
        ("code-dtype", "qkv_proj.bias", None),
    }


def test_files_without_a_configuration(tmp_path: Path) -> None:
    """A plain cast of a model whose norms are called scales; names of ComfyUI in a file that says it is one."""
    plain = {"a.weight": SOURCE[W].astype(E4M3), "norm.scale": np.ones(8, BF16)}
    assert not audit(checkpoint(tmp_path / "plain", plain)).findings
    scaled = {"a.weight": codes(), "a.scale_weight": f32(1e-4)[0], "scaled_fp8": np.zeros(2, E4M3)}
    assert not audit(checkpoint(tmp_path / "scaled", scaled)).findings
    findings = audit(checkpoint(tmp_path / "lost", scaled | {"b.weight": codes()})).findings
    assert [(finding.check, finding.tensor) for finding in findings] == [("scale-missing", "b.weight")]


def test_codes_of_other_weights_are_an_error_and_explained_zeros_are_none(tmp_path: Path) -> None:
    """A few codes of another rounding are a warning; a zero weight is a fault where its quantizer is not known."""
    source = checkpoint(tmp_path / "source", SOURCE | {W: np.zeros((512, 512), BF16)})
    tensors: Tensors = {}
    for name, x in (SOURCE | {W: np.zeros((512, 512), BF16)}).items():
        made = quantize(x, "vllm_tensor")
        tensors |= {name: made.codes, f"{name}_scale": made.scale.reshape(1)}
    tensors_of_half = {name: x.astype(np.float16) if "scale" in name else x for name, x in tensors.items()}
    underflow = checkpoint(tmp_path / "half", tensors_of_half, compressed("tensor"))
    rounded = [(finding.check, finding.severity) for finding in audit(underflow, source=source).findings]
    assert rounded == [("scale-dtype", Severity.WARNING)] * 2 + [("scale-zero", Severity.WARNING)]
    path = checkpoint(tmp_path / "zeros", tensors, compressed("tensor"))
    for origin, severity in ((None, Severity.WARNING), (source, Severity.NOTE)):
        (finding,) = audit(path, source=origin).findings
        assert (finding.check, finding.tensor, finding.severity) == ("scale-zero", W, severity)
    rolled = quantized(BLOCK) | {W: np.roll(quantized(BLOCK)[W].view(np.uint8), 1, 0).view(E4M3)}
    path = checkpoint(tmp_path / "rolled", rolled, CONFIGS[BLOCK])
    (finding,) = audit(path, source=checkpoint(tmp_path / "sound", SOURCE)).findings
    assert (finding.check, finding.severity) == ("no-dialect", Severity.ERROR)


@pytest.mark.parametrize("dialect", NAMES)
def test_codes_of_a_master_beside_its_copy_and_the_reverse(dialect: DialectName, tmp_path: Path) -> None:
    """Each is told, and nothing else; with a faulty code a weight is neither's."""
    generator = np.random.default_rng(7)
    masters: Tensors = {W: (SOURCE[W] * generator.uniform(0.99, 1.01, (512, 512))).astype(np.float32)}
    copies = {name: x.astype(BF16) for name, x in masters.items()}
    for number, (served, other) in enumerate(((masters, copies), (copies, masters))):
        tensors, source = quantized(dialect, served), checkpoint(tmp_path / f"source {number}", other)
        findings = audit(checkpoint(tmp_path / f"sound {number}", tensors, CONFIGS[dialect]), source=source).findings
        assert [finding.check for finding in findings] == ["cast-from"] and 'cast_weight_from="bfloat16"' in findings[
            0
        ].remedy
        tensors[W].view(np.uint8)[5, 7] ^= 0x04
        findings = audit(checkpoint(tmp_path / f"faulty {number}", tensors, CONFIGS[dialect]), source=source).findings
        assert [finding.check for finding in findings] == ["no-dialect"]


@pytest.mark.parametrize("dialect", NAMES)
def test_without_a_fault_nothing_is_named(dialect: DialectName, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", quantized(dialect), CONFIGS[dialect])
    result = audit(path, source=checkpoint(tmp_path / "source", SOURCE), consumer="transformers:h100")
    assert result.verdict.status == 0 and not result.findings and dialect in result.dialects


def test_what_is_not_float8_is_left_alone(tmp_path: Path) -> None:
    """Packed weights of other formats beside their scales, norms, biases, embeddings, a router and an ignored head."""
    other = {
        **dict.fromkeys(("norm.weight", "q_proj.bias", "mlp.gate.e_score_correction_bias"), f32(1.0)),
        **dict.fromkeys(("model.embed_tokens.weight", "mlp.gate.weight", "l.9.weight"), SOURCE[W]),
        **{"up.weight_packed": np.zeros((8, 4), np.uint8), "up.weight_scale": f32([1.0])},
        **{
            "down.weight": np.zeros((8, 4), np.uint8),
            "down.weight_scale": np.ones((8, 1), E4M3),
            "a.k_scale": f32(0.5),
        },
    }
    path = checkpoint(tmp_path / "model", quantized(BLOCK) | other, fp8(modules_to_not_convert=["l.9", "lm_head"]))
    assert not audit(path, source=checkpoint(tmp_path / "source", SOURCE)).findings
    mistral = {"wq.weight": quantized(BLOCK)[W], "wq.qscale_weight": f32(1e-4)[0], "wq.qscale_act": f32(0.1)[0]}
    assert not audit(checkpoint(tmp_path / "mistral", mistral)).findings


@pytest.mark.parametrize(
    ("check", "source"),
    [("source-missing", {"model.l.1.weight": SOURCE[W]}), ("source-shape", {W: SOURCE[W][:256]})],
)
def test_a_source_that_is_another_model(check: str, source: Tensors, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", quantized(BLOCK), CONFIGS[BLOCK])
    result = audit(path, source=checkpoint(tmp_path / "source", source))
    assert result.verdict.status == 1 and [finding.check for finding in result.findings] == [check]


def test_a_source_refutes_what_was_judged_by_chance(tmp_path: Path) -> None:
    """Weights that were clipped before they were quantized have 448 as often as codes that were clipped."""
    x = np.clip(SOURCE[W].astype(np.float32), -0.0136, 0.0136).astype(BF16)
    made = quantize(x, MX)
    path = checkpoint(tmp_path / "model", {W: made.codes, C: made.scale.view(np.uint8)}, MXFP8)
    for source, severity in ((None, Severity.ERROR), (checkpoint(tmp_path / "source", {W: x}), Severity.NOTE)):
        (finding,) = audit(path, source=source).findings
        assert (finding.check, finding.severity) == ("saturated", severity)


def test_a_layer_that_was_left_out_on_purpose(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", {n: x for n, x in quantized(BLOCK).items() if n not in (W, S)}, fp8())
    assert not audit(path, source=checkpoint(tmp_path / "source", SOURCE)).findings


def test_shards_that_share_a_scale_excuse_each_other(tmp_path: Path) -> None:
    """As Model-Optimizer exports q, k and v: the scale is that of the largest."""
    x = SOURCE[W].astype(np.float32)
    scale = np.float32(np.abs(x).max() / 448)
    large, small = ((x * factor / scale).astype(E4M3) for factor in (1, 0.1))
    both = {"q.weight": large, "k.weight": small, "q.weight_scale": f32([scale])[0], "k.weight_scale": f32([scale])[0]}
    assert not audit(checkpoint(tmp_path / "both", both, compressed("tensor"))).findings
    both["k.weight_scale"] = np.nextafter(both["k.weight_scale"], np.float32(0))
    (finding,) = audit(checkpoint(tmp_path / "apart", both, compressed("tensor"))).findings
    assert (finding.check, finding.tensor) == ("too-coarse", "k.weight")


def test_blocks_that_end_early_and_experts(tmp_path: Path) -> None:
    """Partial blocks, in shards; experts that are one tensor: the block that is named is that of the grid."""
    x = np.stack([normal(200, 272, seed=i) for i in range(3)])
    made = [quantize(one, BLOCK) for one in x]
    stacked = {"e.up": np.stack([one.codes for one in made]), "e.up_scale_inv": np.stack([one.scale for one in made])}
    shards = {"a.safetensors": ["e.up"], "b.safetensors": ["e.up_scale_inv"]}
    source = checkpoint(tmp_path / "source", {"e.up": x})
    result = audit(checkpoint(tmp_path / "sound", stacked, fp8(), shards), source=source)
    assert not result.findings and result.blocks == 18 and BLOCK in result.dialects
    stacked["e.up"].view(np.uint8)[2, 199, 271] = 0x7F
    stacked["e.up_scale_inv"][1, 0, 1] *= np.float32(1.5)
    result = audit(checkpoint(tmp_path / "faulty", stacked, fp8(), shards), source=source)
    places = {one.check: one.block for one in result.findings}
    assert places == {"nan-code": (2, 1, 2), "no-dialect": (1, 0, 1)}


def test_bands_do_not_change_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a band, the largest codes are those of each block."""
    from f8emu.audit import blocks
    from f8emu.audit.checkpoint import read_checkpoint
    from f8emu.audit.formats import format_of

    codes = np.random.default_rng(0).integers(0, 256, (300, 272), np.uint8)
    for scale, extent in (((3, 3), (128, 128)), ((300, 1), (1, 272)), ((1,), (300, 272)), ((300, 9), (1, 32))):
        tensors = {"l.weight": codes.view(E4M3), "l.weight_scale": np.ones(scale, BF16)}
        checkpoint_ = read_checkpoint(checkpoint(tmp_path / "model", tensors))
        (weight,) = blocks.weights_of(checkpoint_, format_of(checkpoint_))
        assert weight.extent == extent
        h, w = extent
        parts = [[codes[r : r + h, c : c + w] & 0x7F for c in range(0, 272, w)] for r in range(0, 300, h)]
        expected = [int(part.max()) for row in parts for part in row]
        for size in (272, 1000, 40_000, 1 << 20):
            measured = blocks.measured(weight, size)
            assert measured.largest.tolist() == expected, (scale, size)


@pytest.mark.parametrize("scheme", ["shard", CHANNEL, BLOCK, MX])
def test_the_shards_of_a_fused_weight_are_compared_each_with_its_source(scheme: str, tmp_path: Path) -> None:
    """Of sizes of their own; a code that no rule gives is found in its shard."""
    shapes = {"q_proj": (512, 256), "k_proj": (128, 256), "v_proj": (128, 256)}
    source = {f"l.{name}.weight": normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    dialect = "vllm_tensor" if scheme == "shard" else scheme
    made = [quantize(x, dialect_by_name(dialect)) for x in source.values()]
    scale = np.concatenate([finding.scale.view(np.uint8) if scheme == MX else finding.scale for finding in made])
    weight = np.concatenate([finding.codes for finding in made])
    name = "l.qkv_proj.weight_scale" + "_inv" * (scheme == BLOCK)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"} if scheme == "shard" else CONFIGS[scheme]
    origin = checkpoint(tmp_path / "source", source)
    for folder in ("clean", "planted"):
        tensors = {"l.qkv_proj.weight": weight, name: scale.reshape(-1) if scheme == "shard" else scale}
        result = audit(checkpoint(tmp_path / folder, tensors, config), source=origin)
        assert result.compared == 3, result.findings
        faults = [finding for finding in result.findings if finding.is_fault]
        if folder == "clean":
            assert not faults and result.dialects[dialect] == 3
        else:
            assert [finding.tensor for finding in faults] == ["l.qkv_proj.weight (k_proj)"], faults
        weight.view(np.uint8)[512 + 5, 7] ^= 1


def test_a_fused_weight_whose_scales_are_packed_is_left_whole(tmp_path: Path) -> None:
    tensors = {"l.qkv_proj.weight": codes(384), "l.qkv_proj.weight_scale_inv": np.full((3, 1), 0x77777777, np.int32)}
    source = {f"l.{name}.weight": normal(128, 128) for name in ("q_proj", "k_proj", "v_proj")}
    path = checkpoint(tmp_path / "model", tensors, fp8())
    findings = audit(path, source=checkpoint(tmp_path / "source", source)).findings
    assert ("scale-packed", "l.qkv_proj.weight") in {(finding.check, finding.tensor) for finding in findings}


def test_a_finding_counts_the_blocks_that_have_it(tmp_path: Path) -> None:
    """Two of four scales have mantissa bits: the consumer's finding, and that of the configuration, are of those."""
    tensors = {"l.weight": codes(128, 512), "l.weight_scale_inv": f32([2**-9, 3 * 2**-10, 2**-9, 3 * 2**-11])}
    path = checkpoint(tmp_path / "model", tensors, fp8(scale_fmt="ue8m0"))
    findings = {finding.check: finding for finding in audit(path, consumer="deep_gemm:b200").findings}
    assert {(findings[check].block, findings[check].blocks) for check in ("scale-kind", "scale-format")} == {
        ((0, 1), 2)
    }
