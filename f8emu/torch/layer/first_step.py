"""A warning after the first step of a converted model: which of its layers compute nothing in float8.

The first step is over when an optimizer of torch has stepped and a layer of the conversion was called before. Nothing
is attached to the model: until then a set holds the layers that were called. Compiled code notes no calls; there the
gradient of a weight shows that its layer was called.
"""

import logging
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from f8emu.torch.layer.float8_layer import Float8Layer, pattern_of, shortened
from f8emu.torch.library import constant_in_traces
from f8emu.torch.torch_internals import is_in_backward_pass, named_modules, own_parameters, rank_of_process

_log = logging.getLogger("f8emu")
_waiting: list["FirstStep"] = []
_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers that were called while a conversion waits
_is_traced = False  # whether a compiler traced a layer: code that it made then runs layers of other models too


def note_call(layer: nn.Module) -> None:
    """Note a call of `layer` while a conversion waits for its first step."""
    if torch.compiler.is_compiling():
        _note_trace()
    elif _waiting:
        _called.add(layer)


@constant_in_traces  # Dynamo calls it while it traces
def _note_trace() -> bool:
    global _is_traced
    _is_traced = True
    return True


class FirstStep:
    """A conversion of `model`, to `layers` by name, that waits for its first step."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Float8Layer]) -> None:
        self.model, self.names = weakref.ref(model), frozenset(layers)
        self.layers = weakref.WeakValueDictionary(layers)
        _waiting.append(self)
        _listen()

    def end(self) -> None:
        """Report what is not in float8, if it was a step of the model."""
        model = self.model()
        findings = {} if model is None else self._findings(dict(named_modules(model)))
        if findings is None:
            return
        _waiting.remove(self)
        if not _waiting:
            _called.clear()
        lines = [f"{shortened(names)}: {finding}" for finding, names in findings.items() if names]
        if lines and rank_of_process()[0] == 0:
            _log.warning("convert_to_float8_training: not in float8 in the first step:\n  %s", "\n  ".join(lines))

    def _findings(self, modules: Mapping[str, nn.Module]) -> dict[str, list[str]] | None:
        # 1. The layers that were called. None was: it was the step of another model.
        inside = set(modules.values())
        layers = {name: layer for name, layer in self.layers.items() if layer in inside}
        weights = {name: own_parameters(layer).get("weight") for name, layer in layers.items()}
        trained = {name for name, weight in weights.items() if weight is not None and weight.grad is not None}
        called = {name for name, layer in layers.items() if layer in _called or (_is_traced and name in trained)}
        if not called:
            return None
        # 2. Those that were not. Where others of their kind were, they are idle in this step, as experts may be. Of
        #    compiled code nothing is known where weights are frozen, or gradients lie elsewhere (ZeRO, FSDP1).
        kinds = {pattern_of(name) for name in called}
        known = {name for name, x in weights.items() if trained and x is not None and x.requires_grad and x.numel()}
        uncalled = [name for name in layers if name not in called]
        idle = [name for name in uncalled if name not in trained and pattern_of(name) not in kinds]
        linear = {name: part for name, part in modules.items() if isinstance(part, nn.Linear)}
        return {
            "never called; another module multiplies it, in high precision": [x for x in uncalled if x in trained],
            "never called": [name for name in idle if not _is_traced or name in known],
            "plain nn.Linear again; convert the model after what replaces layers (resizing, fusing, merging)": [
                name for name in linear if name in self.names and not isinstance(linear[name], Float8Layer)
            ],
        }


@cache
def _listen() -> None:
    # For ever: a hook that removes itself ends torch's loop over the hooks behind it with an error.
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    # An optimizer that steps within the backward pass may do so before other layers have gradients.
    if not torch.compiler.is_compiling() and _waiting and not is_in_backward_pass():
        for step in tuple(_waiting):
            step.end()
