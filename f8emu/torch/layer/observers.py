"""Who watches layers: observers, what they are shown, and the taps by which layers show it (`layer.taps`).

A layer without an observer has no tap (`Float8Linear.tap` is None): its code, and the graphs that a compiler makes of
it, are the same as if there were no taps.

Observers see tensors as they are, on their device, and must not change them. They run where the layer runs: those of a
backward pass on a GPU on the thread of that pass. What activation checkpointing repeats is seen once.
"""

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from f8emu.spec.errors import OperandError
from f8emu.spec.recipe import Gemm, Recipe
from f8emu.torch.float8_layer import Float8Layer, all_float8_layers
from f8emu.torch.layer.operands import Operand

UNKNOWN_CALL = -1
"""The id of a forward pass that checkpointing repeated: its first run has another id."""


class Tap(NamedTuple):
    """The tokens of one layer: int64 [2] on the CPU, the number of the layer and that of the calls.

    Two, since a graph may not write to one tensor in both passes. Copies and pickles of a layer have no tap.
    """

    forward: Tensor
    backward: Tensor
    call: Tensor | None = None
    """int64 [1] on the CPU: the id of one forward pass, which the backward pass shows again."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class TensorSeen(NamedTuple):
    """A matrix before it is cast."""

    layer: str
    tensor: str
    """input, weight or grad_output."""
    value: Tensor
    """[rows, columns] in high precision; under tensor parallelism that of this rank."""
    recipe: Recipe
    is_delayed: bool = False
    """Whether it is cast by the state of delayed scaling, if the recipe has one for it, and not by its own amax."""
    call: int = UNKNOWN_CALL
    """The forward pass of the layer that the matrix belongs to."""


class GemmSeen(NamedTuple):
    """A GEMM that was computed."""

    layer: str
    gemm: str
    """output, grad_input or grad_weight."""
    a: Operand
    """Codes [M, K]; scale of `Granularity.scale_shape`, None in high precision."""
    b: Operand
    """Codes [N, K]."""
    product: Tensor
    """[M, N], without a bias; under tensor parallelism before it is added to that of other ranks."""
    spec: Gemm
    engine: str
    """hardware or emulated."""
    split_k: int
    """S of the plan [PLAN-1], for the GEMM as it ran: zero-padded."""
    split_source: str
    """How well the plan knows `split_k`: a value of `f8emu.split_k.plan.Source`."""
    recipe: Recipe
    call: int = UNKNOWN_CALL
    """The forward pass of the layer that the operands belong to."""


class Observer(Protocol):
    """What is shown. The tensors are the layer's own: an observer that keeps one copies it."""

    def tensor(self, seen: TensorSeen) -> None: ...
    def gemm(self, seen: GemmSeen) -> None: ...


@dataclass(slots=True, kw_only=True)
class Watched:
    """A layer with a tap."""

    name: str
    layer: weakref.ref[Float8Layer]
    """Not the layer itself: an observer that is never removed goes with it."""
    observers: list[Observer]


_watched: dict[int, Watched] = {}
"""Number of the layer, as its tokens have it -> who watches it; until the last removal, or as long as the layer is."""
_numbers = itertools.count(1)


class Observation:
    """An observer's place at the taps of some layers, and the hook of an optimizer that ends steps.

    It keeps neither the model nor its layers, and is removed with the model.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, Float8Layer], observer: Observer, hook: Any) -> None:
        self.layers = weakref.WeakValueDictionary(layers)
        self.hook = hook
        """The handle of the hook; None without one, or after it was removed."""
        self.is_on = False
        """Whether the layers have taps for the observer."""
        self._observer = observer
        self._end = weakref.finalize(model, self.remove)
        self._end.atexit = False

    def turn(self, on: bool) -> None:
        """Show the observer the coming passes, or nothing. A layer without another observer then has no tap."""
        if on is self.is_on:
            return
        self.is_on = on
        for name, layer in self.layers.items():
            if on:
                _tapped(name, layer).observers.append(self._observer)
            elif layer.tap is not None:
                watched = _watched[_number(layer.tap)]
                watched.observers.remove(self._observer)
                if not watched.observers:
                    del _watched[_number(layer.tap)]
                    del layer.tap  # then the class's None counts, as before: compiled code is found again

    def remove(self) -> None:
        """Show it nothing any more, and remove the hook. Safe to call twice."""
        self.turn(False)
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self._end.detach()


def observe(model: nn.Module, observer: Observer, layers: Mapping[str, nn.Module] | None = None) -> Observation:
    """Show `observer` what the layers cast and multiply, from their next forward pass on.

    Compiled code of a layer is compiled once more with its tap; without it, it runs as before.

    Args:
        model: the model.
        observer: is called in the middle of a pass; an error that it raises ends the pass. It is kept until it is
            removed or the model is gone, so it should not keep that itself.
        layers: name -> `Float8Linear`, of those to watch; None: all of the model. A layer with two names has the first.

    Raises:
        OperandError: a layer that is no Float8Linear.
    """
    names: dict[Float8Layer, str] = {}
    for name, layer in (all_float8_layers(model) if layers is None else layers).items():
        if not isinstance(layer, Float8Layer):
            raise OperandError(
                f"observe: every layer must be a Float8Linear; got {type(layer).__name__} for {name!r}; convert the "
                "model first, with convert_to_float8_training"
            )
        names.setdefault(layer, name)
    observation = Observation(model, {name: layer for layer, name in names.items()}, observer, None)
    observation.turn(True)
    return observation


def _tapped(name: str, layer: Float8Layer) -> Watched:
    """The layer's entry, of a layer with a tap from now on."""
    if layer.tap is None:
        number = next(_numbers)
        with torch.inference_mode(False):
            layer.tap = Tap(torch.tensor([number, 0]), torch.tensor([number, 0]))
        _watched[number] = Watched(name=name, layer=weakref.ref(layer), observers=[])
        weakref.finalize(layer, _watched.pop, number, None).atexit = False
    return _watched[_number(layer.tap)]


def _number(tap: Tap) -> int:
    return int(tap.forward[0])


def watched_by(token: Tensor) -> Watched | None:
    """Who watches the layer to which a token belongs."""
    return _watched.get(int(token[0]))
