"""How producers lay a float8 checkpoint out, and which scales a serving stack takes: data, and how a config is read.

A name of a scale is a template of `{w}`, the name of the weight, and `{m}`, its module. A scale decodes: a weight is
about code * scale, in every format here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from f8emu.audit.checkpoint import FLOATS, Checkpoint
from f8emu.audit.findings import Severity
from f8emu.dialects.rules import MX_GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.environment import limited
from f8emu.spec import SpecError
from f8emu.spec.chips import GPUS, RELATED, named

SCALES = (
    *("{w}_scale_inv", "{w}_scale", "{m}.scale_weight", "{m}.scale", "{m}._weight_scale"),
    "{m}.qscale_weight",
)
"""Every name under which a producer stores the scale of a weight."""
_MISTRAL = ("{m}.qscale_weight", "{m}.qscale_act")
"""Its names of the scales of weights and of activations."""
INPUT_SCALES = ("{m}.input_scale", "{m}.activation_scale", "{m}.act_scale", "{m}.scale_input", "{m}.qscale_act")
_BYTES = ("U8", "F8_E8M0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The layout of float8 weights that a configuration promises."""

    name: str
    method: str = ""
    """`quant_method`; empty where there is no configuration."""
    scales: tuple[str, ...] = SCALES
    """The names that a consumer of this format reads, one of them for each weight."""
    dtypes: tuple[str, ...] = (*FLOATS, *_BYTES)
    blocks: tuple[Block, ...] = ()
    """The granularities that occur; empty: any."""
    input_scales: tuple[str, ...] = ()
    """Names of the activations' scale, one of which is read, where they are quantized statically."""
    has_one_dynamic_scale: bool = False
    """All activations of a layer have one scale, which is computed as they come."""
    has_ones: bool = False
    """Scales of blocks are [n, 1, k, 1]."""
    is_power_of_two: bool = False
    """The configuration says scale_fmt ue8m0."""
    observer: str = ""
    """What computes scales, where that is not the largest magnitude."""
    ignored: tuple[str, ...] = ()
    """Modules that stay in high precision: names, their first or last parts, or patterns."""

    targets: tuple[str, ...] = ()
    """Modules that are quantized; empty: all."""

    @property
    def is_complete(self) -> bool:
        """Whether the configuration gives the precision of every layer."""
        return (
            self.method in ("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "modelopt") and "MIXED" not in self.name
        )

    def quantizes(self, module: str) -> bool:
        """Whether a module is among those that are quantized."""
        return not self.targets or "Linear" in self.targets or any(_fits(module, target) for target in self.targets)

    @property
    def is_certain(self) -> bool:
        """Whether every float8 weight must have a scale."""
        return self.method != "" or self.scales != SCALES

    def ignores(self, module: str) -> bool:
        """Whether the configuration leaves a module in high precision."""
        return any(_fits(module, pattern) for pattern in self.ignored)


_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "FP8": {"blocks": (TENSOR,), "input_scales": ("{m}.input_scale",)},
    "FP8_PER_CHANNEL_PER_TOKEN": {"blocks": (ROW,)},
    "FP8_PB_WO": {"blocks": (SQUARE,), "has_ones": True},
    "MXFP8": {"blocks": (MX_GROUP,), "dtypes": _BYTES},
}
"""quant_algo of Model-Optimizer."""
TURNED_ROW: Block = (None, 1)
"""A row of experts [E, K, rows], as Llama-4 has them."""
_STRATEGIES = {"tensor": TENSOR, "channel": ROW}
"""strategy of compressed-tensors."""


