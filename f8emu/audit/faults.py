"""The faults that an audit looks for: what each does to a served model, the remedy, and where it was met in public."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is. A note is no fault."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kind of fault."""

    title: str
    severity: Severity
    effect: str
    """What it does to the served model."""
    remedy: str
    thread: str = ""
    """Where it was met in public."""


_EXPORT = "quantize the weights again"
_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE


def _check(title: str, severity: Severity, effect: str, remedy: str, thread: str = "") -> Check:
    return Check(title=title, severity=severity, effect=effect, remedy=remedy, thread=thread)


CHECKS: dict[str, Check] = {
    # 1. Configuration, names, shapes, dtypes.
    "config-missing": _check(
        "float8 weights that config.json does not mention",
        _E,
        "the codes are taken for the weights themselves, 200 to 1000 times too large",
        "add the quantization_config of the quantizer",
        "unslothai/unsloth#6978",
    ),
    "scale-missing": _check(
        "a float8 weight without a scale",
        _E,
        "the codes are taken for the weights themselves, or the scale is uninitialized memory",
        "export the scale, and list it in the index",
        "leejet/stable-diffusion.cpp#1898",
    ),
    "scale-name": _check(
        "a scale under a name that consumers of this format do not read",
        _E,
        "the scale is dropped: uninitialized, or weights 200 to 1000 times too large",
        "rename the tensor",
        "NVIDIA/Model-Optimizer#1807",
    ),
    "scale-orphan": _check(
        "a scale whose weight is not there, or is not float8",
        _E,
        "loading fails, or a weight in high precision is scaled",
        "export weight and scale together",
        "Lightricks/LTX-2#172",
    ),
    "scale-shape": _check(
        "a scale of another shape",
        _E,
        "loading fails, or scales are broadcast over the wrong blocks",
        "store one scale for each block, as the format says",
        "vllm-project/vllm#54770",
    ),
    "scale-dtype": _check(
        "a scale of a dtype that the format does not have",
        _E,
        "bytes are read as other numbers, or loading fails",
        "store the scale in the dtype of the format",
        "sgl-project/sglang#26701",
    ),
    "scale-packed": _check(
        "packed scales where plain ones are loaded",
        _E,
        "four exponents are read as one number",
        "send the scales as they were before they were packed for DeepGEMM",
        "radixark/miles#1338",
    ),
    "scale-per-shard": _check(
        "one scale for a fused weight of several shards",
        _W,
        "loaders that expect a scale of each shard leave the others uninitialized",
        "store one scale for each shard, or the shards by themselves",
        "sgl-project/sglang#28546",
    ),
    "input-scale-missing": _check(
        "no scale of the activations, which are quantized statically",
        _E,
        "activations are quantized by uninitialized memory",
        "export the calibrated scale",
        "vllm-project/vllm#5353",
    ),
    "unlisted": _check(
        "a tensor of a shard that the index does not list",
        _E,
        "loaders that go by the index never read it",
        "list it in the index",
        "leejet/stable-diffusion.cpp#1898",
    ),
    "ignored": _check(
        "a float8 weight in a module that the configuration leaves in high precision",
        _E,
        "the codes are taken for the weights themselves",
        "take the module from the list, or store it in high precision",
        "vllm-project/vllm#50617",
    ),
    "consumer-format": _check(
        "a format that the consumer does not read",
        _E,
        "loading fails, or the scales are dropped",
        "export in a format that it reads",
    ),
    # 2. Forbidden codes and scales.
    "nan-code": _check("NaN codes", _E, "outputs are NaN", _EXPORT, "THUDM/slime#2256"),
    "zero-over-zero": _check(
        "NaN codes under a scale of 0: zeros divided by 0",
        _E,
        "outputs are NaN",
        "floor the amax of zero blocks, and " + _EXPORT,
        "pytorch/ao#4713",
    ),
    "scale-invalid": _check(
        "a scale that is negative, infinite or NaN",
        _E,
        "outputs are NaN or have the wrong sign",
        _EXPORT,
        "sgl-project/sglang#40243",
    ),
    "scale-zero": _check(
        "a scale of 0",
        _W,
        "the block is served as zeros, and a consumer that divides by the scale gets NaN",
        "floor the amax of zero blocks, and " + _EXPORT,
        "huggingface/kernels-community#681",
    ),
    "kv-scale": _check(
        "a scale of the key-value cache that is not one positive number",
        _E,
        "keys and values are NaN, or scaled by uninitialized memory",
        "calibrate the cache again, or leave the scale out (1.0)",
        "sgl-project/sglang#40243",
    ),
    "input-scale": _check(
        "a scale of activations that is not positive and finite",
        _E,
        "activations are NaN or all saturated",
        "calibrate again",
        "sgl-project/sglang#40243",
    ),
    "e4m3-scale": _check(
        "NaN in a scale stored as E4M3",
        _E,
        "outputs are NaN",
        "clamp block scales to 448 before they are cast",
        "NVIDIA/Model-Optimizer#1397",
    ),
    "e8m0-by-value": _check(
        "exponent bytes that were copied by value",
        _E,
        "blocks are served as zeros",
        "reinterpret the bytes (view), and do not convert them",
        "sgl-project/sglang#26701",
    ),
    # 3. The kind of scale.
    "scale-kind": _check(
        "scales of a kind that the consumer does not serve as they are",
        _W,
        "",
        "requantize the weights with powers of two (a UE8M0 dialect)",
        "huggingface/transformers#47030, sgl-project/sglang#39193, vllm-project/vllm#22399",
    ),
    "scale-format": _check(
        "scales that are no powers of two, against scale_fmt ue8m0",
        _E,
        "scales are rounded without requantizing: every block is too large by up to 2x",
        "requantize with powers of two, or take scale_fmt from the configuration",
        "huggingface/transformers#46209",
    ),
    "scale-format-unsaid": _check(
        "scales that are all powers of two, without scale_fmt ue8m0",
        _W,
        "weights are coarser than float32 scales need; activations are quantized by another rule than the weights",
        "say scale_fmt ue8m0 if powers of two are wanted, or requantize with float32 scales",
        "PrimeIntellect-ai/prime-rl#3112, NovaSky-AI/SkyRL#1898",
    ),
    # 4. The largest codes against the rule.
    "rounded-after": _check(
        "quantized first, and the scale rounded to a power of two after",
        _E,
        "every block is wrong by a factor of its own, up to 2x",
        "round the scale first, then quantize by it",
        "huggingface/transformers#47030, sgl-project/sglang#28307",
    ),
    "saturated": _check(
        "exponents one step too low: the largest weights are clipped",
        _E,
        "outliers of every block are clipped to half their size",
        "round exponents up (RCEIL)",
        "ROCm/FlyDSL#590, ml-explore/mlx#4353",
    ),
    "too-coarse": _check(
        "scales more than 2x larger than the codes need",
        _W,
        "a bit of precision or more is lost in every block",
        "compute scales from the amax of each block",
        "ROCm/aiter#3212",
    ),
    "floored": _check(
        "blocks quantized at a floor of the scale",
        _W,
        "small weights of the block lose precision, or become 0",
        "quantize with a dialect whose floor is lower",
        "vllm-project/vllm#46400",
    ),
    # 5. Amplitude.
    "inverted": _check(
        "the reciprocal of the scale is stored",
        _E,
        "weights are too large by orders of magnitude",
        "store the factor that decodes: amax / 448",
        "kekzl/imp#1433, modular/modular#6600",
    ),
    # 7. With the source.
    "no-dialect": _check(
        "codes or scales that no known dialect gives from the source",
        _E,
        "the model is not the quantized source",
        "compare the block with the quantizer; were weights changed afterwards?",
        "vllm-project/vllm#46400",
    ),
    "grid-moved": _check(
        "scales of the right values in the wrong places",
        _E,
        "blocks are scaled by their neighbours' scales, invisible without the source",
        "store the scales in the order of the blocks",
        "vllm-project/vllm#54770",
    ),
    "source-shape": _check("a source of another shape", _W, "", "give the model that was quantized"),
    "source-missing": _check(
        "no weight of the source has the name of a float8 weight", _W, "", "give the model that was quantized"
    ),
}
"""Key -> what is checked. Findings cite the key."""
