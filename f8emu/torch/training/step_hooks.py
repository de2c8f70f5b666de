"""The update of delayed scaling by itself: when an optimizer steps the weight of a layer.

torch.optim calls a hook after every step of every optimizer. The hook updates the layers whose weight that optimizer
holds, in the order of its parameters, which all ranks share. An optimizer within the step of another
(ZeroRedundancyOptimizer, whose inner one holds other weights on every rank) is left to the outer one. A layer with a
frozen weight that no optimizer holds follows every step of any optimizer, since its input and its gradient change too.

A weight that was changed in another way is detected at the next backward pass, by a sum over its bits, of a large one
over a sample of them.
"""

import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from f8emu.torch.training.delayed import ConvertedModel, DelayedScalingError
from f8emu.torch.training.delayed_update import update_states, weight_of
from f8emu.torch.training.gathered_weight import GatheredWeight
from f8emu.torch.training.torch_internals import not_compiled, own_parameters
from f8emu.torch.training.weight_scales import local_tensor

if TYPE_CHECKING:
    from f8emu.torch.training.float8_linear import Float8Linear

_layers: "weakref.WeakSet[Float8Linear]" = weakref.WeakSet()
"""All layers with delayed scaling."""
_changes = 0
"""How often `follow_steps` was called."""
_lock = threading.Lock()
_inner: list[weakref.ref[Optimizer]] = []
"""The optimizers that stepped within the step that runs now."""


class WeightWatch:
    """What ties the state of one layer to the steps of its weight. Copies and pickles begin anew."""

    def __init__(self) -> None:
        self.weight: weakref.ref[nn.Parameter] | None = None
        """The weight of the last forward pass; under `functional_call` not the layer's own."""
        self.optimizer: weakref.ref[Optimizer] | None = None
        """The one that stepped the weight last."""
        self.other: weakref.ref[Optimizer] | None = None
        """The one that stepped since then, and does not hold the weight."""
        self._hook: Any = None
        self._sum: Tensor | None = None
        """Over bits of the weight, at its last backward pass."""
        self._after: tuple[weakref.ref[Tensor], int, int] | None = None
        """After the last backward pass: the gradient, its version, and that of the weight."""

    def watch(self, layer: "Float8Linear", weight: nn.Parameter) -> None:
        """Check `weight` whenever its gradient is complete; the hook runs outside of compiled code."""
        if self.weight is not None and self.weight() is weight and self._hook is not None:
            return
        self.forget()
        self.weight = weakref.ref(weight)
        if not weight.requires_grad or not weight.is_leaf:
            return
        reference = weakref.ref(layer)

        def check(parameter: Tensor) -> None:
            if (alive := reference()) is not None:
                self.check(alive, parameter)

        self._hook = weight.register_post_accumulate_grad_hook(check)  # pyright: ignore[reportUnknownMemberType]

    def forget(self) -> None:
        """Watch nothing, until `watch` is called again."""
        if self._hook is not None:
            self._hook.remove()
        self.weight = self._hook = self._sum = self._after = None

    def is_left_to(self, optimizer: Optimizer) -> bool:
        """Whether the layer, of a frozen weight, follows the steps of `optimizer`, which does not hold the weight.

        Not while one that holds it steps in between. That one is given up at the second step of `optimizer` in
        succession: the model was trained, frozen, and is trained on with new layers.
        """
        if self.optimizer is not None:  # even if it is gone: ranks may differ in when it was collected
            if self.other is None or self.other() is not optimizer:
                self.other = weakref.ref(optimizer)
                return False
            self.optimizer = None
        return True

    def check(self, layer: "Float8Linear", weight: Tensor) -> None:
        """Raise DelayedScalingError if `weight` changed since the last backward pass and the scales did not.

        Not for a layer that an optimizer steps, nor in a CUDA graph, whose replays run no hooks. The sums are compared,
        which waits for the device, only if there may have been a step: the gradient was not just added to, or the
        weight was written to.
        """
        is_stepped = self.optimizer is not None and self.optimizer() is not None
        if is_stepped or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._sum = self._after = None
            return
        buffers, grad = layer.delayed, weight.grad
        assert buffers is not None, "only such a layer is watched"
        is_same_step = False
        if self._after is not None and grad is not None:
            before, version, weight_version = self._after
            is_same_step = before() is grad and (grad._version, weight._version) == (version + 1, weight_version)
        with torch.no_grad():
            found = _sum_of_bits(weight)
        if self._sum is not None and not is_same_step and not buffers.notes.has_updated and bool(self._sum != found):
            raise DelayedScalingError(
                f"Float8Linear: under recipe {layer.recipe.name!r} the scales are updated once a step; the weight of "
                f"{buffers.notes.name or 'a layer'}, of shape {list(weight.shape)}, has changed since the last "
                "backward pass, by no optimizer of torch.optim, and its scales have not; call "
                "f8emu.torch.sync_float8_amax_and_scale_history(model) after every backward pass"
            )
        if not is_same_step:
            buffers.notes.has_updated = False
        self._sum = found
        self._after = None if grad is None else (weakref.ref(grad), grad._version, weight._version)

    def __deepcopy__(self, memo: Any) -> "WeightWatch":
        return WeightWatch()

    def __reduce__(self) -> Any:
        return WeightWatch, ()


