"""Layers of f8emu.jax and f8emu.torch, eager or compiled. Each framework is imported when a layer of it is run.

JAX: `dot_general` under a recipe. In a jitted layer a tap puts a callback into the program. Gradients are those of
`jax.vjp`, and states those that `linear_delayed_update` makes of them. Jitted layers have their weight as a kernel
[K, N], as flax does. torch: layers that `convert_to_float8_training` made.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.layers.layer import LayerCase, Place
from f8emu.conformance.layers.training import Executed, GemmTap, Training
from f8emu.spec import TENSORS

if TYPE_CHECKING:
    from torch import Tensor


class JaxTraining(Training):
    """Layers as a function of input, parameters and states."""

    taps = tuple(GemmTap(f"f8emu.jax.gemm.{engine}", "multiply", False) for engine in ("emulation", "hardware"))

    def __init__(self, case: LayerCase, framework: Framework) -> None:
        import jax

        import f8emu.jax as f8

        super().__init__(case)
        self.framework, self.load = framework, framework.load
        self.f8 = f8
        is_delayed = case.recipe.delayed is not None
        multiply: Any = f8.delayed_dot_general(case.recipe) if is_delayed else f8.dot_general(case.recipe)
        self.states: list[Any] = [f8.linear_delayed_state(case.recipe) if is_delayed else None for _ in self.numbers]
        dtype = framework.dtype(case.dtype)

        def one_layer(x: Any, parameters: dict[str, Any], state: Any) -> Any:
            dimensions = (((x.ndim - 1,), (0 if self.is_compiled else 1,)), ((), ()))
            operands = (x, parameters["weight"]) if state is None else (x, parameters["weight"], state)
            output = multiply(*operands, dimensions)
            if "bias" not in parameters:
                return output
            return output + jax.numpy.broadcast_to(parameters["bias"].astype(dtype), output.shape)

        def forward(trained: dict[str, Any], fixed: dict[str, Any]) -> list[Any]:
            """All layers; `trained` is what has a gradient."""
            x = (trained | fixed)["input"].astype(dtype)
            states = trained.get("states", self.states if not trained else None)
            return [
                one_layer(x, {name: (trained | fixed)[name][i] for name in self.parameters}, states[i])
                for i in range(case.layers)
            ]

        self.parameters = ("weight", "bias") if case.with_bias else ("weight",)
        jit: Callable[..., Any] = f8.jit if self.is_compiled else lambda function: function
        self.run = jit(forward)
        self.run_and_pull = jit(lambda trained, fixed: jax.vjp(lambda t: forward(t, fixed), trained))
        self.pulled = jit(lambda pull, grads: pull(grads)[0])

    def begin(self, step: int) -> None:
        self.grads: dict[str, list[Any]] = {name: [] for name in self.parameters}  # by pass

    def forward(self, places: Sequence[Place], x: np.ndarray) -> list[np.ndarray]:
        case, tensors = self.case, [self.case.tensors(place) for place in places]
        weights = [t["weight"].T.copy() if self.is_compiled else t["weight"] for t in tensors]
        values: dict[str, Any] = {"input": self.load(x), "weight": list(map(self.load, weights))}
        if case.with_bias:
            values["bias"] = [self.load(t["bias"]) for t in tensors]
        names = {*case.trained, "bias"} & values.keys() if case.trained else set[str]()
        trained = {name: values.pop(name) for name in names}
        if trained:
            outputs, self.pull = self.run_and_pull(trained | {"states": self.states}, values)
        else:
            outputs = self.run(trained, values)
        self._wait(outputs)
        return [np.asarray(output) for output in outputs]

    def backward(self, grads: Sequence[np.ndarray]) -> np.ndarray | None:
        pulled = self.pulled(self.pull, [self.load(grad) for grad in grads])
        self._wait(pulled)
        if self.case.updates:
            pairs = zip(self.states, pulled["states"], strict=True)
            self.states = [self.f8.linear_delayed_update(state, amaxes, self.case.recipe) for state, amaxes in pairs]
        for name, passes in self.grads.items():
            passes += [pulled[name]] if name in pulled else []
        return np.asarray(pulled["input"]) if "input" in pulled else None

    def parameter_grads(self) -> Iterator[tuple[int, str, np.ndarray]]:
        for name, passes in self.grads.items():
            for number, grads in enumerate(zip(*passes, strict=True), start=1):
                grad = np.asarray(reduce(operator.add, grads))
                yield number, name, grad.T if name == "weight" and self.is_compiled else grad

    def state(self, number: int, tensor: str, field: str) -> np.ndarray:
        value = np.asarray(getattr(getattr(self.states[number - 1], tensor), field))
        return value != 0 if field == "initialized" else value

    def tapped(self, run: Callable[..., Any], is_scaled: bool) -> Callable[..., Any]:
        import jax
        from jax.core import Tracer

        def record(is_transposed: bool, a: Any, b: Any, result: Any, *scales: Any) -> None:
            # numpy transposes here: every eager transpose of JAX would be a program.
            scale_a, scale_b = (np.array(scales[0]), np.array(scales[1]).T) if scales else (None, None)
            product = np.array(result).T if is_transposed else np.array(result)
            self.executed.append(Executed(np.array(a), np.array(b).T, scale_a, scale_b, product))

        def call(gemm: Any, a: Any, b: Any, *scales: Any, **options: Any) -> Any:
            result = run(gemm, a, b, *scales, **options)
            seen, arrays = partial(record, gemm.is_transposed), (a, b, result, *scales)
            is_traced = any(isinstance(x, Tracer) for x in arrays)
            jax.debug.callback(seen, *arrays) if is_traced else seen(*arrays)
            return result

        return call

    def _wait(self, arrays: Any) -> None:
        import jax

        jax.block_until_ready(arrays)
        jax.effects_barrier()


class TorchTraining(Training):
    """Layers made by `convert_to_float8_training`, and how they are called."""

    taps = tuple(  # what the operators of f8emu call
        GemmTap(f"f8emu.torch.gemm.{engine}", verb, verb == "scaled_mm")
        for engine, verb in product(("emulation", "hardware"), ("scaled_mm", "mm"))
    )

    def __init__(self, case: LayerCase, framework: Framework) -> None:
        import torch

        from f8emu.torch import convert_to_float8_training

        super().__init__(case)
        self.framework, self.load = framework, framework.load
        plain = [torch.nn.Linear(k, n, case.with_bias) for _, n, k in map(case.sizes, self.numbers)]
        model = torch.nn.ModuleList(plain).to(self.load(np.zeros(0, np.float32)).device)
        for layer in plain:
            layer.weight.data = layer.weight.data.to(framework.dtype(case.weight_dtype))
            layer.weight.requires_grad_("weight" in case.trained)
        self.model = convert_to_float8_training(model, config=case.recipe, pad=True)
        self.layers: list[Any] = list(self.model.children())
        layers, is_shared = list(self.layers), case.layers > 1

        def forward(x: "Tensor") -> list["Tensor"]:
            # A view, as in a model: operands are kept for another layer only if autograd computed their input.
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
