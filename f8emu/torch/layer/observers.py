"""Who watches layers: observers, what they are shown, and the taps by which layers show it, eager and compiled.

A layer without an observer has no tap (`Float8Linear.tap` is None): its code, and the graphs that a compiler makes of
it, are the same as if there were no taps. An observed layer has the bits of one that is not.

Observers see tensors as they are, on their device, and must not change them. They run where the layer runs: those of a
backward pass on a GPU on the thread of that pass. What activation checkpointing repeats is seen once.

In a graph that was traced with a tap, what a layer shows goes through opaque operators. They write to a token, a small
CPU tensor, so that no compiler drops, repeats or reorders them; its first element says whose tap it is, so that layers
of the same code share their graphs.
"""

import itertools
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from f8emu.spec.chips import CHIPS
from f8emu.spec.formats import FORMATS
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.recipe import TRANSPOSED, Gemm, Recipe
from f8emu.torch.casts.operand import Operand, weight_to_cast
from f8emu.torch.chip import name_of
from f8emu.torch.gemm import emulation
from f8emu.torch.gemm.engine import resolve_engine
from f8emu.torch.layer.float8_layer import Float8Layer
from f8emu.torch.library import fake, operator
from f8emu.torch.torch_internals import is_in_backward_pass

UNKNOWN_CALL = -1  # the id of a forward pass that checkpointing repeated: its first run has another id


class Tap(NamedTuple):
    """The tokens of one layer: int64 [2] on the CPU, the number of the layer and that of the calls.

    Two, since a graph may not write to one tensor in both passes. Copies and pickles of a layer have no tap.
    """

    forward: Tensor
    backward: Tensor
    call: Tensor | None = None  # int64 [1] on the CPU: the id of one forward pass, which the backward pass shows again

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class TensorSeen(NamedTuple):
    """A matrix before it is cast."""

    layer: str
    tensor: str  # input, weight or grad_output
    value: Tensor  # [rows, columns] in high precision, as casts read it; under tensor parallelism that of this rank
    recipe: Recipe
    is_delayed: bool = False  # cast by the state of delayed scaling, if the recipe has one for it, not by its own amax
    call: int = UNKNOWN_CALL  # the forward pass of the layer that the matrix belongs to


class GemmSeen(NamedTuple):
    """A GEMM that was computed."""

    layer: str
    gemm: str  # output, grad_input or grad_weight
    a: Operand  # codes [M, K]; scale of `Granularity.scale_shape`, None in high precision
    b: Operand  # codes [N, K]
    product: Tensor  # [M, N], without a bias; under tensor parallelism before it is added to that of other ranks
    spec: Gemm
    engine: str  # hardware or emulated
    split_k: int  # S of the plan [PLAN-1], for the GEMM as it ran: zero-padded
    split_source: str  # how well the plan knows `split_k`: a value of `f8emu.split_k.plan.Source`
    recipe: Recipe
    call: int = UNKNOWN_CALL  # the forward pass of the layer that the operands belong to


class Observer(Protocol):
    """An observer of layers. The tensors are the layer's own: an observer that keeps one copies it."""

    def tensor(self, seen: TensorSeen) -> None: ...
    def gemm(self, seen: GemmSeen) -> None: ...


class Watched(NamedTuple):
    """A layer with a tap."""

    name: str
    layer: weakref.ref[Float8Layer]  # not the layer itself: an observer that is never removed goes with it
    observers: list[Observer]


_watched: dict[int, Watched] = {}
"""Number of the layer, as its tokens have it -> who watches it; until the last removal, or as long as the layer is."""
_numbers, _calls = itertools.count(1), itertools.count(1)


