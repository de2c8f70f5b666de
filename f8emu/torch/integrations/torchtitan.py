"""torchtitan with f8emu's recipes: docs/guides/trainers.md has the commands and the configurations.

The installed version of torchtitan selects the adapter; torchtitan is not changed. torchtitan 0.2 converts modules:
section [f8emu] has the keys of its own float8 section. torchtitan 0.3 converts trees of configurations.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.util import find_spec
from types import new_class
from typing import Any

from torch import nn

from f8emu.spec.errors import required_by
from f8emu.spec.exports import public
from f8emu.spec.names import CastFromName
from f8emu.spec.recipe import recipe_by_name
from f8emu.torch.conversion.convert import convert_to_float8_training
from f8emu.torch.conversion.filters import filter_layers, filter_small_layers
from f8emu.torch.conversion.report import surrounds_forward
from f8emu.torch.layer.delayed_update import DelayedScalingState
from f8emu.torch.weights.sharded_weight import precompute_float8_dynamic_scale_for_fsdp

_log = logging.getLogger("f8emu")
_AUTO_FILTER = "auto_filter_small_kn"  # torchtitan's entry of `filter_fqns` for layers too small for float8


@dataclass(kw_only=True)
class Options:
    """The keys of torchtitan's own float8 section, with f8emu's recipes."""

    recipe_name: str = "tensorwise"
    """The name of a recipe in `f8emu.RECIPES`."""
    enable_fsdp_float8_all_gather: bool = False
    """Cast weights to float8 on each rank, before FSDP gathers them."""
    float8_primary_weights: bool = False
    """Keep the float8 codes of each rank's weights from one optimizer step to the next; FSDP gathers them."""
    cast_weight_from: CastFromName = "parameter"
    """"bfloat16" casts what a bfloat16 copy of a weight holds, as FSDP gathers it in high precision."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights in one all-reduce after the optimizer step."""
    filter_fqns: list[str] = field(default_factory=list)
    """Layers whose names contain one of these stay in high precision; "auto_filter_small_kn" adds the small ones."""
    fqns: list[str] = field(default_factory=lambda: ["experts"])
    """Experts whose names contain one of these are converted: the key of torchtitan's `quantize.grouped_mm.float8`. Of
    any number of tokens: they need no padding of groups."""


def _convert(model: nn.Module, options: Options, *, subclasses: Collection[type[nn.Linear]] = ()) -> None:
    recipe = recipe_by_name(options.recipe_name)
    # On a command line an empty list is "", a name that all names contain.
    names = [name for name in options.filter_fqns if name and name != _AUTO_FILTER]
    of_experts = [name for name in options.fqns if name]
    if _AUTO_FILTER in options.filter_fqns:
        is_wanted = filter_small_layers(recipe, filter_fqns=names)
    else:
        is_wanted = filter_layers(names, False, None)
    convert_to_float8_training(
        model,
        config=recipe,
        module_filter_fn=lambda module, fqn: (
            is_wanted(module, fqn) and (isinstance(module, nn.Linear) or any(name in fqn for name in of_experts))
        ),
        subclasses=subclasses,
        enable_fsdp_float8_all_gather=options.enable_fsdp_float8_all_gather,
        float8_primary_weights=options.float8_primary_weights,
        cast_weight_from=options.cast_weight_from,
    )


def _precompute(model_parts: Iterable[nn.Module], options: Options) -> None:
    # Of delayed scaling, backward passes update the scales.
    gathers = options.enable_fsdp_float8_all_gather or options.float8_primary_weights
    if gathers and options.precompute_float8_dynamic_scale_for_fsdp:
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


with required_by("f8emu.torch.integrations.torchtitan"):
    _HAS_CONVERTERS = find_spec("torchtitan.protocols.model_converter") is not None

if _HAS_CONVERTERS:  # 0.2
    from torchtitan.protocols.model_converter import register_model_converter  # pyright: ignore[reportMissingImports]

    @dataclass
    class JobConfig:
        """Section [f8emu] of the TOML file, `--f8emu.*` on the command line, for torchtitan to merge into its own."""

        f8emu: Options = field(default_factory=Options)

    class Float8Converter:  # pyright: ignore[reportRedeclaration]
        """A torchtitan ModelConverter: `model.converters = ["f8emu"]`."""

        def __init__(self, job_config: Any, parallel_dims: Any) -> None:
            options: Options = job_config.f8emu
            if not parallel_dims.fsdp_enabled:  # then no weight is gathered
                if options.float8_primary_weights:
                    _log.warning("f8emu: float8_primary_weights needs FSDP here; weights are cast in every pass")
                options = replace(options, enable_fsdp_float8_all_gather=False, float8_primary_weights=False)
            self.options = options

        def convert(self, model: nn.Module) -> None:
            """Convert the model, before torchtitan parallelizes, checkpoints, compiles and shards it."""
            _convert(model, self.options)

        def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
            """Precompute the scales of gathered weights; torchtitan calls this after every optimizer step."""
            _precompute(model if isinstance(model, list) else [model], self.options)

    register_model_converter(Float8Converter, "f8emu")
else:
    from torchtitan.protocols.model import BaseModel, ModelConfigConverter  # pyright: ignore[reportMissingImports]
    from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]

    @cache
    def _with_protocol(of: type[nn.Module]) -> type[Any]:
        return new_class(of.__name__, (of, Module))

    class Float8Converter(ModelConfigConverter):
        """A converter for `converters` of torchtitan's `model_registry`; put it last: it converts what others add.

        Every `Linear` of torchtitan, and every subclass whose `forward` surrounds `super().forward()`, becomes a layer
        that is an instance of both its old class and `f8emu.torch.Float8Linear`. A subclass with a `forward` of its own
        stays in high precision, and the logged report names it.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(ModelConfigConverter.Config, Options):
            """The keys of `Options`."""

        def __init__(self, config: Config) -> None:
            self.options = config

        def convert(self, model_config: Any) -> Any:
            """A configuration with the fields of `model_config`, in a subclass of its class."""
            options, config_class = self.options, type(model_config)

            class Float8ModelConfig(config_class):
                def build(self, **kwargs: Any) -> BaseModel:
                    model = config_class.build(self, **kwargs)
                    linears = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
                    _convert(model, options, subclasses=tuple(filter(surrounds_forward, linears - {nn.Linear})))
                    for module in model.modules():  # torchtitan wants its own class of all, as of what experts add
                        if not isinstance(module, Module):
                            module.__class__ = _with_protocol(type(module))
                    return model

            Float8ModelConfig.__qualname__ = f"Float8{config_class.__qualname__}"
            return Float8ModelConfig(**{f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init})

        def post_optimizer_build(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
            """Precompute the scales of gathered weights after every step; for `ModelSpec.post_optimizer_build_fn`."""
            optimizers.register_step_post_hook(lambda *args, **kwargs: _precompute(model_parts, self.options))


__all__, __dir__ = public(__name__)
