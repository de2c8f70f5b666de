"""How producers lay a float8 checkpoint out, and which scales a serving stack takes: data, and how a config is read.

A name of a scale is a template of `{w}`, the name of the weight, and `{m}`, its module. A scale decodes: a weight is
about code * scale, in every format here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from f8emu.audit.checkpoint import Checkpoint
from f8emu.audit.faults import Severity
from f8emu.dialects.rules import MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.spec import SpecError

_FLOATS = ("F32", "BF16", "F16")
SCALES = ("{w}_scale_inv", "{w}_scale", "{m}.scale_weight", "{m}.scale", "{m}._weight_scale")
"""Every name under which a producer stores the scale of a weight."""
INPUT_SCALES = ("{m}.input_scale", "{m}.activation_scale", "{m}.act_scale", "{m}.scale_input")
FUSED = {"qkv_proj": 3, "query_key_value": 3, "gate_up_proj": 2, "w13": 2}
"""The name of a fused Linear -> the shards that a loader expects scales of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a configuration promises about each float8 weight."""

    name: str
    method: str = ""
    """`quant_method`; empty where there is no configuration."""
    scales: tuple[str, ...] = SCALES
    """The names that a consumer of this format reads, one of them for each weight."""
    dtypes: tuple[str, ...] = (*_FLOATS, "F8_E8M0", "U8")
    blocks: tuple[Block, ...] = ()
    """The granularities that occur; empty: any."""
    input_scale: str = ""
    """The name of the activations' scale, where they are quantized statically."""
    has_ones: bool = False
    """Scales of blocks are [n, 1, k, 1]."""
    is_power_of_two: bool = False
    """The configuration says scale_fmt ue8m0."""
    ignored: tuple[str, ...] = ()
    """Modules that stay in high precision: names, their last parts, or patterns."""

    def ignores(self, module: str) -> bool:
        """Whether the configuration leaves a module in high precision."""
        return any(_fits(module, pattern) for pattern in self.ignored)


# quant_algo of Model-Optimizer -> granularity, and whether scales of blocks have ones between.
_ALGORITHMS: dict[str, tuple[tuple[Block, ...], bool]] = {
    "FP8": ((TENSOR,), False),
    "FP8_PER_CHANNEL_PER_TOKEN": ((ROW,), False),
    "FP8_PB_WO": ((SQUARE,), True),
    "MXFP8": ((MX_GROUP,), False),
}
_STRATEGIES: dict[str, Block] = {"tensor": TENSOR, "channel": ROW}  # of compressed-tensors


def format_of(checkpoint: Checkpoint) -> Format:
    """The format that the configuration declares, or else the names."""
    said = checkpoint.quantization
    match said.get("quant_method"):
        case "fp8":
            return _fp8(said, checkpoint)
        case "compressed-tensors":
            return _compressed_tensors(said)
        case "modelopt":
            blocks, ones = _ALGORITHMS.get(str(said.get("quant_algo")), ((), False))
            static = "{m}.input_scale" if said.get("quant_algo") == "FP8" else ""
            ignored = _names(said, "ignore", "exclude_modules")
            name = f"Model-Optimizer {said.get('quant_algo', '')}".strip()
            dtypes = ("U8", "F8_E8M0") if blocks == (MX_GROUP,) else (*_FLOATS, "U8")
            common: dict[str, Any] = {"dtypes": dtypes, "blocks": blocks, "has_ones": ones, "input_scale": static}
            return Format(name=name, method="modelopt", scales=("{w}_scale",), ignored=ignored, **common)
        case "fbgemm_fp8":
            ignored = _names(said, "modules_to_not_convert")
            common = {"dtypes": ("F32",), "blocks": (ROW,), "ignored": ignored}
            return Format(name="FBGEMM float8", method="fbgemm_fp8", scales=("{w}_scale",), **common)
        case "torchao":
            ignored = _names(said, "modules_to_not_convert")
            return Format(name="torchao float8", method="torchao", scales=("{m}._weight_scale",), ignored=ignored)
        case str(other):
            return Format(name=f"quant_method {other!r:.40}", method=other)
    if any(name.endswith("._weight_qdata") for name in checkpoint.tensors):
        return Format(name="torchao float8, by its names", scales=("{m}._weight_scale",))
    return Format(name="float8 without a configuration")


def _fp8(said: Mapping[str, Any], checkpoint: Checkpoint) -> Format:
    # 1. Blocks: DeepSeek, Qwen3, transformers.
    ignored = _names(said, "modules_to_not_convert", "ignored_layers")
    is_static = said.get("activation_scheme") == "static"
    size = said.get("weight_block_size")
    if size is not None:
        match size:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                pass
            case _:
                raise SpecError(
                    f"audit: expected weight_block_size [rows, columns]; found {size!r:.60}; mend the config"
                )
        return Format(
            name=f"float8 in blocks of {rows} x {columns}",
            method="fp8",
            scales=("{w}_scale_inv", "{m}.scale"),
            dtypes=(*_FLOATS, "F8_E8M0"),
            blocks=((rows, columns),),
            input_scale="{m}.activation_scale" if is_static else "",
            is_power_of_two=said.get("scale_fmt") == "ue8m0",
            ignored=ignored,
        )
    # 2. One scale a tensor: transformers names it as that of blocks, AutoFP8 and vLLM do not.
    is_inv = any(name.endswith("_scale_inv") for name in checkpoint.tensors)
    static = "{m}.activation_scale" if is_inv else "{m}.input_scale"
    return Format(
        name="float8 with a scale a tensor",
        method="fp8",
        scales=("{w}_scale_inv",) if is_inv else ("{w}_scale",),
        dtypes=_FLOATS,
        blocks=(TENSOR,),
        input_scale=static if is_static else "",
        ignored=ignored,
    )


