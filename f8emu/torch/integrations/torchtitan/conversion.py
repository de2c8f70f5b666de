"""What the adapters for torchtitan 0.2 and 0.3 share: which layers are converted, and the state in checkpoints."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from f8emu.torch.conversion.convert import convert_to_float8_training
from f8emu.torch.conversion.small_layers import ModuleFilter, filter_small_layers
from f8emu.torch.delayed.sync import DelayedScalingState
from f8emu.torch.gemm.checks import SIZE_MULTIPLE
from f8emu.torch.weights.sharded_weight import precompute_float8_dynamic_scale_for_fsdp

_AUTO_FILTER = "auto_filter_small_kn"
"""torchtitan's entry of `filter_fqns` that also leaves out layers too small for float8."""


@dataclass(kw_only=True)
class Options:
    """The keys of torchtitan's own float8 section, with f8emu's recipes."""

    recipe_name: str = "tensorwise"
    """The name of a recipe in `f8emu.RECIPES`."""
    enable_fsdp_float8_all_gather: bool = False
    """Cast weights to float8 on each rank, before FSDP gathers them."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights in one all-reduce after the optimizer step."""
    filter_fqns: list[str] = field(default_factory=list)
    """Layers whose names contain one of these stay in high precision; "auto_filter_small_kn" adds the small ones."""


def convert(model: nn.Module, options: Options, *, subclasses: Collection[type[nn.Linear]] = ()) -> None:
    """`convert_to_float8_training` with the options; it logs which layers it converted."""
    convert_to_float8_training(
        model,
        config=options.recipe_name,
        module_filter_fn=_wanted(options),
        subclasses=subclasses,
        enable_fsdp_float8_all_gather=options.enable_fsdp_float8_all_gather,
    )


def precompute(model_parts: Iterable[nn.Module], options: Options) -> None:
    """The scales of gathered weights, after an optimizer step. Delayed ones are updated by backward passes."""
    if options.enable_fsdp_float8_all_gather and options.precompute_float8_dynamic_scale_for_fsdp:
        for part in model_parts:
            precompute_float8_dynamic_scale_for_fsdp(part)


def checkpoint_delayed_scaling(trainer: Any) -> None:
    """Keep the state of delayed scaling in the checkpoints of a torchtitan Trainer, as "float8", "float8_1", ...

    Call it between the trainer's construction and `trainer.train()`, which loads checkpoints. For a recipe without
    delayed scaling it does nothing. To resume from a checkpoint without these entries, name them in
    `checkpoint.exclude_from_loading`; scaling then starts anew.
    """
    for number, part in enumerate(trainer.model_parts):
        state = DelayedScalingState(part)
        if state.state_dict():
            trainer.checkpointer.states[f"float8_{number}" if number else "float8"] = state


def _wanted(options: Options) -> ModuleFilter:
    names = [name for name in options.filter_fqns if name != _AUTO_FILTER]
    if len(names) < len(options.filter_fqns):
        return filter_small_layers(options.recipe_name, filter_fqns=names)

    def is_wanted(layer: nn.Module, fqn: str) -> bool:
        is_multiple = isinstance(layer, nn.Linear) and not any(
            size % SIZE_MULTIPLE for size in (layer.in_features, layer.out_features)
        )
        return is_multiple and not any(name in fqn for name in names)

    return is_wanted
