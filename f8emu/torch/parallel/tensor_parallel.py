"""Tensor-parallel styles whose activations and gradients are gathered as float8: one byte an element, and scales.

They replace the styles of torch.distributed.tensor.parallel, whose names they extend, on the layers of a converted
model, and shard parameters in the same way. An input stays with each rank's tokens: the layer casts it under the scales
of all and gathers the codes. Partial outputs are added by the layer itself, so that the gradient comes with each rank's
tokens and is gathered as float8 too. Sums over ranks stay in high precision. torch's own styles work with every recipe,
and gather in high precision.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.torch.casts.placements import require_gatherable
from f8emu.torch.casts.shared_input import TracedInput
from f8emu.torch.layer.float8_linear import Float8Linear


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` with a float8 all-gather of an input that is sharded along tokens.

    The gradient of that input is reduce-scattered in high precision.

    Exactness: every rank's output is a slice of a single device's output.

    Raises:
        OperandError: a module that is not a Float8Linear.
        UnsupportedError: a recipe with operands that cannot be gathered as float8; an input sharded along K.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        return _placed(inputs[0], device_mesh, input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_float8("Float8ColwiseParallel", module)
        return super()._apply(module, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` with a float8 all-gather of the gradient of an output that is sharded along tokens.

    The partial outputs are added in high precision, then the bias.

    Exactness: codes, scales and each partial output equal a single device's for this rank's part of K.

    Raises:
        OperandError: a module that is not a Float8Linear.
        UnsupportedError: a recipe with operands that cannot be gathered as float8; an input sharded along tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require_float8("Float8RowwiseParallel", module)
        (of_input,), (of_output,) = self.input_layouts, self.output_layouts
        if not of_input.is_replicate() and not of_input.is_shard(-1):
            raise UnsupportedError(
                "Float8RowwiseParallel: input_layouts must be Shard(-1), the output of a column-parallel layer, or "
                f"Replicate(); got {of_input}; use RowwiseParallel, which exchanges the input in high precision"
            )
        if of_output.is_partial() or of_output.is_shard(-1):
            raise UnsupportedError(
                "Float8RowwiseParallel: output_layouts must be Replicate() or Shard of a dimension of tokens; got "
                f"{of_output}; use RowwiseParallel"
            )
        layer.reduce_to = self.output_layouts
        return super()._apply(module, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that keeps inputs sharded along tokens and gathers them as float8.

    The float8 layers of the module cast and gather the input. Layers that share an input do so once, except under
    delayed scaling, where every layer has its own scale. Other code in the module sees a DTensor that holds each rank's
    tokens and has the shape of the whole, so `use_local_output` must be False. A desired layout is Replicate, or the
    layout that the input has. What cannot be done is refused when the style is applied.

    Args:
        float8_dtype: the format to which the layers cast their input; it is checked.
        fwd_config_submodule_fqn: the layer whose format is checked; None checks all float8 layers of the module.
        layouts: the arguments of `PrepareModuleInput`.

    Raises:
        OperandError: a module without float8 layers, or with inputs of another format.
        UnsupportedError: `use_local_output`; other layouts; a recipe with operands that cannot be gathered as float8.
    """

    def __init__(
        self,
        *,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
        **layouts: Any,
    ) -> None:
        super().__init__(**layouts)
        self.float8_dtype, self.fwd_config_submodule_fqn = float8_dtype, fwd_config_submodule_fqn

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        return input if input_layout is None else _placed(input, mesh, (input_layout,))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
        if not layers:
            raise OperandError(
                f"PrepareFloat8ModuleInput: the module must have a Float8Linear; got {type(module).__name__} without; "
                "convert the model first (convert_to_float8_training), or use PrepareModuleInput"
            )
        if self.use_local_output:
            raise UnsupportedError(
                "PrepareFloat8ModuleInput: use_local_output must be False, since an input that is gathered as float8 "
                "is codes and scales; use PrepareModuleInput, which gathers in high precision"
            )
        pairs = list(zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True))
        desired_kwargs = self.desired_input_kwarg_layouts
        pairs += [(layout, desired_kwargs[name]) for name, layout in self.input_kwarg_layouts.items()]
        for layout, desired in pairs:
            if layout is not None and desired is not None and not (desired.is_replicate() or desired == layout):
                raise UnsupportedError(
                    f"PrepareFloat8ModuleInput: an input can be gathered, from Shard of a dimension of tokens to "
                    f"Replicate(), or left as it is; got {layout} to {desired}; use PrepareModuleInput"
                )
        traced, checked = TracedInput(), self.fwd_config_submodule_fqn
        for layer in layers:
            require_gatherable("PrepareFloat8ModuleInput", layer.recipe)
            format = layer.recipe.output.a.format
            is_checked = checked is None or module.get_submodule(checked) is layer
            if is_checked and (format is None or getattr(torch, format.name) is not self.float8_dtype):
                raise OperandError(
                    f"PrepareFloat8ModuleInput: float8_dtype must be what the layers cast their input to; got "
                    f"{self.float8_dtype}, and {format} in recipe {layer.recipe.label}; leave float8_dtype out"
                )
            layer.traced_input = traced
        module.register_forward_pre_hook(traced.begin)
        module.register_forward_hook(traced.end)
        return super()._apply(module, device_mesh)


def _placed(input: Any, mesh: DeviceMesh, layouts: tuple[Placement, ...]) -> Tensor:
    if isinstance(input, DTensor):
        return input
    return DTensor.from_local(input, mesh, layouts, run_check=False)


def _require_float8(style: str, module: nn.Module) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise OperandError(
            f"{style}: the module must be a Float8Linear; got {type(module).__name__}; convert the model first "
            f"(convert_to_float8_training), or use {style.removeprefix('Float8')}"
        )
    require_gatherable(style, module.recipe)
    return module
