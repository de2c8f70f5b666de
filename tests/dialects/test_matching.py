"""Which dialect gives every byte: one rule, also of zeros and NaN, for whoever asks."""

from pathlib import Path

import ml_dtypes
import numpy as np

from f8emu.audit import audit
from f8emu.capture.explain import Side, explained
from f8emu.dialects import quantize
from f8emu.dialects.matching import fitting
from tests.audit.checkpoints import checkpoint, fp8

DIALECT = "vllm_weight_block"


def test_diff_and_audit_name_the_same_dialect_where_zeros_have_lost_their_sign(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).standard_normal((256, 256))
    drawn[:, ::5] *= 1e-6  # become zeros of both signs
    x = drawn.astype(ml_dtypes.bfloat16)
    codes, scale = quantize(x, DIALECT)
    lost = int(np.count_nonzero(codes.view(np.uint8) == 0x80))
    unsigned = np.where(codes.view(np.uint8) == 0x80, 0, codes.view(np.uint8)).astype(np.uint8).view(codes.dtype)
    assert lost > 1000
    # 1. The one function.
    for found, zeros in ((codes, 0), (unsigned, lost)):
        fits = {one.dialect.name: one.zeros_differ for one in fitting(x, found, scale, (128, 128))}
        assert fits[DIALECT] == zeros
    # 2. Those that ask it.
    side = Side(codes=unsigned, scale=scale, block=(128, 128), stack="vllm_weight")
    said = explained(x, side, side)
    assert DIALECT in said and f"but for the sign of {lost:,} zeros" in said
    made = checkpoint(tmp_path / "made", {"l.weight": unsigned, "l.weight_scale_inv": scale}, fp8())
    found = audit(made, source=checkpoint(tmp_path / "source", {"l.weight": x}))
    assert DIALECT in found.dialect and not found.findings
    # 3. One other code, and none fits.
    unsigned.view(np.uint8)[0, 0] ^= 1
    assert not fitting(x, unsigned, scale, (128, 128))


def test_any_nan_is_any_nan_and_a_rule_of_another_format_does_not_fit() -> None:
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    x[1, 3] = np.nan
    codes, scale = quantize(x, "torchao_inference", block=(1, None))
    turned = codes.view(np.uint8).copy()
    turned[turned == 0x7F] = 0xFF
    assert "torchao_inference" in {
        one.dialect.name for one in fitting(x, turned.view(codes.dtype), scale.astype(np.float32), (1, 256))
    }
    assert not fitting(x, codes.view(ml_dtypes.float8_e5m2), scale, (1, 256))
