"""Nothing is found in what the quantizer of any dialect gives, or any tool writes; tests/dialects audits packages."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from f8emu.audit import audit
from f8emu.dialects import DIALECTS, DialectName, quantize
from f8emu.dialects.rules import MX_GROUP, ROW, SQUARE, TENSOR
from tests.audit.checkpoints import BF16, MXFP8, checkpoint, compressed, fp8
from tests.audit.sound import TOOLS, accused, sound


def weights(rows: int, k: int, seed: int) -> dict[str, np.ndarray]:
    """Distributions of trained, initialized and artificial weights."""
    draw = np.random.default_rng(seed)
    normal, scale = draw.standard_normal((rows, k)), 10.0 ** draw.uniform(-2, 0)
    outlier = normal.copy()
    outlier[1, 2] = 1000
    return {
        "normal": normal,
        "heavy tails": draw.standard_t(3, (rows, k)) * 0.1,
        "uniform": draw.uniform(-1, 1, (rows, k)) * scale,
        "constant": np.full((rows, k), scale),
        "ternary": draw.integers(-1, 2, (rows, k)) * scale,
        "sparse": normal * (draw.random((rows, k)) < 0.05),
        "one outlier": outlier,
        "rows of all sizes": normal * 2.0 ** draw.uniform(-3, 3, (rows, 1)),
        "tiny": normal * 1e-15,
        "skewed": np.exp(2 * normal) * 0.01,
    }


CONFIGURATIONS = {
    SQUARE: ("l.weight_scale_inv", fp8()),
    MX_GROUP: ("l.weight_scale", MXFP8),
    TENSOR: ("l.weight_scale", compressed("tensor")),
    ROW: ("l.weight_scale", compressed("channel")),
}
SEEDS = {"llm-compressor": (3, 8), "Model-Optimizer": (3, 4), "transformers": (2, 3), "TransformerEngine": (2, 7)}
"""Layouts that were accused, where these are not the first."""
WITHOUT_FLOORS = (
    "compressed_tensors_tensor compressed_tensors_channel compressed_tensors_block compressed_tensors_mxfp8 qwix "
    "transformers_block transformers_block_ue8m0 modelopt_tensor modelopt_channel modelopt_block modelopt_mxfp8 "
    "transformer_engine_block transformer_engine_mxfp8 torchao_mx_floor torchao_mx_even torchao_mx_ceil"
).split()
"""Dialects that quantize weights of any size by their amax."""


@pytest.mark.parametrize("name", WITHOUT_FLOORS)
def test_no_fault_is_invented(name: DialectName, tmp_path: Path) -> None:
    for seed, (dtype, shape) in enumerate([(BF16, (256, 256)), (np.float32, (200, 320))]):
        for kind, x in [*weights(*shape, seed).items()][seed::2]:
            x = x.astype(np.float32).astype(dtype)
            block = next(one for one in DIALECTS[name].blocks if one in CONFIGURATIONS)
            made = quantize(x, name, block=block)
            scale_name, config = CONFIGURATIONS[block]
            if made.scale.dtype == ml_dtypes.float8_e8m0fnu and block == MX_GROUP:
                made = made._replace(scale=made.scale.view(np.uint8))
            if block == SQUARE and made.scale.dtype != BF16 and name.endswith(("ue8m0", "engine_block")):
                config = fp8(scale_fmt="ue8m0")
            scale = made.scale.reshape(1) if block == TENSOR else made.scale
            path = checkpoint(tmp_path / "model", {"l.weight": made.codes, scale_name: scale}, config)
            result = audit(path, source=checkpoint(tmp_path / "source", {"l.weight": x}))
            assert result.verdict.status == 0 and not result.findings, (kind, dtype, result.findings)
            assert name in result.dialect.split(", "), kind


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "f8emu"])  # tests/dialects audits its exports
def test_what_a_tool_writes_is_not_accused(tool: str, tmp_path: Path) -> None:
    """Two seeds of each, with and without a source; ten: `python -m benchmarks.proofs.sound_checkpoints`."""
    for seed in SEEDS.get(tool, (0, 1)):
        made = sound(tool, seed)
        (tmp_path / str(seed)).mkdir()
        assert accused(*made.write(tmp_path / str(seed)), made.dialect) == [], (seed, made.variant)
