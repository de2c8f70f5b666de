"""A linear layer of f8emu.jax as people train it: `dot_general` under a recipe, forward and backward, eager or jitted.

As in `torch_layer`, operands and product of a GEMM are taken where its engine is entered, by taps on the functions that
compute it; in a jitted layer a tap puts a callback into the program. Gradients are those of `jax.vjp`, and states those
that `linear_delayed_update` makes of them. Jitted layers have their weight as a kernel [K, N], as flax does.

Taps are on functions of the whole process, so one case runs at a time. JAX is imported when a layer is run.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.layers.executed import Executed, Parts, Wanted, alone, engine_taps, gemm_parts, matched
from f8emu.conformance.layers.layer import LayerCase, LayerMode, Place
from f8emu.spec import DelayedState

TAPS = engine_taps("f8emu.jax")


def train(framework: Framework, case: LayerCase) -> Parts:
    """The parts of `layer_trace.layer_parts`, as the layer gives them. Warnings are no part."""
    with alone():
        return _Run(case, framework).parts()


class _Run:
    """One case: its layers as a function of input, parameters and states."""

    def __init__(self, case: LayerCase, framework: Framework) -> None:
        import jax

        import f8emu.jax as f8

        self.case, self.framework, self.f8 = case, framework, f8
        self.numbers = range(1, case.layers + 1)
        self.is_jitted = case.mode is LayerMode.COMPILED
        is_delayed = case.recipe.delayed is not None
        multiply: Any = f8.delayed_dot_general(case.recipe) if is_delayed else f8.dot_general(case.recipe)
        self.states: list[Any] = [f8.linear_delayed_state(case.recipe) if is_delayed else None for _ in self.numbers]
        dtype = framework.dtype(case.dtype)

        def one_layer(x: Any, parameters: dict[str, Any], state: Any) -> Any:
            dimensions = (((x.ndim - 1,), (0 if self.is_jitted else 1,)), ((), ()))
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
        jit: Callable[..., Any] = f8.jit if self.is_jitted else lambda function: function
        self.forward = jit(forward)
        self.forward_and_backward = jit(lambda trained, fixed: jax.vjp(lambda t: forward(t, fixed), trained))
        self.backward = jit(lambda pull, grads: pull(grads)[0])

    def parts(self) -> Parts:
        """All steps."""
        case, parts = self.case, Parts()
        with _tapped() as executed:
            for step in range(1, case.steps + 1):
                grads: dict[str, Any] | None = None
                for turn in range(1, case.passes + 1):
                    of_pass, found = self._pass(step, turn, executed)
                    parts |= of_pass
                    if case.updates:
                        parts |= self._update(step, found["states"])
                    grads = found if grads is None else self._accumulated(grads, found)
                for i, number in enumerate(self.numbers):
                    for name in self.parameters:
                        if grads is not None and name in grads:
                            grad = np.asarray(grads[name][i])
                            part = case.part(Place(step, layer=number), f"{name}.grad", of="step")
                            parts[part] = grad.T if name == "weight" and self.is_jitted else grad
        return parts

    def _pass(self, step: int, turn: int, executed: list[Executed]) -> tuple[Parts, dict[str, Any]]:
        """Forward and backward: the parts, and the gradients of everything trained."""
        import jax

        case, parts = self.case, Parts()
        places = [Place(step, turn, number) for number in self.numbers]
        tensors = [case.tensors(place) for place in places]
        values: dict[str, Any] = {
            "input": self._load(tensors[0]["input"]).reshape(*(case.batch or case.shape[:1]), -1),
            "weight": [self._load(t["weight"].T.copy() if self.is_jitted else t["weight"]) for t in tensors],
            "bias": [self._load(t["bias"]) for t in tensors if case.with_bias],
            "states": self.states,
        }
        wanted = set(case.trained) | ({"bias", "states"} if case.trained else set())
        trained = {name: value for name, value in values.items() if name in wanted}
        fixed = {name: value for name, value in values.items() if name not in wanted and name != "states"}
        # 1. Forward.
        pull = None
        if trained:
            outputs, pull = self.forward_and_backward(trained, fixed)
        else:
            outputs = self.forward(trained, fixed)
        self._wait(outputs)
        count = len(executed)
        of_forward = [Wanted(place, "output", case.gemm_sizes(place.layer)["output"]) for place in places]
        for place, found, output in zip(places, matched(of_forward, executed), outputs, strict=True):
            parts |= gemm_parts(case, found)
            parts[case.part(place, "result")] = np.asarray(output)
        executed.clear()
        # 2. Backward.
        grads: dict[str, Any] = {}
        if pull is not None:
            given = [self._load(t["grad_output"]).reshape(o.shape) for t, o in zip(tensors, outputs, strict=True)]
            grads = jax.block_until_ready(self.backward(pull, given))
            self._wait(grads)
        count += len(executed)
        of_backward = [
            Wanted(place, name, case.gemm_sizes(place.layer)[name])
            for place in reversed(places)
            for name in case.gemms[1:]
        ]
        for found in matched(of_backward, executed):
            parts |= gemm_parts(case, found)
        executed.clear()
        # 3. What is left.
        parts[case.part(places[0], "gemms", of="pass")] = np.array(count)
        if "input" in grads:
            parts[case.part(places[0], "input.grad", of="pass")] = np.asarray(grads["input"])
        return parts, grads

    def _accumulated(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        """The sums of the gradients of two passes."""
        return {name: [x + y for x, y in zip(a[name], b[name], strict=True)] for name in self.parameters if name in a}

    def _update(self, step: int, amaxes: Sequence[Any]) -> Parts:
        """The states of the next pass."""
        case, parts = self.case, Parts()
        delayed = case.recipe.delayed
        assert delayed is not None, "it has updates"
        pairs = zip(self.states, amaxes, strict=True)
        self.states = [self.f8.linear_delayed_update(state, found, case.recipe) for state, found in pairs]
        for (i, number), tensor, field in product(enumerate(self.numbers), delayed.tensors, DelayedState._fields):
            value = np.asarray(getattr(getattr(self.states[i], tensor), field))
            part = case.part(Place(step, layer=number), f"delayed.{tensor}.{field}", of="step")
            parts[part] = value != 0 if field == "initialized" else value
        return parts

    def _wait(self, arrays: Any) -> None:
        """Until the arrays are there, and the callbacks have run."""
        import jax

        jax.block_until_ready(arrays)
        jax.effects_barrier()

    def _load(self, array: np.ndarray) -> Any:
        return self.framework.load(array)


@contextmanager
def _tapped() -> Iterator[list[Executed]]:
    """The GEMMs that run inside; whoever reads the list clears it."""
    import jax
    from jax.core import Tracer

    executed: list[Executed] = []

    def record(is_transposed: bool, a: Any, b: Any, result: Any, *scales: Any) -> None:
        # What is turned is turned here: every eager transpose would be a program.
        operands = np.array(a), np.array(b).T
        scale_a, scale_b = (np.array(scales[0]), np.array(scales[1]).T) if scales else (None, None)
        product = np.array(result)
        executed.append(Executed(*operands, scale_a, scale_b, product.T if is_transposed else product))

    def tapped(run: Callable[..., Any], is_scaled: bool) -> Callable[..., Any]:
        def call(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
            result = run(a, b, *rest, **options)
            seen = partial(record, bool(options.get("transposed")))
            arrays = (a, b, result, *(rest[:2] if is_scaled else ()))
            is_traced = any(isinstance(x, Tracer) for x in arrays)
            jax.debug.callback(seen, *arrays) if is_traced else seen(*arrays)
            return result

        return call

    with ExitStack() as stack:
        for module, attribute, is_scaled in TAPS:
            owner = importlib.import_module(module)
            stack.enter_context(patch.object(owner, attribute, tapped(getattr(owner, attribute), is_scaled)))
        yield executed
