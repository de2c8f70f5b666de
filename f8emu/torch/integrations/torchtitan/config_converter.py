"""torchtitan 0.3: a converter of configuration trees. The model that its result builds is converted as it is built."""

from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torchtitan.protocols.model import BaseModel, ModelConfigConverter  # pyright: ignore[reportMissingImports]

from f8emu.torch.conversion.subclass import surrounds_forward
from f8emu.torch.integrations.torchtitan.conversion import Options, convert, precompute


class Float8Converter(ModelConfigConverter):
    """A converter for `converters` of torchtitan's `model_registry`; put it last, so that it converts what others add.

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
                convert(model, options, subclasses=tuple(filter(surrounds_forward, linears - {nn.Linear})))
                return model

        Float8ModelConfig.__qualname__ = f"Float8{config_class.__qualname__}"
        return Float8ModelConfig(**{f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init})

    def post_optimizer_build(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        """Precompute the scales of gathered weights after every step; for `ModelSpec.post_optimizer_build_fn`."""
        optimizers.register_step_post_hook(lambda *args, **kwargs: precompute(model_parts, self.options))
