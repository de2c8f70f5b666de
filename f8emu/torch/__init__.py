"""f8emu for torch: casts, scales and GEMMs with the bits of a Hopper GPU, on its tensor cores or emulated.

Importing this package loads torch, but neither JAX nor the reference; those are loaded when a GEMM is emulated.
"""

import typing as _typing
from importlib import import_module as _import_module

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    from f8emu.spec.errors import MissingExtraError

    raise MissingExtraError("f8emu.torch", "torch", "torch") from error

from f8emu.spec.exports import public as _public
from f8emu.torch.capture import Capture as Capture
from f8emu.torch.capture import capture as capture
from f8emu.torch.cast import cast as cast
from f8emu.torch.cast import decode as decode
from f8emu.torch.cast import dequantize as dequantize
from f8emu.torch.cast import quantize as quantize
from f8emu.torch.casts.delayed_state import DelayedScalingError as DelayedScalingError
from f8emu.torch.conversion.convert import convert_to_float8_training as convert_to_float8_training
from f8emu.torch.conversion.convert import dequantize_float8_training as dequantize_float8_training
from f8emu.torch.conversion.convert import plan_conversion as plan_conversion
from f8emu.torch.conversion.convert import swap_linear_with_float8_linear as swap_linear_with_float8_linear
from f8emu.torch.conversion.filters import filter_small_layers as filter_small_layers
from f8emu.torch.conversion.report import ConversionEntry as ConversionEntry
from f8emu.torch.conversion.report import ConversionReport as ConversionReport
from f8emu.torch.conversion.report import OtherWeight as OtherWeight
from f8emu.torch.conversion.report import Outcome as Outcome
from f8emu.torch.emulated.switch import Emulation as Emulation
from f8emu.torch.emulated.switch import emulate as emulate
from f8emu.torch.gemm.engine import engine_of as engine_of
from f8emu.torch.gemm.scaled_mm import mm as mm
from f8emu.torch.gemm.scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from f8emu.torch.gemm.scaled_mm import scaled_mm as scaled_mm
from f8emu.torch.inspection.config import InspectConfig as InspectConfig
from f8emu.torch.inspection.config import InspectOptions as InspectOptions
from f8emu.torch.inspection.inspector import Inspector as Inspector
from f8emu.torch.inspection.inspector import inspect as inspect
from f8emu.torch.layer.delayed_update import DelayedScalingState as DelayedScalingState
from f8emu.torch.layer.delayed_update import delayed_state_dict as delayed_state_dict
from f8emu.torch.layer.delayed_update import load_delayed_state_dict as load_delayed_state_dict
from f8emu.torch.layer.delayed_update import set_amax_reduction_group as set_amax_reduction_group
from f8emu.torch.layer.delayed_update import sync_float8_amax_and_scale_history as sync_float8_amax_and_scale_history
from f8emu.torch.layer.experts import Float8Experts as Float8Experts
from f8emu.torch.layer.experts import float8_experts as float8_experts
from f8emu.torch.layer.feed_forward import Float8FeedForward as Float8FeedForward
from f8emu.torch.layer.float8_linear import Float8Linear as Float8Linear
from f8emu.torch.layer.grouped_linear import grouped_linear as grouped_linear
from f8emu.torch.library import float8_checkpoint_policy as float8_checkpoint_policy
from f8emu.torch.scale import amax as amax
from f8emu.torch.scale import initial_delayed_state as initial_delayed_state
from f8emu.torch.scale import scale_from_amax as scale_from_amax
from f8emu.torch.scale import update_delayed_state as update_delayed_state
from f8emu.torch.swizzle import swizzle_scales as swizzle_scales
from f8emu.torch.swizzle import unswizzle_scales as unswizzle_scales
from f8emu.torch.weights.float8_weight import Float8Weight as Float8Weight
from f8emu.torch.weights.master_weights import MasterWeights as MasterWeights
from f8emu.torch.weights.sharded_weight import (
    precompute_float8_dynamic_scale_for_fsdp as precompute_float8_dynamic_scale_for_fsdp,
)

if _typing.TYPE_CHECKING:
    from f8emu.torch.parallel.expert_parallel import ExpertParallel as ExpertParallel
    from f8emu.torch.parallel.tensor_parallel import Float8ColwiseParallel as Float8ColwiseParallel
    from f8emu.torch.parallel.tensor_parallel import Float8RowwiseParallel as Float8RowwiseParallel
    from f8emu.torch.parallel.tensor_parallel import PrepareFloat8ModuleInput as PrepareFloat8ModuleInput
    from f8emu.torch.serving.checkpoint import verify_export as verify_export
    from f8emu.torch.serving.export import export_float8 as export_float8
    from f8emu.torch.serving.stream import stream_float8 as stream_float8

_LATE = {
    "ExpertParallel": "parallel.expert_parallel",
    "Float8ColwiseParallel": "parallel.tensor_parallel",
    "Float8RowwiseParallel": "parallel.tensor_parallel",
    "PrepareFloat8ModuleInput": "parallel.tensor_parallel",
    "export_float8": "serving.export",
    "stream_float8": "serving.stream",
    "verify_export": "serving.checkpoint",
}
"""Loaded on first use, each from its file: they need classes of torch that take half a second to load."""


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"f8emu.torch.{_LATE[name]}"), name)


__all__, __dir__ = _public(__name__, *_LATE)
