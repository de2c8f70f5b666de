"""MXFP8 checkpoints as producers lay them out: clean ones, f8emu's own casts too, and scales in wrong places."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import f8emu.numpy as f8
from f8emu.audit.run import audit
from f8emu.dialects import quantize
from f8emu.spec import E8M0Rule, ScaleRule
from tests.audit.checkpoints import MXFP8, checkpoint, fp8, normal

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "MXDynamicActivationMXWeightConfig"}}}
BLOCKS = fp8(weight_block_size=[1, 32], scale_fmt="ue8m0")
NAMES = ("l.weight", "l.weight_scale")
W = normal(256, 384)


def ours(rule: E8M0Rule) -> tuple[np.ndarray, np.ndarray]:
    inv_scale, scale = f8.scale_from_amax(f8.amax(W, "blockwise_1x32"), "float8_e4m3fn", ScaleRule(e8m0=rule))
    return f8.quantize(W, inv_scale, "float8_e4m3fn", "blockwise_1x32"), scale


def audited(folder: Path, config: Any, codes: np.ndarray, scale: np.ndarray, names: tuple[str, str] = NAMES) -> Any:
    stored = checkpoint(folder / "stored", dict(zip(names, (codes, scale), strict=True)), config)
    return audit(stored, source=checkpoint(folder / "source", {"l.weight": W}))


LAYOUTS: dict[str, tuple[Any, tuple[str, str], bool]] = {
    "Model-Optimizer MXFP8": (MODELOPT, NAMES, True),
    "compressed-tensors": (MXFP8, NAMES, True),
    "MXFP8": ({"quant_method": "mxfp8"}, ("l.weight", "l.weight_scale_inv"), True),
    "float8 in blocks of 1 x 32": (BLOCKS, ("l.weight", "l.weight_scale_inv"), True),
    "torchao float8": (TORCHAO, ("l._weight_qdata", "l._weight_scale"), False),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rule", [E8M0Rule.RCEIL, E8M0Rule.FLOOR])
def test_a_layout_is_clean_and_the_rule_is_named(name: str, rule: E8M0Rule, tmp_path: Path) -> None:
    config, names, is_bytes = LAYOUTS[name]
    codes, scale = ours(rule)
    result = audited(tmp_path, config, codes, scale.view(np.uint8) if is_bytes else scale, names)
    assert (result.format, [finding.check for finding in result.findings]) == (name, [])
    expected = "torchao_mx_floor" if rule is E8M0Rule.FLOOR else "transformer_engine_mxfp8"
    assert expected in str(result.dialects)


def swizzled(scale: np.ndarray) -> np.ndarray:
    return f8.swizzle_scales(scale).reshape(scale.shape)


@pytest.mark.parametrize(
    ("change", "place"),
    [(swizzled, "cuBLASLt's swizzled layout"), (lambda s: np.roll(s, 1, 1), "shifted by 1 block across")],
    ids=["swizzled", "shifted"],
)
def test_scales_in_wrong_places_are_named(change: Any, place: str, tmp_path: Path) -> None:
    codes, scale = quantize(W, "modelopt_mxfp8")
    result = audited(tmp_path, MODELOPT, codes, change(scale.view(np.uint8)))
    assert [finding.check for finding in result.findings] == ["grid-moved"]
    assert place in result.findings[0].found
