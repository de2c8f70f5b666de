"""A layer of f8emu.torch: converted, eager or compiled. torch is imported when a layer is run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.layers.layer import LayerCase, Place
from f8emu.conformance.layers.training import Executed, GemmTap, Training, engine_taps
from f8emu.spec import TENSORS

if TYPE_CHECKING:
    from torch import Tensor


class TorchTraining(Training):
    """Layers made by `convert_to_float8_training`, and how they are called."""

    def __init__(self, case: LayerCase, framework: Framework) -> None:
        import torch

        from f8emu.torch import convert_to_float8_training

        super().__init__(case, framework)
        self.taps = engine_taps("f8emu.torch")  # what the operators of f8emu call
        plain = [torch.nn.Linear(k, n, case.with_bias) for _, n, k in map(case.sizes, self.numbers)]
        model = torch.nn.ModuleList(plain).to(self.load(np.zeros(0, np.float32)).device)
        for layer in plain:
            layer.weight.data = layer.weight.data.to(framework.dtype(case.weight_dtype))
            layer.weight.requires_grad_("weight" in case.trained)
        self.model = convert_to_float8_training(model, config=case.recipe, pad=True)
        layers = list(self.model.children())
        self.layers: list[Any] = list(layers)
        is_shared = case.layers > 1

        def forward(x: "Tensor") -> list["Tensor"]:
            # As in a model: only the operands of an input that autograd computed are kept for another layer.
            shared = x.view_as(x) if is_shared else x
            return [layer(shared) for layer in layers]

        self.run: Callable[..., list[Tensor]] = forward
        if self.is_compiled:
            self.taps += (GemmTap("torch._inductor.select_algorithm", "extern_kernels._scaled_mm", True),)
            torch.compiler.reset()  # another case's graphs count toward the limit of recompilations
            self.run = torch.compile(forward, fullgraph=True, dynamic=False)

    def begin(self, step: int) -> None:
        import torch

        self.model.zero_grad()
        with torch.no_grad():
            for number, layer in zip(self.numbers, self.layers, strict=True):
                tensors = self.case.tensors(Place(step, layer=number))
                layer.weight.copy_(self.load(tensors["weight"]))
                if self.case.with_bias:
                    layer.bias.copy_(self.load(tensors["bias"]))

    def forward(self, places: Sequence[Place], x: np.ndarray) -> list[np.ndarray]:
        import torch

        self.x = self.load(x)
        self.x.requires_grad_("input" in self.case.trained)
        dtype = self.framework.dtype(self.case.dtype)
        autocast = torch.autocast(self.x.device.type, dtype=dtype) if self.case.is_autocast else nullcontext()
        with autocast, torch.set_grad_enabled(bool(self.case.trained)):
            self.outputs = self.run(self.x)
        return [self.store(output) for output in self.outputs]

    def backward(self, grads: Sequence[np.ndarray]) -> np.ndarray | None:
        import torch

        torch.autograd.backward(self.outputs, [self.load(grad) for grad in grads])
        return None if self.x.grad is None else self.store(self.x.grad)

    def parameter_grads(self) -> Iterator[tuple[int, str, np.ndarray]]:
        for number, layer in zip(self.numbers, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    yield number, name, self.store(parameter.grad)

    def state(self, number: int, tensor: str, field: str) -> np.ndarray:
        from f8emu.torch import delayed_state_dict

        return self.store(delayed_state_dict(self.layers[number - 1])[field][TENSORS.index(tensor)])

    def tapped(self, run: Callable[..., Any], is_scaled: bool) -> Callable[..., Any]:
        import torch

        def call(a: "Tensor", b: "Tensor", *rest: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or type(a) is not torch.Tensor:
                return run(a, b, *rest, **options)  # a compiler traces: nothing is computed yet
            scale_a = scale_b = None
            if is_scaled:
                scale_a, scale_b = (
                    self.store(s.reshape(1, 1) if s.numel() == 1 else s) for s in (rest[0], rest[1].t())
                )
            operands = self.store(a), self.store(b.t())
            result = run(a, b, *rest, **options)
            self.executed.append(Executed(*operands, scale_a, scale_b, self.store(options.get("out", result))))
            return result

        return call

    def store(self, tensor: "Tensor") -> np.ndarray:
        """A copy: buffers are used again."""
        import torch

        return self.framework.store(tensor.detach().clone(memory_format=torch.contiguous_format))
