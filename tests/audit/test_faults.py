"""Every fault that was met in public, as the smallest checkpoint that has it: found, and named with its tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from f8emu.audit import audit
from f8emu.dialects import quantize
from tests.audit.checkpoints import BF16, E4M3, MXFP8, checkpoint, codes, compressed, f32, fp8, normal

E8M0 = ml_dtypes.float8_e8m0fnu


class Fault(NamedTuple):
    """A checkpoint, and what must be said of it."""

    tensors: dict[str, np.ndarray]
    config: object
    check: str
    tensor: str = "l.weight"
    block: tuple[int, ...] | None = None
    consumer: str | None = None
    source: dict[str, np.ndarray] | None = None


def blocks(codes: np.ndarray, scale: np.ndarray, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {"l.weight": codes, "l.weight_scale_inv": scale, **more}


def late(scale: np.ndarray) -> np.ndarray:
    """Rounded up to a power of two, after the codes were made."""
    return np.exp2(np.ceil(np.log2(scale))).astype(np.float32)


def rounded_after() -> dict[str, np.ndarray]:
    made = quantize(normal(2048, 2048), "deep_gemm_block")
    return blocks(made.codes, late(made.scale))


def one_zero_block() -> dict[str, np.ndarray]:
    made = codes(256, 256, 0x7F)
    made[:128, :128] = codes()
    return blocks(made, f32([1e-4, 0], [0, 0]))


def one_step(by: int) -> dict[str, np.ndarray]:
    """MXFP8 with another byte than the rule's."""
    x = normal(128, 512).astype(np.float32)
    scale = quantize(x, "modelopt_mxfp8").scale.view(np.uint8) + np.int8(by).astype(np.uint8)
    factor = np.repeat(scale.view(E8M0).astype(np.float32), 32, axis=1)
    return {"l.weight": np.clip(x / factor, -448, 448).astype(E4M3), "l.weight_scale": scale}


def changed_block() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A block of 1e-5 that vLLM floors, where llm-compressor does not."""
    x = normal(256, 256)
    x[128:, :128] = (normal(128, 128, seed=1).astype(np.float32) * 1e-4).astype(BF16)
    made = quantize(x, "vllm_weight_block")
    return blocks(made.codes, made.scale), {"l.weight": x}


def by_logarithm() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A float32 block whose amax is the next float above 448 * 2^-20; the other blocks tell that scales are 2^k."""
    x = normal(256, 256).astype(np.float32)
    x[128:, :128] = 2.0**-14
    x[130, 3] = np.nextafter(np.float32(448 * 2.0**-20), np.float32(1))
    made = quantize(x, "transformers_block_ue8m0")
    assert made.scale[1, 0] == 2.0**-20
    return blocks(made.codes, made.scale), {"l.weight": x}


def double_rounded() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x = normal(4, 64).astype(np.float32)
    x[1, 32:] = 0.5
    x[1, 40] = np.nextafter(np.float32(2), np.float32(0))
    made = quantize(x, "torchao_mx_floor")
    scale = made.scale.view(np.uint8).copy()
    assert scale[1, 1] == 119
    scale[1, 1] = 120
    return {"l.weight": made.codes, "l.weight_scale": scale}, {"l.weight": x}


def lost_nan() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x = np.ones((2, 64), BF16)
    x[0, 40] = np.nan
    scale = np.full((2, 2), 119, np.uint8)
    made = quantize(np.ones((2, 64), BF16), "modelopt_mxfp8").codes
    made.view(np.uint8)[0, 40] = 0x7F
    return {"l.weight": made, "l.weight_scale": scale}, {"l.weight": x}


def powers() -> dict[str, np.ndarray]:
    made = quantize(normal(512, 512), "deep_gemm_block_ue8m0")
    return blocks(made.codes, made.scale)