def _compressed_tensors(said: Mapping[str, Any]) -> Format:
    blocks: list[Block] = []
    is_static = False
    groups = said.get("config_groups")
    for group in (groups if isinstance(groups, dict) else {}).values():
        weights, inputs = (_object(_object(group).get(key)) for key in ("weights", "input_activations"))
        is_static |= bool(inputs) and inputs.get("dynamic") is False
        match weights:
            case {"strategy": "block", "block_structure": [int(rows), int(columns)]}:
                blocks.append((rows, columns))
            case {"strategy": "group", "group_size": int(size)}:
                blocks.append((1, size))
            case {"strategy": str(strategy)} if strategy in _STRATEGIES:
                blocks.append(_STRATEGIES[strategy])
    mx = any(block == MX_GROUP for block in blocks)
    return Format(
        name=f"compressed-tensors {said.get('format', '')}".strip(),
        method="compressed-tensors",
        scales=("{w}_scale",),
        dtypes=(*_FLOATS, *["U8", "F8_E8M0"] * mx),
        blocks=tuple(dict.fromkeys(blocks)),
        input_scale="{m}.input_scale" if is_static else "",
        ignored=_names(said, "ignore"),
    )


def _object(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _names(said: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    found = next((said[key] for key in keys if isinstance(said.get(key), list)), [])
    return tuple(one for one in found if isinstance(one, str))


def _fits(module: str, pattern: str) -> bool:
    # The ways in which stacks write what they leave alone: re:..., a glob, a whole name, or its last parts.
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    is_part = module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
    return is_part or ("*" in pattern and fnmatchcase(module, pattern))


class Kind(StrEnum):
    """What the scales of blocks are."""

    FLOAT = "floats with mantissa bits"
    POWER = "powers of two, as floats"
    E8M0 = "E8M0 bytes"


Takes = Mapping[Kind, tuple[Severity, str]]
_REQUANTIZED = "weights are requantized to powers of two when they are loaded: other codes and scales than these"
_ROUNDED = "scales are rounded up to powers of two without requantizing: every block is too large by up to 2x"
_LEAKS = (
    "DeepGEMM packs the exponents alone: mantissa bits are a trap, and in older versions the next scale's mantissa "
    "leaks into the byte (wrong by 25%, or NaN)"
)
CONSUMERS: Mapping[str, Takes] = {
    "deep_gemm:sm90": {Kind.E8M0: (Severity.ERROR, "takes float32 scales alone")},
    "deep_gemm:sm100": {Kind.FLOAT: (Severity.ERROR, _LEAKS)},
    "vllm:sm90": {Kind.FLOAT: (Severity.NOTE, f"{_REQUANTIZED}, unless VLLM_USE_DEEP_GEMM_E8M0=0")},
    "vllm:sm100": {Kind.FLOAT: (Severity.WARNING, f"{_REQUANTIZED}; where that is left out, {_LEAKS}")},
    "sglang:sm90": {},
    "sglang:sm100": {Kind.FLOAT: (Severity.WARNING, f"{_REQUANTIZED}; where that is left out, {_LEAKS}")},
    "transformers:sm90": {},
    "transformers:sm100": {Kind.FLOAT: (Severity.WARNING, f"{_ROUNDED}, in versions that use DeepGEMM with them")},
    "comfyui:sm90": {},
    "comfyui:sm100": {},
}
"""Stack and chip -> the kinds of block scales that it does not serve as they are, and what it does to them."""
READS: Mapping[str, frozenset[str]] = {
    "deep_gemm": frozenset(["fp8", "compressed-tensors", "modelopt", ""]),
    "vllm": frozenset(["fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "torchao"]),
    "sglang": frozenset(["fp8", "compressed-tensors", "modelopt", "torchao"]),
    "transformers": frozenset(["fp8", "compressed-tensors", "fbgemm_fp8", "torchao"]),
    "comfyui": frozenset([""]),
}
"""Stack -> the `quant_method`s whose checkpoints it reads; the empty one is a file without a configuration."""
_CHIPS = {
    **dict.fromkeys(("sm90", "hopper", "h100", "h200", "h800", "h20", "gh200"), "sm90"),
    **dict.fromkeys(("sm100", "blackwell", "b100", "b200", "b300", "gb200", "gb300"), "sm100"),
}


def consumers_of(text: str) -> list[str]:
    """The keys of CONSUMERS that STACK or STACK:CHIP names; all chips of the stack where none is named.

    Raises:
        SpecError: an unknown stack or chip.
    """
    stack, separator, chip = text.lower().replace("-", "_").partition(":")
    if stack not in READS or (separator and chip not in _CHIPS):
        raise SpecError(
            f"audit --consumer: expected STACK or STACK:CHIP with a stack among {', '.join(READS)} and a chip among "
            f"{', '.join(_CHIPS)}; got {text!r:.40}"
        )
    return [
        key
        for key in CONSUMERS
        if key == f"{stack}:{_CHIPS.get(chip, '')}" or (not separator and key.startswith(f"{stack}:"))
    ]