def format_of(checkpoint: Checkpoint) -> Format:
    """The format that the configuration declares, or else the names."""
    quantization, names = checkpoint.quantization, checkpoint.tensors
    method = quantization.get("quant_method", "")
    ignored = next((quantization[key] for key in _IGNORED if isinstance(quantization.get(key), list)), ())
    of = partial(Format, method=str(method), ignored=tuple(one for one in ignored if isinstance(one, str)))
    match method:
        case "fp8":
            return of(**_fp8(quantization, names))
        case "compressed-tensors":
            return of(**_compressed_tensors(quantization))
        case "modelopt":
            algorithm = str(quantization.get("quant_algo", "")).upper()
            name = f"Model-Optimizer {algorithm}".strip()
            return of(name=name, scales=("{w}_scale",), **_ALGORITHMS.get(algorithm, {}))
        case "mxfp8":
            scales = ("{w}_scale_inv", "{w}_scale")
            return of(name="MXFP8", scales=scales, dtypes=_BYTES, blocks=(MX_GROUP,), is_power_of_two=True)
        case "fbgemm_fp8":
            return of(name="FBGEMM float8", scales=("{w}_scale",), dtypes=("F32",), blocks=(TURNED_ROW, ROW))
    if method == "torchao" or any(name.endswith("._weight_qdata") for name in names):
        return of(name="torchao float8", scales=("{m}._weight_scale",))
    if not method and "scaled_fp8" in names:  # an empty tensor that marks the format
        return Format(name="ComfyUI float8", scales=("{m}.scale_weight",))
    return of(name=f"quant_method {method!r:.40}" if method else "float8 without a configuration")


