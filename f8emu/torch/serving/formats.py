"""The formats of float8 checkpoints, as data: the scales that each has, their name, and its `quantization_config`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.formats import E4M3FN
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Granularity

BLOCK = 128
_OF_WEIGHTS: dict[Granularity, dict[str, object]] = {
    Granularity.TENSORWISE: {"strategy": "tensor"},
    Granularity.ROWWISE: {"strategy": "channel"},
    Granularity.BLOCKWISE_128X128: {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
}
_OF_INPUTS: dict[Granularity, dict[str, object]] = {
    Granularity.TENSORWISE: {"strategy": "tensor"},
    Granularity.ROWWISE: {"strategy": "token"},
    Granularity.BLOCKWISE_1X128: {"strategy": "group", "group_size": BLOCK},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """How a float8 checkpoint says what its codes mean."""

    granularities: tuple[Granularity, ...]
    """Those of the weights' scales that it has."""
    scale_name: str
    """What follows the name of the module. The scale is float32 and decodes."""
    config: Callable[[Recipe, Sequence[str]], dict[str, Any]]
    """(recipe, names of linear layers in high precision) -> the `quantization_config`."""


def _block(recipe: Recipe, left: Sequence[str]) -> dict[str, Any]:
    is_ue8m0 = all(recipe.rule_of(cast).power_of_two for cast in (recipe.output.a, recipe.output.b))
    kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return {**kind, **({"scale_fmt": "ue8m0"} if is_ue8m0 else {}), "modules_to_not_convert": list(left)}


def _compressed_tensors(recipe: Recipe, left: Sequence[str]) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **_OF_WEIGHTS[recipe.output.b.granularity]},
        "input_activations": {**common, "dynamic": True, **_OF_INPUTS[recipe.output.a.granularity]},
    }
    kind = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return {**kind, "config_groups": {"group_0": group}, "ignore": list(left)}


def _fbgemm(recipe: Recipe, left: Sequence[str]) -> dict[str, Any]:
    # The default bound, 1,200, would clamp activations that the trained layers did not.
    bound = torch.finfo(torch.float32).max
    return {"quant_method": "fbgemm_fp8", "activation_scale_ub": bound, "modules_to_not_convert": list(left)}


_SQUARE = (Granularity.BLOCKWISE_128X128,)

CHECKPOINT_FORMATS: dict[str, CheckpointFormat] = {
    "block": CheckpointFormat(granularities=_SQUARE, scale_name="weight_scale_inv", config=_block),
    "compressed-tensors": CheckpointFormat(
        granularities=tuple(_OF_WEIGHTS), scale_name="weight_scale", config=_compressed_tensors
    ),
    "per-channel": CheckpointFormat(granularities=(Granularity.ROWWISE,), scale_name="weight_scale", config=_fbgemm),
}
"""Name -> format: DeepSeek's blocks, compressed-tensors, and FBGEMM's scales of rows."""


def format_of(call: str, name: str, recipe: Recipe) -> CheckpointFormat:
    """The format called `name`, if it holds weights of `recipe`.

    Raises:
        SpecError: an unknown format.
        UnsupportedError: weights that it cannot hold; the message says why, and what would be needed.
    """
    found = CHECKPOINT_FORMATS.get(name)
    if found is None:
        raise SpecError(f"{call}: format must be one of {', '.join(CHECKPOINT_FORMATS)}; got {name!r}")
    cast = recipe.output.b
    if any(recipe.delayed_scaling_of(tensor) is not None for tensor in ("input", "weight")):
        reason = (
            "its scales are those of earlier steps, and a server would need that of each layer's input too "
            "(activation_scheme static, input_scale), which is not written; train under tensorwise"
        )
    elif cast.format != E4M3FN:
        reason = f"it multiplies the weight as {cast}, and servers take {E4M3FN}; train under blockwise or rowwise"
    elif cast.granularity not in found.granularities:
        others = [other for other, one in CHECKPOINT_FORMATS.items() if cast.granularity in one.granularities]
        reason = f"its weights are scaled {cast.granularity.value}; choose format {' or '.join(others)}"
    else:
        return found
    raise UnsupportedError(f"{call}: format {name!r} cannot hold recipe {recipe.label!r}: {reason}")
