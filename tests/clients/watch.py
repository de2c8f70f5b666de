"""What a library does with a converted model: its layers are called, its parameters learn, and it comes back."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import f8emu.torch as f8
from f8emu.spec import RecipeName
from tests.torch_path.states import assert_same_state, state_of


class Watch:
    """The models of one run under one recipe. A script converts by it and tells it the losses."""

    def __init__(self, recipe: RecipeName) -> None:
        self.recipe: RecipeName = recipe
        self.losses: list[float] = []
        self.resumes: bool | None = None
        """Whether a run that was resumed from the library's checkpoint has the same bits; None: not tried."""
        self.layers: dict[str, f8.Float8Linear] = {}
        self.parameters: dict[str, tuple[nn.Parameter, Tensor]] = {}
        """Name -> the parameter with a copy of its first value."""
        self.gradients: Counter[str] = Counter()
        self.calls: Counter[int] = Counter()
        self.told: list[str] = []

    def convert(self, model: Any, **options: Any) -> Any:
        """The model, converted and watched."""
        f8.convert_to_float8_training(model, config=self.recipe, **options)
        return self.follow(model)

    def follow(self, model: Any) -> Any:
        """The model, already converted; a script calls it again where the library adds layers or parameters."""
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, f8.Float8Linear)}
        self.parameters, self.gradients = {}, Counter()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.parameters[name] = parameter, parameter.detach().clone()
                parameter.register_hook(lambda gradient, name=name: self._note(name, gradient))
        return model

    def _note(self, name: str, gradient: Tensor) -> None:
        self.gradients[name] += bool(gradient.isfinite().all())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Calls of float8 layers count inside, and what f8emu's log says of layers that are not in float8."""

        def count(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(module, f8.Float8Linear):
                self.calls[id(module)] += 1

        hook, handler, log = register_module_forward_hook(count), logging.Handler("WARNING"), logging.getLogger("f8emu")
        handler.emit = lambda record: self.told.append(record.getMessage())
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            hook.remove()

    def fit(self, optimizer: Any, loss_of: Callable[[], Tensor], steps: int = 4) -> None:
        """An ordinary loop on one batch."""
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())

    def resumed(self, one: nn.Module, other: nn.Module) -> None:
        """`other` went on from a checkpoint of `one`: the bits of weights and state must be the same."""
        assert_same_state(state_of(one), state_of(other))
        self.resumes = True

    def facts(self) -> dict[str, Any]:
        """What is recorded, after everything was checked; an AssertionError names what is wrong."""
        assert self.layers, "no layer was converted"
        _none([name for name, layer in self.layers.items() if not self.calls[id(layer)]], "never called")
        _none([name for name in self.parameters if not self.gradients[name]], "without a finite gradient")
        _none([n for n, (p, first) in self.parameters.items() if torch.equal(p, first)], "did not change")
        _none(
            [name for name, layer in self.layers.items() if not _has_history(layer)], "whose scales were never updated"
        )
        _none([line for line in self.told if "in the first step" in line], "reports of layers not in float8")
        assert len(self.losses) > 1 and all(map(math.isfinite, self.losses)), f"losses {self.losses}"
        assert self.losses[-1] < self.losses[0], f"losses do not fall: {self.losses}"
        losses = [round(self.losses[place], 4) for place in (0, -1)]
        return {
            "layers": len(self.layers),
            "parameters": len(self.parameters),
            "steps": len(self.losses),
            "losses": losses,
            "resumes": self.resumes,
        }


def _none(names: list[str], fault: str) -> None:
    assert not names, f"{len(names)} {fault}: {', '.join(names[:5])}"


def _has_history(layer: f8.Float8Linear) -> bool:
    """Under delayed scaling, and where its weight trains: an amax of the input, the weight and the gradient."""
    if not layer.weight.requires_grad:
        return True
    histories: Mapping[str, Tensor] = f8.delayed_state_dict(layer)
    return all(bool((value > 0).any(1).all()) for key, value in histories.items() if key.endswith("amax_history"))