def _fp8(quantization: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    # Blocks: DeepSeek, Qwen3, transformers. One scale a tensor: transformers calls it as those of blocks, AutoFP8 and
    # vLLM do not.
    size, is_static = quantization.get("weight_block_size"), quantization.get("activation_scheme") == "static"
    is_inv = size is not None or any(name.endswith("_scale_inv") for name in names)
    # Beside them Mistral's own names, by which vLLM loads the model.
    is_mistral = any(name.endswith(_MISTRAL[0][3:]) for name in names)
    scale, act = ([suffix] if is_mistral else [] for suffix in _MISTRAL)
    input_scales = ("{m}.activation_scale" if is_inv else "{m}.input_scale", *act) if is_static else ()
    fields: dict[str, Any] = {"dtypes": (*FLOATS, "F8_E8M0"), "input_scales": input_scales}
    match size:
        case None:
            scales = ("{w}_scale_inv" if is_inv else "{w}_scale", *scale)
            return {**fields, "name": "float8 with a scale a tensor", "scales": scales, "blocks": (TENSOR,)}
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            is_power_of_two = quantization.get("scale_fmt") == "ue8m0"
            fields |= {"scales": ("{w}_scale_inv", "{m}.scale"), "is_power_of_two": is_power_of_two}
            if (rows, columns) == MX_GROUP:
                fields["dtypes"] = (*FLOATS, *_BYTES)
            return {**fields, "name": f"float8 in blocks of {rows} x {columns}", "blocks": ((rows, columns),)}
    raise SpecError(f"audit: expected weight_block_size [rows, columns]; found {size!r:.60}; mend config.json")


def _compressed_tensors(quantization: Mapping[str, Any]) -> dict[str, Any]:
    blocks: dict[Block, None] = {}
    fields: dict[str, Any] = {
        "name": f"compressed-tensors {quantization.get('format', '')}".strip(),
        "scales": ("{w}_scale",),
    }
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        match group:
            case {"weights": {"strategy": "block", "block_structure": [int(rows), int(columns)]}}:
                blocks[rows, columns] = None
            case {"weights": {"strategy": "group", "group_size": int(size)}}:
                blocks[1, size] = None
            case {"weights": {"strategy": str(strategy)}} if strategy in _STRATEGIES:
                blocks[_STRATEGIES[strategy]] = None
        match group:
            case {"targets": [*targets]}:
                names = [target for target in targets if isinstance(target, str)]
                fields["targets"] = (*fields.get("targets", ()), *names)
        match group:
            case {"weights": {"observer": str(observer)}} if "minmax" not in observer:
                fields["observer"] = f"the observer {observer:.40}"
        match group:
            case {"input_activations": {"dynamic": False}}:
                fields["input_scales"] = ("{m}.input_scale",)
            case {"input_activations": {"dynamic": True, "strategy": "tensor"}}:
                fields["has_one_dynamic_scale"] = True
    return {**fields, "blocks": tuple(blocks), "dtypes": (*FLOATS, *_BYTES) if MX_GROUP in blocks else FLOATS}


def _fits(module: str, pattern: str) -> bool:
    # The ways in which stacks write what they leave alone: re:..., a glob, a whole name, or its first or last parts.
    if pattern.startswith("re:"):
        if re.search(r"\)[*+{]", pattern):  # a repeated group may take forever: a file may ask for no such thing
            return False
        try:
            with limited(seconds=0.2):  # what is not hostile takes microseconds
                return re.match(pattern[3:], module) is not None
        except re.error:
            return False
        except TimeoutError:
            raise SpecError(f"audit: the pattern {pattern!r:.60} takes too long; mend the configuration") from None
    return f".{pattern}." in f".{module}." or ("*" in pattern and fnmatchcase(module, pattern))


class ScaleKind(StrEnum):
    """The kind of numbers that the scales of blocks are."""

    FLOAT = "floats with mantissa bits"
    POWER = "powers of two, as floats"
    E8M0 = "E8M0 bytes"


_REQUANTIZED = "weights are requantized to powers of two when they are loaded: other codes and scales than these"
_LEAKS = (
    "DeepGEMM packs the exponents alone: mantissa bits are a trap, and in older versions the next scale's mantissa "
    "leaks into the byte (wrong by 25%, or NaN)"
)
_ROUNDED = "versions that give them to DeepGEMM round scales up without requantizing: blocks too large by up to 2x"
_GPU = re.compile(r"G?[BH]\d+")
_EITHER = (Severity.WARNING, f"{_REQUANTIZED}; where that is left out, {_LEAKS}")
CONSUMERS: Mapping[str, Mapping[ScaleKind, tuple[Severity, str]]] = {
    "deep_gemm:sm90": {ScaleKind.E8M0: (Severity.ERROR, "DeepGEMM takes float32 scales alone")},
    "deep_gemm:sm100": {ScaleKind.FLOAT: (Severity.ERROR, _LEAKS)},
    "vllm:sm90": {ScaleKind.FLOAT: (Severity.NOTE, f"{_REQUANTIZED}, unless VLLM_USE_DEEP_GEMM_E8M0=0")},
    "vllm:sm100": {ScaleKind.FLOAT: _EITHER},
    "sglang:sm90": {},
    "sglang:sm100": {ScaleKind.FLOAT: _EITHER},
    "transformers:sm90": {},
    "transformers:sm100": {ScaleKind.FLOAT: (Severity.WARNING, _ROUNDED)},
}
"""Stack and chip -> the kinds of block scales that it does not serve as they are, and what it does to them."""
_SERVING = {
    family: [name for name, chip in {**GPUS, **RELATED}.items() if chip.capability == at and _GPU.fullmatch(name)]
    for family, at in (("Hopper", (9, 0)), ("Blackwell", (10, 0)))
}


def consumers_of(text: str) -> list[str]:
    """The keys of CONSUMERS that STACK or STACK:CHIP names; all chips of the stack where none is named."""
    stack, separator, name = text.lower().replace("-", "_").replace("deepgemm", "deep_gemm").partition(":")
    chip = named(name, related=True)
    architecture = f"sm{chip.capability[0]}{chip.capability[1]}" if chip and chip.capability else "?"
    keys = [key for key in CONSUMERS if key.startswith(f"{stack}:{architecture}" if separator else f"{stack}:")]
    stacks = dict.fromkeys(key.partition(":")[0] for key in CONSUMERS)
    if stack not in stacks:
        raise SpecError(f"audit --consumer: unknown stack {stack!r:.40}; known stacks are {', '.join(stacks)}")
    if not keys:
        known = "; ".join(f"{family}: {', '.join(gpus)}" for family, gpus in _SERVING.items())
        raise SpecError(
            f"audit --consumer: {stack} on {name!r:.40} is not known; name a GPU ({known}), or the stack alone"
        )
    return keys


def has(consumers: Iterable[str], *stacks: str) -> bool:
    """Whether one of these stacks is among the keys of CONSUMERS."""
    return any(consumer.partition(":")[0] in stacks for consumer in consumers)