class Observation:
    """An observer's place at the taps of some layers, and the hook of an optimizer that ends steps.

    It keeps neither the model nor its layers, and is removed with the model.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, Float8Layer], observer: Observer, hook: Any = None
    ) -> None:
        self.layers = weakref.WeakValueDictionary(layers)
        self.hook = hook  # its handle; None without one, or after it was removed
        self.is_on = False  # whether the layers have taps for the observer
        self._observer = observer
        self._end = weakref.finalize(model, self.remove)
        self._end.atexit = False

    def turn(self, on: bool) -> None:
        """Show the observer the coming passes, or nothing. A layer without another observer then has no tap.

        Compiled code of a layer is compiled once more with its tap; without it, it runs as before. An error that an
        observer raises ends the pass.
        """
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


def _tapped(name: str, layer: Float8Layer) -> Watched:
    if layer.tap is None:
        number = next(_numbers)
        with torch.inference_mode(False):
            layer.tap = Tap(torch.tensor([number, 0]), torch.tensor([number, 0]))
        _watched[number] = Watched(name, weakref.ref(layer), [])
        weakref.finalize(layer, _watched.pop, number, None).atexit = False
    return _watched[_number(layer.tap)]


def _number(tap: Tap) -> int:
    return int(tap.forward[0])


# What layers call.


def begin_call(tap: Tap, x: Tensor) -> Tap:
    """The tap for one forward pass of its layer, with the input `x`, and the backward pass of that."""
    return tap._replace(call=next_call(x.detach()))


def show_tensor(tap: Tap | None, tensor: str, value: Tensor, *, is_delayed: bool) -> None:
    """Show a matrix; nothing of a weight that exists only as float8 codes."""
    if tap is not None and type(value) in (Tensor, nn.Parameter):
        token = tap.backward if tensor == "grad_output" else tap.forward
        observe_tensor(token, tensor, value, is_delayed, tap.call)


def show_gemm(tap: Tap | None, gemm: str, a: Operand, b: Operand, product: Tensor) -> None:
    """Show a GEMM."""
    if tap is not None:
        token = tap.forward if gemm == "output" else tap.backward
        of_a, of_b = _in_memory(gemm, a.codes, a.scale, b.codes, b.scale)
        observe_gemm(token, gemm, of_a, _as_bytes(a.scale), of_b, _as_bytes(b.scale), product, tap.call)


def _in_memory(
    gemm: str, a: Tensor, scale_a: Tensor | None, b: Tensor, scale_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    # An operand in high precision goes as the matrix that it is a transpose of, which is in memory, and is transposed
    # again where it is shown. With the transpose Inductor placed that matrix elsewhere, and fused the code before it
    # otherwise: other roundings to bfloat16.
    is_a_transposed, is_b_transposed = TRANSPOSED[gemm]
    return a.t() if scale_a is None and is_a_transposed else a, b.t() if scale_b is None and is_b_transposed else b


def _as_bytes(scale: Tensor | None) -> Tensor | None:
    # Inductor compiles no operator that writes to an argument and reads E8M0.
    return scale.view(torch.uint8) if scale is not None and scale.dtype is torch.float8_e8m0fnu else scale


def _of_bytes(scale: Tensor | None) -> Tensor | None:
    return scale.view(torch.float8_e8m0fnu) if scale is not None and scale.dtype is torch.uint8 else scale


@operator()
def next_call(x: Tensor) -> Tensor:
    """The id of a forward pass with the input `x`, int64 [1] on the CPU."""
    # It writes to no token: compiled checkpointing computes it again in the backward pass, and would save the token for
    # that, which later forward passes write to. A compiler may merge calls with the same input: of one layer they are
    # equal, and those of other layers are told apart by the layer.
    return torch.full((1,), UNKNOWN_CALL if is_in_backward_pass() else next(_calls), dtype=torch.int64, device="cpu")


@operator(mutates_args={"token"})
def observe_tensor(token: Tensor, tensor: str, value: Tensor, is_delayed: bool, call: Tensor | None) -> None:
    """Call the observers of the layer to which `token` belongs."""
    watched = _counted(token, tensor != "grad_output", value)
    if watched is not None:
        _show(watched, tensor, value, call, is_delayed)


@operator(mutates_args={"token"}, tags=(torch.Tag.needs_exact_strides,))
def observe_gemm(
    token: Tensor,
    gemm: str,
    a: Tensor,
    scale_a: Tensor | None,
    b: Tensor,
    scale_b: Tensor | None,
    product: Tensor,
    call: Tensor | None,
) -> None:
    """Call the observers of the layer to which `token` belongs; `a` and `b` are in memory."""
    watched = _counted(token, gemm == "output", product)
    layer = None if watched is None else watched.layer()
    if watched is None or layer is None:
        return
    a, b = _in_memory(gemm, a, scale_a, b, scale_b)
    scale_a, scale_b = _of_bytes(scale_a), _of_bytes(scale_b)
    recipe, spec, chip = layer.recipe, layer.recipe.gemms[gemm], CHIPS[layer.recipe.chip]
    sizes = a.shape[0], b.shape[0], a.shape[1]
    gemm_call = layer_call(spec, sizes, FORMATS[name_of(product.dtype)], chip)
    split, source = emulation.split_of(gemm_call, a.device, emulation.layout_of(a, b.t()), warns=False)
    seen = GemmSeen(
        layer=watched.name,
        gemm=gemm,
        a=Operand(a, scale_a),
        b=Operand(b, scale_b),
        product=product.detach(),
        spec=spec,
        engine=resolve_engine("observe", a.device, layer.engine, chip).value,
        split_k=split,
        split_source=source.value,
        recipe=recipe,
        call=_id(call),
    )
    for observer in tuple(watched.observers):
        observer.gemm(seen)


@fake(next_call)
def _(x: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


for _shown in (observe_tensor, observe_gemm):
    fake(_shown)(lambda *_: None)


def _counted(token: Tensor, is_forward: bool, x: Tensor) -> Watched | None:
    # Who watches, and is called; the call is counted in the token.
    torch.autograd.graph.increment_version(token)
    token[1] += 1
    # A backward pass that runs a forward pass repeats it: activation checkpointing.
    if x.is_meta or (is_forward and is_in_backward_pass()):
        return None
    return _watched.get(int(token[0]))


def _show(watched: Watched, tensor: str, value: Tensor, call: Tensor | None, is_delayed: bool) -> None:
    layer = watched.layer()
    if layer is None:  # the graph of a layer that is gone
        return
    value = value.detach()
    value = weight_to_cast(value, layer.recipe) if tensor == "weight" else value
    seen = TensorSeen(watched.name, tensor, value, layer.recipe, is_delayed, _id(call))
    for observer in tuple(watched.observers):
        observer.tensor(seen)


def _id(call: Tensor | None) -> int:
    return UNKNOWN_CALL if call is None else int(call)
