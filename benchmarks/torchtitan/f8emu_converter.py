"""f8emu as a model converter of torchtitan 0.2.x, as a user would write it; torchtitan itself stays as it is.

    torchrun ... -m torchtitan.train --job.config_file FILE --model.converters f8emu --f8emu.recipe tensorwise \
        --job.custom_config_module MODULE --experimental.custom_import MODULE       with MODULE this one
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torchtitan.components.quantization.utils import module_filter_fn  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.model_converter import register_model_converter  # pyright: ignore[reportMissingImports]

from f8emu.torch import convert_to_float8_training, sync_float8_amax_and_scale_history


@dataclass
class F8emu:
    """Section [f8emu] of the TOML file, --f8emu.* on the command line."""

    recipe: str = "tensorwise"
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Layers with one of these in their name stay in bfloat16."""


@dataclass
class JobConfig:
    """torchtitan merges it into its own."""

    f8emu: F8emu = field(default_factory=F8emu)


class F8emuConverter:
    """The methods that torchtitan calls."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        self.config: F8emu = job_config.f8emu

    def convert(self, model: nn.Module) -> None:
        wanted = partial(module_filter_fn, filter_fqns=self.config.filter_fqns)
        convert_to_float8_training(model, config=self.config.recipe, module_filter_fn=wanted)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        for part in model if isinstance(model, list) else [model]:
            sync_float8_amax_and_scale_history(part)  # recipes without delayed scaling have nothing to update


register_model_converter(F8emuConverter, "f8emu")
