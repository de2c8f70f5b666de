"""A layer of f8emu.torch as people train it: converted, run forward and backward, eager or compiled.

There is no second path to look into. Operands and product of a GEMM are taken where its engine is entered, by taps on
the functions that compute it (`TAPS`), behind the compiler; gradients and the state of delayed scaling are read where
training leaves them. An amax or inv_scale stays inside of a kernel, so it is no part of such a layer.

Compiled code calls GEMMs in the order of its compiler, so they are told apart by their sizes (`executed`). Taps are on
functions of the whole process, so one case runs at a time. torch is imported when a layer is run.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.layers.executed import Executed, Parts, Tap, Wanted, alone, engine_taps, gemm_parts, matched
from f8emu.conformance.layers.layer import LayerCase, LayerMode, Place
from f8emu.spec import TENSORS, DelayedState

if TYPE_CHECKING:
    from torch import Tensor

TAPS = engine_taps("f8emu.torch")
"""What the operators of f8emu call."""
COMPILED_TAPS = (Tap("torch._inductor.select_algorithm", "extern_kernels._scaled_mm", True),)
"""What code that Inductor has generated calls besides."""


def train(framework: Framework, case: LayerCase) -> Parts:
    """The parts of `layer_trace.layer_parts`, as the layer gives them. Warnings are no part."""
    with alone():
        return _Run(case, framework).parts()


class _Run:
    """One case: the layers, and how they are called."""

    def __init__(self, case: LayerCase, framework: Framework) -> None:
        import torch

        from f8emu.torch import convert_to_float8_training

        self.case, self.framework = case, framework
        self.numbers = range(1, case.layers + 1)
        plain = [torch.nn.Linear(k, n, case.with_bias) for _, n, k in map(case.sizes, self.numbers)]
        model = torch.nn.ModuleList(plain).to(self._load(np.zeros(0, np.float32)).device)
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

        self.forward: Callable[..., list[Tensor]] = forward
        if case.mode is LayerMode.COMPILED:
            torch.compiler.reset()  # another case's graphs count toward the limit of recompilations
            self.forward = torch.compile(forward, fullgraph=True, dynamic=False)

    def parts(self) -> Parts:
        """All steps."""
        from f8emu.torch import delayed_state_dict

        case, parts = self.case, Parts()
        with _tapped(case.mode, self._store) as executed:
            for step in range(1, case.steps + 1):
                self._begin(step)
                for turn in range(1, case.passes + 1):
                    parts |= self._pass(step, turn, executed)
                for number, layer in zip(self.numbers, self.layers, strict=True):
                    for name, parameter in layer.named_parameters():
                        if parameter.grad is not None:
                            part = case.part(Place(step, layer=number), f"{name}.grad", of="step")
                            parts[part] = self._store(parameter.grad)
                if case.updates:
                    for number, layer in zip(self.numbers, self.layers, strict=True):
                        state = delayed_state_dict(layer)
                        delayed = case.recipe.delayed
                        assert delayed is not None, "it has updates"
                        for tensor, field in product(delayed.tensors, DelayedState._fields):
                            part = case.part(Place(step, layer=number), f"delayed.{tensor}.{field}", of="step")
                            parts[part] = self._store(state[field][TENSORS.index(tensor)])
        return parts

    def _begin(self, step: int) -> None:
        """Weights as after a step of an optimizer, gradients cleared."""
        import torch

        self.model.zero_grad()
        with torch.no_grad():
            for number, layer in zip(self.numbers, self.layers, strict=True):
                tensors = self.case.tensors(Place(step, layer=number))
                layer.weight.copy_(self._load(tensors["weight"]))
                if self.case.with_bias:
                    layer.bias.copy_(self._load(tensors["bias"]))

    def _pass(self, step: int, turn: int, executed: list[Executed]) -> Parts:
        """Forward and backward."""
        import torch

        case, parts = self.case, Parts()
        places = [Place(step, turn, number) for number in self.numbers]
        tensors = [case.tensors(place) for place in places]
        x = self._load(tensors[0]["input"]).reshape(*(case.batch or case.shape[:1]), -1)
        x.requires_grad_("input" in case.trained)
        # 1. Forward.
        dtype = self.framework.dtype(case.dtype)
        autocast = torch.autocast(x.device.type, dtype=dtype) if case.is_autocast else nullcontext()
        with autocast, torch.set_grad_enabled(bool(case.trained)):
            outputs = self.forward(x)
        count = len(executed)
        of_forward = [Wanted(place, "output", case.gemm_sizes(place.layer)["output"]) for place in places]
        for place, found, output in zip(places, matched(of_forward, executed), outputs, strict=True):
            parts |= gemm_parts(case, found)
            parts[case.part(place, "result")] = self._store(output)
        executed.clear()
        # 2. Backward.
        if case.trained:
            grads = [self._load(t["grad_output"]).reshape(o.shape) for t, o in zip(tensors, outputs, strict=True)]
            torch.autograd.backward(outputs, grads)
        count += len(executed)
        wanted = [Wanted(p, name, case.gemm_sizes(p.layer)[name]) for p in reversed(places) for name in case.gemms[1:]]
        for found in matched(wanted, executed):
            parts |= gemm_parts(case, found)
        executed.clear()
        # 3. What is left.
        parts[case.part(places[0], "gemms", of="pass")] = np.array(count)
        if x.grad is not None:
            parts[case.part(places[0], "input.grad", of="pass")] = self._store(x.grad)
        return parts

    def _load(self, array: np.ndarray) -> Any:
        return self.framework.load(array)

    def _store(self, tensor: "Tensor") -> np.ndarray:
        import torch

        # A copy: buffers are used again.
        return self.framework.store(tensor.detach().clone(memory_format=torch.contiguous_format))


@contextmanager
def _tapped(mode: LayerMode, store: Callable[["Tensor"], np.ndarray]) -> Iterator[list[Executed]]:
    """The GEMMs that run inside, in order; whoever reads the list clears it."""
    import torch

    executed: list[Executed] = []

    def tapped(run: Callable[..., Any], is_scaled: bool) -> Callable[..., Any]:
        def call(a: "Tensor", b: "Tensor", *rest: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or type(a) is not torch.Tensor:
                return run(a, b, *rest, **options)  # a compiler traces: nothing is computed yet
            scale_a = scale_b = None
            if is_scaled:
                scale_a, scale_b = (store(s.reshape(1, 1) if s.numel() == 1 else s) for s in (rest[0], rest[1].t()))
            codes_a, codes_b = store(a), store(b.t())
            result = run(a, b, *rest, **options)
            executed.append(Executed(codes_a, codes_b, scale_a, scale_b, store(options.get("out", result))))
            return result

        return call

    with ExitStack() as stack:
        for module_name, attribute, is_scaled in (*TAPS, *(COMPILED_TAPS if mode is LayerMode.COMPILED else ())):
            *path, name = attribute.split(".")
            owner: Any = importlib.import_module(module_name)
            for step in path:
                owner = getattr(owner, step)
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, tapped(getattr(owner, name), is_scaled)))
        yield executed
