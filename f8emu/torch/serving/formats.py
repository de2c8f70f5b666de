"""The formats of float8 checkpoints: which scales each holds, under which name, and its `quantization_config`."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.formats import E4M3FN
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import BLOCK, Granularity

CheckpointFormat = Literal["block", "compressed-tensors", "per-channel"]
"""A format of float8 checkpoints by name: `CHECKPOINT_FORMATS`."""
CHECKPOINT_FORMATS: dict[str, tuple[str, tuple[Granularity, ...]]] = {
    "block": ("weight_scale_inv", (Granularity.BLOCKWISE_128X128,)),
    "compressed-tensors": (
        "weight_scale",
        (Granularity.TENSORWISE, Granularity.ROWWISE, Granularity.BLOCKWISE_128X128),
    ),
    "per-channel": ("weight_scale", (Granularity.ROWWISE,)),
}
"""Name -> what the scale of a module is called, float32, which decodes; and the granularities of weights."""
_STRATEGIES: dict[Granularity, tuple[str, dict[str, object]]] = {
    Granularity.TENSORWISE: ("tensor", {"strategy": "tensor"}),
    Granularity.ROWWISE: ("channel", {"strategy": "token"}),
    Granularity.BLOCKWISE_1X128: ("", {"strategy": "group", "group_size": BLOCK}),
    Granularity.BLOCKWISE_128X128: ("block", {}),
}
"""compressed-tensors' words for the scales of a weight, and of activations."""


def scale_name(call: str, format: str, recipe: Recipe) -> str:
    """The name of the scales in a format that holds the weights of a recipe."""
    if format not in CHECKPOINT_FORMATS:
        raise SpecError(f"{call}: format must be one of {', '.join(CHECKPOINT_FORMATS)}; got {format!r}")
    (name, granularities), cast = CHECKPOINT_FORMATS[format], recipe.output.b
    if any(recipe.delayed_scaling_of(tensor) is not None for tensor in ("input", "weight")):
        reason = (
            "its scales are those of earlier steps, and a server would need that of each layer's input too "
            "(activation_scheme static, input_scale), which is not written; train under tensorwise"
        )
    elif cast.format != E4M3FN:
        reason = f"it multiplies the weight as {cast}, and servers take {E4M3FN}; train under blockwise or rowwise"
    elif cast.granularity not in granularities:
        others = [other for other, (_, kinds) in CHECKPOINT_FORMATS.items() if cast.granularity in kinds]
        remedy = (
            f"choose format {' or '.join(others)}" if others else "save the model in bfloat16, for the server to cast"
        )
        reason = f"its weights are scaled {cast.granularity.value}; {remedy}"
    else:
        return name
    raise UnsupportedError(f"{call}: format {format!r} cannot hold recipe {recipe.label!r}: {reason}")


def quantization_config(format: str, recipe: Recipe, left: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json for the format; `left` are the linear layers in high precision."""
    a, b = recipe.output.a, recipe.output.b
    if format == "block":
        is_ue8m0 = all(recipe.rule_of(cast).power_of_two for cast in (a, b))
        kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        shape = {"weight_block_size": [BLOCK, BLOCK], **({"scale_fmt": "ue8m0"} if is_ue8m0 else {})}
        return {**kind, **shape, "modules_to_not_convert": list(left)}
    if format == "per-channel":
        # The default bound, 1,200, would clamp activations that the trained layers did not.
        bound = torch.finfo(torch.float32).max
        return {"quant_method": "fbgemm_fp8", "activation_scale_ub": bound, "modules_to_not_convert": list(left)}
    common, strategy = {"num_bits": 8, "type": "float", "symmetric": True}, _STRATEGIES[b.granularity][0]
    shape = {"block_structure": [BLOCK, BLOCK]} if strategy == "block" else {}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, "strategy": strategy, **shape},
        "input_activations": {**common, "dynamic": True, **_STRATEGIES[a.granularity][1]},
    }
    kind = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return {**kind, "config_groups": {"group_0": group}, "ignore": list(left)}
