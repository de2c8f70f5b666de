"""Casts that are wrong are told by the counts of their codes alone; sound weights of any kind are not."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from f8emu.audit import audit
from f8emu.audit.counts import Counts, wrong_cast
from f8emu.dialects import DialectName, dialect_by_name, quantize
from tests.audit.checkpoints import BF16, E4M3, E5M2, MXFP8, checkpoint, compressed, fp8, normal
from tests.audit.test_clean import weights

Array = np.ndarray


def right(x: Array) -> Array:
    return np.clip(x, -448, 448).astype(E4M3)


def to_zero(x: Array) -> Array:
    y = right(x)
    return (y.view(np.uint8) - (np.abs(y.astype(np.float32)) > np.abs(x))).astype(np.uint8).view(E4M3)


def top_binade(x: Array) -> Array:
    y = right(x).astype(np.float32)
    return np.where(np.abs(y) >= 256, np.sign(x) * 448, y).astype(E4M3)


def flushed(x: Array) -> Array:
    y = right(x).astype(np.float32)
    return np.where(np.abs(y) < 2.0**-6, 0, y).astype(E4M3)


def lost_carry(x: Array) -> Array:
    y, floor = right(x).astype(np.float32), np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6))))
    return np.where((np.abs(x) < 2 * floor) & (np.abs(y) >= 2 * floor), np.sign(x) * floor, y).astype(E4M3)


CASTS: dict[str, Callable[[Array], Array]] = {
    "256 and more as 448": top_binade,
    "two fraction bits": lambda x: right(x.astype(E5M2).astype(np.float32)),
    "clipped at 240": lambda x: np.clip(x, -240, 240).astype(E4M3),
    "clipped at 224": lambda x: np.clip(x, -224, 224).astype(E4M3),
    "bytes of E5M2": lambda x: (x * 128).astype(E5M2).view(E4M3),
    "subnormals flushed": flushed,
    "rounded to zero": to_zero,
    "a lost carry": lost_carry,
}


UNDER_POWERS = ("256 and more as 448", "clipped at 240", "clipped at 224", "rounded to zero")


@pytest.mark.parametrize(
    ("dialect", "name"),
    [*(("deep_gemm_block", one) for one in CASTS), *(("deep_gemm_block_ue8m0", one) for one in UNDER_POWERS)],
)
def test_a_wrong_cast_is_told_by_its_codes(dialect: DialectName, name: str, tmp_path: Path) -> None:
    """Without a source: three weights, each too small to tell alone what is rare."""
    tensors: dict[str, Array] = {}
    for i in range(3):
        x = normal(1024, 512, seed=i)
        scale = quantize(x, dialect).scale
        factor = np.kron(scale.astype(np.float32), np.ones((128, 128), np.float32))
        tensors |= {f"l.{i}.weight": CASTS[name](x.astype(np.float32) / factor), f"l.{i}.weight_scale_inv": scale}
    config = fp8(**({"scale_fmt": "ue8m0"} if dialect.endswith("ue8m0") else {}))
    checks = {finding.check for finding in audit(checkpoint(tmp_path / "model", tensors, config)).findings}
    assert checks & {"wrong-cast", "too-coarse"} and ("wrong-cast" in checks or name.startswith("clipped")), checks


def pruned(x: Array) -> Array:
    return np.where(np.abs(x) < np.quantile(np.abs(x), 0.5), 0, x)


def test_sound_weights_have_the_counts_of_a_right_cast() -> None:
    """Weights of every kind under every scale; those that were quantized before, whose codes have holes, too."""
    draw, shape = np.random.default_rng(5), (512, 256)
    x = draw.standard_normal(shape) * 0.02
    rows = np.exp2(draw.uniform(-3, 3, (512, 1)))
    every = weights(*shape, 3) | {
        "laplace": draw.laplace(0, 0.02, shape),
        "pruned": pruned(x),
        "clipped": np.clip(x, -0.05, 0.05),
        "two clusters": np.where(draw.random(shape) < 0.01, 1 + x, x),
        "a constant beside small weights": np.where(draw.random(shape) < 0.01, 1.0, x),
        **{f"{bits} bits": np.round(x * 2 ** (bits - 1) / 0.09) * rows for bits in (3, 4, 5, 8)},
        "4-bit floats": x.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * rows,
        "float8 of another scale": right(x.astype(np.float32) * 4000).astype(np.float64),
    }
    for kind, values in every.items():
        for block in ((128, 128), (1, 256), (512, 256), (1, 32)):
            for dtype in (np.float32, BF16):
                v = (
                    values.astype(dtype)
                    .astype(np.float32)
                    .reshape(512 // block[0], block[0], 256 // block[1], block[1])
                )
                amax = np.maximum(np.abs(v).max((1, 3), keepdims=True), 1e-12)
                for scale in (amax / 448, np.exp2(np.ceil(np.log2(amax / 448)))):
                    codes = right(v / scale).view(np.uint8) & 0x7F
                    counts = Counts(np.bincount(codes.reshape(-1), minlength=128), float(amax.size))
                    largest = codes.max((1, 3)).reshape(-1)
                    fault = wrong_cast(counts, largest[largest > 0], is_float=bool(np.any(np.frexp(scale)[0] != 0.5)))
                    assert fault is None, (kind, block, dtype, fault)


LOST: dict[str, tuple[str, object, Callable[[Array], object]]] = {
    "half": ("deep_gemm_block", fp8(), lambda codes: codes[512:].fill(0)),
    "all": ("deep_gemm_block", fp8(), lambda codes: codes.fill(0)),
    "one block": ("deep_gemm_block", fp8(), lambda codes: codes[128:256, 256:384].fill(0)),
    "powers of two": ("deep_gemm_block_ue8m0", fp8(scale_fmt="ue8m0"), lambda codes: codes[512:].fill(0)),
    "rows": ("compressed_tensors_channel", compressed("channel"), lambda codes: codes[700:].fill(0)),
    "groups": ("modelopt_mxfp8", MXFP8, lambda codes: codes[:, 256:].fill(0)),
    "half of a tensor": ("vllm_tensor", compressed("tensor"), lambda codes: codes[512:].fill(0)),
    "a whole tensor": ("vllm_tensor", compressed("tensor"), lambda codes: codes.fill(0)),
}


@pytest.mark.parametrize("name", LOST)
def test_codes_that_were_lost_are_told_from_zeros(name: str, tmp_path: Path) -> None:
    """Zeros that were quantized have the scale of zeros, also of a floor that no dialect has."""
    dialect, config, lose = LOST[name]
    suffix = "_scale_inv" if dialect.startswith("deep") else "_scale"
    for is_lost in (False, True):
        tensors: dict[str, Array] = {}
        for i in range(3):
            x = normal(1024, 512, seed=i) * BF16(2.0**-i)
            if i == 1 and not is_lost and name != "half of a tensor":
                lose(x.view(np.uint16))
            codes, scale = quantize(x, dialect_by_name(dialect))
            if i == 1 and is_lost:
                lose(codes.view(np.uint8))
            scale = scale.view(np.uint8) if dialect == "modelopt_mxfp8" else scale.copy()
            if name == "half":
                scale[scale == np.float32(1e-4) / np.float32(448)] = 1e-9
            tensors |= {f"l.{i}.weight": codes, f"l.{i}.weight{suffix}": scale.reshape(1) if scale.size == 1 else scale}
        findings = audit(checkpoint(tmp_path / f"model {is_lost}", tensors, config)).findings
        assert [finding.tensor for finding in findings if finding.check == "lost-codes"] == ["l.1.weight"] * is_lost, (
            findings
        )