def follow_steps(layer: "Float8Linear") -> None:
    """Update the layer when an optimizer steps its weight."""
    global _changes
    with _lock:
        _layers.add(layer)
        _changes += 1
    _install()


_installed: list[Any] = []


def _install() -> None:
    if not _installed:
        # Not traced: they look at the stack and may warn. A compiled step calls them between its graphs.
        _installed.append(register_optimizer_step_pre_hook(not_compiled(_before_step)))
        _installed.append(register_optimizer_step_post_hook(not_compiled(_after_step)))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A closure may run backward passes after the step has changed the weights (LBFGS), so their layers must know.
    if (len(args) > 1 or kwargs) and _layers:
        for layer, place in _placed([optimizer]):
            if place is not None:
                layer.weight_watch.optimizer = weakref.ref(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _layers:
        return
    if _is_within_a_step():
        _inner.append(weakref.ref(optimizer))
        return
    inner = [found for reference in _inner if (found := reference()) is not None]
    _inner.clear()
    for layers in stepped_layers([optimizer, *inner]):
        update_states(layers)


def _is_within_a_step() -> bool:
    """Whether the step that has ended ran within another. The stack tells, also after a step that raised an error."""
    steps = 0
    frame = inspect.currentframe()
    while frame is not None:
        steps += frame.f_code is _STEP
        frame = frame.f_back
    return steps > 1


_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the function that calls an optimizer's step and its hooks."""


def stepped_layers(optimizers: Sequence[Optimizer]) -> list[list["Float8Linear"]]:
    """The layers to update after a step of the first optimizer; the others stepped within that step.

    First the layers whose weights these optimizers hold, in the order of the parameters. Then, a list for each model,
    its layers with frozen weights: separately, since the update of a model that was not called must change nothing.
    """
    held: list[tuple[int, Float8Linear]] = []
    frozen: dict[ConvertedModel, list[Float8Linear]] = {}
    trains = any(
        x.requires_grad for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]
    )
    first = weakref.ref(optimizers[0])
    for layer, place in _placed(optimizers):
        watch = layer.weight_watch
        if place is not None:
            watch.optimizer, watch.other = first, None
            held.append((place, layer))
        elif trains and _is_frozen(layer) and watch.is_left_to(optimizers[0]):
            assert layer.delayed is not None, "only such a layer has a place"
            frozen.setdefault(layer.delayed.notes.model, []).append(layer)
    held.sort(key=itemgetter(0))  # layers of one weight stay in their order
    return [[layer for _, layer in held], *frozen.values()] if held else list(frozen.values())


def _is_frozen(layer: "Float8Linear") -> bool:
    own = weight_of(layer)
    return own is not None and not own.requires_grad


def _placed(optimizers: Sequence[Optimizer]) -> Iterator[tuple["Float8Linear", int | None]]:
    """All layers in the order of creation, with the place of their weight among the parameters of the optimizers."""
    # Each counts where it comes first: ranks differ in what the inner optimizers hold.
    parameters = {id(x): x for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]}
    order = {key: i for i, key in enumerate(parameters)}
    # FSDP1's flat parameters know the modules whose parameters they hold.
    of_modules = {
        id(info.module): order[key] for key, x in parameters.items() for info in getattr(x, "_param_infos", ())
    }
    for reference in _in_order(_changes):
        layer = reference()
        if layer is None or layer.delayed is None:
            continue
        place = order.get(id(own_parameters(layer).get("weight")))
        yield layer, _other_place(layer, order, of_modules) if place is None else place


def _other_place(layer: "Float8Linear", order: dict[int, int], of_modules: dict[int, int]) -> int | None:
    """That of what the weight is computed from, or of the weight of the last forward pass, or of FSDP1's parameter."""
    watched = layer.weight_watch.weight
    places = (order.get(id(x)) for x in (weight_of(layer), None if watched is None else watched()) if x is not None)
    return next((place for place in places if place is not None), of_modules.get(id(layer)))


@lru_cache(maxsize=1)
def _in_order(changes: int) -> list["weakref.ref[Float8Linear]"]:
    """The layers in the order of creation, which all ranks share; sorted again after so many calls of `follow_steps`.

    By their number, because a thread may add a layer while another one sorts.
    """
    return [weakref.ref(layer) for layer in sorted(_layers, key=_number)]


def _number(layer: "Float8Linear") -> int:
    return -1 if layer.delayed is None else layer.delayed.notes.number


def _sum_of_bits(weight: Tensor) -> Tensor:
    """Over the bits of `weight`; of a large one over a sample of `_SAMPLE` places, so that it costs next to nothing."""
    local = local_tensor(weight)
    local = local.rows if isinstance(local, GatheredWeight) else local
    flat = local.detach().contiguous().view(-1)
    size = flat.element_size()
    # torch sums int64 in one kernel; narrower integers it converts first.
    is_int64 = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    bits = flat.view(torch.int64 if is_int64 else {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    every = bits.numel() // _SAMPLE | 1  # odd: not always the same columns
    return bits[::every].sum(dtype=torch.int64)


_SAMPLE = 65536
