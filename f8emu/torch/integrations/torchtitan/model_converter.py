"""torchtitan 0.2: the model converter "f8emu" and its section of the configuration."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torchtitan.protocols.model_converter import register_model_converter  # pyright: ignore[reportMissingImports]

from f8emu.torch.integrations.torchtitan.conversion import Options, convert, precompute


@dataclass
class JobConfig:
    """Section [f8emu] of the TOML file, `--f8emu.*` on the command line, for torchtitan to merge into its own."""

    f8emu: Options = field(default_factory=Options)


class Float8Converter:
    """A torchtitan ModelConverter: `model.converters = ["f8emu"]`."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        options: Options = job_config.f8emu
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
