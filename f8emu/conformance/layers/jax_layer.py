"""A layer of f8emu.jax: `dot_general` under a recipe, eager or jitted. JAX is imported when a layer is run.

In a jitted layer a tap puts a callback into the program. Gradients are those of `jax.vjp`, and states those that
`linear_delayed_update` makes of them. Jitted layers have their weight as a kernel [K, N], as flax does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.layers.layer import LayerCase, Place
from f8emu.conformance.layers.training import Executed, GemmTap, Training


class JaxTraining(Training):
    """Layers as a function of input, parameters and states."""

    taps = tuple(GemmTap(f"f8emu.jax.gemm.{engine}", "multiply", False) for engine in ("emulation", "hardware"))

    def __init__(self, case: LayerCase, framework: Framework) -> None:
        import jax

        import f8emu.jax as f8

        super().__init__(case, framework)
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
        self.grads: dict[str, Any] = {}

    def forward(self, places: Sequence[Place], x: np.ndarray) -> list[np.ndarray]:
        case = self.case
        tensors = [case.tensors(place) for place in places]
        values: dict[str, Any] = {
            "input": self.load(x),
            "weight": [self.load(t["weight"].T.copy() if self.is_compiled else t["weight"]) for t in tensors],
            "bias": [self.load(t["bias"]) for t in tensors if case.with_bias],
            "states": self.states,
        }
        wanted = set(case.trained) | ({"bias", "states"} if case.trained else set())
        trained = {name: value for name, value in values.items() if name in wanted}
        fixed = {name: value for name, value in values.items() if name not in wanted and name != "states"}
        if trained:
            outputs, self.pull = self.run_and_pull(trained, fixed)
        else:
            outputs = self.run(trained, fixed)
        self._wait(outputs)
        return [np.asarray(output) for output in outputs]

    def backward(self, grads: Sequence[np.ndarray]) -> np.ndarray | None:
        found = self.pulled(self.pull, [self.load(grad) for grad in grads])
        self._wait(found)
        if self.case.updates:
            pairs = zip(self.states, found["states"], strict=True)
            self.states = [self.f8.linear_delayed_update(state, amaxes, self.case.recipe) for state, amaxes in pairs]
        for name in self.parameters:  # the gradients of several passes add up
            if name in found:
                known = self.grads.get(name)
                added = found[name] if known is None else [x + y for x, y in zip(known, found[name], strict=True)]
                self.grads[name] = added
        return np.asarray(found["input"]) if "input" in found else None

    def parameter_grads(self) -> Iterator[tuple[int, str, np.ndarray]]:
        for name, grads in self.grads.items():
            for number, grad in zip(self.numbers, map(np.asarray, grads), strict=True):
                yield number, name, grad.T if name == "weight" and self.is_compiled else grad

    def state(self, number: int, tensor: str, field: str) -> np.ndarray:
        value = np.asarray(getattr(getattr(self.states[number - 1], tensor), field))
        return value != 0 if field == "initialized" else value

    def tapped(self, run: Callable[..., Any], is_scaled: bool) -> Callable[..., Any]:
        import jax
        from jax.core import Tracer

        def record(is_transposed: bool, a: Any, b: Any, result: Any, *scales: Any) -> None:
            # What is turned is turned here: every eager transpose would be a program.
            operands = np.array(a), np.array(b).T
            scale_a, scale_b = (np.array(scales[0]), np.array(scales[1]).T) if scales else (None, None)
            product = np.array(result)
            self.executed.append(Executed(*operands, scale_a, scale_b, product.T if is_transposed else product))

        def call(gemm: Any, a: Any, b: Any, *scales: Any, **options: Any) -> Any:
            result = run(gemm, a, b, *scales, **options)
            seen = partial(record, gemm.is_transposed)
            arrays = (a, b, result, *scales)
            is_traced = any(isinstance(x, Tracer) for x in arrays)
            jax.debug.callback(seen, *arrays) if is_traced else seen(*arrays)
            return result

        return call

    def _wait(self, arrays: Any) -> None:
        """Until the arrays are there, and the callbacks have run."""
        import jax

        jax.block_until_ready(arrays)
        jax.effects_barrier()
