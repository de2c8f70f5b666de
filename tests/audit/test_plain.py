"""Weights in high precision beside the source, weights that are gone, and scales that a whole weight was given."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from f8emu.audit import Audit, Severity, audit
from f8emu.dialects import quantize
from tests.audit.checkpoints import BF16, checkpoint, fp8, normal

Tensors = dict[str, np.ndarray]
PARTS, SCALE = ("gate_proj", "up_proj", "down_proj"), "layers.1.mlp.up_proj.weight_scale_inv"
DOWN = "layers.1.mlp.down_proj.weight"
SOURCE = {f"layers.{i}.mlp.{p}.weight": normal(512, 512, seed=3 * i + j) for i in range(3) for j, p in enumerate(PARTS)}
SOURCE |= {f"layers.{i}.norm.weight": normal(1, 256, seed=20 + i)[0] for i in range(3)}
SOURCE |= {"embed.weight": normal(64, 256, seed=30).astype(np.float32) * np.float32(1.01)}
SOURCE |= {"lm_head.weight": normal(64, 256, seed=31), "visual.patch.proj.weight": normal(8, 8)}


def quantized(*gone: str) -> Tensors:
    """As an exporter leaves it: the embedding in bfloat16, nothing of the vision tower."""
    tensors: Tensors = {}
    for name, x in SOURCE.items():
        if "_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(x, "deep_gemm_block_ue8m0")
        elif "visual" not in name:
            tensors[name] = x.astype(BF16)
    return {name: x for name, x in tensors.items() if name not in gone}


def audited(folder: Path, tensors: Tensors, source: Tensors | None = SOURCE, config: object = None) -> Audit:
    path = checkpoint(folder / "model", tensors, config or fp8(scale_fmt="ue8m0"))
    return audit(path, source=None if source is None else checkpoint(folder / "source", source))


def test_what_a_sound_export_leaves_out(tmp_path: Path) -> None:
    result = audited(tmp_path, quantized())
    assert not result.findings and result.verdict.status == 0
    assert result.verdict.line == "no fault in 9 of 9 float8 weights; 5 unquantized weights compared"
    assert "--source" in audited(tmp_path, quantized(), None).verdict.line
    tied = SOURCE | {"lm_head.weight": SOURCE["embed.weight"]}
    assert not audited(tmp_path, quantized("lm_head.weight"), tied).findings


@pytest.mark.parametrize("gone", ["lm_head.weight", "embed.weight", "layers.2.norm.weight", DOWN])
def test_a_weight_that_is_gone_is_named(gone: str, tmp_path: Path) -> None:
    result = audited(tmp_path, quantized(gone, f"{gone}_scale_inv"))
    assert [(finding.check, finding.tensor) for finding in result.findings] == [("left-out", gone)]
    result = audited(tmp_path, quantized(gone, f"{gone}_scale_inv"), None)
    gaps = [(finding.check, finding.severity, finding.tensor, finding.expected) for finding in result.findings]
    expected = ("layer-gap", Severity.WARNING, DOWN.removesuffix(".weight"), "down_proj, which 2 other layers have")
    assert gaps == ([expected] if gone == DOWN else [])


CHANGES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str, str]] = {
    "one value": ("layers.0.norm.weight", lambda x: np.where(np.arange(256) == 7, 2, x), "weight-altered", "1 of 256"),
    "rows": ("lm_head.weight", lambda x: x[:63], "weight-altered", "[63, 256]"),
    "doubled": (SCALE, lambda s: 2 * s, "no-dialect", "its codes, with scales that are 2 times its own"),
    "inverse": (SCALE, lambda s: 1 / s, "no-dialect", "its codes, with scales that are the inverses of its own"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensor, change, check, seen = CHANGES[name]
    tensors = quantized()
    tensors[tensor] = change(tensors[tensor]).astype(tensors[tensor].dtype)
    (finding,) = [finding for finding in audited(tmp_path, tensors).findings if finding.check == check]
    assert finding.tensor == tensor.removesuffix("_scale_inv") and seen in finding.found


def test_one_scale_accuses_its_own_block_alone(tmp_path: Path) -> None:
    tensors = quantized()
    tensors[SCALE] = tensors[SCALE] * np.where(np.arange(16).reshape(4, 4) == 6, np.float32(1.3), np.float32(1))
    for config in (fp8(), fp8(scale_fmt="ue8m0")):
        (finding,) = [finding for finding in audited(tmp_path, tensors, None, config).findings if finding.block]
        assert (finding.check, finding.block, finding.blocks) == ("scale-format", (1, 2), 1)
