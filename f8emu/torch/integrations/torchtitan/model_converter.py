"""torchtitan 0.2: the model converter "f8emu" and its section of the configuration."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torchtitan.protocols.model_converter import register_model_converter  # pyright: ignore[reportMissingImports]

from f8emu.torch.integrations.torchtitan.conversion import convert, precompute


@dataclass
class Float8:
    """Section [f8emu] of the TOML file, `--f8emu.*` on the command line; the keys of `conversion.Options`."""

    recipe_name: str = "tensorwise"
    enable_fsdp_float8_all_gather: bool = False
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    filter_fqns: list[str] = field(default_factory=list)


@dataclass
class JobConfig:
    """The section that torchtitan merges into its own configuration."""

    f8emu: Float8 = field(default_factory=Float8)


class Float8Converter:
    """A torchtitan ModelConverter: `model.converters = ["f8emu"]`."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        options: Float8 = job_config.f8emu
        # Without FSDP no weight is gathered.
        gathers = options.enable_fsdp_float8_all_gather and parallel_dims.fsdp_enabled
        self.options = replace(options, enable_fsdp_float8_all_gather=gathers)

    def convert(self, model: nn.Module) -> None:
        """Convert the model, before torchtitan parallelizes, checkpoints, compiles and shards it."""
        convert(model, self.options)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Precompute the scales of gathered weights; torchtitan calls this after every optimizer step."""
        precompute(model if isinstance(model, list) else [model], self.options)


register_model_converter(Float8Converter, "f8emu")