WITH_SOURCE = {
    "another floor, with the source": (changed_block, "floored", fp8(), (1, 0)),
    "log2 against bits": (by_logarithm, "logarithm", fp8(scale_fmt="ue8m0"), (1, 0)),
    "double rounding": (double_rounded, "no-dialect", MXFP8, (1, 1)),
    "NaN lost in the amax": (lost_nan, "nan-code", MXFP8, (0, 1)),
}
FAULTS: dict[str, Callable[[], Fault]] = {
    "rounded at load": lambda: Fault(
        blocks(codes(), f32([1.5])), fp8(), "scale-kind", block=(0, 0), consumer="transformers:b200"
    ),
    "rounded at load, as the config says": lambda: Fault(
        blocks(codes(), f32([1.5])), fp8(scale_fmt="ue8m0"), "scale-format", block=(0, 0)
    ),
    "rounded after the cast": lambda: Fault(rounded_after(), fp8(scale_fmt="ue8m0"), "rounded-after"),
    "mantissas leak": lambda: Fault(
        blocks(codes(128, 512), f32([1.0, 1.5, 1.0, 1.0])), fp8(), "scale-kind", block=(0, 1), consumer="deep_gemm:b200"
    ),
    "0 / 0": lambda: Fault(one_zero_block(), fp8(), "zero-over-zero", block=(0, 1)),
    "the reciprocal": lambda: Fault(
        {"l.weight": codes(), "l.weight_scale": f32(4480)}, compressed("tensor"), "amplitude"
    ),
    "another name": lambda: Fault({"l.weight": codes(), "l.weight_scale": f32([1e-4])}, fp8(), "scale-name"),
    "another shape": lambda: Fault(
        blocks(codes(256, 256), f32([[[1e-4], [2e-4]]], [[[1e-4], [3e-4]]])), fp8(), "scale-shape"
    ),
    "no scale": lambda: Fault({"l.weight": codes()}, None, "scale-missing"),
    "no scale, with a config": lambda: Fault({"l.weight": codes(code=0x40)}, fp8(), "scale-missing"),
    "ComfyUI's name": lambda: Fault({"l.weight": codes(), "l.scale_weight": f32(1e-4)[0]}, None, "scale-name"),
    "exponents by value": lambda: Fault(
        {"l.weight": codes(1, 160), "l.weight_scale": np.array([[0, 0, 1, 8, 0]], np.uint8)}, MXFP8, "e8m0-by-value"
    ),
    "one scale for q, k and v": lambda: Fault(
        {"qkv_proj.weight": codes(384), "qkv_proj.weight_scale": f32(1e-4)},
        compressed("tensor"),
        "scale-per-shard",
        "qkv_proj.weight",
        consumer="sglang:h100",
    ),
    "scale of the cache": lambda: Fault(
        {"l.weight": codes(), "l.weight_scale": f32(1e-4), "a.k_scale": f32(np.inf)},
        compressed("tensor"),
        "kv-scale",
        "a.k_scale",
    ),
    "one step low": lambda: Fault(one_step(-1), MXFP8, "saturated"),
    "one step high": lambda: Fault(one_step(1), MXFP8, "too-coarse"),
    "E4M3 scale": lambda: Fault(
        {
            "l.weight": np.zeros((16, 8), np.uint8),
            "l.weight_scale": codes(16, 1, 0x7F),
            "m.weight": codes(),
            "m.weight_scale": f32(1e-4),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "e4m3-scale",
        "l.weight_scale",
    ),
    "powers of two unsaid": lambda: Fault(powers(), fp8(), "scale-format-unsaid"),
    "packed": lambda: Fault(blocks(codes(128, 512), np.full((128, 1), 0x77777777, np.int32)), fp8(), "scale-packed"),
    **{
        name: lambda make=make, check=check, config=config, block=block: Fault(
            (made := make())[0], config, check, block=block, source=made[1]
        )
        for name, (make, check, config, block) in WITH_SOURCE.items()
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]()
    path = checkpoint(tmp_path / "model", fault.tensors, fault.config)
    source = None if fault.source is None else checkpoint(tmp_path / "source", fault.source)
    result = audit(path, source=source, consumer=fault.consumer)
    assert result.verdict.status == 1
    (finding,) = [
        finding for finding in result.findings if finding.check == fault.check and finding.tensor == fault.tensor
    ]
    assert fault.block is None or finding.block == fault.block
    print(name, [(f.check, f.severity, f.place, f.expected, f.found) for f in result.findings])
