"""Checkpoints that the tests write: numpy arrays, a configuration, and the quantizers of other stacks."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
BF16 = ml_dtypes.bfloat16
NAMES = {
    "uint8": "U8",
    "int32": "I32",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
Tensors = Mapping[str, np.ndarray]


def fp8(**more: object) -> dict[str, object]:
    """The configuration of DeepSeek-V3."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]} | more


def compressed(strategy: str, **weights: object) -> dict[str, object]:
    group = {
        "targets": ["Linear"],
        "weights": {"strategy": strategy, **weights},
        "input_activations": {"dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


MXFP8 = compressed("group", group_size=32)


def write(path: Path, tensors: Tensors) -> Path:
    """A .safetensors file."""
    header: dict[str, Any] = {}
    offset, parts = 0, []
    for name, array in tensors.items():
        parts.append(np.array(array, order="C").tobytes())
        end = offset + len(parts[-1])
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def checkpoint(
    folder: Path, tensors: Tensors, quantization: object = None, shards: Mapping[str, list[str]] | None = None
) -> Path:
    """A directory; with `shards`, file -> tensors, of several files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if quantization is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    if shards is None:
        write(folder / "model.safetensors", tensors)
        return folder
    for file, names in shards.items():
        write(folder / file, {name: tensors[name] for name in names})
    listed = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def codes(rows: int = 128, k: int = 128, code: int = 0x7E) -> np.ndarray:
    """All codes the same."""
    return np.full((rows, k), code, np.uint8).view(E4M3)


def f32(*scale: Any) -> np.ndarray:
    return np.array(scale, np.float32)


def normal(rows: int, k: int, *, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """Weights as trained ones are."""
    return (np.random.default_rng(seed).standard_normal((rows, k)) * scale).astype(BF16)
